"""Starting and ending model processes: what a launcher must do, and the one that uses `multiprocessing` spawn.

Owns the moment of a start (pins in place before the first import, signals out of the way) and the last moment of a
process with all that it started. Decides nothing about when. The parent's side is for the main thread of the model
server alone: the parent-death signal that each child asks for follows the thread that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from model_worker import guardian as guardians
from model_worker.guardian import REPLICA_VARIABLE, Guardian
from model_worker.specs import ReplicaSpec
from shared.processes import set_parent_death_signal

# <linux/prctl.h>; the kernel keeps 15 bytes of a name.
_PR_SET_NAME = 15
_NAME_BYTES_MAX = 15
# A killed process that does not end within this time is stuck in the kernel; its handle is given up.
_REAP_TIMEOUT_S = 5.0


class Child(Protocol):
    """One started process. A launcher of another kind returns its own class of it."""

    @property
    def pid(self) -> int: ...

    @property
    def pidfd(self) -> int:
        """A descriptor that becomes readable when the process has ended; closed by `reap`."""

    def exit_code(self) -> int | None:
        """Never blocks. None while it runs; negative: the signal that ended it."""

    def kill(self) -> None:
        """Ends the process and everything it started, at once, whatever they are doing. Does not wait."""

    def dump_stacks(self) -> bool:
        """Asks the process to write the stacks of its threads to its stderr; whether it could be asked."""

    def reap(self) -> None:
        """Call it once, when the process has ended or was killed: ends what it left behind and closes the handle."""


class Launcher(Protocol):
    """A way to start model processes."""

    def start(self, spec: ReplicaSpec) -> Child:
        """Starts one incarnation; returns before it has imported anything.

        Raises:
            OSError: the process could not be started.
        """


class SpawnLauncher:
    """Starts each replica as a fresh interpreter on this host, which calls `target(spec)`."""

    def __init__(self, target: Callable[[ReplicaSpec], None], epoch: str, guardian: Guardian | None = None) -> None:
        """`target` is a function of a module, not of the main program, and begins with `guard_child`."""
        self._target = target
        self._epoch = epoch
        self._guardian = guardian
        self._context = multiprocessing.get_context("spawn")

    def start(self, spec: ReplicaSpec) -> SpawnedChild:
        assert threading.current_thread() is threading.main_thread(), "children die with the thread that starts them"
        _start_resource_tracker()
        mark = guardians.mark(self._epoch, spec.slot, spec.incarnation)
        process = self._context.Process(target=self._target, args=(spec,), name=spec.slot, daemon=False)
        with _environment({**spec.environment, REPLICA_VARIABLE: mark}), _sigint_blocked():
            process.start()
        child = SpawnedChild(process, guardians.of_replica(mark), self._guardian)
        if self._guardian is not None:
            self._guardian.watch(child.pid)
        return child


class SpawnedChild:
    """A `Child` that is a child process in the ordinary sense. Its process group has its pid for a number."""

    def __init__(self, process: multiprocessing.context.SpawnProcess, sought: bytes, guardian: Guardian | None) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self._process = process
        self._sought = sought
        self._guardian = guardian

    def exit_code(self) -> int | None:
        try:
            # Looks without collecting: until `reap` the pid, and so the number of the group, stays this child's.
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # `multiprocessing` collects ended children whenever it starts another one.
            return self._process.exitcode
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def kill(self) -> None:
        # The search comes first: a descendant that hides from its group and from its mark is known by its parent only,
        # while that lives.
        guardians.kill_processes(self._sought, {self.pid})
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def dump_stacks(self) -> bool:
        if not _catches(self.pid, signal.SIGUSR1):
            # Not yet guarded, or ended: the signal would kill it and say nothing.
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)
            return True
        return False

    def reap(self) -> None:
        self.kill()
        if self._guardian is not None:
            self._guardian.forget(self.pid)
        self._process.join(_REAP_TIMEOUT_S)
        if self._process.exitcode is not None:
            self._process.close()
        os.close(self.pidfd)


def guard_child(spec: ReplicaSpec) -> None:
    """Makes this process a proper replica; the first thing that it does, on its main thread.

    It gets a process group of its own, dies with its parent (by the kernel, and by a thread that watches the parent,
    should the kernel have been asked too late), cannot be interrupted from the terminal, writes its stacks to stderr
    on SIGUSR1, reads nothing from the terminal, and keeps to its cores.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only for a process that a launcher has started"
    os.setpgid(0, 0)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent.pid:
        # It ended before the signal was armed.
        _end_group()
    threading.Thread(target=_end_with_parent, args=(parent.sentinel,), name="parent-watch", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not a Python handler: that would wait for the end of a C call. Whoever wants a clean end sends a message.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Works while a C call holds the GIL, unlike anything written in Python, and whatever the model does to its stderr.
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _close_stdin()
    if spec.cores:
        _keep_to(spec.cores)
    _set_name(f"hw {spec.slot}")


def _end_with_parent(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    _end_group()


def _end_group() -> None:
    os.killpg(0, signal.SIGKILL)


def _close_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != 0:
        os.dup2(nothing, 0)
        os.close(nothing)


def _keep_to(cores: tuple[int, ...]) -> None:
    # Imports may have started threads already (a BLAS pool does), and each thread has an affinity of its own.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def _set_name(name: str) -> None:
    """What `ps` and `top` show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES_MAX], 0, 0, 0)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _start_resource_tracker() -> None:
    """Brings up `multiprocessing`'s tracker of semaphores and shared memory, if it is not running yet.

    Not left to the first start of a replica, whose mark it would carry and with whose end it would be ended. It cleans
    up what a model process leaves when it is killed or leaves at once; that is its purpose here, and no news, so it
    is started with its warning about that off.
    """
    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)
    try:
        multiprocessing.resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process, which the next process started gets at its exec, and puts the old ones back."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        os.environ.update(changes)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """The next process started has SIGINT blocked from its first instruction; one for this process is not lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

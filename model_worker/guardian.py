"""The last one standing: a tiny process that outlives the model server just long enough to end what it left behind.

A model process dies with the model server (`launchers.guard_child`), but the processes that a model's own code
started do not: a pool's workers, a server in a session of its own. Every process started for a replica carries a mark
in its environment, `HEADWAITER_REPLICA=EPOCH/SLOT#INCARNATION`, and its children inherit it. The guardian blocks on a
pipe from the model server; when that closes, however the server ended, it kills whatever carries the server's mark,
belongs to the process group of a replica, or descends from either.

Run as a script by the interpreter alone (`-I -S`), so this file imports the standard library's smallest modules only
and nothing of ours. The server's side, `Guardian`, and the search itself, which the launcher shares, are here as well.
Beyond its reach: a process that has left its group, cleared its environment and lost its parent, all three.
"""

from __future__ import annotations

import os
import signal
import sys
import time

REPLICA_VARIABLE = "HEADWAITER_REPLICA"

# Rounds that must find nobody before the guardian believes it: a process that is being forked while one round reads
# the process table is seen by the next.
_QUIET_ROUNDS = 3
_ROUND_PAUSE_S = 0.02
# A killed process that is still there after this long is stuck in the kernel, and nothing more can be done about it.
_SWEEP_S_MAX = 10.0
_STOP_S_MAX = 12.0
# A round finds only processes that no earlier one has seen; each was started by one that was not yet killed.
_KILL_ROUNDS_MAX = 100


def mark(epoch: str, slot: str, incarnation: int) -> str:
    """The value of `HEADWAITER_REPLICA` for one incarnation; epochs hold no `/`."""
    return f"{epoch}/{slot}#{incarnation}"


def of_replica(replica_mark: str) -> bytes:
    """What to search environments for: exactly this replica."""
    return f"\0{REPLICA_VARIABLE}={replica_mark}\0".encode()


def of_server(epoch: str) -> bytes:
    """What to search environments for: any replica of this model server."""
    return f"\0{REPLICA_VARIABLE}={epoch}/".encode()


def find_processes(sought: bytes, groups: frozenset[int] | set[int] = frozenset()) -> set[tuple[int, int]]:
    """Live processes of this user with the mark `sought` or in one of the process groups, and all their descendants.

    Each is (pid, start time), which together no two processes share. This process itself is never among them.
    """
    children: dict[int, list[tuple[int, int]]] = {}
    found: list[tuple[int, int]] = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            if os.stat(f"/proc/{entry}").st_uid != os.getuid():
                continue
            state, parent, group, started = _read_stat(int(entry))
            environment = b"\0" + _read(f"/proc/{entry}/environ") + b"\0"
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # It ended meanwhile, or has given up its right to be looked at by raising its own.
            continue
        if state in "ZX":
            continue
        identity = (int(entry), started)
        children.setdefault(parent, []).append(identity)
        if group in groups or sought in environment:
            found.append(identity)
    reached: set[tuple[int, int]] = set()
    while found:
        identity = found.pop()
        if identity not in reached:
            reached.add(identity)
            found += children.get(identity[0], [])
    return reached


def kill_processes(sought: bytes, groups: frozenset[int] | set[int] = frozenset()) -> int:
    """SIGKILL for everything that `find_processes` finds, until it finds nobody new; returns how many there were.

    Does not wait for the killed to be gone.
    """
    killed: set[tuple[int, int]] = set()
    for _ in range(_KILL_ROUNDS_MAX):
        fresh = find_processes(sought, groups) - killed
        if not fresh:
            break
        for pid, started in fresh:
            _kill(pid, started)
        killed |= fresh
    return len(killed)


class Guardian:
    """The model server's handle on its guardian process. Main thread only."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._groups: set[int] = set()
        self._pipe: int | None = None
        self.pid = 0
        self.pidfd = -1
        """Readable when the guardian has died; then `start` puts a new one in its place."""

    def start(self) -> None:
        """Starts the process, or a new one after the last has died; it is told all the groups that are being guarded.

        Raises:
            OSError: it could not be started.
        """
        self._collect()
        read_end, self._pipe = os.pipe()
        # A guardian that is stopped (SIGSTOP) must not stop the model server too.
        os.set_blocking(self._pipe, False)
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", os.path.abspath(__file__), self._epoch],
                # Its own environment must not carry the mark of a replica, should this server be one's child.
                {name: value for name, value in os.environ.items() if name != REPLICA_VARIABLE},
                file_actions=[(os.POSIX_SPAWN_DUP2, read_end, 0)],
                # Neither Ctrl-C nor a supervisor's signal to the group may end it before the server ends.
                setsid=True,
                setsigmask=signal.valid_signals(),
            )
        finally:
            os.close(read_end)
        self.pidfd = os.pidfd_open(self.pid)
        for group in self._groups:
            self._tell(b"+", group)

    @property
    def alive(self) -> bool:
        return self.pidfd >= 0 and os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def watch(self, group: int) -> None:
        """Counts a replica's process group among what must not outlive the model server."""
        self._groups.add(group)
        self._tell(b"+", group)

    def forget(self, group: int) -> None:
        """The group is gone, and its number may come to mean something else."""
        self._groups.discard(group)
        self._tell(b"-", group)

    def stop(self) -> None:
        """Has it make its last round, and waits until it has exited."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        deadline_s = time.monotonic() + _STOP_S_MAX
        while self.alive and time.monotonic() < deadline_s:
            time.sleep(_ROUND_PAUSE_S / 4)
        self._collect()

    def _tell(self, sign: bytes, group: int) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, b"%s%d\n" % (sign, group))
        except (BrokenPipeError, BlockingIOError):
            # It is dead, or stopped for so long that it may as well be: its successor is told everything at once.
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def _collect(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        if self.pidfd >= 0:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            os.close(self.pidfd)
            self.pidfd = -1


def _read_stat(pid: int) -> tuple[str, int, int, int]:
    """State, parent, process group and start time of a process; see proc(5)."""
    # The name in brackets is the process's own choice and may hold anything, brackets included.
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[19])


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _kill(pid: int, started: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The descriptor holds on to one process; only now is it certain that it is the one that was found.
        if _read_stat(pid)[3] == started:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    finally:
        os.close(descriptor)


def _read_groups() -> set[int]:
    """Blocks for as long as the model server lives; returns the groups that it had not told to be gone."""
    groups: set[int] = set()
    pending = b""
    while part := os.read(0, 1 << 12):
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            change = groups.add if line.startswith(b"+") else groups.discard
            change(int(line[1:]))
    return groups


def _main(epoch: str) -> int:
    groups = _read_groups()
    sought = of_server(epoch)
    deadline_s = time.monotonic() + _SWEEP_S_MAX
    quiet_rounds = 0
    while quiet_rounds < _QUIET_ROUNDS and time.monotonic() < deadline_s:
        quiet_rounds = 0 if kill_processes(sought, groups) else quiet_rounds + 1
        time.sleep(_ROUND_PAUSE_S)
    return 0 if quiet_rounds == _QUIET_ROUNDS else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))

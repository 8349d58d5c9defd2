"""What is done to the service: each kind of fault with its injection, and what its clients may notice of it.

A fault that is done by a request is a request of `questions.culprit`; one that is done by clients is in `storms`.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tests.chaos import questions, storms
from tests.chaos.clients import Clients
from tests.chaos.ledger import Ledger
from tests.chaos.subject import DISK_BYTES, Subject, paused, signalled
from tests.topology import alive, wait_for

# Shorter than what replaces a silent process, longer than what notices it.
STOP_S = 1.5
# A process that is frozen while it has nothing to do is replaced after a minute of silence.
GIVE_UP_S = 120.0
# There is one disk, so it is filled by one fault at a time.
_DISK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Scene:
    """What an injection may use."""

    subject: Subject
    clients: Clients
    ledger: Ledger
    chance: random.Random


Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    inject: Callable[[Scene], None]
    may_cut: bool = False
    """A front worker is killed: the connections that it held end without an answer."""
    may_shut: bool = False
    """The whole front is gone for a moment: nobody listens."""
    kills: int = 0
    """Model processes are killed from outside."""
    is_free: bool = False
    """It costs no client an error, because another process or the next one answers in time."""


def whole(find: Callable[[], Found]) -> Found:
    """A process, or several, that may be between two lives at the moment."""
    found: list[Found] = []

    def is_there() -> bool:
        try:
            found.append(find())
        except (LookupError, IndexError):
            return False
        return True

    wait_for(is_there, "the process is there", GIVE_UP_S)
    return found[-1]


def send(find: Callable[[Scene], int], number: signal.Signals) -> Callable[[Scene], None]:
    """An injection that signals one process, and waits for its end."""

    def inject(scene: Scene) -> None:
        sent: list[int] = []

        def is_sent() -> bool:
            pid = whole(lambda: find(scene))
            if signalled(pid, number):
                sent.append(pid)
            return bool(sent)

        wait_for(is_sent, "a process is signalled", GIVE_UP_S)
        wait_for(lambda: not alive(sent[0]), f"{sent[0]} has ended", GIVE_UP_S)

    return inject


def freeze(scene: Scene) -> None:
    """Until it is killed for that. Stopped again and again, because another fault may let it go on."""
    pid = whole(lambda: one_of_two(scene))
    wait_for(lambda: not (signalled(pid, signal.SIGSTOP) and alive(pid)), f"{pid} has ended", GIVE_UP_S)


def renew_workers(scene: Scene) -> None:
    before = whole(scene.subject.workers)
    signalled(whole(scene.subject.master), signal.SIGHUP)
    wait_for(lambda: not any(alive(pid) for pid in before), "all workers are new", GIVE_UP_S)


def ask(deed: str) -> Callable[[Scene], None]:
    """An injection by a request, whose own end is in the ledger too."""

    def inject(scene: Scene) -> None:
        scene.clients.ask(questions.culprit(deed)).result(GIVE_UP_S)

    return inject


def one_of_two(scene: Scene) -> int:
    return scene.chance.choice(scene.subject.replicas("m"))


def the_only_one(scene: Scene) -> int:
    return scene.subject.replicas("one")[0]


def a_worker(scene: Scene) -> int:
    return scene.chance.choice(scene.subject.workers())


def kill_while_loading(scene: Scene) -> None:
    """Once while it serves, then its successor before that has loaded."""
    before = whole(lambda: the_only_one(scene))
    signalled(before, signal.SIGKILL)

    def successor() -> int:
        pid = the_only_one(scene)
        if pid == before:
            raise LookupError
        return pid

    signalled(whole(successor), signal.SIGKILL)


def lose_counters_with_full_disk(scene: Scene) -> None:
    """A worker that is started then finds neither its predecessor's files nor room for its own."""
    with full_disk(scene.subject):
        shutil.rmtree(scene.subject.run_directory, ignore_errors=True)
        fill(scene.subject)
        send(a_worker, signal.SIGKILL)(scene)
        scene.subject.wait_whole()


def remove_run_directory(scene: Scene) -> None:
    shutil.rmtree(scene.subject.run_directory, ignore_errors=True)
    wait_for((scene.subject.run_directory / "front.sock").exists, "it is made again", GIVE_UP_S)


@contextlib.contextmanager
def full_disk(subject: Subject) -> Iterator[None]:
    """Where the logs and the run directory are there is no room, until the block ends."""
    with _DISK:
        fill(subject)
        try:
            yield
        finally:
            (subject.disk / "ballast").unlink()


def fill(subject: Subject) -> None:
    with contextlib.suppress(OSError), (subject.disk / "ballast").open("ab", buffering=0) as file:
        for _ in range(2 * DISK_BYTES // 4096):
            file.write(bytes(4096))


def fill_disk(scene: Scene) -> None:
    with full_disk(scene.subject):
        time.sleep(STOP_S)


def kill_with_full_disk(scene: Scene) -> None:
    """Whoever dies then has to be replaced without any room."""
    with full_disk(scene.subject):
        for find in (a_worker, one_of_two, lambda scene: scene.subject.server()):
            send(find, signal.SIGKILL)(scene)
            scene.subject.wait_whole()


FAULTS: tuple[Fault, ...] = (
    Fault("model.kill", send(one_of_two, signal.SIGKILL), kills=1, is_free=True),
    Fault("model.term", send(one_of_two, signal.SIGTERM), kills=1, is_free=True),
    Fault("model.stop", lambda scene: paused([whole(lambda: one_of_two(scene))], STOP_S), is_free=True),
    Fault("model.freeze", freeze, kills=1),
    Fault("only_model.kill", send(the_only_one, signal.SIGKILL), kills=1, is_free=True),
    Fault("only_model.kill_loading", kill_while_loading, kills=2, is_free=True),
    Fault("input.exit", ask("exit"), is_free=True),
    Fault("input.segfault", ask("segfault"), is_free=True),
    Fault("input.sleep", ask("sleep"), is_free=True),
    Fault("input.hold_gil", ask("hold_gil"), is_free=True),
    Fault("input.spin", ask("spin"), is_free=True),
    Fault("input.memory", ask("memory"), is_free=True),
    Fault("input.device_memory", ask("device_memory"), is_free=True),
    Fault("input.device_assert", ask("device_assert"), is_free=True),
    Fault("server.kill", send(lambda scene: scene.subject.server(), signal.SIGKILL), kills=1),
    Fault("server.term", send(lambda scene: scene.subject.server(), signal.SIGTERM)),
    Fault("server.stop", lambda scene: paused([whole(scene.subject.server)], STOP_S), is_free=True),
    Fault("guardian.kill", send(lambda scene: scene.subject.guardian(), signal.SIGKILL), is_free=True),
    Fault("worker.kill", send(a_worker, signal.SIGKILL), may_cut=True),
    Fault("worker.stop", lambda scene: paused([whole(lambda: a_worker(scene))], STOP_S), is_free=True),
    Fault("worker.term", send(a_worker, signal.SIGTERM)),
    Fault("master.hup", renew_workers),
    Fault("master.term", send(lambda scene: scene.subject.master(), signal.SIGTERM), may_shut=True),
    Fault("master.kill", send(lambda scene: scene.subject.master(), signal.SIGKILL), may_cut=True, may_shut=True),
    Fault(
        "supervisord.kill",
        send(lambda scene: scene.subject.supervisord(), signal.SIGKILL),
        may_cut=True,
        may_shut=True,
        kills=1,
    ),
    Fault("serve.kill", send(lambda scene: scene.subject.serve, signal.SIGKILL), may_cut=True, may_shut=True, kills=1),
    Fault("everything.stop", lambda scene: paused(scene.subject.everything(), STOP_S), is_free=True),
    Fault("run_directory.removed", remove_run_directory),
    Fault("disk.full", fill_disk, is_free=True),
    Fault("disk.full_and_kills", kill_with_full_disk, may_cut=True, kills=2),
    Fault("disk.full_and_counters_lost", lose_counters_with_full_disk, may_cut=True),
    Fault("clients.leave", storms.leave),
    Fault("clients.read_slowly", storms.read_slowly, is_free=True),
    Fault("clients.send_slowly", storms.send_slowly, is_free=True),
    Fault("clients.waves", storms.waves),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def inject(fault: Fault, scene: Scene) -> None:
    """Does it, and waits until the service is whole again; what its clients meet meanwhile is put down to it."""
    with scene.ledger.window(fault.name, may_cut=fault.may_cut, may_shut=fault.may_shut, kills=fault.kills):
        fault.inject(scene)
        scene.subject.wait_whole()
        # One more of its own, so that every fault has met somebody.
        scene.clients.ask(questions.square("m")).result(GIVE_UP_S)

"""Finding what belongs to a replica, and the process that ends it all when the model server is gone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from model_worker import guardian as guardians
from model_worker.guardian import (
    REPLICA_VARIABLE,
    Guardian,
    find_processes,
    kill_processes,
    mark,
    of_replica,
    of_server,
)
from tests.topology import alive, wait_for

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def epoch() -> str:
    return f"test-{uuid4().hex}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program, `sleep` by default, in a group of its own, with a mark or with no environment at all."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(replica_mark: str | None = None, command: tuple[str, ...] = ("sleep", "600")) -> subprocess.Popen[bytes]:
        environment = {"PATH": os.environ["PATH"]}
        if replica_mark is not None:
            environment[REPLICA_VARIABLE] = replica_mark
        process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE)
        processes.append(process)
        # The kernel shows an empty environment for the microseconds of the exec itself.
        wait_for(Path(f"/proc/{process.pid}/environ").read_bytes, "the exec is over")
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def guardian(epoch: str) -> Iterator[Guardian]:
    started = Guardian(epoch)
    started.start()
    yield started
    started.stop()


def found(sought: bytes, *groups: int) -> set[int]:
    return {pid for pid, _ in find_processes(sought, set(groups))}


def test_a_replica_is_found_by_its_whole_mark_and_a_server_by_its_epoch(epoch: str, start: Start) -> None:
    one, ten, other = start(mark(epoch, "qa/0", 1)), start(mark(epoch, "qa/0", 10)), start(mark(epoch + "x", "qa/0", 1))
    assert found(of_replica(mark(epoch, "qa/0", 1))) == {one.pid}
    assert found(of_server(epoch)) == {one.pid, ten.pid}
    assert found(of_server(epoch + "x")) == {other.pid}


def test_the_searcher_is_never_found(epoch: str) -> None:
    assert found(of_server(epoch), os.getpgid(0)).isdisjoint({os.getpid()})


def test_a_group_is_found_whatever_its_environment(epoch: str, start: Start) -> None:
    process = start()
    assert found(of_server(epoch)) == set()
    assert found(of_server(epoch), process.pid) == {process.pid}


def test_a_descendant_without_group_and_mark_is_found_by_its_parent(epoch: str, start: Start) -> None:
    # The shell's own child starts a session and loses its environment; its pid is what it prints.
    script = "env -i setsid sh -c 'echo $$; exec sleep 600' & wait"
    process = start(mark(epoch, "qa/0", 1), ("sh", "-c", script))
    assert process.stdout is not None
    hidden = int(process.stdout.readline())
    assert found(of_server(epoch)) >= {process.pid, hidden}
    assert kill_processes(of_server(epoch)) >= 2
    wait_for(lambda: not alive(process.pid) and not alive(hidden), "both are gone")


def test_the_dead_are_not_found(epoch: str, start: Start) -> None:
    process = start(mark(epoch, "qa/0", 1))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert found(of_server(epoch), process.pid) == set()
    assert kill_processes(of_server(epoch)) == 0


def test_a_process_that_took_over_a_pid_is_not_killed(start: Start) -> None:
    process = start()
    guardians._kill(process.pid, started=1)
    assert alive(process.pid)
    guardians._kill(2**22 - 1, started=1)


def test_a_name_full_of_brackets_does_not_mislead(tmp_path: Path, epoch: str, start: Start) -> None:
    program = tmp_path / ") Z 1 (x"
    program.symlink_to("/bin/sleep")
    process = start(mark(epoch, "qa/0", 1), (str(program), "600"))
    wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == ") Z 1 (x\n", "it has its name")
    assert found(of_server(epoch)) == {process.pid}


def test_the_end_of_the_pipe_ends_all_that_is_marked_and_nothing_else(
    epoch: str, start: Start, guardian: Guardian
) -> None:
    mine, others = start(mark(epoch, "qa/0", 3)), start(mark("another", "qa/0", 3))
    guardian.stop()
    wait_for(lambda: not alive(mine.pid), "the marked one is gone")
    assert alive(others.pid)
    assert not guardian.alive


def test_watched_groups_end_with_the_server_and_forgotten_ones_do_not(start: Start, guardian: Guardian) -> None:
    watched, forgotten = start(), start()
    for process in (watched, forgotten):
        guardian.watch(process.pid)
    guardian.forget(forgotten.pid)
    guardian.stop()
    wait_for(lambda: not alive(watched.pid), "the watched group is gone")
    assert alive(forgotten.pid)


def test_a_dead_guardian_is_noticed_and_its_successor_knows_the_groups(start: Start, guardian: Guardian) -> None:
    process = start()
    guardian.watch(process.pid)
    dead = guardian.pid
    os.kill(dead, signal.SIGKILL)
    assert select.select([guardian.pidfd], [], [], 30)[0]
    assert not guardian.alive
    guardian.watch(start().pid)
    guardian.start()
    assert guardian.alive
    assert guardian.pid != dead
    guardian.stop()
    wait_for(lambda: not alive(process.pid), "the group that the first one was told of is gone")


def test_a_guardian_that_is_stopped_does_not_stop_the_server(guardian: Guardian) -> None:
    os.kill(guardian.pid, signal.SIGSTOP)
    told = 0
    while not select.select([guardian.pidfd], [], [], 0)[0]:
        guardian.watch(2**22)
        told += 1
        assert told < 1_000_000
    assert not guardian.alive


def test_signals_to_the_servers_group_do_not_reach_the_guardian(guardian: Guardian) -> None:
    assert os.getsid(guardian.pid) == guardian.pid
    status = Path(f"/proc/{guardian.pid}/status").read_text()
    blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        assert blocked >> (number - 1) & 1
        os.kill(guardian.pid, number)
    assert guardian.alive


def test_the_guardian_carries_no_mark(monkeypatch: pytest.MonkeyPatch, epoch: str) -> None:
    monkeypatch.setenv(REPLICA_VARIABLE, "outer/qa/0#1")
    guardian = Guardian(epoch)
    guardian.start()
    assert REPLICA_VARIABLE.encode() not in Path(f"/proc/{guardian.pid}/environ").read_bytes()
    guardian.stop()


def test_starting_and_stopping_leaves_nothing_open(epoch: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    guardian = Guardian(epoch)
    for _ in range(2):
        guardian.start()
        guardian.start()
        guardian.stop()
        guardian.stop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_guardian_process_is_tiny(epoch: str) -> None:
    command = [sys.executable, "-X", "importtime", "-I", "-S", guardians.__file__, epoch]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "encodings" in imported
    assert imported.isdisjoint(
        {"subprocess", "typing", "dataclasses", "multiprocessing", "threading", "shared", "site"}
    )

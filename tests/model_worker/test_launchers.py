"""What every launcher promises, what the spawning one adds, and that nothing outlives its parent. Real processes."""

from __future__ import annotations

import json
import multiprocessing.resource_tracker
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from model_worker import launchers
from model_worker.guardian import REPLICA_VARIABLE, find_processes, of_server
from model_worker.launchers import Child, Launcher, SpawnLauncher
from model_worker.specs import ReplicaSpec
from tests import launched, launched_slowly
from tests.launched import read_report, replica_spec
from tests.topology import ROOT, alive, wait_for

Target = Callable[[ReplicaSpec], None]
EPOCH = f"test-{os.getpid()}"

# A second launcher joins here: a callable that makes one for a target.
LAUNCHERS: dict[str, Callable[[Target], Launcher]] = {"spawn": lambda target: SpawnLauncher(target, EPOCH)}


@pytest.fixture(params=LAUNCHERS)
def make_launcher(request: pytest.FixtureRequest) -> Callable[[Target], Launcher]:
    return LAUNCHERS[request.param]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "report"


@contextmanager
def started(launcher: Launcher, spec: ReplicaSpec) -> Iterator[Child]:
    """A child that is gone at the end of the block, with all it started."""
    child = launcher.start(spec)
    try:
        yield child
    finally:
        child.kill()
        child.reap()


def wait_exit(child: Child) -> int:
    """The exit code, once the pidfd says that there is one."""
    readable, _, _ = select.select([child.pidfd], [], [], 30)
    assert readable, "the pidfd never fired"
    code = child.exit_code()
    assert code is not None
    return code


def gone(pids: Any) -> bool:
    return not any(alive(pid) for pid in pids)


# --- the contract of every launcher ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"then": "exit", "code": 0}, 0),
        ({"then": "exit", "code": 7}, 7),
        ({"then": "signal", "number": signal.SIGSEGV}, -signal.SIGSEGV),
        ({"then": "signal", "number": signal.SIGTERM}, -signal.SIGTERM),
        ({"then": "signal", "number": signal.SIGKILL}, -signal.SIGKILL),
    ],
)
def test_the_exit_is_seen_with_its_code(
    make_launcher: Callable[[Target], Launcher], report: Path, options: dict[str, Any], expected: int
) -> None:
    with started(make_launcher(launched.run), replica_spec(report, **options)) as child:
        assert wait_exit(child) == expected
        assert child.exit_code() == expected


def test_an_exception_in_the_target_is_an_exit_with_one(
    make_launcher: Callable[[Target], Launcher], report: Path
) -> None:
    with started(make_launcher(launched.run_and_raise), replica_spec(report)) as child:
        assert wait_exit(child) == 1


def test_a_running_child_has_no_exit_code_and_a_silent_pidfd(
    make_launcher: Callable[[Target], Launcher], report: Path
) -> None:
    with started(make_launcher(launched.run), replica_spec(report)) as child:
        assert read_report(report)["pid"] == child.pid
        assert child.exit_code() is None
        assert select.select([child.pidfd], [], [], 0)[0] == []


@pytest.mark.parametrize("state", ["ignoring SIGTERM", "stopped", "holding the GIL"])
def test_a_kill_is_final(make_launcher: Callable[[Target], Launcher], report: Path, state: str) -> None:
    then = "hold_gil" if state == "holding the GIL" else "wait"
    spec = replica_spec(report, then=then, ignore_sigterm=state == "ignoring SIGTERM")
    with started(make_launcher(launched.run), spec) as child:
        read_report(report)
        if state == "stopped":
            os.kill(child.pid, signal.SIGSTOP)
        child.kill()
        assert wait_exit(child) == -signal.SIGKILL


def test_a_kill_reaches_everything_the_child_started(make_launcher: Callable[[Target], Launcher], report: Path) -> None:
    with started(make_launcher(launched.run), replica_spec(report, family=True)) as child:
        family = read_report(report)["family"].values()
        assert all(alive(pid) for pid in family)
        child.kill()
        wait_for(lambda: gone([*family, child.pid]), "the child and its family are gone")


def test_reaping_ends_what_a_crashed_child_left_behind(
    make_launcher: Callable[[Target], Launcher], report: Path
) -> None:
    child = make_launcher(launched.run).start(
        replica_spec(report, family=True, then="signal", number=int(signal.SIGSEGV))
    )
    family = read_report(report)["family"]
    # Its parent is dead before anybody looks, and it has neither the mark nor the group: beyond any reach.
    bare = family.pop("bare")
    try:
        assert wait_exit(child) == -signal.SIGSEGV
        child.reap()
        wait_for(lambda: gone(family.values()), "the family is gone")
    finally:
        if alive(bare):
            os.kill(bare, signal.SIGKILL)


def test_reaping_frees_pid_and_descriptors(make_launcher: Callable[[Target], Launcher], tmp_path: Path) -> None:
    launcher = make_launcher(launched.run)

    def run_one(incarnation: int) -> int:
        spec = replica_spec(tmp_path / str(incarnation), incarnation=incarnation, then="exit", code=0)
        with started(launcher, spec) as child:
            wait_exit(child)
        assert not Path(f"/proc/{child.pid}").exists()
        return len(os.listdir("/proc/self/fd"))

    # The first one also brings up what all of them share.
    assert run_one(1) >= run_one(2) == run_one(3)


def test_children_of_one_launcher_are_told_apart(make_launcher: Callable[[Target], Launcher], tmp_path: Path) -> None:
    launcher = make_launcher(launched.run)
    with ExitStack() as stack:
        # Incarnations 1 and 10: the beginning of a mark must not be taken for the mark.
        first, second = (
            stack.enter_context(started(launcher, replica_spec(tmp_path / str(number), incarnation=number)))
            for number in (1, 10)
        )
        read_report(tmp_path / "1")
        read_report(tmp_path / "10")
        first.kill()
        assert wait_exit(first) == -signal.SIGKILL
        assert second.exit_code() is None
        assert alive(second.pid)


def test_pins_are_in_place_at_exec_and_the_parents_environment_is_untouched(
    make_launcher: Callable[[Target], Launcher], report: Path
) -> None:
    before = dict(os.environ)
    with started(make_launcher(launched.run), replica_spec(report)) as child:
        # The kernel shows an empty one for the microseconds of the exec itself.
        shown = wait_for(Path(f"/proc/{child.pid}/environ").read_bytes, "the exec is over")
        environment = shown.split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=GPU-of-this-test" in environment
        assert f"{REPLICA_VARIABLE}={EPOCH}/qa/0#1".encode() in environment
        assert dict(os.environ) == before


# --- the spawning launcher and its guarded child -----------------------------------------------------------------


def test_a_child_is_set_up_as_a_replica(report: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with started(SpawnLauncher(launched.run, EPOCH), replica_spec(report, cores=(core,))) as child:
        facts = read_report(report)
        assert facts["group"] == child.pid != os.getpgid(0)
        assert facts["daemon"] is False
        assert set(map(tuple, facts["affinity"].values())) == {(core,)}
        assert facts["stdin"] == "/dev/null"
        assert facts["sigint_ignored"]
        assert facts["blocked"] == []
        assert "parent-watch" in facts["threads"]
        assert Path(f"/proc/{child.pid}/comm").read_text() == "hw qa/0\n"


def test_no_cores_named_means_all_of_them(report: Path) -> None:
    with started(SpawnLauncher(launched.run, EPOCH), replica_spec(report)):
        assert set(map(tuple, read_report(report)["affinity"].values())) == {tuple(sorted(os.sched_getaffinity(0)))}


@pytest.mark.parametrize("then", ["wait", "hold_gil"])
def test_stacks_are_dumped_even_while_the_gil_is_held(
    report: Path, capfd: pytest.CaptureFixture[str], then: str
) -> None:
    with started(SpawnLauncher(launched.run, EPOCH), replica_spec(report, then=then)) as child:
        read_report(report)
        assert child.dump_stacks()
        seen = ""

        def dumped() -> bool:
            nonlocal seen
            seen += capfd.readouterr().err
            return "in _then" in seen and "in _end_with_parent" in seen

        wait_for(dumped, "the stacks of both threads are on stderr")
        assert child.exit_code() is None


def test_a_child_that_cannot_dump_its_stacks_is_not_harmed_by_being_asked(report: Path) -> None:
    with started(SpawnLauncher(launched_slowly.run, EPOCH), replica_spec(report)) as child:
        read_report(report.with_suffix(".importing"))
        assert not child.dump_stacks()
        report.with_name("release").touch()
        assert read_report(report)["pid"] == child.pid


def test_an_interrupt_while_a_child_starts_is_not_lost() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with launchers._sigint_blocked():
            # Another thread of the test runner might take one that is sent to the process.
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_children_are_started_from_the_main_thread_only(report: Path) -> None:
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            SpawnLauncher(launched.run, EPOCH).start(replica_spec(report))
        except AssertionError as error:
            raised.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert len(raised) == 1


def test_the_resource_tracker_belongs_to_no_replica(report: Path) -> None:
    with started(SpawnLauncher(launched.run, EPOCH), replica_spec(report)):
        read_report(report)
    tracker = multiprocessing.resource_tracker._resource_tracker
    tracker_pid: int = tracker._pid  # type: ignore[attr-defined]
    assert alive(tracker_pid)
    assert REPLICA_VARIABLE.encode() not in Path(f"/proc/{tracker_pid}/environ").read_bytes()


def test_an_exit_that_multiprocessing_collected_first_is_still_seen(tmp_path: Path) -> None:
    launcher = SpawnLauncher(launched.run, EPOCH)
    with started(launcher, replica_spec(tmp_path / "first", then="exit", code=7)) as first:
        select.select([first.pidfd], [], [], 30)
        # Starting another one collects all that have ended.
        with started(launcher, replica_spec(tmp_path / "second", incarnation=2)):
            assert first.exit_code() == 7


# --- when the parent dies ----------------------------------------------------------------------------------------


class Doomed:
    """A model server of its own, with one replica, for a test to kill."""

    def __init__(self, report: Path, **options: object) -> None:
        self.report = report
        command = [sys.executable, "-m", "tests.doomed_server", str(report), json.dumps(options)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
        self.facts = read_report(report.with_suffix(".server"))
        self.pids = [int(pid) for pid in self.facts.values() if pid]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def clean_up(self) -> None:
        """Whatever a failed test leaves alive."""
        self.kill()
        for pid, _ in find_processes(of_server(f"doomed-{self.process.pid}")):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def doom(report: Path) -> Iterator[Callable[..., Doomed]]:
    servers: list[Doomed] = []

    def start(**options: object) -> Doomed:
        servers.append(Doomed(report, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.clean_up()


@pytest.mark.parametrize("then", ["wait", "hold_gil"])
def test_a_killed_server_takes_a_replica_and_its_family_with_it(
    doom: Callable[..., Doomed], report: Path, then: str
) -> None:
    server = doom(guardian=True, family=True, then=then)
    family = read_report(report)["family"]
    bare = family.pop("bare")
    server.kill()
    try:
        wait_for(lambda: gone([*server.pids, *family.values()]), "everything is gone, the guardian included")
    finally:
        if alive(bare):
            os.kill(bare, signal.SIGKILL)


def test_a_killed_server_takes_a_replica_that_is_being_imported_with_it(
    doom: Callable[..., Doomed], report: Path
) -> None:
    server = doom(guardian=True, slow_import=True)
    read_report(report.with_suffix(".importing"))
    server.kill()
    wait_for(lambda: gone(server.pids), "everything is gone, the guardian included")


@pytest.mark.parametrize("then", ["wait", "hold_gil"])
def test_a_replica_dies_with_its_server_by_itself(doom: Callable[..., Doomed], report: Path, then: str) -> None:
    server = doom(guardian=False, then=then)
    read_report(report)
    server.kill()
    wait_for(lambda: gone(server.pids), "the replica is gone")


def test_the_watching_thread_alone_ends_a_replica(doom: Callable[..., Doomed], report: Path) -> None:
    server = doom(guardian=False, without_kernel_guard=True)
    read_report(report)
    server.kill()
    wait_for(lambda: gone(server.pids), "the replica is gone")


def test_a_replica_whose_server_died_during_its_import_ends_when_it_comes_to_itself(
    doom: Callable[..., Doomed], report: Path
) -> None:
    server = doom(guardian=False, slow_import=True)
    read_report(report.with_suffix(".importing"))
    server.kill()
    assert alive(server.facts["child"])
    report.with_name("release").touch()
    wait_for(lambda: gone(server.pids), "the replica is gone")
    assert not report.exists()


def test_ctrl_c_harms_no_replica_that_is_being_imported_or_runs(doom: Callable[..., Doomed], report: Path) -> None:
    server = doom(guardian=True, slow_import=True)
    read_report(report.with_suffix(".importing"))
    assert os.getpgid(server.facts["child"]) == os.getpgid(server.process.pid)
    os.killpg(server.process.pid, signal.SIGINT)
    report.with_name("release").touch()
    assert read_report(report)["pid"] == server.facts["child"]
    os.kill(server.facts["child"], signal.SIGINT)
    os.killpg(server.process.pid, signal.SIGTERM)
    assert all(alive(pid) for pid in server.pids)

"""`headwaiter top` as people run it: one frame, frames in a pipe, frames on a terminal, and the rates in them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import termios
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from model_worker.commands.exits import Exit
from model_worker.commands.rates import quantile, rates
from model_worker.commands.top import slots_that_fit, sparkline
from shared.messages import DeviceState, Inspect, ModelCounters, SlotState, Snapshot, Trouble
from shared.version import VERSION
from tests.command_line import COMMAND, ECHO, environment, headwaiter, only_line, write_config
from tests.serving import in_terminal, read_available, short_directory
from tests.stub_broker import StubBroker
from tests.topology import wait_for


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as made:
        write_config(made, ECHO)
        yield made


@pytest.fixture
def broker(directory: Path) -> Iterator[StubBroker]:
    with StubBroker(directory / "run") as started:
        started.devices = (DeviceState("cpu", "", 2**30),)
        started.troubles = (Trouble("replica_exited", "echo/0", "crashed: killed by signal 9", 7, 3.0),)
        yield started


def test_one_frame_has_models_rates_devices_slots_and_troubles(directory: Path, broker: StubBroker) -> None:
    completed = headwaiter("top", "--once", cwd=directory)
    assert (completed.returncode, completed.stderr) == (Exit.OK, "")
    lines = [line.split() for line in completed.stdout.splitlines()]
    # The stub has answered 4 and refused 3 in 12.5 s, has 1 MiB on the device, and its troubles.
    assert ["since", "the", "start,", "12s", "ago:"] in lines
    assert [line[:3] for line in lines if line[:2] == ["echo", "0.3"]] == [["echo", "0.3", "0.2"]]
    assert ["cpu", "1", "1.0", "MiB", "1.0", "GiB", "0%"] in lines
    assert [line[:3] for line in lines if line[:1] == ["echo/0"]] == [["echo/0", "cpu", "ready"]]
    assert ["replica_exited", "echo/0", "7", "3s", "crashed:", "killed", "by", "signal", "9"] in lines


def test_without_a_server_it_says_so_and_exits_with_69(directory: Path) -> None:
    completed = headwaiter("top", cwd=directory)
    assert completed.returncode == Exit.UNAVAILABLE
    assert "headwaiter serve" in only_line(completed.stderr)
    assert completed.stdout == ""


def test_in_a_pipe_frames_follow_each_other_until_it_is_interrupted(directory: Path, broker: StubBroker) -> None:
    process = subprocess.Popen(
        [*COMMAND, "top", "--every", "0.2"],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    frames = 0
    while frames < 3:
        line = process.stdout.readline()
        assert line, "it goes on"
        assert "\x1b" not in line
        frames += line.startswith("model server ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (Exit.OK, "")


class Terminal:
    """`headwaiter top` on a terminal of its own."""

    def __init__(self, directory: Path) -> None:
        arguments = [*COMMAND, "top", "--every", "0.2"]
        self.process, self.outer = in_terminal(arguments, directory, {"COLUMNS": "160", "LINES": "50"})
        self.shown = ""

    def shows(self, text: str) -> bool:
        self.shown += read_available(self.outer).decode()
        return text in self.shown

    def wait(self, text: str) -> None:
        wait_for(lambda: self.shows(text), f"it shows {text!r}")

    def press(self, keys: bytes) -> int:
        """Types, and returns what it exits with."""
        os.write(self.outer, keys)

        def ended() -> bool:
            # Nobody ends whose last words find no room.
            self.shows("")
            return self.process.poll() is not None

        wait_for(ended, "it ends")
        return self.process.returncode


@pytest.fixture
def terminal(directory: Path, broker: StubBroker) -> Iterator[Terminal]:
    started = Terminal(directory)
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()
    os.close(started.outer)


@pytest.mark.parametrize("keys", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_on_a_terminal_a_key_ends_it_and_the_terminal_is_as_before(terminal: Terminal, keys: bytes) -> None:
    before = termios.tcgetattr(terminal.outer)
    terminal.wait("echo/0")
    wait_for(lambda: termios.tcgetattr(terminal.outer) != before, "keys are read one by one")
    assert "\x1b[?1049h" in terminal.shown
    assert terminal.press(keys) == Exit.OK
    assert termios.tcgetattr(terminal.outer) == before
    assert "\x1b[?1049l" in terminal.shown
    assert "Traceback" not in terminal.shown


def test_other_keys_do_nothing(terminal: Terminal, broker: StubBroker) -> None:
    terminal.wait("echo/0")
    os.write(terminal.outer, b"x\n")
    asked = len(broker.received(Inspect))

    def goes_on() -> bool:
        # Nobody draws whose frames find no room.
        terminal.shows("")
        return len(broker.received(Inspect)) > asked + 2

    wait_for(goes_on, "it goes on")
    assert terminal.press(b"q") == Exit.OK


def test_a_server_that_goes_away_is_told_and_a_new_one_is_found(directory: Path) -> None:
    with StubBroker(directory / "run"):
        terminal = Terminal(directory)
        terminal.wait("echo/0")
    try:
        terminal.wait("was not heard for")
        terminal.shown = ""
        with StubBroker(directory / "run") as second:
            second.troubles = (Trouble("loop_late", "", "late_s=2", 1, 1.0),)
            terminal.wait("loop_late")
            assert terminal.press(b"q") == Exit.OK
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.outer)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def slot(**changes: Any) -> SlotState:
    values: dict[str, Any] = {
        "slot": "m/0",
        "model": "m",
        "device": "cpu",
        "pid": 1,
        "incarnation": 1,
        "state": "ready",
    }
    values |= {"reason": "", "loads": 1, "restarts": 0, "memory_bytes": 0, "batches": 0, "requests": 0, "held": 0}
    return SlotState(**(values | {"progress": -1.0, "heard_ms_ago": 0} | changes))


def counters(**changes: Any) -> ModelCounters:
    values: dict[str, Any] = {"model": "m", "admitted": 0, "ended": {}, "rejected": {}, "retried": 0, "batches": 0}
    values |= {"batch_size_sum": 0, "batch_size_buckets": {}, "queue_s_sum": 0.0, "queue_s_buckets": {}}
    return ModelCounters(**(values | {"forward_s_sum": 0.0, "forward_s_buckets": {}, "restarts": {}} | changes))


def snapshot(uptime_s: float, counted: ModelCounters, *slots: SlotState) -> Snapshot:
    return Snapshot(1, "epoch", 1, VERSION, uptime_s, False, (), slots, (counted,), 0, 0)


def test_rates_are_what_was_gained_for_each_second_between() -> None:
    buckets = {"0.1": 10, "1": 10, "+Inf": 10}
    before = counters(ended={"ok": 10, "model_error": 1}, batches=10, batch_size_sum=10, queue_s_buckets=buckets)
    now = counters(
        ended={"ok": 30, "model_error": 2},
        rejected={"overloaded": 3},
        batches=15,
        batch_size_sum=30,
        queue_s_buckets={"0.1": 10, "1": 30, "+Inf": 30},
    )
    found = rates(snapshot(14.0, now), snapshot(10.0, before))["m"]
    assert (found.answered_per_s, found.otherwise_per_s, found.batch_size) == (5.0, 1.0, 4.0)
    # All twenty since then waited between 0.1 s and 1 s.
    assert found.wait_s == pytest.approx((0.55, 0.955))
    assert found.forward_s == (None, None)
    assert found.tokens_per_s is None


def test_tokens_of_a_process_that_was_replaced_are_counted_from_its_start() -> None:
    continuous = {"batching": "continuous: x"}
    before = snapshot(10.0, counters(), slot(step_items=1000, choices=continuous))
    same = snapshot(12.0, counters(), slot(step_items=1100, choices=continuous))
    assert rates(same, before)["m"].tokens_per_s == 50
    replaced = snapshot(12.0, counters(), slot(step_items=30, incarnation=2, choices=continuous))
    assert rates(replaced, before)["m"].tokens_per_s == 15


@given(st.lists(st.integers(0, 20), min_size=3, max_size=6), st.floats(0.01, 0.99))
def test_a_percentile_lies_in_the_bucket_that_holds_it(counts: list[int], share: float) -> None:
    bounds = [float(2**index) for index in range(len(counts) - 1)]
    total, cumulative = 0, {}
    for bound, count in zip([*bounds, math.inf], counts, strict=True):
        total += count
        cumulative[bound] = total
    value = quantile(cumulative, share)
    if total == 0:
        assert value is None
        return
    assert value is not None
    index = next(place for place, bound in enumerate(cumulative) if cumulative[bound] >= total * share)
    edges = [0.0, *bounds]
    assert edges[index] <= value <= edges[min(index + 1, len(edges) - 1)]


def test_slots_that_have_no_room_are_counted_and_those_that_are_ready_give_way() -> None:
    slots = tuple(slot(slot=f"m/{number}", state="ready" if number != 8 else "failed") for number in range(10))
    whole = replace(snapshot(1.0, counters()), slots=slots)
    assert len(slots_that_fit(whole, 10)) == 1
    table, rest = slots_that_fit(whole, 4)
    assert [str(cell) for cell in table.columns[0].cells] == ["m/0", "m/1", "m/8"]  # type: ignore[union-attr]
    assert str(rest) == "and 7 more slots"


def test_a_line_of_sparks_reaches_its_top_where_most_happened() -> None:
    assert sparkline(deque([0.0, 5.0, 10.0]), "_-#") == "_-#"
    assert sparkline(deque([0.0, 0.0]), "_-#") == "__"
    assert sparkline(deque()) == ""

"""An operator's orders as people type them: what reaches the model server, what is shown, and how the command ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from model_worker.commands import orders
from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags
from model_worker.commands.orders import Order, run_order
from shared.messages import Manage, Managed
from tests.command_line import COMMAND, ECHO, document, environment, headwaiter, only_line, write_config
from tests.serving import in_terminal, read_available, short_directory
from tests.stub_broker import StubBroker, end_with, model_state, slot_state
from tests.topology import wait_for

NAMES = ("echo", "sentiment")


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with short_directory() as made:
        write_config(made, *({**ECHO, "name": name} for name in NAMES))
        yield made


@pytest.fixture
def broker(directory: Path) -> Iterator[StubBroker]:
    with StubBroker(directory / "run", models=[model_state(name) for name in NAMES]) as started:
        yield started


@pytest.fixture
def flags(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Flags:
    """For a command that runs in this process."""
    monkeypatch.setenv("HEADWAITER_CONFIG", str(directory / "headwaiter.toml"))
    return Flags(config=directory / "headwaiter.toml")


def test_what_is_typed_is_what_the_model_server_is_told(directory: Path, broker: StubBroker) -> None:
    completed = headwaiter("scale", "sentiment", "3", cwd=directory)
    assert (completed.returncode, completed.stdout, completed.stderr) == (Exit.OK, "scale sentiment 3\n", "")
    completed = headwaiter("drain", "--json", cwd=directory)
    assert completed.returncode == Exit.OK
    assert document(completed) == {"action": "drain", "model": "", "outcome": "done", "text": "drain  0"}
    told = [(order.action, order.model, order.replicas) for order in broker.received(Manage)]
    assert told == [("scale", "sentiment", 3), ("drain", "", 0)]


@pytest.mark.parametrize(("outcome", "code"), [("refused", Exit.REFUSED), ("failed", Exit.FAILED)])
def test_what_is_not_done_is_one_line_on_standard_error(
    flags: Flags, broker: StubBroker, capfd: pytest.CaptureFixture[str], outcome: str, code: Exit
) -> None:
    broker.manage = end_with(outcome, "because of the weather: wait for the sun")
    assert run_order(flags, Order("reload", "echo"), as_json=False) is code
    shown = capfd.readouterr()
    assert only_line(shown.err) == "headwaiter: because of the weather: wait for the sun"
    assert "weather" not in shown.out
    assert run_order(flags, Order("reload", "echo"), as_json=True) is code
    assert json.loads(capfd.readouterr().out)["outcome"] == outcome


def test_a_mistyped_model_is_never_ordered_about(
    flags: Flags, broker: StubBroker, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_order(flags, Order("unload", "sentimnet"), as_json=False) is Exit.USAGE
    said = only_line(capfd.readouterr().err)
    assert "'sentimnet' (did you mean 'sentiment'?)" in said
    assert "known: echo, sentiment" in said
    assert broker.received(Manage) == []


def test_without_a_service_it_says_so(directory: Path) -> None:
    nobody = {"HEADWAITER_RUN_DIR": str(directory / "nobody")}
    completed = headwaiter("reload", "echo", "--json", cwd=directory, variables=nobody)
    assert completed.returncode == Exit.UNAVAILABLE
    assert "headwaiter serve" in only_line(completed.stderr)
    assert document(completed)["outcome"] == "unreachable"


def test_a_pipe_gets_one_line_for_each_change_of_the_models_own_slots(
    flags: Flags, broker: StubBroker, capfd: pytest.CaptureFixture[str]
) -> None:
    loading: dict[str, Any] = {"incarnation": 2, "state": "loading"}
    # One look sees one of these, the first one what was there before.
    course = [
        [slot_state("sentiment"), slot_state("sentiment", slot="sentiment/1"), slot_state("echo")],
        [slot_state("sentiment", **loading, progress=0.11), slot_state("sentiment", slot="sentiment/1")],
        [slot_state("sentiment", **loading, progress=0.12, reason="byte 2"), slot_state("echo", state="loading")],
        [slot_state("sentiment", **loading, progress=-1.0, reason="asks the hub again")],
        [slot_state("sentiment", incarnation=2)],
    ]

    def go_on() -> None:
        if course:
            broker.slots = tuple(course.pop(0))
        else:
            broker.end_orders("done", "both have come up")

    go_on()
    broker.after_look = go_on
    broker.manage = lambda order: []
    assert run_order(flags, Order("reload", "sentiment"), as_json=False) is Exit.OK
    assert capfd.readouterr().out.splitlines() == [
        "sentiment/0 on cpu: loading 11%",
        "sentiment/1: gone",
        "sentiment/0 on cpu: loading: asks the hub again",
        "sentiment/0 on cpu: ready",
        "both have come up",
    ]


def test_a_terminal_sees_the_slots_come_up_in_one_place(directory: Path, broker: StubBroker) -> None:
    broker.manage = lambda order: []
    broker.slots = (slot_state("echo", state="loading", progress=0.4, reason="from the disk"),)
    process, terminal = in_terminal([*COMMAND, "reload", "echo"], directory, {})
    shown = b""

    def said(words: bytes) -> bool:
        nonlocal shown
        shown += read_available(terminal)
        return words in shown

    try:
        wait_for(lambda: said(b"loading 40%") and said(b"from the disk"), "the slot is shown")
        os.write(terminal, b"\x03")
        wait_for(lambda: said(b"goes on"), "Ctrl-C says what it does not stop")
        assert process.wait(20) == Exit.INTERRUPTED
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_ctrl_c_stops_the_waiting_and_nothing_else(directory: Path, broker: StubBroker) -> None:
    broker.manage = lambda order: []
    process = subprocess.Popen(
        [*COMMAND, "reload", "echo"], cwd=directory, env=environment(), stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: broker.received(Manage), "it was ordered")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == Exit.INTERRUPTED
    assert only_line(said) == (
        "headwaiter: not waiting any more; the reload of echo goes on: headwaiter status shows how far it is"
    )
    assert [order.action for order in broker.received(Manage)] == ["reload"]


def test_a_model_server_that_is_restarted_or_dies_meanwhile_ends_the_waiting(
    flags: Flags, broker: StubBroker, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def restart(order: Manage) -> Sequence[tuple[float, Managed]]:
        broker.epoch = "another"
        return []

    def die(order: Manage) -> Sequence[tuple[float, Managed]]:
        broker.answers_inspect = False
        return []

    broker.manage = restart
    assert run_order(flags, Order("reload", "echo"), as_json=False) is Exit.FAILED
    assert "was restarted before the reload of echo had ended" in only_line(capfd.readouterr().err)
    monkeypatch.setattr(orders, "SILENCE_S_MAX", 0.5)
    broker.manage = die
    assert run_order(flags, Order("drain"), as_json=False) is Exit.FAILED
    assert "whether the drain of the service has ended is not known" in only_line(capfd.readouterr().err)

"""The life of a model process, seen from the broker's place: start, load, work, faults, exit.

Every test here starts a real process by spawn and talks to it over a real socket.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from model_worker.launchers import SpawnLauncher
from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.process import run
from shared import values
from shared.errors import Code
from shared.messages import (
    Drain,
    Phase,
    ReplicaCancel,
    ReplicaHello,
    Result,
    State,
    Stop,
)
from shared.version import VERSION
from tests.replica_bench import WITHIN_S, Replica, replica

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def no_leftovers(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """No process complains at its end, whichever way it ended."""
    yield
    errors = capfd.readouterr().err
    assert "resource_tracker" not in errors
    assert "Exception ignored" not in errors


# --- starting --------------------------------------------------------------------------------------------------------


def test_hello_comes_first_and_ready_last() -> None:
    with replica("Echo") as bench:
        hello, *rest = bench.messages
        assert hello == ReplicaHello("m/0", 3, bench.child.pid, VERSION)
        phases = [message.phase for message in rest if isinstance(message, State)]
        assert phases == [Phase.LOADING, Phase.WARMING, Phase.READY]


def test_ready_comes_after_a_warm_up_with_the_fullest_batch() -> None:
    with replica("Echo", max_batch_size=8, max_batch_cost=20, examples=["12345", "1"]) as bench:
        assert bench.forwards() == [["12345"] * 4, ["1"]]
        assert len(bench.journal("prepared")) == 1 + 4 + 1 + 1
        assert len(bench.journal("finished")) == 5
        assert {line["thread"] for line in bench.journal("forwarded")} == {"MainThread"}


def test_model_s_own_cost_limit_holds_where_none_is_configured() -> None:
    with replica("Echo", max_batch_size=8, examples=["12345"], cost_limit=10) as bench:
        ready = bench.wait_phase(Phase.READY)
        assert (ready.max_batch_cost, ready.max_batch_size) == (10, 8)
        assert bench.forwards() == [["12345"] * 2]


def test_the_budget_a_model_sees_is_the_configured_one_or_what_fits() -> None:
    with replica("Echo", max_batch_cost=20, examples=["12345", "1"], cost_limit=10) as bench:
        assert {line["budget"] for line in bench.journal("forwarded")} == {20}
    with replica("Hungry", max_batch_size=8, capacity=3, examples=["12345"]) as bench:
        bench.ask("1")
        assert bench.journal("forwarded")[-1]["budget"] == 10


def test_warm_up_that_does_not_fit_lowers_the_limit_that_ready_reports() -> None:
    with replica("Hungry", max_batch_size=8, capacity=3, examples=["12345"]) as bench:
        assert bench.wait_phase(Phase.READY).max_batch_cost == 10
        assert [len(items) for items in bench.forwards()] == [8, 4, 2]


def test_ready_says_what_was_decided() -> None:
    with replica("Grouping") as bench:
        ready = bench.wait_phase(Phase.READY)
        assert ready.mixes_parameters is True
        assert ready.choices["dtype"] == "none at all"
        assert isinstance(ready.choices["odd"], str)


def test_pulses_and_progress_arrive_while_the_model_loads(tmp_path: Path) -> None:
    release = tmp_path / "release"
    with replica("SlowLoader", until=Phase.LOADING, release=str(release)) as bench:
        bench.wait_pulse(lambda pulse: pulse.memory_bytes > 0 and pulse.running_ms == 0)
        reported = [(state.phase, state.progress, state.detail) for state in bench.states()]
        assert (Phase.DOWNLOADING, 0.25, "download of the first part") in reported
        assert (Phase.LOADING, 0.5, "second part") in reported
        assert Phase.READY not in [state.phase for state in bench.states()]
        release.touch()
        bench.wait_phase(Phase.READY)


def test_batch_that_comes_before_ready_is_refused() -> None:
    with replica("SlowLoader", until=Phase.LOADING, release="/never/made") as bench:
        assert [result.code for result in bench.ask("x")] == [Code.MODEL_LOADING]


@pytest.mark.parametrize(
    ("model", "how", "cause", "permanent"),
    [
        ("Unloadable", "plain", "ValueError: weights are upside down", False),
        ("Unloadable", "permanent", "the directory holds no model", True),
        ("Unloadable", "exit", "SystemExit: the model's author gives up", False),
        ("Absent", "", "tests.stub_models:Absent", True),
    ],
)
def test_failed_load_is_reported_in_one_line_before_the_exit(model: str, how: str, cause: str, permanent: bool) -> None:
    options = {"how": how} if how else {}
    with replica(model, until=None, **options) as bench:
        assert bench.wait_exit() == ReplicaExit.LOAD_FAILED
        failed = bench.wait_phase(Phase.FAILED)
        assert cause in failed.detail
        assert "\n" not in failed.detail
        assert failed.permanent is permanent


def test_first_cause_of_a_failed_load_is_kept() -> None:
    with replica("Masked", until=None) as bench:
        assert bench.wait_exit() == ReplicaExit.LOAD_FAILED
        failed = bench.wait_phase(Phase.FAILED)
        assert "busy or unavailable" in failed.detail
        assert "AttributeError" in failed.detail


def test_failed_warm_up_is_a_failed_load() -> None:
    with replica("Grumpy", until=None, examples=["forward fails"]) as bench:
        assert bench.wait_exit() == ReplicaExit.LOAD_FAILED
        assert bench.wait_phase(Phase.FAILED).detail.startswith("warm-up failed: TwoArguments")


def test_model_without_torch_gets_a_process_without_torch() -> None:
    with replica("Echo") as bench:
        assert bench.values_of("a") == ["a"]
        assert "torch" not in Path(f"/proc/{bench.child.pid}/maps").read_text()


def test_model_that_brings_torch_gets_its_threads_its_memory_errors_and_its_tensors_handled() -> None:
    with replica("tests.torch_stub:TorchEcho", threads=1) as bench:
        assert bench.journal("loaded")[0]["device"] == "1 threads"
        assert [value.tolist() for value in bench.values_of("a", "bb")] == [[1, 1], [2, 2]]
        assert [len(items) for items in bench.forwards()] == [2, 1, 1]


def test_error_outside_any_item_ends_the_process_and_not_just_its_thread(capfd: pytest.CaptureFixture[str]) -> None:
    with replica("Echo") as bench:
        lost = SpawnLauncher(run, f"bench-{os.getpid()}").start(replace(bench.spec, endpoint="tcp://127.0.0.1:1"))
        assert select.select([lost.pidfd], [], [], WITHIN_S)[0]
        assert lost.exit_code() == ReplicaExit.INTERNAL_ERROR
        lost.reap()
    assert "on the io thread" in capfd.readouterr().err


STREAMS = ["absent", "closed", "descriptors closed", "broken"]


@pytest.mark.parametrize("how", STREAMS)
def test_model_without_standard_streams_serves_is_heard_and_ends_when_told_to(
    how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with replica("Undressed", how=how) as bench:
        assert bench.values_of("a") == ["a"]
        assert bench.child.dump_stacks()
        # The signal interrupts the main thread before its next forward; a message alone could overtake it.
        assert bench.values_of("b") == ["b"]
        bench.send(Stop())
        assert bench.wait_exit() == ReplicaExit.STOPPED
    written = capfd.readouterr().err
    assert " model_ready " in written
    assert " replica_left " in written
    assert "most recent call first" in written


@pytest.mark.parametrize("how", STREAMS)
def test_cause_of_a_failed_load_survives_the_standard_streams(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    with replica("Undressed", until=None, how=how, fails=True) as bench:
        assert bench.wait_exit() == ReplicaExit.LOAD_FAILED
        assert bench.wait_phase(Phase.FAILED).detail == "ValueError: weights are upside down"
    [line] = [line for line in capfd.readouterr().err.splitlines() if " replica_left " in line]
    assert "weights are upside down" in line


def test_failed_load_is_told_once_with_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    with replica("Unloadable", until=None, how="permanent") as bench:
        assert bench.wait_exit() == ReplicaExit.LOAD_FAILED
    written = capfd.readouterr().err
    told = [line for line in written.splitlines() if "the directory holds no model" in line]
    assert [" replica_left " in line for line in told if not line.startswith(" ")] == [True]
    assert "in load" in written
    assert "LoadError: the directory holds no model" in told[-1]


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        ("examples", "Misdescribed.examples returned ['a'] (list): return a list of pairs (inputs, parameters)"),
        ("describe", "Misdescribed.describe returned ['a'] (list): return a dict with text for keys"),
    ],
)
def test_wrong_return_at_the_load_names_the_method(method: str, cause: str) -> None:
    with replica("Misdescribed", until=None, method=method) as bench:
        assert bench.wait_exit() == ReplicaExit.LOAD_FAILED
        assert cause in bench.wait_phase(Phase.FAILED).detail


# --- working ---------------------------------------------------------------------------------------------------------


def test_batch_comes_back_with_values_costs_and_timings_in_one_message() -> None:
    # Where finishing takes long, results leave before all are there; and on a busy machine anything may take long.
    with replica("Unhurried") as bench:
        seen = len(bench.messages)
        results = bench.ask("abc", "abc", "abc")
        assert [bench.values[result.id] for result in results] == ["abc"] * 3
        for result in results:
            assert (result.attempt, result.cost, result.batch_size) == (1, 3, 3)
            assert result.prepare_ms > 0
            assert result.forward_ms > 0
            assert result.finish_ms > 0
        messages = [message for message in bench.messages[seen:] if isinstance(message, Result)]
        assert [len(message.results) for message in messages] == [3]


def test_each_stage_keeps_to_its_thread_or_the_main_one_and_is_never_entered_twice() -> None:
    with replica("Echo") as bench:
        ids = [request_id for number in range(60) for request_id in bench.submit(f"text {number}", "other")]
        # Sixteen batches may wait; what came on top was refused, and is not what this is about.
        results = bench.wait_results(ids)
        assert {result.code for result in results} <= {Code.OK, Code.OVERLOADED}
        assert {line["thread"] for line in bench.journal("prepared")} <= {"prepare", "MainThread"}
        assert {line["thread"] for line in bench.journal("forwarded")} == {"MainThread"}
        assert {line["thread"] for line in bench.journal("finished")} <= {"finish", "MainThread"}


def test_large_arrays_go_through_in_frames_of_their_own() -> None:
    blob = bytes(range(256)) * 1024
    with replica("Echo") as bench:
        assert bench.values_of(blob, {"nested": blob}) == [blob, {"nested": blob}]


def test_early_micro_batches_are_answered_while_later_ones_run() -> None:
    with replica("Sleeper", max_batch_cost=40) as bench:
        release = bench.file("a name that is much longer than the texts")
        short, long = bench.submit("ab", release)
        bench.wait_results([short])
        assert long not in bench.results
        Path(release).touch()
        bench.wait_results([long])
        assert bench.forwards() == [["ab"], [release]]


def test_micro_batches_are_sorted_by_cost_and_keep_the_budget() -> None:
    with replica("Echo", max_batch_cost=12) as bench:
        bench.values_of("aaaa", "b", "cccc", "dd", "eeee")
        for items in bench.forwards():
            assert max(map(len, items)) * len(items) <= 12
        assert [len(item) for items in bench.forwards() for item in items] == [1, 2, 4, 4, 4]


def test_groups_and_lone_batches_never_share_a_forward() -> None:
    with replica("Grouping") as bench:
        bench.values_of("a1", "b1", "a2", "b2")
        bench.values_of("a1", "a2", alone=True)
        assert bench.forwards() == [["a1", "a2"], ["b1", "b2"], ["a1"], ["a2"]]


@pytest.mark.parametrize("alone", [False, True])
def test_forward_runs_beside_the_finishing_of_the_batch_before_unless_that_was_alone(alone: bool) -> None:
    with replica("Lingering") as bench:
        [held] = bench.submit("held", alone=alone)
        bench.wait_results([held, *bench.submit("next")])
        assert bench.values[held] is not alone


def test_operations_reach_only_a_model_that_declares_them() -> None:
    with replica("Grouping") as bench:
        assert bench.values_of("four", operation="count") == ["count 4"]
        [refused] = bench.ask("four", operation="divide")
        assert refused.code is Code.BAD_REQUEST
        assert refused.message == "operation 'divide' is not one of this model's: predict, count"


@pytest.mark.parametrize("payload", [[b"\xc1"], [], "pair"])
def test_unreadable_payload_is_a_bad_request(payload: object) -> None:
    with replica("Echo") as bench:
        frames = values.pack({"inputs": 1}) if payload == "pair" else payload
        assert [result.code for result in bench.ask("x", payload=frames)] == [Code.BAD_REQUEST]
        assert bench.values_of("still there") == ["still there"]


def test_malformed_messages_are_dropped() -> None:
    with replica("Echo") as bench:
        bench.send_raw(b"garbage")
        bench.send_raw(b"\x01\xff", b"\x90")
        bench.send_raw(b"\x80\x04\x95", b"pickled", b"frames")
        assert bench.values_of("still there") == ["still there"]


def test_pulse_tells_a_running_forward_from_an_idle_process() -> None:
    with replica("Sleeper") as bench:
        release = bench.file("release")
        ids = bench.submit(release)
        first = bench.wait_pulse(lambda pulse: pulse.running_ms > 0)
        assert first.memory_bytes > 0
        second = bench.wait_pulse(lambda pulse: pulse.running_ms > first.running_ms)
        assert second.progress_count == first.progress_count == 0
        Path(release).touch()
        bench.wait_results(ids)
        bench.wait_pulse(lambda pulse: pulse.progress_count == 1 and pulse.running_ms == 0)


A_COST = "a cost is a whole number from 0 to 9223372036854775807"

# --- one item's errors -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grumpy() -> Iterator[Replica]:
    with replica("Grumpy") as bench:
        yield bench


@pytest.mark.parametrize(
    ("inputs", "code", "message"),
    [
        ("refused", Code.INVALID_INPUT, "inputs must not be 'refused'"),
        ("prepare fails", Code.MODEL_ERROR, "KeyError: ('prepare', 'failed\\nin two lines')"),
        ("prepare panics", Code.MODEL_ERROR, "PanicException: called `Option::unwrap()` on a `None` value"),
        ("cost fails", Code.MODEL_ERROR, f"WrongReturn: Grumpy.cost returned -5 (int): {A_COST}"),
        ("cost is text", Code.MODEL_ERROR, f"WrongReturn: Grumpy.cost returned 'many' (str): {A_COST}"),
        (
            "group fails",
            Code.MODEL_ERROR,
            "WrongReturn: Grumpy.group returned ['unhashable'] (list): a group is hashable, such as a string, a number "
            "or a tuple of these",
        ),
        ("forward fails", Code.MODEL_ERROR, "TwoArguments: ('forward', 7)"),
        ("forward panics", Code.MODEL_ERROR, "PanicException: index out of bounds"),
        ("output fails", Code.MODEL_ERROR, "ValueError: this output is bad"),
        ("finish fails", Code.MODEL_ERROR, "Speechless: (its text cannot be read: AttributeError)"),
    ],
)
def test_bad_item_fails_alone_with_one_line(grumpy: Replica, inputs: str, code: Code, message: str) -> None:
    results = grumpy.ask("before", inputs, "after")
    assert [result.code for result in results] == [Code.OK, code, Code.OK]
    assert results[1].message == message
    assert [grumpy.values[result.id] for result in (results[0], results[2])] == ["before", "after"]


def test_detail_of_a_refusal_reaches_the_broker(grumpy: Replica) -> None:
    [refused] = grumpy.ask("refused")
    assert refused.detail == {"got": "refused"}


def test_value_that_cannot_be_sent_is_named_by_its_key(grumpy: Replica) -> None:
    results = grumpy.ask("unserialisable", "fine")
    assert [result.code for result in results] == [Code.MODEL_ERROR, Code.OK]
    assert results[0].message.startswith("Grumpy.finish().list[1] ")


def test_nan_is_a_value(grumpy: Replica) -> None:
    [value] = grumpy.values_of("nan")
    assert value["score"] != value["score"]


def test_failed_batch_is_retried_one_by_one_so_that_only_the_bad_item_fails() -> None:
    with replica("Grumpy") as bench:
        results = bench.ask("aaaaaaaaaaaaa", "forward fails", "bbbbbbbbbbbbb")
        assert [result.code for result in results] == [Code.OK, Code.MODEL_ERROR, Code.OK]
        assert [len(items) for items in bench.forwards()] == [3, 1, 1, 1]
        assert results[0].batch_size == 1


def test_stack_of_an_item_s_error_is_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    with replica("Grumpy") as bench:
        for _ in range(3):
            bench.ask("prepare fails")
        bench.send(Stop())
        bench.wait_exit()
    log = capfd.readouterr().err
    assert log.count("Traceback") == 1
    assert log.count("item_failed") == 3


def test_wrong_number_of_outputs_fails_the_batch_and_names_both_numbers() -> None:
    with replica("Miscounting") as bench:
        results = bench.ask("a", "b", "c")
        assert [result.code for result in results] == [Code.MODEL_ERROR] * 3
        assert (
            results[0].message
            == "WrongOutputs: Miscounting.forward returned 2 outputs for 3 items: return one for each"
        )
        [uncounted] = bench.ask("iterator")
        assert "list_iterator" in uncounted.message
        assert len(bench.forwards()) == 2


def test_batch_that_does_not_fit_into_memory_is_halved_until_it_does() -> None:
    with replica("Hungry", capacity=2) as bench:
        assert bench.values_of("a", "b", "c", "d", "e", "f", "g", "h") == list("abcdefgh")
        assert [len(items) for items in bench.forwards()] == [8, 4, 2, 2, 4, 2, 2]


def test_item_that_does_not_fit_alone_is_out_of_memory() -> None:
    with replica("Hungry", capacity=4) as bench:
        results = bench.ask("abcd", "huge", "efgh")
        assert [result.code for result in results] == [Code.OK, Code.OUT_OF_MEMORY, Code.OK]


# --- faults of the process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", ["fault", "returned fault"])
def test_device_fault_of_an_item_alone_is_that_item_s(capfd: pytest.CaptureFixture[str], inputs: str) -> None:
    with replica("Faulty") as bench:
        assert bench.values_of("fine") == ["fine"]
        [result] = bench.ask(inputs)
        assert result.code is Code.MODEL_ERROR
        assert "device-side assert triggered" in result.message
        assert "reported later" not in result.message
        assert bench.wait_exit() == ReplicaExit.DEVICE_FAULT
    assert "device_fault" in capfd.readouterr().err


def test_device_fault_of_several_items_blames_none_and_earlier_results_leave_first() -> None:
    with replica("Faulty") as bench:
        ids = [*bench.submit("patient"), *bench.submit("fault", "mate")]
        assert bench.wait_exit() == ReplicaExit.DEVICE_FAULT
        codes = [result.code for result in bench.wait_results(ids)]
        assert codes == [Code.OK, Code.REPLICA_FAULT, Code.REPLICA_FAULT]


@pytest.mark.parametrize(("alone", "code"), [(False, Code.REPLICA_FAULT), (True, Code.MODEL_ERROR)])
def test_device_fault_that_shows_in_finish_blames_the_item_only_if_it_had_the_device_to_itself(
    alone: bool, code: Code
) -> None:
    with replica("Faulty") as bench:
        ids = bench.submit("late fault", alone=alone)
        assert bench.wait_exit() == ReplicaExit.DEVICE_FAULT
        assert bench.wait_results(ids)[0].code is code


@pytest.mark.parametrize(("inputs", "thread"), [("forward exits", "MainThread"), ("finish exits", "finish")])
def test_model_that_exits_ends_its_process_with_a_line_in_the_log(
    capfd: pytest.CaptureFixture[str], inputs: str, thread: str
) -> None:
    with replica("Grumpy") as bench:
        bench.submit(inputs)
        assert bench.wait_exit() == ReplicaExit.MODEL_EXITED
    log = capfd.readouterr().err
    assert "cause=model_exited" in log
    assert f"on the {thread} thread" in log


# --- work that nobody waits for --------------------------------------------------------------------------------------


def test_expired_and_cancelled_items_are_skipped_before_prepare_and_before_forward() -> None:
    with replica("Sleeper", max_batch_size=1) as bench:
        release = bench.file("release")
        holder = bench.submit(release)
        bench.wait_until(lambda: bench.forwards() or None, "the holder runs")
        prepared = bench.submit("prepared then cancelled", "stays")
        bench.wait_until(lambda: len(bench.journal("prepared")) == 3 or None, "both are prepared")
        expired = bench.submit("expired on arrival", remaining_ms=0)
        bench.send(ReplicaCancel((prepared[0], b"\xff" * 16)))  # type: ignore[arg-type]
        # Its answer shows that everything sent before it was taken in.
        assert bench.wait_results(expired)[0].code is Code.DEADLINE_EXCEEDED
        Path(release).touch()
        results = bench.wait_results([*holder, *prepared])
        assert [result.code for result in results] == [Code.OK, Code.CANCELLED, Code.OK]
        assert bench.forwards() == [[release], ["stays"]]
        assert "expired on arrival" not in [line["inputs"] for line in bench.journal("prepared")]


# --- streams ---------------------------------------------------------------------------------------------------------


def test_stream_sends_its_pieces_in_order_and_ends_with_what_it_returned() -> None:
    with replica("Streaming") as bench:
        plain, counted = bench.submit("one two", "three four five counted", stream=True)
        bench.wait_results([plain, counted])
        pieces = [(chunk.id, chunk.index, value) for chunk, value in bench.chunks]
        assert [piece for piece in pieces if piece[0] == plain] == [(plain, 0, "one"), (plain, 1, "two")]
        assert [value for owner, _, value in pieces if owner == counted] == ["three", "four", "five", "counted"]
        assert [chunk.index for chunk, _ in bench.chunks if chunk.id == counted] == [0, 1, 2, 3]
        assert (bench.values[plain], bench.values[counted]) == (None, "4 words")


def test_each_piece_of_many_long_streams_arrives_once_and_in_order() -> None:
    texts = [" ".join(f"{name}{number}" for number in range(300)) for name in "abcd"]
    with replica("Streaming") as bench:
        ids = bench.submit(*texts, stream=True)
        bench.wait_results(ids)
        for request_id, text in zip(ids, texts, strict=True):
            own = [(chunk.index, value) for chunk, value in bench.chunks if chunk.id == request_id]
            assert own == list(enumerate(text.split()))


def test_request_that_does_not_stream_gets_all_pieces_at_once() -> None:
    with replica("Streaming") as bench:
        assert bench.values_of("one two", "x counted") == [["one", "two"], "2 words"]
        assert bench.chunks == []


def test_cancelled_stream_stops_at_the_next_step() -> None:
    with replica("Streaming") as bench:
        release = bench.file("release")
        ids = bench.submit(f"one {release} three four", stream=True)
        bench.wait_until(lambda: bench.chunks or None, "the first chunk")
        bench.send(ReplicaCancel(tuple(ids)))
        _settle(bench)
        Path(release).touch()
        assert bench.wait_results(ids)[0].code is Code.CANCELLED
        assert [line["word"] for line in bench.journal("stepped")] == ["one", release]
        assert len(bench.journal("closed")) == 1


def test_stream_that_breaks_fails_alone_after_its_chunks() -> None:
    with replica("Streaming") as bench:
        results = bench.ask("one fails", "one two", stream=True)
        assert [result.code for result in results] == [Code.MODEL_ERROR, Code.OK]
        assert results[0].message == "ValueError: the stream broke"
        assert [value for chunk, value in bench.chunks if chunk.id == results[0].id] == ["one"]


# --- ending ----------------------------------------------------------------------------------------------------------


def test_stop_ends_an_idle_process_with_code_0(capfd: pytest.CaptureFixture[str]) -> None:
    with replica("Echo") as bench:
        bench.send(Stop())
        assert bench.wait_exit() == ReplicaExit.STOPPED
    assert "Traceback" not in capfd.readouterr().err


def test_stop_ends_a_process_in_the_middle_of_a_forward(capfd: pytest.CaptureFixture[str]) -> None:
    with replica("Sleeper") as bench:
        bench.submit(bench.file("never"))
        bench.wait_until(lambda: bench.forwards() or None, "the forward runs")
        bench.send(Stop())
        assert bench.wait_exit() == ReplicaExit.STOPPED
    assert "Traceback" not in capfd.readouterr().err


def test_stop_ends_a_process_that_still_loads() -> None:
    with replica("SlowLoader", until=Phase.LOADING, release="/never/made") as bench:
        bench.send(Stop())
        assert bench.wait_exit() == ReplicaExit.STOPPED


def test_drain_finishes_what_was_sent_and_takes_nothing_new() -> None:
    with replica("Sleeper", max_batch_size=1) as bench:
        release = bench.file("release")
        running = bench.submit(release)
        waiting = bench.submit("waiting", "too")
        bench.send(Drain(1000))
        late = bench.submit("late")
        assert bench.wait_results(late)[0].code is Code.DRAINING
        assert bench.states()[-1].phase is Phase.DRAINING
        Path(release).touch()
        assert [result.code for result in bench.wait_results([*running, *waiting])] == [Code.OK] * 3
        bench.wait_pulse(lambda pulse: pulse.running_ms == 0)
        bench.send(Stop())
        assert bench.wait_exit() == ReplicaExit.STOPPED


def test_killed_process_is_a_signal_and_no_code() -> None:
    with replica("Echo") as bench:
        os.kill(bench.child.pid, signal.SIGKILL)
        assert bench.wait_exit() == -signal.SIGKILL


def _settle(bench: Replica) -> None:
    """Returns when everything sent so far has been taken in: an expired item is answered in order of arrival."""
    bench.ask("expired", remaining_ms=0)

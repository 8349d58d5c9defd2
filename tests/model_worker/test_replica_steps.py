"""A model process that batches continuously: who joins when, what a step's failure does, and to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_worker.replica.exit_codes import ReplicaExit
from shared.errors import Code
from shared.messages import Drain, Phase, ReplicaCancel, ReplicaChunk, RequestId
from tests.replica_bench import Replica, replica

MODEL = "Counting"
# Steps that take longer than it takes another item to arrive.
LONG = 5_000


def held(bench: Replica, name: str, to: int, at: int = 1, **more: Any) -> dict[str, Any]:
    """An item that stops the step in which it gets to `at` until the file `name` is made."""
    return {"name": name, "to": to, "wait_at": at, "release": bench.file(name), **more}


def stepped(bench: Replica) -> list[list[str]]:
    return [line["names"] for line in bench.journal("stepped")]


def wait_stepped(bench: Replica, names: list[str]) -> None:
    bench.wait_until(lambda: names in stepped(bench), f"a step of {names}")


def release(bench: Replica, name: str) -> None:
    Path(bench.file(name)).touch()


def pieces(bench: Replica, request_id: RequestId) -> list[Any]:
    return [value for chunk, value in bench.chunks if chunk.id == request_id]


def test_it_says_how_many_it_takes_and_warms_up_step_by_step() -> None:
    with replica(MODEL, max_batch_size=4, examples=[{"name": "warm", "to": 2}]) as bench:
        ready = bench.wait_phase(Phase.READY)
        assert ready.concurrency == 5
        # Four of the first example at once: the fullest step there will be.
        assert stepped(bench)[0] == ["warm"] * 4


def test_items_join_and_leave_between_steps() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        [first] = bench.submit(held(bench, "a", 4))
        wait_stepped(bench, ["a"])
        [second] = bench.submit(held(bench, "b", 1))
        # It is prepared meanwhile, and joins the next step.
        release(bench, "b")
        release(bench, "a")
        assert [result.code for result in bench.wait_results([first, second])] == ["ok", "ok"]
        assert bench.values[first] == {"numbers": [1, 2, 3, 4]}
        assert bench.values[second] == {"numbers": [1]}


def test_all_that_came_during_a_step_join_the_next_one() -> None:
    """However many: a burst that trickles in ends later, and each of its steps computes less."""
    with replica(MODEL, max_batch_size=16) as bench:
        ids = bench.submit(held(bench, "first", 2))
        wait_stepped(bench, ["first"])
        for number in range(12):
            ids += bench.submit({"name": str(number), "to": 1})
        bench.wait_until(lambda: len(bench.journal("prepared")) == 13, "all are prepared")
        release(bench, "first")
        bench.wait_results(ids)
        # The last one may be prepared and still on its way.
        assert {"first", *map(str, range(11))} <= set(stepped(bench)[1])


def test_no_more_share_a_step_than_the_configured_number() -> None:
    with replica(MODEL, max_batch_size=2) as bench:
        bench.values_of(*({"name": str(number), "to": 3} for number in range(5)))
        assert max(map(len, stepped(bench))) == 2
        assert bench.journal("left") == []


def test_no_more_join_than_the_model_has_room_for() -> None:
    with replica(MODEL, max_batch_size=8, room=1) as bench:
        bench.values_of(*({"name": str(number), "to": 2} for number in range(3)))
        assert stepped(bench) == [["0"], ["0"], ["1"], ["1"], ["2"], ["2"]]


def test_pieces_of_all_streams_of_a_step_are_one_message_and_come_before_the_ends() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        ids = bench.submit(*({"name": str(number), "to": 3} for number in range(4)), stream=True)
        bench.wait_results(ids)
        assert [pieces(bench, request_id) for request_id in ids] == [[1, 2, 3]] * 4
        messages = [message for message in bench.messages if isinstance(message, ReplicaChunk)]
        assert len(messages) <= len(stepped(bench))
        assert bench.values[ids[0]] == {"numbers": [1, 2, 3]}


def test_a_cancelled_item_leaves_before_the_next_step() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        [gone] = bench.submit({"name": "gone", "to": 100_000}, stream=True)
        bench.wait_until(lambda: pieces(bench, gone), "a piece")
        bench.send(ReplicaCancel((gone,)))
        [result] = bench.wait_results([gone])
        assert result.code is Code.CANCELLED
        [left] = bench.journal("left")
        assert left["count"] == len(stepped(bench)) < 100_000


def test_an_item_leaves_at_its_deadline() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        [late] = bench.submit({"name": "late", "to": 10_000_000}, remaining_ms=300)
        [result] = bench.wait_results([late])
        assert result.code is Code.DEADLINE_EXCEEDED
        assert len(bench.journal("left")) == 1


def test_an_answer_that_is_an_error_fails_its_own_item() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        results = bench.ask({"to": 2}, {"to": 2, "ends": "badly"}, {"to": 2, "join": "raise"})
        assert [result.code for result in results] == [Code.OK, Code.MODEL_ERROR, Code.MODEL_ERROR]
        assert [result.message for result in results[1:]] == ["ValueError: it ends badly", "ValueError: not this one"]


def test_after_a_failed_step_its_items_begin_again_one_by_one_and_only_the_bad_one_fails() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        ids = bench.submit({"name": "a", "to": LONG})
        wait_stepped(bench, ["a"])
        ids += bench.submit({"name": "bad", "to": 3, "raise_from": 1, "error": "no"}, {"name": "c", "to": 3})
        results = bench.wait_results(ids)
        assert [result.code for result in results] == [Code.OK, Code.MODEL_ERROR, Code.OK]
        assert results[1].message == "RuntimeError: no"
        assert bench.values[ids[2]] == {"numbers": [1, 2, 3]}
        names = stepped(bench)
        failed_at = next(index for index, step in enumerate(names) if "bad" in step)
        assert names[failed_at][:2] == ["a", "bad"]
        assert all(len(step) == 1 for step in names[failed_at + 1 :])


def test_a_stream_that_was_begun_is_not_begun_again() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        [whole] = bench.submit({"name": "whole", "to": LONG})
        wait_stepped(bench, ["whole"])
        bad = {"name": "bad", "to": LONG, "raise_at": 2, "raise_from": 2, "error": "no"}
        [stream] = bench.submit(bad, stream=True)
        results = bench.wait_results([stream, whole])
        assert [result.code for result in results] == [Code.MODEL_ERROR, Code.OK]
        assert pieces(bench, stream) == [1]
        assert bench.values[whole] == {"numbers": list(range(1, LONG + 1))}


def test_a_step_that_is_short_of_memory_is_tried_with_half_as_many() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        ids = bench.submit(*({"name": str(number), "to": LONG} for number in range(3)))
        wait_stepped(bench, ["0", "1", "2"])
        hungry = {"name": "h", "to": 3, "raise_from": 3, "error": "CUDA out of memory"}
        ids += bench.submit(hungry)
        assert [result.code for result in bench.wait_results(ids)] == [Code.OK] * 4
        names = stepped(bench)
        failed_at = names.index(["0", "1", "2", "h"])
        assert max(map(len, names[failed_at + 1 :])) == 2


@pytest.mark.parametrize(("company", "code"), [(0, Code.MODEL_ERROR), (1, Code.REPLICA_FAULT)])
def test_a_lost_device_ends_the_process_and_blames_who_was_alone(company: int, code: Code) -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        ids = bench.submit(*({"name": "b", "to": LONG} for _ in range(company)))
        error = "CUDA error: device-side assert triggered"
        ids += bench.submit({"name": "bad", "to": LONG, "raise_from": company + 1, "error": error})
        assert {result.code for result in bench.wait_results(ids)} == {code}
        assert bench.wait_exit() == ReplicaExit.DEVICE_FAULT


def test_what_was_sent_before_a_drain_is_finished() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        ids = bench.submit({"to": 30}, {"to": 3})
        bench.send(Drain(1000))
        bench.wait_phase(Phase.DRAINING)
        assert [result.code for result in bench.wait_results(ids)] == ["ok", "ok"]


def test_progress_about_unknown_items_fails_the_step_and_is_explained() -> None:
    with replica("Confused", max_batch_size=8) as bench:
        [result] = bench.ask({"to": 2})
        assert result.code is Code.MODEL_ERROR
        assert "Confused.step returned 'whatever' (str): what moves has joined, and has not ended" in result.message


def test_pulses_tell_how_many_items_were_in_the_steps() -> None:
    with replica(MODEL, max_batch_size=8) as bench:
        bench.values_of({"to": 3}, {"to": 4})
        pulse = bench.wait_pulse(lambda pulse: pulse.step_items > 0)
        assert pulse.step_items == 7
        assert pulse.progress_count == len(stepped(bench))

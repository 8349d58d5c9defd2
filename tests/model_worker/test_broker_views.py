"""What operators see: states in words, totals that only grow."""

from __future__ import annotations

import pytest

from model_worker.broker.events import ReplicaPhaseChanged, ReplicaPulsed, ReplicaSpawned
from model_worker.broker.words import duration
from shared.errors import Code
from shared.messages import ModelState, Phase
from tests.broker_history import QA0, QA1, History, broker_settings, model_settings


def test_a_model_is_loading_then_ready_then_failed() -> None:
    history = History()

    def state() -> ModelState:
        return history.broker.model_states()[0]

    assert (state().state, state().reason) == ("loading", "qa/0: starting")
    assert state().required
    history.ready()
    assert (state().state, state().reason, state().replicas_ready) == ("ready", "", 1)
    history.wait(3, pulses=False)
    assert (state().state, state().reason, state().replicas_ready) == ("loading", "qa/0: not heard", 0)
    history.pulse()
    history.exit()
    assert (state().state, state().replicas_ready) == ("loading", 0)
    assert state().reason == "qa/0: starting (before: killed by signal 9, probably out of memory)"
    history.tell(ReplicaPhaseChanged(QA0, 2, Phase.FAILED, detail="file is gone", permanent=True))
    assert (state().state, state().reason) == ("failed", "qa/0: file is gone")


def test_what_a_load_is_at_is_told_until_it_ends() -> None:
    history = History()

    def told() -> tuple[str, str]:
        (slot,) = history.broker.slot_states(history.now_s)
        return slot.reason, history.broker.model_states()[0].reason

    doing = "download or find its weights: waiting to ask the hub again"
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.DOWNLOADING, detail=doing))
    assert told() == (doing, f"qa/0: downloading, {doing}")
    history.exit(70)
    before = "exited with code 70 while it loaded"
    assert told() == (before, f"qa/0: starting (before: {before})")
    history.tell(ReplicaPhaseChanged(QA0, 2, Phase.LOADING, 0.4, detail="load its weights"))
    assert told() == (
        f"load its weights (before: {before})",
        f"qa/0: loading 40%, load its weights (before: {before})",
    )
    history.ready()
    assert told() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "less than 1 ms"),
        (0.00162, "1.6 ms"),
        (0.0312, "31 ms"),
        (0.0999, "0.1 s"),
        (0.29834, "0.3 s"),
        (2.51, "2.5 s"),
        (9.97, "10 s"),
        (612.3, "612 s"),
        (86_400.0, "86400 s"),
    ],
)
def test_times_in_texts_are_rounded(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_waiting_requests_are_those_that_do_not_run() -> None:
    history = History()
    history.ready()
    for number in range(4):
        history.arrive(number)
    assert history.broker.model_states()[0].queued == 3


def test_a_slot_shows_what_was_observed() -> None:
    history = History(broker_settings([model_settings(max_batch_size=2)], slots=2))
    history.tell(ReplicaSpawned(QA0, 1, 4711))
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.READY, choices={"dtype": "float32"}))
    history.tell(ReplicaPulsed(QA0, 1, 3, 0.0, 123))
    history.arrive(1)
    history.arrive(2)
    history.arrive(3)
    history.finish(1)
    history.wait(0.5, pulses=False)
    first, second = history.broker.slot_states(history.now_s)
    assert (first.pid, first.incarnation, first.state, first.memory_bytes) == (4711, 1, "ready", 123)
    assert (first.batches, first.requests, first.held, first.heard_ms_ago) == (2, 1, 2, 500)
    assert first.choices == {"dtype": "float32"}
    assert (second.state, second.pid, second.incarnation, second.restarts) == ("starting", 0, 1, 0)


def test_a_slot_that_waits_for_its_turn_is_vacant() -> None:
    history = History(broker_settings([model_settings()], slots=2))
    _, second = history.broker.slot_states(0.0)
    assert (second.slot, second.state, second.incarnation, second.heard_ms_ago) == (QA1, "vacant", 0, -1)
    assert history.broker.model_states()[0].reason == "qa/0: starting; qa/1: waiting for its turn to load"


def test_totals_add_up() -> None:
    history = History(broker_settings([model_settings(max_batch_size=3, queue_size_max=4)]))
    history.ready()
    for number in range(7):
        history.arrive(number)  # 0 runs, 1 to 3 are prefetched, 4 waits, 5 and 6 are refused
    history.wait(0.2)
    for number in range(4):
        history.finish(number, Code.MODEL_ERROR if number == 2 else Code.OK)
    history.cancel(4)
    totals = history.broker.counters()[0]
    assert totals.admitted == 5
    assert totals.rejected == {"overloaded": 2}
    assert totals.ended == {"ok": 3, "model_error": 1, "cancelled": 1}
    assert (totals.batches, totals.batch_size_sum) == (3, 5)
    assert totals.batch_size_buckets["1"] == 2
    assert totals.batch_size_buckets["2"] == 2
    assert totals.batch_size_buckets["4"] == 3
    assert totals.batch_size_buckets["+Inf"] == 3
    assert round(totals.queue_s_sum, 6) == 0.6
    assert totals.queue_s_buckets["0.001"] == 1
    assert totals.queue_s_buckets["0.25"] == 4
    assert totals.queue_s_buckets["+Inf"] == 4

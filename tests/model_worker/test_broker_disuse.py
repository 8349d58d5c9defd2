"""Models that nobody asks for are unloaded where the configuration says so, and loaded for the next request."""

from __future__ import annotations

from model_worker.broker.effects import SendStop, SpawnReplica
from model_worker.broker.events import ReplicaPhaseChanged
from shared.errors import Code
from shared.messages import Phase
from tests.broker_history import QA0, QA1, History, batches, broker_settings, model_settings, replies, spawns


def lazy(slots: int = 1, **limits: float) -> History:
    history = History(broker_settings([model_settings(idle_unload_s=10.0)], slots=slots, **limits))
    history.ready()
    return history


def test_a_model_is_unloaded_after_so_long_without_a_request_and_not_before() -> None:
    history = lazy()
    history.wait(9.0)
    history.arrive(1)
    history.wait(9.0)
    history.finish(1)
    assert SendStop(QA0, 1) not in history.wait(9.9)
    assert SendStop(QA0, 1) in history.wait(0.1)
    assert history.exit(0) == []
    [state] = history.broker.model_states()
    assert (state.state, state.answers) == ("idle", True)
    assert history.broker.slot_states(history.now_s)[0].state == "unloaded"
    assert history.wait(1000.0) == []


def test_a_model_whose_request_runs_is_not_unloaded() -> None:
    history = lazy()
    history.arrive(1, timeout_s=300.0)
    assert history.wait(50.0) == []
    history.finish(1)
    assert history.wait(10.0) == [SendStop(QA0, 1)]


def test_a_model_that_still_loads_elsewhere_is_not_unloaded() -> None:
    history = lazy(slots=2)
    assert history.wait(50.0) == []
    history.ready(QA1)
    assert history.wait(10.0) == [SendStop(QA0, 1), SendStop(QA1, 1)]


def test_the_next_request_has_the_model_loaded_and_is_answered() -> None:
    history = lazy()
    history.wait(10.0)
    history.exit(0)
    assert history.arrive(1) == [SpawnReplica(QA0, 2)]
    assert history.broker.model_states()[0].state == "loading"
    assert batches(history.ready()) == [("qa/0", [1])]
    assert replies(history.finish(1, incarnation=2)) == {1: Code.OK}


def test_a_request_that_comes_while_the_process_stops_waits_for_the_next_one() -> None:
    history = lazy()
    history.wait(10.0)
    assert history.arrive(1) == []
    assert spawns(history.exit(0)) == [("qa/0", 2)]
    assert batches(history.ready()) == [("qa/0", [1])]


def test_a_request_that_is_refused_wakes_nobody() -> None:
    history = lazy()
    history.wait(10.0)
    history.exit(0)
    assert replies(history.arrive(1, body_bytes=10**9)) == {1: Code.TOO_LARGE}
    assert history.broker.model_states()[0].state == "idle"


def test_a_load_that_fails_on_the_way_back_is_tried_again_as_ever() -> None:
    history = lazy()
    history.wait(10.0)
    history.exit(0)
    history.arrive(1, timeout_s=300.0)
    history.tell(ReplicaPhaseChanged(QA0, 2, Phase.FAILED, detail="no such file"))
    assert spawns(history.exit(70)) == [("qa/0", 3)]
    assert batches(history.ready()) == [("qa/0", [1])]


def test_an_operator_loads_and_unloads_an_idle_model() -> None:
    history = lazy()
    history.wait(10.0)
    history.exit(0)
    assert spawns(history.order("load", "qa")) == [("qa/0", 2)]
    history.ready()
    assert history.wait(10.0) == [SendStop(QA0, 2)]
    history.exit(0)
    history.order("unload", "qa")
    assert replies(history.arrive(1)) == {1: Code.MODEL_LOADING}

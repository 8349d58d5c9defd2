"""The life of slots: loading in turn, failing to load, dying, backing off, the breaker, giving up."""

from __future__ import annotations

import pytest

from model_worker.broker.effects import KillReplica, SendReply, SpawnReplica, StopServer
from model_worker.broker.events import ReplicaPhaseChanged, SpawnFailed
from shared.errors import Code
from shared.messages import Phase, SlotName
from tests.broker_history import (
    QA0,
    QA1,
    History,
    broker_settings,
    model_settings,
    replies,
    reply,
    spawns,
)


def fail_load(history: History, detail: str = "out of disk", *, permanent: bool = False, slot: SlotName = QA0) -> None:
    """The present incarnation says FAILED and exits."""
    incarnation = history.broker.keeper.slots[slot].incarnation
    history.tell(ReplicaPhaseChanged(slot, incarnation, Phase.FAILED, detail=detail, permanent=permanent))
    history.exit(70, slot=slot)


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parallel_loads", "at_once"), [(1, 1), (2, 2), (5, 3)])
def test_as_many_slots_load_at_once_as_allowed_in_the_order_of_the_plan(parallel_loads: int, at_once: int) -> None:
    history = History(broker_settings([model_settings()], slots=3, parallel_loads=parallel_loads))
    assert spawns(history.started) == [(f"qa/{number}", 1) for number in range(at_once)]
    later = [spawns(history.ready(SlotName(f"qa/{number}"))) for number in range(3)]
    assert [spawn for step in later for spawn in step] == [(f"qa/{number}", 1) for number in range(at_once, 3)]


def test_a_load_that_was_killed_blocks_the_next_until_its_exit() -> None:
    history = History(broker_settings([model_settings(load_timeout_s=100.0)], slots=2))
    assert history.wait(100) == [KillReplica(QA0, 1, "the load took longer than 100 s")]
    assert history.wait(5) == []
    assert spawns(history.exit()) == [("qa/0", 2)]
    assert history.broker.keeper.slots[QA0].reason == "the load took longer than 100 s"


def test_a_loading_replica_may_be_silent() -> None:
    history = History()
    assert history.wait(599.9, pulses=False) == []
    assert "replica_quarantined" not in history.log_events()


def test_the_load_timeout_ends_with_ready() -> None:
    history = History(broker_settings([model_settings(load_timeout_s=10.0)]))
    history.wait(9.9)
    history.ready()
    assert history.wait(50) == []


def test_progress_of_the_load_is_kept() -> None:
    history = History()
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.DOWNLOADING, 0.25))
    state = history.broker.slot_states(history.now_s)[0]
    assert (state.state, state.progress) == ("downloading", 0.25)
    assert history.broker.model_states()[0].reason == "qa/0: downloading 25%"


def test_a_failed_load_is_tried_again_after_a_while_and_then_given_up() -> None:
    history = History(broker_settings([model_settings()], load_attempts_max=3))
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.FAILED, detail="out of disk"))
    assert history.exit(70) == [SpawnReplica(QA0, 2)]
    fail_load(history)
    assert history.wait(0.9) == []
    assert history.wait(0.1) == [SpawnReplica(QA0, 3)]
    history.arrive(1)
    history.tell(ReplicaPhaseChanged(QA0, 3, Phase.FAILED, detail="out of disk"))
    effects = history.exit(70)
    answer = reply(effects, 1)
    assert answer.code is Code.MODEL_FAILED
    assert answer.message == "model 'qa' has failed: qa/0: out of disk (failed loads: 3)"
    assert answer.retry_after_s == 0.0
    assert effects[-1] == StopServer(
        1, "no model can be loaded: qa: qa/0: out of disk (failed loads: 3)", hopeless=True
    )


def test_a_process_that_says_failed_and_stays_is_killed_and_keeps_its_reason() -> None:
    history = History()
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.FAILED, detail="out of disk"))
    assert history.wait(4.9) == []
    assert history.wait(0.1) == [KillReplica(QA0, 1, "out of disk; no exit within 5 s")]
    history.exit(-9)
    assert history.broker.keeper.slots[QA0].reason == "out of disk; no exit within 5 s"


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DRAINING])
def test_a_process_that_is_not_ready_any_more_and_stays_is_replaced(phase: Phase) -> None:
    """It would be given nothing, and, as it is heard and does not hang, would hold its slot for ever."""
    history = History()
    history.ready()
    history.tell(ReplicaPhaseChanged(QA0, 1, phase))
    assert [effect for effect in history.wait(10.0) if isinstance(effect, KillReplica)] == [
        KillReplica(QA0, 1, f"said '{phase.value}' after it was ready; no exit within 5 s")
    ]
    assert spawns(history.exit()) == [("qa/0", 2)]


def test_a_permanent_failure_is_answered_at_once_and_never_tried_again() -> None:
    history = History(broker_settings([model_settings("qa"), model_settings("ner")]))
    history.arrive(1)
    effects = history.tell(ReplicaPhaseChanged(QA0, 1, Phase.FAILED, detail="no such task", permanent=True))
    assert replies(effects) == {1: Code.MODEL_FAILED}
    assert reply(history.arrive(2), 2).message == "model 'qa' has failed: qa/0: no such task"
    assert spawns(history.exit(70)) == [("ner/0", 1)]
    history.ready(SlotName("ner/0"))
    assert history.wait(3600) == []
    # One line for the server's log: the process itself has told the cause of its end.
    told = [log.event for log in history.logs if "no such task" in str(log.fields)]
    assert told == ["model_failed"]


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [
        (-9, "killed by signal 9, probably out of memory while it loaded"),
        (-11, "killed by signal 11 while it loaded"),
        (1, "exited with code 1 while it loaded"),
        (0, "exited with code 0 while it loaded"),
    ],
)
def test_an_exit_during_the_load_names_its_cause(exit_code: int, reason: str) -> None:
    history = History()
    history.exit(exit_code)
    assert history.broker.keeper.slots[QA0].reason == reason


def test_a_spawn_that_fails_counts_as_a_failed_load() -> None:
    history = History(broker_settings([model_settings()], load_attempts_max=2))
    assert history.tell(SpawnFailed(QA0, 1, "no more processes")) == [SpawnReplica(QA0, 2)]
    assert history.tell(SpawnFailed(QA0, 1, "no more processes")) == []  # an old one
    [stop] = history.tell(SpawnFailed(QA0, 2, "no more processes"))
    assert isinstance(stop, StopServer)
    assert "qa/0: cannot start a process: no more processes (failed loads: 2)" in stop.reason


def test_the_server_goes_on_while_any_slot_may_serve() -> None:
    history = History(broker_settings([model_settings()], slots=2, load_attempts_max=1))
    fail_load(history)
    assert history.broker.model_states()[0].state == "loading"
    history.ready(QA1)
    assert replies(history.arrive(1)) == {}
    assert history.broker.model_states()[0].replicas_ready == 1


def test_the_server_stops_only_when_no_process_is_left() -> None:
    history = History(broker_settings([model_settings()], slots=2, parallel_loads=2))
    for slot in (QA0, QA1):
        history.tell(ReplicaPhaseChanged(slot, 1, Phase.FAILED, detail="no such task", permanent=True))
    assert history.exit(70, slot=QA1) == []
    [stop] = history.exit(70, slot=QA0)
    assert isinstance(stop, StopServer)
    assert stop.exit_code == 1
    assert history.broker.wake_at_s is None
    assert replies(history.arrive(1)) == {1: Code.MODEL_FAILED}


def test_a_server_that_once_was_ready_does_not_stop_by_itself() -> None:
    history = History()
    history.ready()
    history.exit()
    effects = history.tell(ReplicaPhaseChanged(QA0, 2, Phase.FAILED, detail="file is gone", permanent=True))
    effects += history.exit(70)
    effects += history.wait(3600)
    assert effects == []
    assert history.broker.model_states()[0].state == "failed"


# --- dying -----------------------------------------------------------------------------------------------------------


def test_deaths_in_a_row_wait_longer_and_longer() -> None:
    history = History(broker_settings([model_settings()], breaker_deaths_max=100))
    waits_s = []
    for _ in range(9):
        history.ready()
        died_s = history.now_s
        effects = history.exit()
        while not spawns(effects):
            effects = history.wait(0.25)
        waits_s.append(history.now_s - died_s)
    assert waits_s == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_success_forgives_earlier_deaths() -> None:
    history = History()
    history.ready()
    for number in range(20):
        history.arrive(number)
        incarnation = history.broker.keeper.slots[QA0].incarnation
        history.finish(number, incarnation=incarnation)
        assert spawns(history.exit()) == [("qa/0", incarnation + 1)]
        history.ready()


def test_an_item_that_fails_is_no_success() -> None:
    history = History()
    history.ready()
    history.exit()
    history.ready()
    history.arrive(1)
    history.finish(1, Code.INVALID_INPUT, incarnation=2)
    assert spawns(history.exit()) == []


def die(history: History, times: int) -> None:
    for _ in range(times):
        history.ready()
        history.exit()
        history.wait(31)


def test_five_deaths_without_a_success_open_the_breaker() -> None:
    history = History()
    die(history, 4)
    history.ready()
    history.arrive(1)
    answer = reply(history.exit(-11), 1)
    assert answer.code is Code.MODEL_FAILED
    assert answer.message == (
        "model 'qa' has failed: qa/0: killed by signal 11 (deaths without a success between them: 5)"
    )
    assert answer.retry_after_s == 600.0
    assert history.last_log("model_failed").fields["failure"] == "breaker"
    assert history.broker.model_states()[0].state == "failed"
    assert history.wait(599.9) == []
    assert spawns(history.wait(0.1)) == [("qa/0", 6)]


def test_the_same_deaths_over_a_longer_time_do_not() -> None:
    history = History()
    for _ in range(12):
        history.ready()
        history.exit()
        history.wait(151)
    assert history.broker.keeper.slots[QA0].incarnation == 13


def test_a_trial_is_refused_requests_until_it_is_ready_and_a_success_closes_the_breaker() -> None:
    history = History()
    die(history, 4)
    history.ready()
    history.exit()
    history.wait(600)
    assert replies(history.arrive(1)) == {1: Code.MODEL_FAILED}
    assert history.broker.slot_states(history.now_s)[0].state == "failed"
    history.ready()
    assert replies(history.arrive(2)) == {}
    history.finish(2, incarnation=6)
    assert spawns(history.exit()) == [("qa/0", 7)]


def test_a_trial_that_dies_opens_the_breaker_again() -> None:
    history = History()
    die(history, 4)
    history.ready()
    history.exit()
    history.wait(600)
    history.ready()
    assert history.exit() == []
    assert history.wait(599) == []
    assert spawns(history.wait(1)) == [("qa/0", 7)]
    history.exit(1)  # this time before it is ready
    assert history.wait(599) == []
    assert spawns(history.wait(1)) == [("qa/0", 8)]


def test_the_breaker_of_one_slot_leaves_the_other_one_alone() -> None:
    history = History(broker_settings([model_settings()], slots=2))
    history.ready(QA0)
    history.ready(QA1)
    for _ in range(5):
        history.exit(slot=QA1)
        history.wait(31)
        if history.broker.keeper.slots[QA1].replica is not None:
            history.ready(QA1)
    states = history.broker.slot_states(history.now_s)
    assert [state.state for state in states] == ["ready", "failed"]
    effects = history.arrive(1)
    assert replies(effects) == {}
    assert not isinstance(effects[0], SendReply)


def test_a_failed_reload_of_a_slot_that_was_ready_follows_the_rule_of_deaths() -> None:
    history = History(broker_settings([model_settings()], load_attempts_max=1))
    history.ready()
    history.exit()
    fail_load(history)
    assert spawns(history.wait(1)) == [("qa/0", 3)]
    fail_load(history)
    assert spawns(history.wait(2)) == [("qa/0", 4)]


def test_restarts_are_counted_by_cause() -> None:
    history = History()
    history.ready()
    history.exit()
    fail_load(history)
    history.wait(1)
    history.ready()
    history.wait(61, pulses=False)
    history.exit()
    history.wait(2)
    assert history.broker.counters()[0].restarts == {"crashed": 1, "load_failed": 1, "silent": 1}
    assert history.broker.slot_states(history.now_s)[0].restarts == 3
    assert history.broker.slot_states(history.now_s)[0].loads == 2

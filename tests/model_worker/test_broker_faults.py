"""What requests see when their process dies, hangs, falls silent or tells of a fault; and who is blamed."""

from __future__ import annotations

import pytest

from model_worker.broker.effects import (
    DigestPoison,
    KillReplica,
    RelayChunk,
    SendBatch,
    SendCancel,
    SendReply,
    SpawnReplica,
)
from model_worker.broker.events import PoisonDigested, ReplicaExited, ReplicaPhaseChanged
from shared.errors import Code
from shared.messages import Phase
from tests.broker_history import (
    FRONT,
    QA0,
    QA1,
    History,
    batches,
    broker_settings,
    entry,
    model_settings,
    replies,
    reply,
    request_id,
)


def serving(max_batch_size: int = 1, slots: int = 1, **limits: float) -> History:
    history = History(broker_settings([model_settings(max_batch_size=max_batch_size)], slots, **limits))
    history.ready(QA0)
    if slots > 1:
        history.ready(QA1)
    return history


# --- death -----------------------------------------------------------------------------------------------------------


def test_a_running_request_survives_the_death_of_its_process() -> None:
    history = serving()
    history.arrive(1)
    assert history.exit(-11) == [SpawnReplica(QA0, 2)]
    assert history.last_log("replica_exited").fields == {
        "slot": "qa/0",
        "incarnation": 1,
        "cause": "crashed",
        "signal": 11,
        "reason": "killed by signal 11",
    }
    assert history.ready() == [SendBatch(QA0, 2, 2, True, (entry(1, attempt=2),))]
    assert replies(history.finish(1, incarnation=2, attempt=2)) == {1: Code.OK}
    assert history.broker.counters()[0].retried == 1


def test_all_witnesses_of_a_death_run_alone_and_in_their_old_order() -> None:
    history = serving(max_batch_size=2)
    history.arrive(0)
    history.arrive(1)
    history.arrive(2)  # prefetched with 1
    history.arrive(3)
    history.exit()
    assert batches(history.ready()) == [("qa/0", [0])]
    assert batches(history.finish(0, incarnation=2, attempt=2)) == [("qa/0", [1])]
    assert batches(history.finish(1, incarnation=2, attempt=2)) == [("qa/0", [2])]
    assert batches(history.finish(2, incarnation=2, attempt=2)) == [("qa/0", [3])]


def test_nothing_is_prefetched_behind_a_request_that_runs_alone() -> None:
    history = serving()
    history.arrive(1)
    history.exit()
    history.ready()
    assert history.arrive(2) == []
    assert batches(history.finish(1, incarnation=2, attempt=2)) == [("qa/0", [2])]


def test_a_request_that_runs_alone_waits_for_an_empty_process() -> None:
    history = serving(slots=2, max_batch_size=2)
    history.arrive(1)  # qa/0
    history.arrive(2)  # qa/1
    history.arrive(3)
    history.arrive(4)
    assert batches(history.all_effects)[-1] == ("qa/0", [3, 4])
    history.exit(slot=QA1)
    history.arrive(5)
    history.arrive(6)
    assert batches(history.finish(1)) == []  # 2 is the oldest: qa/0 runs 3 and 4, and is given nothing behind them
    history.finish(3)
    assert batches(history.finish(4)) == [("qa/0", [2])]


def test_the_same_input_kills_twice_and_is_banned_before_its_answer() -> None:
    history = serving()
    history.arrive(1)
    history.exit()
    history.ready()
    effects = history.exit()
    assert effects[:2] == [
        DigestPoison(request_id(1), "qa"),
        SendReply(
            FRONT,
            request_id(1),
            Code.POISON_INPUT,
            message="this input ended the model process twice: killed by signal 9, probably out of memory",
            attempt=2,
            slot="qa/0",
            incarnation=2,
        ),
    ]
    assert "request_poisoned" in history.log_events()
    history.tell(PoisonDigested("qa", b"bad"))
    assert replies(history.arrive(2, digest=b"bad")) == {2: Code.POISON_INPUT}


def test_innocent_batch_mates_of_poison_are_served() -> None:
    history = serving(max_batch_size=3)
    history.arrive(0)
    for number in (1, 2, 3):  # 2 is poison
        history.arrive(number)
    history.finish(0)
    history.exit()
    history.ready()
    history.finish(1, incarnation=2, attempt=2)
    assert replies(history.exit()) == {2: Code.POISON_INPUT}
    history.wait(1.0)
    assert batches(history.ready()) == [("qa/0", [3])]
    assert replies(history.finish(3, incarnation=3, attempt=2)) == {3: Code.OK}


def test_a_running_request_that_must_not_run_twice_is_told_of_the_crash() -> None:
    history = serving()
    history.arrive(1, retryable=False)
    history.arrive(2, retryable=False)  # prefetched: it has not run
    answer = reply(history.exit(-9), 1)
    assert answer.code is Code.MODEL_CRASHED
    assert "killed by signal 9, probably out of memory" in answer.message
    assert batches(history.ready()) == [("qa/0", [2])]


def test_a_stream_that_has_begun_is_not_run_again() -> None:
    history = serving()
    history.arrive(1, stream=True)
    assert history.chunk(1) == [RelayChunk(FRONT, request_id(1))]
    assert replies(history.exit(3)) == {1: Code.MODEL_CRASHED}
    assert "exited with code 3" in reply(history.all_effects, 1).message
    assert history.chunk(1) == []


def test_a_stream_that_has_not_begun_is_run_again() -> None:
    history = serving()
    history.arrive(1, stream=True)
    history.exit()
    assert batches(history.ready()) == [("qa/0", [1])]


def test_the_deadline_holds_over_deaths() -> None:
    history = serving()
    history.arrive(1, timeout_s=5.0)
    history.wait(4.0)
    history.exit()
    answer = reply(history.wait(1.0), 1)
    assert answer.code is Code.MODEL_LOADING
    assert "did not become ready within 5 s" in answer.message
    assert answer.retry_after_s > 0


def test_a_dead_incarnation_is_not_heard() -> None:
    history = serving()
    history.arrive(1)
    history.exit()
    history.ready()
    assert history.finish(1, incarnation=1) == []
    assert history.chunk(1, incarnation=1) == []
    assert history.tell(ReplicaPhaseChanged(QA0, 1, Phase.FAILED, detail="too late", permanent=True)) == []
    assert history.broker.fenced == 3
    assert replies(history.finish(1, incarnation=2, attempt=2)) == {1: Code.OK}


def test_an_exit_counts_once() -> None:
    history = serving()
    history.arrive(1)
    history.exit()
    assert history.tell(ReplicaExited(QA0, 1, -9)) == []
    assert history.broker.keeper.slots[QA0].incarnation == 2


def test_an_exit_can_overtake_ready() -> None:
    history = History()
    history.exit(1)
    assert history.tell(ReplicaPhaseChanged(QA0, 1, Phase.READY)) == []
    assert history.broker.model_states()[0].state == "loading"


def test_cancelled_and_expired_requests_witness_nothing() -> None:
    history = serving(max_batch_size=2)
    history.arrive(0)
    history.arrive(1)
    history.arrive(2, timeout_s=1.0)
    history.finish(0)
    history.cancel(1)
    history.wait(1.0)
    assert history.exit() == [SpawnReplica(QA0, 2)]
    assert history.ready() == []


# --- a fault that the process tells of -------------------------------------------------------------------------------


def test_a_replica_that_tells_of_a_fault_gets_no_more_work_and_its_batch_runs_alone_elsewhere() -> None:
    history = serving(max_batch_size=2)
    history.arrive(0)
    history.arrive(1)
    history.arrive(2)
    history.finish(0)
    assert history.finish(1, Code.REPLICA_FAULT, message="device-side assert") == []
    assert history.finish(2, Code.REPLICA_FAULT, message="device-side assert") == []
    assert history.arrive(3) == []  # the replica is idle, but about to exit
    assert history.exit(71) == [SpawnReplica(QA0, 2)]
    # The process has told its reason in its own line of the log.
    exited = {"slot": "qa/0", "incarnation": 1, "cause": "crashed", "exit_code": 71}
    assert history.last_log("replica_exited").fields == exited
    assert history.broker.keeper.slots[QA0].reason == "device-side assert"
    assert batches(history.ready()) == [("qa/0", [1])]
    assert replies(history.finish(1, incarnation=2, attempt=2)) == {1: Code.OK}


def test_a_replica_that_tells_of_a_fault_and_stays_is_killed() -> None:
    history = serving()
    history.arrive(1)
    history.finish(1, Code.REPLICA_FAULT, message="device-side assert")
    history.wait(4.9)
    assert history.wait(0.1) == [KillReplica(QA0, 1, "device-side assert; no exit within 5 s")]


@pytest.mark.parametrize("retryable", [True, False])
def test_a_fault_alone_is_the_requests_own(retryable: bool) -> None:
    history = serving()
    history.arrive(1, retryable=retryable)
    first = history.finish(1, Code.REPLICA_FAULT, message="device-side assert")
    if retryable:
        history.exit(71)
        history.ready()
        first = history.finish(1, Code.REPLICA_FAULT, incarnation=2, attempt=2, message="device-side assert")
    assert replies(first) == {1: Code.MODEL_ERROR}
    assert reply(first, 1).message == "device-side assert"


def test_an_item_that_was_reported_is_not_cancelled() -> None:
    history = serving(max_batch_size=2)
    for number in (1, 2, 3):
        history.arrive(number, retryable=False)
    history.finish(1)
    told = [*history.finish(2, Code.REPLICA_FAULT), *history.finish(3, Code.REPLICA_FAULT)]
    assert replies(told) == {2: Code.MODEL_ERROR, 3: Code.MODEL_ERROR}
    assert not [effect for effect in told if isinstance(effect, SendCancel)]


def test_a_fault_told_and_then_a_death_alone_is_poison() -> None:
    history = serving()
    history.arrive(1)
    history.finish(1, Code.REPLICA_FAULT)
    history.exit(71)
    history.ready()
    assert replies(history.exit(71)) == {1: Code.POISON_INPUT}


# --- hangs -----------------------------------------------------------------------------------------------------------


def test_one_request_that_hangs_is_answered_at_once_and_its_process_replaced() -> None:
    history = serving()
    history.arrive(1, timeout_s=600)
    history.arrive(2, timeout_s=600)
    assert history.wait(59.9) == []
    reason = "hung: no progress for 60 s"
    assert history.wait(0.1) == [
        KillReplica(QA0, 1, reason, dump_stacks=True),
        SendReply(
            FRONT,
            request_id(1),
            Code.DEADLINE_EXCEEDED,
            message=f"model process qa/0 {reason}",
            attempt=1,
            slot="qa/0",
            incarnation=1,
        ),
    ]
    # Whoever carries out the kill tells of it, with the reason: one line for one event.
    assert history.log_events()[-1] == "replica_ready"
    assert history.wait(0.3) == []  # once
    assert history.exit(-9) == [SpawnReplica(QA0, 2)]
    exited = {"slot": "qa/0", "incarnation": 1, "cause": "hung", "signal": 9}
    assert history.last_log("replica_exited").fields == exited
    assert history.broker.keeper.slots[QA0].reason == reason  # our own kill, not a lack of memory
    assert batches(history.ready()) == [("qa/0", [2])]
    assert replies(history.finish(2, incarnation=2, attempt=2)) == {2: Code.OK}


def test_a_batch_that_hangs_is_run_again_one_by_one_and_the_culprit_is_told() -> None:
    history = serving(max_batch_size=3)
    history.arrive(0)
    history.arrive(1, timeout_s=600)
    history.arrive(2, timeout_s=600)
    history.arrive(3, timeout_s=600, retryable=False)
    history.finish(0)
    assert replies(history.wait(60)) == {3: Code.DEADLINE_EXCEEDED}
    history.exit(-9)
    history.ready()
    history.finish(1, incarnation=2, attempt=2)
    assert replies(history.wait(60)) == {2: Code.DEADLINE_EXCEEDED}


def test_the_last_one_open_in_a_hung_batch_is_the_culprit() -> None:
    history = serving(max_batch_size=2)
    history.arrive(0)
    history.arrive(1, timeout_s=600)
    history.arrive(2, timeout_s=600)
    history.finish(0)
    history.finish(1)
    assert replies(history.wait(60)) == {2: Code.DEADLINE_EXCEEDED}


@pytest.mark.parametrize("sign", ["pulse", "chunk", "result"])
def test_progress_of_any_kind_puts_the_hang_off(sign: str) -> None:
    history = serving(max_batch_size=2)
    history.arrive(0)
    history.arrive(1, timeout_s=600)
    history.arrive(2, timeout_s=600)
    history.finish(0)
    history.wait(50)
    if sign == "pulse":
        history.pulse(progress_count=1)
    elif sign == "chunk":
        history.chunk(2)
    else:
        history.finish(1)
    assert history.wait(59.9) == []
    assert isinstance(history.wait(0.1)[0], KillReplica)


def test_a_pulse_without_progress_does_not() -> None:
    history = serving()
    history.arrive(1, timeout_s=600)
    history.pulse(progress_count=5)
    history.wait(30)
    history.pulse(progress_count=5)
    assert replies(history.wait(30)) == {1: Code.DEADLINE_EXCEEDED}


def test_a_hang_is_noticed_even_if_nobody_waits_for_the_batch_any_more() -> None:
    history = serving()
    history.arrive(1, timeout_s=5)
    assert replies(history.wait(5)) == {1: Code.DEADLINE_EXCEEDED}
    assert history.wait(55) == [KillReplica(QA0, 1, "hung: no progress for 60 s", dump_stacks=True)]


def test_a_result_from_a_hung_process_still_counts_until_its_exit() -> None:
    history = serving(max_batch_size=2)
    history.arrive(0)
    history.arrive(1, timeout_s=600)
    history.arrive(2, timeout_s=600)
    history.finish(0)
    history.wait(60)
    assert replies(history.finish(1)) == {1: Code.OK}
    history.exit(-9)
    assert batches(history.ready()) == [("qa/0", [2])]


def test_a_prefetched_batch_gets_its_own_time() -> None:
    history = serving()
    history.arrive(1, timeout_s=600)
    history.arrive(2, timeout_s=600)
    history.wait(50)
    history.finish(1)
    assert history.wait(59.9) == []
    assert replies(history.wait(0.1)) == {2: Code.DEADLINE_EXCEEDED}


# --- silence ---------------------------------------------------------------------------------------------------------


def test_a_silent_replica_gets_no_work_until_it_is_heard_again() -> None:
    history = serving()
    history.wait(3.0, pulses=False)
    assert history.last_log("replica_quarantined").fields["slot"] == "qa/0"
    assert history.broker.model_states()[0].replicas_ready == 0
    assert history.arrive(1) == []
    assert batches(history.pulse()) == [("qa/0", [1])]
    assert "replica_heard_again" in history.log_events()
    assert history.broker.model_states()[0].replicas_ready == 1


def test_work_goes_to_a_replica_that_is_heard() -> None:
    history = serving(slots=2)
    history.wait(2.0, pulses=False)
    history.pulse(QA1)
    history.wait(1.5, pulses=False)
    assert batches(history.arrive(1)) == [("qa/1", [1])]
    assert batches(history.arrive(2)) == [("qa/1", [2])]  # prefetched there, for qa/0 is no idle replica
    assert history.arrive(3) == []


def test_silence_of_an_idle_replica_is_not_endured_for_ever() -> None:
    history = serving()
    assert history.wait(59.9, pulses=False) == []
    assert history.wait(0.1, pulses=False) == [KillReplica(QA0, 1, "not heard for 60 s")]
    assert history.exit() == [SpawnReplica(QA0, 2)]
    assert history.broker.keeper.slots[QA0].reason == "not heard for 60 s"


def test_a_silent_replica_with_work_is_judged_by_its_progress_only() -> None:
    model = model_settings(batch_timeout_s=100.0)
    history = History(broker_settings([model], replica_silence_kill_s=10.0, front_silence_s=1000.0))
    history.ready()
    history.arrive(1, timeout_s=600)
    assert history.wait(90, pulses=False) == []
    assert history.broker.model_states()[0].replicas_ready == 0
    assert history.arrive(2, timeout_s=600) == []  # nothing is prefetched into silence
    assert [type(effect) for effect in history.wait(10, pulses=False)] == [KillReplica, SendReply]


def test_a_request_held_by_a_silent_replica_meets_its_deadline() -> None:
    history = serving(front_silence_s=1000.0)
    history.arrive(1, timeout_s=10)
    assert history.wait(10, pulses=False) == [
        SendReply(
            FRONT,
            request_id(1),
            Code.DEADLINE_EXCEEDED,
            message="not done within 10 s, the time it was given: the request was running at model 'qa'",
            attempt=1,
            slot="qa/0",
            incarnation=1,
        ),
        SendCancel(QA0, 1, (request_id(1),)),
    ]


def test_a_loop_that_was_late_blames_nobody() -> None:
    history = serving()
    history.arrive(1, timeout_s=600)
    history.now_s += 300.0  # the whole server was stopped
    assert history.pulse() == []
    assert history.last_log("loop_late").fields == {"late_s": 297.0}
    assert FRONT in history.broker.fronts.known
    assert history.wait(59.9) == []
    assert [type(effect) for effect in history.wait(0.1)] == [KillReplica, SendReply]


def test_a_loop_that_was_late_ends_no_load() -> None:
    history = History(broker_settings([model_settings(load_timeout_s=100.0)]))
    history.wait(90)
    history.now_s += 60.0
    assert history.ready() == []
    assert history.broker.model_states()[0].state == "ready"


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_a_queued_request_ends_at_its_deadline() -> None:
    history = serving()
    history.arrive(1)
    history.arrive(2)
    history.arrive(3, timeout_s=1.0)
    assert history.wait(0.999) == []
    assert replies(history.wait(0.001)) == {3: Code.DEADLINE_EXCEEDED}
    history.finish(1)
    assert batches(history.finish(2)) == []


def test_a_running_request_ends_at_its_deadline_and_is_cancelled_and_fenced() -> None:
    history = serving()
    history.arrive(1, timeout_s=1.0)
    effects = history.wait(1.0)
    assert replies(effects) == {1: Code.DEADLINE_EXCEEDED}
    assert effects[-1] == SendCancel(QA0, 1, (request_id(1),))
    assert history.finish(1) == []
    assert history.broker.fenced == 1


def test_a_result_at_the_very_deadline_is_late() -> None:
    history = serving()
    history.arrive(1, timeout_s=1.0)
    history.now_s = 1.0
    assert replies(history.finish(1)) == {1: Code.DEADLINE_EXCEEDED}


def test_a_deadline_before_any_replica_was_ready_says_loading() -> None:
    history = History()
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.LOADING, 0.4))
    history.arrive(1, timeout_s=1.0)
    answer = reply(history.wait(1.0), 1)
    assert answer.code is Code.MODEL_LOADING
    assert answer.message == "model 'qa' did not become ready within 1 s: qa/0: loading 40%"
    assert answer.retry_after_s > 0


def test_cancels_of_one_turn_are_one_message_per_replica() -> None:
    history = serving(max_batch_size=3)
    history.arrive(0)
    for number in (1, 2, 3):
        history.arrive(number, timeout_s=1.0)
    history.finish(0)
    effects = history.wait(1.0)
    assert effects[-1] == SendCancel(QA0, 1, (request_id(1), request_id(2), request_id(3)))
    assert len(effects) == 4


def test_a_pulse_is_given_time_to_tell_of_progress() -> None:
    """A step that ends just after a pulse is heard of a second later: that alone is no hang."""
    history = serving(pulse_tolerance_s=1.25)
    history.arrive(1, timeout_s=600)
    history.wait(60)
    assert history.wait(1) == []
    history.pulse(progress_count=1)
    assert history.wait(60) == []
    assert KillReplica(QA0, 1, "hung: no progress for 60 s", dump_stacks=True) in history.wait(1.25)

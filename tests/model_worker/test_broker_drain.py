"""The way to the end: admitted requests finish, processes stop, the server may go."""

from __future__ import annotations

from model_worker.broker.effects import KillReplica, SendReply, SendStop, StopServer
from model_worker.broker.events import DrainRequested, ReplicaPhaseChanged
from shared.errors import Code
from shared.messages import Phase
from tests.broker_history import (
    QA0,
    QA1,
    History,
    batches,
    broker_settings,
    model_settings,
    replies,
    spawns,
)


def test_an_idle_server_stops_at_once() -> None:
    history = History()
    history.ready()
    assert history.tell(DrainRequested(30.0)) == [SendStop(QA0, 1)]
    assert history.broker.draining
    assert history.exit(0) == [StopServer(0, "drained")]
    assert history.last_log("replica_exited").level == "info"
    assert history.broker.wake_at_s is None


def test_running_and_queued_requests_finish_first() -> None:
    history = History()
    history.ready()
    for number in (1, 2, 3):
        history.arrive(number)
    assert history.tell(DrainRequested(30.0)) == []
    assert batches(history.finish(1)) == [("qa/0", [3])]
    assert history.finish(2)[1:] == []
    effects = history.finish(3)
    assert replies(effects) == {3: Code.OK}
    assert effects[-1] == SendStop(QA0, 1)


def test_what_is_left_at_the_end_of_the_grace_is_answered() -> None:
    history = History()
    history.ready()
    for number in (1, 2, 3):
        history.arrive(number)
    history.tell(DrainRequested(5.0))
    assert history.wait(4.9) == []
    effects = history.wait(0.1)
    assert replies(effects) == dict.fromkeys((1, 2, 3), Code.DRAINING)
    assert effects[-1] == SendStop(QA0, 1)
    assert history.exit(0) == [StopServer(0, "drained")]


def test_a_drain_without_grace_ends_in_one_step() -> None:
    history = History()
    history.ready()
    history.arrive(1)
    effects = history.tell(DrainRequested(0.0))
    assert replies(effects) == {1: Code.DRAINING}
    assert effects[-1] == SendStop(QA0, 1)


def test_a_second_drain_can_only_shorten_the_grace() -> None:
    history = History()
    history.ready()
    history.arrive(1)
    history.tell(DrainRequested(20.0))
    history.tell(DrainRequested(300.0))
    history.wait(10)
    history.tell(DrainRequested(1.0))
    assert replies(history.wait(1.0)) == {1: Code.DRAINING}


def test_a_process_that_does_not_stop_is_killed() -> None:
    history = History(broker_settings([model_settings()], slots=2))
    history.ready(QA0)
    history.ready(QA1)
    history.tell(DrainRequested(30.0))
    assert history.exit(0, slot=QA0) == []
    assert history.wait(5.0) == [KillReplica(QA1, 1, "told to stop; no exit within 5 s")]
    assert history.exit(-9, slot=QA1) == [StopServer(0, "drained")]


def test_a_load_that_nobody_waits_for_is_ended_at_once() -> None:
    history = History(broker_settings([model_settings("qa"), model_settings("ner")], parallel_loads=2))
    history.ready()
    history.arrive(1)
    [kill] = history.tell(DrainRequested(30.0))
    assert isinstance(kill, KillReplica)
    assert (kill.slot, kill.incarnation) == ("ner/0", 1)
    assert history.tell(ReplicaPhaseChanged(kill.slot, 1, Phase.READY)) == []  # too late
    assert history.exit(-9, slot=kill.slot) == []  # and no respawn
    assert history.finish(1)[-1] == SendStop(QA0, 1)


def test_a_load_that_queued_requests_wait_for_goes_on() -> None:
    history = History()
    history.arrive(1)
    assert history.tell(DrainRequested(30.0)) == []
    assert batches(history.ready()) == [("qa/0", [1])]
    assert history.finish(1)[-1] == SendStop(QA0, 1)


def test_a_process_that_dies_is_replaced_only_if_a_request_needs_it() -> None:
    history = History(broker_settings([model_settings()], slots=2))
    history.ready(QA0)
    history.ready(QA1)
    history.arrive(1)
    history.tell(DrainRequested(30.0))
    assert spawns(history.exit(slot=QA1)) == []
    assert spawns(history.exit(slot=QA0)) == [("qa/0", 2)]
    assert batches(history.ready(QA0)) == [("qa/0", [1])]
    assert history.finish(1, incarnation=2, attempt=2)[-1] == SendStop(QA0, 2)


def test_a_batch_does_not_wait_for_company_that_cannot_come() -> None:
    history = History(broker_settings([model_settings(max_batch_size=4, max_wait_s=1.0)]))
    history.ready()
    assert history.arrive(1) == []
    assert batches(history.tell(DrainRequested(30.0))) == [("qa/0", [1])]


def test_a_cancelled_request_is_not_waited_for() -> None:
    history = History()
    history.ready()
    history.arrive(1)
    history.tell(DrainRequested(30.0))
    assert history.cancel(1)[-1] == SendStop(QA0, 1)


def test_a_server_whose_models_all_failed_drains_like_any_other() -> None:
    history = History(broker_settings([model_settings()], load_attempts_max=1))
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.FAILED, detail="no such task", permanent=True))
    assert history.tell(DrainRequested(30.0)) == [SendStop(QA0, 1)]
    assert history.exit(70) == [StopServer(0, "drained")]


def test_requests_that_arrive_after_the_end_are_still_answered() -> None:
    history = History()
    history.ready()
    history.tell(DrainRequested(30.0))
    history.exit(0)
    [answer] = history.arrive(1)
    assert isinstance(answer, SendReply)
    assert answer.code is Code.DRAINING

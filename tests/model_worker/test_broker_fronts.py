"""Fronts: heard, silent, gone; their requests go with them."""

from __future__ import annotations

from model_worker.broker.effects import ReleasePayload, SendBatch, SendCancel
from model_worker.broker.events import FrontId, FrontJoined, FrontLeft, FrontPulsed
from shared.errors import Code
from tests.broker_history import FRONT, QA0, QA1, History, batches, broker_settings, model_settings, replies, request_id

OTHER = FrontId(b"front-2")


def serving() -> History:
    history = History()
    history.ready()
    return history


def test_the_requests_of_a_silent_front_are_released_without_an_answer() -> None:
    history = serving()
    history.arrive(1)
    history.arrive(2)
    history.arrive(3)
    history.arrive(4, front=OTHER)
    history.fronts.remove(FRONT)
    assert history.wait(2.9) == []
    assert history.wait(0.1) == [
        ReleasePayload(request_id(1)),
        ReleasePayload(request_id(2)),
        ReleasePayload(request_id(3)),
        SendCancel(QA0, 1, (request_id(1), request_id(2))),
    ]
    assert list(history.broker.fronts.known) == [OTHER]
    assert batches(history.finish(1, Code.CANCELLED)) == [("qa/0", [4])]
    assert history.finish(2, Code.CANCELLED) == []
    assert history.broker.counters()[0].ended == {"cancelled": 3}


def test_a_front_that_left_is_forgotten_at_once() -> None:
    history = serving()
    history.arrive(1)
    assert history.tell(FrontLeft(FRONT)) == [
        ReleasePayload(request_id(1)),
        SendCancel(QA0, 1, (request_id(1),)),
    ]
    assert history.broker.fronts.known == {}
    assert history.tell(FrontLeft(FRONT)) == []


def test_cancels_go_to_each_replica_that_holds_something() -> None:
    history = History(broker_settings([model_settings()], slots=2))
    history.ready(QA0)
    history.ready(QA1)
    for number in range(4):
        history.arrive(number)
    effects = history.tell(FrontLeft(FRONT))
    assert effects[4:] == [
        SendCancel(QA0, 1, (request_id(0), request_id(2))),
        SendCancel(QA1, 1, (request_id(1), request_id(3))),
    ]


def test_a_front_may_come_back() -> None:
    history = serving()
    history.tell(FrontJoined(FRONT))
    history.tell(FrontLeft(FRONT))
    history.tell(FrontJoined(FRONT))
    assert batches(history.arrive(1)) == [("qa/0", [1])]
    assert replies(history.finish(1)) == {1: Code.OK}


def test_pulses_and_requests_keep_a_front() -> None:
    history = serving()
    history.tell(FrontJoined(FRONT))
    history.wait(2.0, pulses=False)
    history.tell(FrontPulsed(FRONT))
    history.wait(2.0, pulses=False)
    history.arrive(1)
    history.wait(2.0, pulses=False)
    history.cancel(1)
    history.wait(2.0, pulses=False)
    assert FRONT in history.broker.fronts.known
    history.wait(1.0, pulses=False)
    assert FRONT not in history.broker.fronts.known


def test_a_queued_request_is_cancelled_without_telling_any_replica() -> None:
    history = serving()
    history.arrive(1)
    history.arrive(2)
    history.arrive(3)
    assert history.cancel(3) == [ReleasePayload(request_id(3))]
    history.finish(1)
    assert history.finish(2)[1:] == []


def test_a_cancelled_request_gets_no_answer_even_if_its_result_comes() -> None:
    history = serving()
    history.arrive(1)
    history.cancel(1)
    assert history.chunk(1) == []
    assert history.finish(1) == []


def test_only_the_sender_can_cancel_and_only_once() -> None:
    history = serving()
    history.arrive(1)
    history.tell(FrontJoined(OTHER))
    assert history.cancel(1, front=OTHER) == []
    assert history.cancel(99) == []
    assert history.cancel(1) != []
    assert history.cancel(1) == []


def test_cancelling_the_head_lets_the_next_ones_go() -> None:
    history = History(broker_settings([model_settings(max_batch_size=2)]))
    history.ready()
    history.arrive(0)
    history.exit()
    history.arrive(1)
    history.arrive(2)
    history.arrive(3)
    history.ready()  # 0 runs alone
    history.arrive(4)
    assert history.cancel(0)[:1] == [ReleasePayload(request_id(0))]
    assert batches(history.finish(0, Code.CANCELLED, incarnation=2, attempt=2)) == [("qa/0", [1, 2]), ("qa/0", [3, 4])]


def test_a_request_that_must_run_alone_and_is_cancelled_no_longer_blocks_prefetching() -> None:
    history = History(broker_settings([model_settings()], slots=2))
    history.ready(QA0)
    history.ready(QA1)
    history.arrive(1)
    history.arrive(2)
    history.exit(slot=QA1)  # 2 waits to run alone
    assert history.arrive(3) == []
    effects = history.cancel(2)
    assert [type(effect) for effect in effects] == [ReleasePayload, SendBatch]
    assert batches(effects) == [("qa/0", [3])]

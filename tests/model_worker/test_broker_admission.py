"""The door: who is refused on arrival, with which code, and when to come back."""

from __future__ import annotations

from collections import Counter

import pytest

from model_worker.broker.effects import SendReply
from model_worker.broker.events import DrainRequested, PoisonDigested, RequestArrived
from shared.errors import Code
from tests.broker_history import (
    FRONT,
    History,
    batches,
    broker_settings,
    model_settings,
    replies,
    reply,
    request_id,
)


def ready(**settings: int | float) -> History:
    history = History(broker_settings([model_settings(**settings)]))  # type: ignore[arg-type]
    history.ready()
    return history


@pytest.mark.parametrize("one_turn", [False, True])
def test_one_runs_four_wait_and_the_rest_is_refused_at_once(one_turn: bool) -> None:
    history = ready(max_batch_size=1, queue_size_max=4)
    effects = []
    for number in range(50):
        arrived = RequestArrived(FRONT, request_id(number), "qa", "predict", b"", 1, 10, 60.0, 0, False, True)
        effects += history.broker.handle(arrived, 0.0, more_follow=one_turn and number < 49)
    history.broker.validate(0.0)
    assert Counter(replies(effects).values()) == {Code.OVERLOADED: 45}
    assert sorted(replies(effects)) == list(range(5, 50))
    assert reply(effects, 49).retry_after_s == 1.0
    served = 0
    for number in range(5):
        served += len(replies(history.finish(number)))
    assert served == 5


def test_bytes_that_wait_are_bounded_and_running_ones_do_not_wait() -> None:
    history = ready(queue_bytes_max=1000)
    history.arrive(1, body_bytes=600)
    history.arrive(2, body_bytes=600)
    assert replies(history.arrive(3, body_bytes=600)) == {3: Code.OVERLOADED}
    assert replies(history.arrive(4, body_bytes=400)) == {}
    history.finish(1)
    assert replies(history.arrive(5, body_bytes=600)) == {}


def test_a_body_that_can_never_be_queued_is_too_large_not_overload() -> None:
    history = ready(queue_bytes_max=1000)
    answer = reply(history.arrive(1, body_bytes=1001), 1)
    assert answer.code is Code.TOO_LARGE
    assert "1001 bytes" in answer.message
    assert "queue_bytes_max (1000)" in answer.message


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    history = History(broker_settings([model_settings("qa"), model_settings("ner")]))
    answer = reply(history.arrive(1, model="qs"), 1)
    assert answer.code is Code.UNKNOWN_MODEL
    assert answer.message == "no model is called 'qs'; known: qa, ner"


def test_a_deadline_in_the_past_is_over() -> None:
    history = ready()
    assert replies(history.arrive(1, timeout_s=0.0)) == {1: Code.DEADLINE_EXCEEDED}
    assert replies(history.arrive(2, timeout_s=-1.0)) == {2: Code.DEADLINE_EXCEEDED}


def test_a_draining_server_says_when_to_come_back() -> None:
    history = ready()
    history.arrive(1)
    history.tell(DrainRequested(30.0))
    answer = reply(history.arrive(2), 2)
    assert answer.code is Code.DRAINING
    assert answer.retry_after_s > 0


def test_a_banned_digest_is_refused_until_the_ban_is_over() -> None:
    history = ready()
    assert not history.broker.refused_digests("qa")
    history.tell(PoisonDigested("qa", b"bad"))
    assert history.broker.refused_digests("qa")
    assert not history.broker.refused_digests("no such model")
    answer = reply(history.arrive(1, digest=b"bad"), 1)
    assert answer.code is Code.POISON_INPUT
    assert "another 600 s" in answer.message
    assert replies(history.arrive(2, digest=b"good")) == {}
    history.finish(2)
    history.wait(599.9)
    history.tell(PoisonDigested("qa", b"worse"))
    history.wait(0.2)
    assert replies(history.arrive(3, digest=b"bad")) == {}
    assert replies(history.arrive(4, digest=b"worse")) == {4: Code.POISON_INPUT}
    history.finish(3)
    history.wait(600)
    assert not history.broker.refused_digests("qa")


def test_a_second_ban_of_the_same_digest_extends_the_first() -> None:
    history = ready()
    history.tell(PoisonDigested("qa", b"bad"))
    history.wait(400)
    history.tell(PoisonDigested("qa", b"bad"))
    history.wait(400)
    assert replies(history.arrive(1, digest=b"bad")) == {1: Code.POISON_INPUT}


def test_bans_are_bounded() -> None:
    history = ready()
    for number in range(1100):
        history.broker.handle(PoisonDigested("qa", number.to_bytes(2, "big")), 0.0)
    history.broker.validate(0.0)
    assert len(history.broker.models["qa"].bans) == 1024
    assert replies(history.arrive(1, digest=(0).to_bytes(2, "big"))) == {}
    assert replies(history.arrive(2, digest=(1099).to_bytes(2, "big"))) == {2: Code.POISON_INPUT}


def busy_history(batch_s: float) -> History:
    """A replica that was measured, and then got 10 requests that wait behind 1 that runs."""
    history = ready(queue_size_max=20)
    history.arrive(0)
    history.wait(batch_s)
    history.finish(0)
    for number in range(1, 12):
        history.arrive(number, timeout_s=600)
    return history


def test_a_wait_longer_than_the_time_left_is_refused_at_once() -> None:
    history = busy_history(batch_s=2.0)
    answer = reply(history.arrive(100, timeout_s=19.0), 100)
    assert answer.code is Code.OVERLOADED
    assert "at least 20 s, more than the 19 s left" in answer.message
    assert answer.retry_after_s == 20.0
    assert replies(history.arrive(101, timeout_s=21.0)) == {}


def test_a_more_urgent_request_waits_for_those_ahead_of_it_only() -> None:
    history = busy_history(batch_s=2.0)
    assert replies(history.arrive(100, timeout_s=3.0, priority=-10)) == {}
    assert replies(history.arrive(101, timeout_s=3.0, priority=0)) == {101: Code.OVERLOADED}


def test_the_wait_is_not_guessed_before_anything_was_measured_or_while_nothing_is_ready() -> None:
    history = ready(queue_size_max=20)
    for number in range(12):
        assert replies(history.arrive(number, timeout_s=0.5)) == {}
    history = busy_history(batch_s=2.0)
    history.exit()
    assert replies(history.arrive(100, timeout_s=0.1)) == {}


def test_retry_after_is_bounded() -> None:
    history = busy_history(batch_s=30.0)
    for number in range(100, 110):
        history.arrive(number, timeout_s=10_000)
    answer = reply(history.arrive(200), 200)
    assert answer.code is Code.OVERLOADED
    assert answer.retry_after_s == 60.0


def test_a_duplicate_is_neither_answered_nor_admitted() -> None:
    history = ready()
    history.arrive(1)
    assert history.arrive(1) == []
    assert history.last_log("request_duplicated").level == "debug"
    assert [type(effect) for effect in history.finish(1)] == [SendReply]


def test_a_request_that_waits_for_company_leaves_room_for_it() -> None:
    history = ready(max_batch_size=8, queue_size_max=2, max_wait_s=1.0)
    for number in range(7):
        assert history.arrive(number) == []
    assert batches(history.arrive(7)) == [("qa/0", list(range(8)))]

"""The link to the model server as histories: what is heard when, and what the front says to it."""

from __future__ import annotations

import pytest

from frontend.link import Aftermath, Say, ServerLink
from shared.messages import ServerPulse, Welcome


def welcome(epoch: str = "one") -> Welcome:
    return Welcome(epoch, "1", ())


def pulse(epoch: str = "one", *, draining: bool = False) -> ServerPulse:
    return ServerPulse(epoch, draining, ())


def welcomed(now_s: float = 0.0) -> ServerLink:
    link = ServerLink(now_s)
    assert link.tick(now_s) is Say.HELLO
    assert link.heard_welcome(welcome(), now_s) is Aftermath.KEPT
    return link


def ticks(link: ServerLink, start_s: float, end_s: float) -> list[Say]:
    """What is said from `start_s` to `end_s`, tick by tick, nothings left out."""
    steps = round((end_s - start_s) / 0.25)
    said = [link.tick(start_s + step * 0.25) for step in range(1, steps + 1)]
    return [say for say in said if say is not Say.NOTHING]


def test_hello_is_repeated_every_second_until_welcome() -> None:
    link = ServerLink(0.0)
    assert link.tick(0.0) is Say.HELLO
    assert ticks(link, 0.0, 3.0) == [Say.HELLO] * 3
    assert not link.is_up
    link.heard_welcome(welcome(), 3.1)
    assert link.is_up


def test_welcomed_front_pulses_every_second() -> None:
    link = welcomed()
    link.heard(1.0)
    assert ticks(link, 0.0, 2.5) == [Say.PULSE] * 2


def test_silence_of_two_seconds_holds_requests_and_says_hello() -> None:
    link = welcomed()
    assert ticks(link, 0.0, 2.0) == [Say.PULSE] * 2
    assert link.is_up
    assert link.tick(2.25) is Say.HELLO
    assert not link.is_up


def test_same_server_after_a_silence_is_asked_again_for_everything() -> None:
    link = welcomed()
    ticks(link, 0.0, 2.5)
    assert link.heard_welcome(welcome(), 2.6) is Aftermath.DOUBTFUL
    assert link.heard_welcome(welcome(), 2.7) is Aftermath.KEPT, "one answer to each HELLO, one resend"


def test_new_epoch_in_welcome_loses_everything() -> None:
    link = welcomed()
    link.not_connected()
    assert link.heard_welcome(welcome("two"), 1.0) is Aftermath.LOST
    assert link.epoch == "two"


def test_new_epoch_in_a_pulse_asks_who_is_there() -> None:
    link = welcomed()
    assert link.heard_pulse(pulse("two"), 1.0) is Say.HELLO
    assert not link.is_up
    assert link.heard_welcome(welcome("two"), 1.1) is Aftermath.LOST


def test_pulse_after_a_silence_asks_for_a_welcome_only_once() -> None:
    link = welcomed()
    ticks(link, 0.0, 2.5)
    assert link.heard_pulse(pulse(), 2.6) is Say.HELLO
    assert link.heard_pulse(pulse(), 2.65) is Say.NOTHING


def test_front_that_was_stopped_itself_assumes_the_worst() -> None:
    link = welcomed()
    link.heard(4.9)
    assert link.tick(5.0) is Say.HELLO
    assert not link.is_up
    assert link.heard_welcome(welcome(), 5.1) is Aftermath.LOST


def test_connection_that_can_be_written_to_is_greeted_at_once() -> None:
    link = ServerLink(0.0)
    assert link.tick(0.0) is Say.HELLO
    link.not_connected()
    assert link.connectable(0.05) is Say.HELLO
    assert link.connectable(0.1) is Say.NOTHING
    link.heard_welcome(welcome(), 0.3)
    assert link.connectable(0.5) is Say.NOTHING


def test_news_is_fresh_for_three_seconds() -> None:
    link = ServerLink(0.0)
    assert not link.is_fresh(0.0)
    link.heard_welcome(welcome(), 1.0)
    assert link.is_fresh(3.9)
    assert not link.is_fresh(4.0)


@pytest.mark.parametrize(("epoch", "draining"), [("one", True), ("two", False)])
def test_only_a_new_server_takes_draining_back(epoch: str, draining: bool) -> None:
    link = welcomed()
    link.heard_pulse(pulse(draining=True), 0.5)
    assert link.draining
    link.heard_welcome(welcome(epoch), 0.6)
    assert link.draining is draining

"""Timers: one per subject, earliest first, and no more memory than they need."""

from __future__ import annotations

import random

from model_worker.broker.timers import STALE_ENTRIES_MAX, Timers


def test_they_ring_in_order_of_time_then_of_setting() -> None:
    timers: Timers[str] = Timers()
    for subject, at_s in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("d", 3.0)):
        timers.set(subject, at_s)
    assert timers.next_s == 1.0
    assert timers.pop_due(0.5) is None
    rung = [timers.pop_due(2.5) for _ in range(4)]
    assert rung == ["a", "b", "c", None]
    assert timers.next_s == 3.0


def test_setting_again_replaces_and_advancing_only_brings_forward() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 5.0)
    assert timers.next_s == 5.0
    timers.advance("a", 7.0)
    assert timers.next_s == 5.0
    timers.advance("a", 4.0)
    assert timers.next_s == 4.0
    assert timers.pop_due(10.0) == "a"
    assert timers.pop_due(10.0) is None


def test_a_cleared_timer_is_not_the_next_one() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("b", 2.0)
    timers.clear("a")
    timers.clear("never set")
    assert timers.next_s == 2.0
    timers.clear("b")
    assert timers.next_s is None
    assert len(timers) == 0


def test_cleared_timers_do_not_pile_up() -> None:
    timers: Timers[int] = Timers()
    timers.set(-1, 0.0)  # stays first, so that nothing stale ever surfaces
    for subject in range(10_000):
        timers.set(subject, 1000.0 - subject / 100)
        timers.clear(subject)
    assert len(timers._heap) <= 2 + STALE_ENTRIES_MAX
    timers.validate()


def test_any_order_of_use_keeps_them_whole() -> None:
    rng = random.Random(1)
    timers: Timers[int] = Timers()
    expected: dict[int, float] = {}
    now_s = 0.0
    for _ in range(5_000):
        subject, at_s = rng.randrange(50), now_s + rng.random()
        match rng.randrange(4):
            case 0:
                timers.set(subject, at_s)
                expected[subject] = at_s
            case 1:
                timers.advance(subject, at_s)
                expected[subject] = min(at_s, expected.get(subject, at_s))
            case 2:
                timers.clear(subject)
                expected.pop(subject, None)
            case _:
                now_s += rng.random() / 10
                while (rung := timers.pop_due(now_s)) is not None:
                    assert expected.pop(rung) <= now_s
                assert all(due_s > now_s for due_s in expected.values())
        assert timers.next_s == min(expected.values(), default=None)
        timers.validate()

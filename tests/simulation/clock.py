"""A virtual clock, connections that take their time, and whoever acts by it. Nothing ever waits.

Actions happen in order of time, then of scheduling.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._agenda: list[tuple[float, int, Action]] = []
        self._sequence = 0

    def at(self, when_s: float, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._agenda, (max(when_s, self.now_s), self._sequence, action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def step(self) -> bool:
        """Does the next action; False if there is none."""
        if not self._agenda:
            return False
        self.now_s, _, action = heapq.heappop(self._agenda)
        action()
        return True


class Wire:
    """One direction of a connection: every message takes a while, and none overtakes another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = 0.0

    def carry(self, latency_s: float, action: Action) -> None:
        self._last_s = max(self._last_s, self._clock.now_s + latency_s)
        self._clock.at(self._last_s, action)


class Actor:
    """A front or a process: it acts while it lives, and not while it is stopped."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.dead = False
        self._stopped_until_s = 0.0

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and later SIGCONT: what was to happen meanwhile happens then."""
        self._stopped_until_s = self.clock.now_s + seconds

    def later(self, delay_s: float, action: Action) -> None:
        """Acts then, if it lives."""

        def act() -> None:
            if self.dead:
                return
            if self.clock.now_s < self._stopped_until_s:
                self.clock.at(self._stopped_until_s, act)
            else:
                action()

        self.clock.after(delay_s, act)

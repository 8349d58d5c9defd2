"""The fronts that are there: who was heard, and what becomes of the requests of one that is not any more.

Owns the record of each front and the limit of its silence.
"""

from __future__ import annotations

from collections.abc import Callable

from model_worker.broker.effects import Effect, Log
from model_worker.broker.events import FrontId
from model_worker.broker.records import Front, Request
from model_worker.broker.settings import BrokerSettings
from model_worker.broker.timers import Timers


class Fronts:
    """Fronts that were heard within `front_silence_s`."""

    def __init__(
        self,
        settings: BrokerSettings,
        timers: Timers[object],
        effects: list[Effect],
        release: Callable[[list[Request]], None],
    ) -> None:
        """`release` ends requests that nobody waits for."""
        self.known: dict[FrontId, Front] = {}
        self._settings = settings
        self._timers = timers
        self._effects = effects
        self._release = release

    def heard(self, front_id: FrontId, now_s: float) -> Front:
        """The front, which is known from now on."""
        front = self.known.get(front_id)
        if front is None:
            front = self.known[front_id] = Front(front_id, now_s)
            self._timers.set(front, now_s + self._settings.front_silence_s)
        front.heard_s = now_s
        return front

    def left(self, front_id: FrontId, reason: str) -> None:
        front = self.known.get(front_id)
        if front is not None:
            self._forget(front, reason)

    def due(self, front: Front, now_s: float) -> None:
        """Its timer has rung; too early, if it was heard meanwhile."""
        silent_at_s = front.heard_s + self._settings.front_silence_s
        if silent_at_s <= now_s:
            self._forget(front, f"not heard for {self._settings.front_silence_s:g} s")
        else:
            self._timers.set(front, silent_at_s)

    def _forget(self, front: Front, reason: str) -> None:
        fields: dict[str, object] = {"front": front.id.hex(), "reason": reason, "cancelled": len(front.requests)}
        self._effects.append(Log("warning" if front.requests else "info", "front_left", fields))
        self._release(list(front.requests.values()))
        self._timers.clear(front)
        del self.known[front.id]

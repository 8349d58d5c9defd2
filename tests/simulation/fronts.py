"""Simulated fronts: they send requests of every kind, change their minds, die silently, and come back as others."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from model_worker.broker.events import (
    Event,
    FrontId,
    FrontJoined,
    FrontLeft,
    FrontPulsed,
    RequestArrived,
    RequestCancelled,
)
from shared.messages import RequestId
from tests.simulation.clock import Action, Wire

if TYPE_CHECKING:
    from tests.simulation.world import World

PULSE_S = 1.0


class Front:
    """One connection of a front worker; dies once, and is then replaced."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(world.rng.random())
        self.id = FrontId(self.rng.randbytes(5))
        self.dead = False
        self._wire = Wire(world.clock)
        self._say(FrontJoined(self.id))
        self._pulse()
        # Half of the fronts come before anything is loaded, half when something may be.
        self._later(self.rng.choice((0.0, 4.0)), self._submit)

    def _later(self, delay_s: float, action: Action) -> None:
        self.world.clock.after(delay_s, lambda: None if self.dead else action())

    def _say(self, event: Event) -> None:
        self._wire.carry(self.rng.uniform(0.0, 0.005), lambda: self.world.deliver(event))

    def _pulse(self) -> None:
        self._say(FrontPulsed(self.id))
        weather = self.world.weather
        if self.rng.random() < weather.fronts_die:
            self._die()
        elif self.rng.random() < weather.fronts_leave:
            self._die()
            self.world.clock.after(self.rng.uniform(0.0, 0.01), lambda: self.world.deliver(FrontLeft(self.id)))
        self._later(PULSE_S, self._pulse)

    def _die(self) -> None:
        self.dead = True
        self.world.clock.after(self.rng.uniform(0.0, 2.0), self._come_back)

    def _come_back(self) -> None:
        Front(self.world)

    def _submit(self) -> None:
        number = self.world.take_request_number()
        if number is None:
            return
        rng, weather = self.rng, self.world.weather
        payload = number.to_bytes(8, "big")
        bad = [known for known, nature in self.world.natures.items() if nature in ("poison", "hanging")]
        if bad and rng.random() < 0.1:
            payload = rng.choice(bad)  # somebody tries again what ended badly
        elif payload not in self.world.natures:
            [self.world.natures[payload]] = rng.choices(list(weather.natures), list(weather.natures.values()))
        request_id = RequestId(payload + number.to_bytes(8, "big"))
        arrived = RequestArrived(
            front=self.id,
            id=request_id,
            model="nobody" if rng.random() < weather.misfits else rng.choice(self.world.settings.models).name,
            operation=rng.choice(("predict", "predict", "other")),
            batch_key=rng.choice((b"", b"", b"warm")),
            cost_hint=rng.choice((0, 0, rng.randint(1, 60))),
            body_bytes=2_000_000 if rng.random() < weather.misfits else rng.randint(1, 400),
            deadline_s=self.world.clock.now_s + rng.choice((0.05, 1.0, 5.0, 30.0)) * rng.uniform(0.5, 1.5),
            priority=rng.choice((0, 0, 0, -1, 1, 5)),
            stream=rng.random() < weather.streams,
            retryable=rng.random() >= weather.unretryable,
        )
        self._say(arrived)
        if rng.random() < weather.duplicates:
            self._say(arrived)
        if rng.random() < weather.cancels:
            self._later(rng.uniform(0.0, 1.0), lambda: self._say(RequestCancelled(self.id, request_id)))
        self._later(rng.expovariate(1.0 / weather.request_every_s), self._submit)

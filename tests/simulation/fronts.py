"""Simulated fronts: they send requests of every kind, change their minds, are slow, die silently, and come back as
others."""

from __future__ import annotations

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
from tests.simulation.clock import Actor, Wire
from tests.simulation.faults import Fault, dice

if TYPE_CHECKING:
    from tests.simulation.world import World

PULSE_S = 1.0
BURST = 30


class Front(Actor):
    """One connection of a front worker; dies once, and is then replaced."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world.clock)
        self.world = world
        self.name = f"front{number}"
        self.rng = dice(world.recipe.seed, self.name)
        self.id = FrontId(self.rng.randbytes(5))
        self._wire = Wire(world.clock)
        self._say(FrontJoined(self.id))
        self._pulse()
        # Half of the fronts come before anything is loaded, half when something may be.
        self.later(self.rng.choice((0.0, 4.0)), self._submit)

    def _say(self, event: Event) -> None:
        latency_s = self.rng.uniform(0.0, self.world.weather.front_latency_s)
        self._wire.carry(latency_s, lambda: self.world.deliver(event))

    def _strikes(self, fault: Fault) -> bool:
        return self.world.faults.strikes(fault, self.name)

    def _pulse(self) -> None:
        self._say(FrontPulsed(self.id))
        if self._strikes(Fault.FRONT_DEATH):
            self._die()
        elif self._strikes(Fault.FRONT_LEAVES):
            self._die()
            self.clock.after(self.rng.uniform(0.0, 0.01), lambda: self.world.deliver(FrontLeft(self.id)))
        elif self._strikes(Fault.FRONT_FREEZE):
            self.stop_for(self.rng.choice((1.0, 3.5, 8.0)))
        self.later(PULSE_S, self._pulse)

    def _die(self) -> None:
        self.dead = True
        self.clock.after(self.rng.uniform(0.0, 2.0), self.world.add_front)

    def _submit(self) -> None:
        for _ in range(BURST if self._strikes(Fault.BURST) else 1):
            number = self.world.take_request_number()
            if number is None:
                return
            self._send_request(number)
        if self._strikes(Fault.LULL):
            self.later(self.rng.uniform(2.0, 12.0), self._submit)
            return
        self.later(self.rng.expovariate(1.0 / self.world.weather.request_every_s), self._submit)

    def _send_request(self, number: int) -> None:
        world, weather = self.world, self.world.weather
        # Its own dice, so that it stays what it is when others are left out.
        rng = dice(world.recipe.seed, "request", number)
        name = f"request{number}"
        payload = number.to_bytes(8, "big")
        if rng.random() < 0.1:
            payload = world.bad_payload(rng) or payload  # somebody tries again what ended badly
        request_id = RequestId(payload + number.to_bytes(8, "big"))
        world.give_nature(payload)
        is_misfit = world.faults.strikes(Fault.MISFIT, name)
        is_large = rng.random() < 0.5
        patience_s = rng.choice((0.05, 1.0, 5.0, 30.0)) * rng.uniform(0.5, 1.5)
        if world.faults.strikes(Fault.LATE_ARRIVAL, name):
            patience_s = -rng.choice((0.0, 0.5))
        arrived = RequestArrived(
            front=self.id,
            id=request_id,
            model="nobody" if is_misfit and not is_large else rng.choice(world.settings.models).name,
            operation=rng.choice(("predict", "predict", "other")),
            batch_key=rng.choice((b"", b"", b"warm")),
            cost_hint=rng.choice((0, 0, rng.randint(1, 60))),
            body_bytes=2_000_000 if is_misfit and is_large else rng.randint(1, 400),
            deadline_s=self.clock.now_s + patience_s,
            priority=rng.choice((0, 0, 0, -1, 1, 5)),
            stream=rng.random() < weather.streams,
            retryable=rng.random() >= weather.unretryable,
            request_id=f"r{number}",
        )
        if number in world.recipe.skipped:
            return
        self._say(arrived)
        if world.faults.strikes(Fault.DUPLICATE, name):
            self._say(arrived)
        if world.faults.strikes(Fault.CANCEL, name):
            self.later(rng.uniform(0.0, 1.0), lambda: self._say(RequestCancelled(self.id, request_id)))
        if world.faults.strikes(Fault.FOREIGN_CANCEL, name):
            foreign = world.some_request(rng)
            self.later(rng.uniform(0.0, 1.0), lambda: self._say(RequestCancelled(self.id, foreign)))

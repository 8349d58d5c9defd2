"""Simulated model processes: they load, compute, crash, hang, freeze, lie, and say things after they are dead.

They know the broker only by the events that their world delivers for them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from model_worker.broker.effects import BatchEntry, SendBatch
from model_worker.broker.events import (
    ChunkArrived,
    Event,
    ItemFinished,
    ReplicaConnected,
    ReplicaExited,
    ReplicaPhaseChanged,
    ReplicaPulsed,
)
from shared.errors import Code
from shared.messages import Phase, RequestId, SlotName
from tests.simulation.clock import Action, Wire

if TYPE_CHECKING:
    from tests.simulation.world import World

PULSE_S = 0.5


class Process:
    """One incarnation of a slot."""

    def __init__(self, world: World, slot: SlotName, incarnation: int) -> None:
        self.world = world
        self.slot = slot
        self.incarnation = incarnation
        self.model = world.models[slot]
        self.dead = False
        self.rng = random.Random(f"{world.seed} {slot} {incarnation}")
        self._to_broker = Wire(world.clock)
        self.from_broker = Wire(world.clock)
        self._frozen_until_s = 0.0
        self._batches: deque[SendBatch] = deque()
        self._cancelled: set[RequestId] = set()
        self._steps = 0
        self._busy = False
        # With continuous batching: what runs, and how many steps each still takes.
        self.concurrency = world.concurrency[self.model]
        self._running: dict[BatchEntry, int] = {}
        # Those of the running batch that are about to end this process, one way or another.
        self.culprits: list[RequestId] = []
        # Its last words take longer than the news of its death.
        self._is_slow_speaker = self.rng.random() < world.weather.late_words
        self._load()

    # --- time, speech, death -------------------------------------------------------------------------------------

    def _later(self, delay_s: float, action: Action) -> None:
        """Acts then, if it lives; a frozen process acts when it thaws."""

        def act() -> None:
            if self.dead:
                return
            if self.world.clock.now_s < self._frozen_until_s:
                self.world.clock.at(self._frozen_until_s, act)
            else:
                action()

        self.world.clock.after(delay_s, act)

    def _say(self, event: Event) -> None:
        latency_s = self.rng.uniform(0.0, 0.5 if self._is_slow_speaker else 0.002)
        self._to_broker.carry(latency_s, lambda: self.world.deliver(event))

    def die(self, exit_code: int) -> None:
        if self.dead:
            return
        self.dead = True
        self.world.process_died(self)
        exited = ReplicaExited(self.slot, self.incarnation, exit_code)
        self.world.clock.after(self.rng.uniform(0.0, 0.05), lambda: self.world.deliver(exited))

    def _is_moody(self, chance: float) -> bool:
        return self.world.clock.now_s >= self.world.weather.moody_after_s and self.rng.random() < chance

    # --- loading -------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        weather, rng = self.world.weather, self.rng
        self._later(rng.uniform(0.01, 0.5), lambda: self._say(ReplicaConnected(self.slot, self.incarnation)))
        self._later(0.5, lambda: self._say(self._phase(Phase.LOADING, progress=0.5)))
        load_s = rng.uniform(0.6, 3.0)
        if self._is_moody(weather.load_hangs):
            return
        if self._is_moody(weather.load_crashes):
            self._later(load_s, lambda: self.die(rng.choice((-9, -11, 1, 0))))
        elif self._is_moody(weather.load_fails):
            self._later(load_s, self._fail_to_load)
        else:
            self._later(load_s, self._ready)

    def _fail_to_load(self) -> None:
        self._say(self._phase(Phase.FAILED, detail="no such file", permanent=self.rng.random() < 0.1))
        if self.rng.random() < 0.8:
            self._later(self.rng.uniform(0.0, 0.1), lambda: self.die(70))

    def _ready(self) -> None:
        rng = self.rng
        ready = self._phase(Phase.READY, mixes_parameters=self.world.mixes_parameters)
        self._say(ready)
        self._pulse()
        if rng.random() < self.world.weather.lies:
            self._say(ready)
        if self._is_moody(self.world.weather.load_crashes / 2):
            # It dies as soon as it has spoken, so that its exit may be noticed first.
            self._later(rng.uniform(0.0, 0.05), lambda: self.die(-9))

    def _phase(
        self,
        phase: Phase,
        *,
        progress: float = -1.0,
        detail: str = "",
        permanent: bool = False,
        mixes_parameters: bool = False,
    ) -> ReplicaPhaseChanged:
        return ReplicaPhaseChanged(
            self.slot,
            self.incarnation,
            phase,
            progress,
            detail,
            permanent,
            mixes_parameters,
            max_batch_cost=100,
            concurrency=self.concurrency if phase is Phase.READY else 0,
        )

    def _pulse(self) -> None:
        self._say(ReplicaPulsed(self.slot, self.incarnation, self._steps, 0.0, 1 << 20))
        if self._is_moody(self.world.weather.freezes):
            self._frozen_until_s = self.world.clock.now_s + self.rng.choice((2.0, 5.0, 40.0))
        self._later(PULSE_S, self._pulse)

    # --- what the broker tells it --------------------------------------------------------------------------------

    def take_batch(self, batch: SendBatch) -> None:
        if self.concurrency:
            self._join(batch)
            return
        self._batches.append(batch)
        self._later(0.0, self._work)

    def cancel(self, ids: tuple[RequestId, ...]) -> None:
        self._cancelled.update(ids)

    def stop(self) -> None:
        if self.rng.random() >= self.world.weather.ignores_stop:
            self._later(self.rng.uniform(0.0, 0.2), lambda: self.die(0))

    # --- computing -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._busy or not self._batches:
            return
        self._busy = True
        batch = self._batches[0]
        entries = [entry for entry in batch.entries if entry.id not in self._cancelled]
        natures = {self.world.nature(entry.id) for entry in entries}
        self.culprits = [entry.id for entry in entries if self.world.nature(entry.id) in ("poison", "hanging")]
        duration_s = self.rng.uniform(0.005, 0.15) * (20 if "slow" in natures else 1)
        if "poison" in natures:
            self._later(self.rng.uniform(0.0, duration_s), lambda: self.die(self.rng.choice((-9, -11))))
        elif "hanging" in natures:
            return
        elif "faulty" in natures:
            self._later(duration_s, lambda: self._break(batch.entries))
        elif self._is_moody(self.world.weather.batch_crashes):
            self._later(self.rng.uniform(0.0, duration_s), lambda: self.die(self.rng.choice((-9, -6, 72))))
        else:
            for step in range(1, 4):
                self._later(duration_s * step / 4, lambda: self._stream(entries))
            self._later(duration_s, lambda: self._complete(batch))

    def _join(self, batch: SendBatch) -> None:
        for entry in batch.entries:
            self._running[entry] = self.rng.randint(1, 8) * (10 if self.world.nature(entry.id) == "slow" else 1)
        if not self._busy:
            self._busy = True
            self._later(0.0, self._step)

    def _step(self) -> None:
        """One step of all that runs; what is cancelled leaves before it."""
        for entry in [entry for entry in self._running if entry.id in self._cancelled]:
            del self._running[entry]
            self._report(entry, Code.CANCELLED)
        entries = list(self._running)
        natures = {self.world.nature(entry.id) for entry in entries}
        self.culprits = [entry.id for entry in entries if self.world.nature(entry.id) in ("poison", "hanging")]
        self._busy = bool(entries)
        if not entries or "hanging" in natures:
            return
        duration_s = self.rng.uniform(0.005, 0.05)
        if "poison" in natures:
            self._later(self.rng.uniform(0.0, duration_s), lambda: self.die(self.rng.choice((-9, -11))))
        elif "faulty" in natures:
            self._later(duration_s, lambda: self._break(entries))
        elif self._is_moody(self.world.weather.batch_crashes / 5):
            self._later(self.rng.uniform(0.0, duration_s), lambda: self.die(self.rng.choice((-9, -6, 72))))
        else:
            self._later(duration_s, lambda: self._end_step(entries))

    def _end_step(self, entries: list[BatchEntry]) -> None:
        self._stream(entries)
        for entry in entries:
            self._running[entry] -= 1
            if self._running[entry] == 0:
                del self._running[entry]
                self._report(entry, Code.INVALID_INPUT if self.world.nature(entry.id) == "invalid" else Code.OK)
        self._step()

    def _stream(self, entries: list[BatchEntry]) -> None:
        self._steps += 1
        for entry in entries:
            if entry.stream:
                self._say(ChunkArrived(self.slot, self.incarnation, entry.id, entry.attempt))

    def _complete(self, batch: SendBatch) -> None:
        self._steps += 1
        entries = list(batch.entries)
        self.rng.shuffle(entries)
        for entry in entries:
            code = Code.INVALID_INPUT if self.world.nature(entry.id) == "invalid" else Code.OK
            if entry.id in self._cancelled:
                code = Code.CANCELLED
            if self.rng.random() < self.world.weather.laggards:
                # It is finished after the next batch has begun, perhaps after that has ended.
                self._later(self.rng.uniform(0.0, 0.3), partial(self._report, entry, code))
            else:
                self._report(entry, code)
        self._batches.popleft()
        self._busy = False
        self._later(0.0, self._work)

    def _break(self, entries: Sequence[BatchEntry]) -> None:
        """The device is lost: who was alone is told so, others may be innocent, and the process ends."""
        code = Code.MODEL_ERROR if len(entries) == 1 else Code.REPLICA_FAULT
        for entry in entries:
            self._report(entry, code)
            self._running.pop(entry, None)
        if self._batches:
            self._batches.popleft()
        self._later(self.rng.choice((0.01, 0.01, 3.0)), lambda: self.die(71))

    def _report(self, entry: BatchEntry, code: Code) -> None:
        cost = self.rng.randint(1, 40)
        told = ItemFinished(self.slot, self.incarnation, entry.id, entry.attempt, code, cost, 1.0, 2.0, 0.5, 1, "")
        lies = self.rng.random() < self.world.weather.lies
        if lies:
            self._say(replace(told, attempt=entry.attempt + self.rng.choice((-1, 1))))
        self._say(told)
        if lies:
            self._say(told)

"""Simulated model processes: they load, compute, crash, hang, freeze, lie, and say things after they are dead.

They know the broker only by the events that their world delivers for them. How they compute is in `Computer`, what
they say of it in `Process`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

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
from tests.simulation.clock import Actor, Wire
from tests.simulation.faults import Fault, dice
from tests.simulation.lies import lie_about, lie_about_phase

if TYPE_CHECKING:
    from tests.simulation.world import World

PULSE_S = 0.5
ENDS_ITS_PROCESS = (Fault.POISON, Fault.HANGING)
CRASHES = (-9, -11, -6, 72, 0)


class Process(Actor):
    """One incarnation of a slot: its life, and what it says."""

    def __init__(self, world: World, slot: SlotName, incarnation: int) -> None:
        super().__init__(world.clock)
        self.world = world
        self.slot = slot
        self.incarnation = incarnation
        self.name = f"{slot}#{incarnation}"
        self.rng = dice(world.recipe.seed, self.name)
        self._to_broker = Wire(world.clock)
        self.from_broker = Wire(world.clock)
        # While a computation holds the interpreter, its other threads say nothing.
        self._mute_until_s = 0.0
        self.steps = 0
        self._stepped_s = 0.0
        # Its last words take longer than the news of its death.
        self._speech_s = 0.5 if world.faults.strikes(Fault.LATE_WORDS, self.name) else 0.002
        self.computer = Computer(self, world.weather.concurrency[slot.rpartition("/")[0]])
        self._load()

    # --- speech, death -------------------------------------------------------------------------------------------

    def say(self, event: Event) -> None:
        latency_s = self.rng.uniform(0.0, self._speech_s) + max(0.0, self._mute_until_s - self.clock.now_s)
        self._to_broker.carry(latency_s, lambda: self.world.deliver(event))

    def mute_for(self, seconds: float) -> None:
        self._mute_until_s = self.clock.now_s + seconds

    def die(self, exit_code: int) -> None:
        if self.dead:
            return
        self.dead = True
        self.world.process_died(self.computer.culprits)
        exited = ReplicaExited(self.slot, self.incarnation, exit_code)
        self.clock.after(self.rng.uniform(0.0, 0.05), lambda: self.world.deliver(exited))

    def kill(self, delay_s: float) -> None:
        if self.world.faults.strikes(Fault.SLOW_KILL, self.name):
            delay_s += self.rng.uniform(0.0, 10.0)
        self.clock.after(delay_s, lambda: self.die(-9))

    def strikes(self, fault: Fault) -> bool:
        return self.clock.now_s >= self.world.weather.moody_after_s and self.world.faults.strikes(fault, self.name)

    def count_step(self) -> None:
        self.steps += 1
        self._stepped_s = self.clock.now_s

    # --- loading -------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        rng = self.rng
        self.later(rng.uniform(0.01, 0.5), lambda: self.say(ReplicaConnected(self.slot, self.incarnation)))
        self.later(0.5, lambda: self.say(self._phase(Phase.LOADING, progress=0.5)))
        load_s = rng.uniform(0.6, 3.0)
        if self.strikes(Fault.LOAD_HANG):
            return
        if self.strikes(Fault.LOAD_CRASH):
            self.later(load_s, lambda: self.die(rng.choice((-9, -11, 1, 0))))
        elif self.strikes(Fault.LOAD_FAILURE):
            self.later(load_s, self._fail_to_load)
        else:
            self.later(load_s, self._ready)

    def _fail_to_load(self) -> None:
        self.say(self._phase(Phase.FAILED, detail="no such file", permanent=self.rng.random() < 0.1))
        if self.rng.random() < 0.8:
            self.later(self.rng.uniform(0.0, 0.1), lambda: self.die(70))

    def _ready(self) -> None:
        rng = self.rng
        weather = self.world.weather
        ready = self._phase(Phase.READY, mixes_parameters=weather.mixes_parameters, pads=weather.pads)
        self.say(ready)
        self._pulse()
        if self.strikes(Fault.PHASE_LIE):
            told = lie_about_phase(ready, rng)
            self.later(rng.uniform(0.0, 5.0), lambda: self.say(told))
        if self.strikes(Fault.READY_CRASH):
            # It dies as soon as it has spoken, so that its exit may be noticed first.
            self.later(rng.uniform(0.0, 0.05), lambda: self.die(-9))

    def _phase(
        self,
        phase: Phase,
        *,
        progress: float = -1.0,
        detail: str = "",
        permanent: bool = False,
        mixes_parameters: bool = False,
        pads: bool = True,
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
            concurrency=self.computer.concurrency if phase is Phase.READY else 0,
            pads=pads,
        )

    def _pulse(self) -> None:
        now_s = self.clock.now_s
        if now_s < self._mute_until_s:
            self.later(self._mute_until_s - now_s, self._pulse)
            return
        self.say(ReplicaPulsed(self.slot, self.incarnation, self.steps, now_s - self._stepped_s, 1 << 20))
        if self.strikes(Fault.FREEZE):
            self.stop_for(self.rng.choice((2.0, 5.0, 40.0)))
        if self.strikes(Fault.IDLE_CRASH):
            self.later(self.rng.uniform(0.0, PULSE_S), lambda: self.die(self.rng.choice(CRASHES)))
        self.later(PULSE_S, self._pulse)

    def drain(self) -> None:
        """What it holds goes on; nothing new will come."""
        self.later(0.0, lambda: self.say(self._phase(Phase.DRAINING)))

    def stop(self) -> None:
        if not self.world.faults.strikes(Fault.STOP_IGNORED, self.name):
            self.later(self.rng.uniform(0.0, 0.2), lambda: self.die(0))


class Computer:
    """What one process computes: batch by batch, or step by step where requests join and leave."""

    def __init__(self, process: Process, concurrency: int) -> None:
        self._process = process
        self._world = process.world
        self._rng = process.rng
        self.concurrency = concurrency
        # Those of the running batch that are about to end this process, one way or another.
        self.culprits: list[RequestId] = []
        self._batches: deque[SendBatch] = deque()
        self._cancelled: set[RequestId] = set()
        self._busy = False
        # With continuous batching: what runs, and how many steps each still takes.
        self._running: dict[BatchEntry, int] = {}

    def take_batch(self, batch: SendBatch) -> None:
        if self.concurrency:
            self._join(batch)
            return
        self._batches.append(batch)
        self._process.later(0.0, self._work)

    def cancel(self, ids: tuple[RequestId, ...]) -> None:
        self._cancelled.update(ids)

    # --- batch by batch ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._busy or not self._batches:
            return
        self._busy = True
        batch = self._batches[0]
        entries = [entry for entry in batch.entries if entry.id not in self._cancelled]
        duration_s = self._rng.uniform(0.005, 0.15) * (20 if self._has(entries, Fault.SLOW) else 1)
        if self._ends_badly(entries, duration_s, batch_crash=Fault.BATCH_CRASH):
            return
        process = self._process
        if process.strikes(Fault.GIL_HELD):
            duration_s = self._rng.uniform(1.0, 7.0)
            process.mute_for(duration_s)
        for step in range(1, 4):
            process.later(duration_s * step / 4, lambda: self._stream(entries))
        process.later(duration_s, lambda: self._complete(batch))

    def _complete(self, batch: SendBatch) -> None:
        process = self._process
        process.count_step()
        entries = list(batch.entries)
        self._rng.shuffle(entries)
        code = Code.OUT_OF_MEMORY if process.strikes(Fault.BATCH_OUT_OF_MEMORY) else None
        for entry in entries:
            told = partial(self._report, entry, code or self._outcome(entry))
            if process.strikes(Fault.LAGGARD):
                process.later(self._rng.uniform(0.0, 0.3), told)
            elif not process.strikes(Fault.FORGOTTEN_ITEM):
                told()
        self._batches.popleft()
        self._busy = False
        process.later(0.0, self._work)

    # --- step by step --------------------------------------------------------------------------------------------

    def _join(self, batch: SendBatch) -> None:
        for entry in batch.entries:
            is_slow = self._world.natures.get(entry.id[:8]) is Fault.SLOW
            self._running[entry] = self._rng.randint(1, 8) * (10 if is_slow else 1)
        if not self._busy:
            self._busy = True
            self._process.later(0.0, self._step)

    def _step(self) -> None:
        """One step of all that runs; what is cancelled leaves before it."""
        for entry in [entry for entry in self._running if entry.id in self._cancelled]:
            del self._running[entry]
            self._report(entry, Code.CANCELLED)
        entries = list(self._running)
        self._busy = bool(entries)
        duration_s = self._rng.uniform(0.005, 0.05)
        if entries and not self._ends_badly(entries, duration_s, batch_crash=Fault.BATCH_CRASH):
            self._process.later(duration_s, lambda: self._end_step(entries))

    def _end_step(self, entries: list[BatchEntry]) -> None:
        self._stream(entries)
        for entry in entries:
            self._running[entry] -= 1
            if self._running[entry] == 0:
                del self._running[entry]
                if not self._process.strikes(Fault.FORGOTTEN_ITEM):
                    self._report(entry, self._outcome(entry))
        self._step()

    # --- both ----------------------------------------------------------------------------------------------------

    def _has(self, entries: Sequence[BatchEntry], nature: Fault) -> bool:
        return any(self._world.natures.get(entry.id[:8]) is nature for entry in entries)

    def _ends_badly(self, entries: list[BatchEntry], duration_s: float, *, batch_crash: Fault) -> bool:
        """Whether this computation will never complete."""
        process, natures = self._process, self._world.natures
        self.culprits = [entry.id for entry in entries if natures.get(entry.id[:8]) in ENDS_ITS_PROCESS]
        if self._has(entries, Fault.POISON) or process.strikes(batch_crash):
            process.later(self._rng.uniform(0.0, duration_s), lambda: process.die(self._rng.choice(CRASHES)))
        elif self._has(entries, Fault.FAULTY):
            process.later(duration_s, lambda: self._break(entries))
        else:
            return self._has(entries, Fault.HANGING)
        return True

    def _break(self, entries: list[BatchEntry]) -> None:
        """The device is lost: who was alone is told so, others may be innocent, and the process ends."""
        code = Code.MODEL_ERROR if len(entries) == 1 else Code.REPLICA_FAULT
        for entry in entries:
            self._report(entry, code)
            self._running.pop(entry, None)
        if self._batches:
            self._batches.popleft()
        self._process.later(self._rng.choice((0.01, 0.01, 3.0)), lambda: self._process.die(71))

    def _outcome(self, entry: BatchEntry) -> Code:
        if entry.id in self._cancelled:
            return Code.CANCELLED
        match self._world.natures.get(entry.id[:8]):
            case Fault.INVALID:
                return Code.INVALID_INPUT
            case Fault.COSTLY:
                return Code.OUT_OF_MEMORY
        return Code.MODEL_ERROR if self._process.strikes(Fault.ITEM_FAILURE) else Code.OK

    def _stream(self, entries: list[BatchEntry]) -> None:
        process = self._process
        process.count_step()
        for entry in entries:
            if entry.stream:
                process.say(ChunkArrived(process.slot, process.incarnation, entry.id, entry.attempt))

    def _report(self, entry: BatchEntry, code: Code) -> None:
        process = self._process
        cost = self._rng.randint(1, 40)
        told = ItemFinished(process.slot, process.incarnation, entry.id, entry.attempt, code, cost, 1.0, 2.0, 0.5, 1)
        lies: tuple[list[Event], list[Event]] = ([], [])
        if process.strikes(Fault.LIE):
            lies = lie_about(told, self._rng, process.world.some_request(self._rng))
        for event in (*lies[0], told, *lies[1]):
            process.say(event)

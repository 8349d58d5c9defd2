"""A large cluster under a virtual clock, around the real broker core: GPUs by the thousand, fronts by the hundred.

Owns traffic, processes that compute for as long as their workload says, and failures at given rates. What happens is
drawn from a seed and the same each time; only `CoreClock` looks at a processor's clock. Nothing here judges: that is
done by `tests/simulation/`, with smaller and nastier worlds.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from model_worker.broker import effects as do
from model_worker.broker import events as happened
from model_worker.broker.machine import Broker
from model_worker.broker.settings import BrokerSettings, ModelSettings, SlotSettings
from shared.errors import Code
from shared.messages import Phase, RequestId, SlotName

MODEL = "m"
PULSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What one GPU does. With `concurrency`, requests join and leave; without, it computes batch by batch."""

    name: str
    run_s: float
    """A full batch; with `concurrency`, a request, from half as long to half as long again."""
    batch_size: int = 1
    concurrency: int = 0
    pieces_per_s: float = 0.0
    """Of a streamed answer; 0.0: answers come whole."""

    @property
    def requests_per_s(self) -> float:
        """What one GPU can do."""
        return (self.concurrency or self.batch_size) / self.run_s


@dataclass(frozen=True, slots=True)
class Rates:
    """How often things go wrong. All 0.0: never."""

    process_deaths_per_gpu_hour: float = 0.0
    poison_share: float = 0.0
    cancelled_share: float = 0.0
    front_deaths_per_hour: float = 0.0

    def times(self, factor: float) -> Rates:
        """Deaths and poison that much more often; clients change their minds as before."""
        return Rates(
            self.process_deaths_per_gpu_hour * factor,
            self.poison_share * factor,
            self.cancelled_share,
            self.front_deaths_per_hour * factor,
        )


@dataclass(frozen=True, slots=True)
class Size:
    gpus: int
    fronts: int
    queued: int
    load: float = 1.0
    """Arrivals, as a share of what all GPUs can do."""
    load_s: float = 30.0
    """How long a process takes to be ready."""
    deadline_s: float = 300.0
    turn_s: float = 0.005
    """What arrives within it is one turn of the loop, so it shares messages."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a process that streams."""

    slot: SlotName
    incarnation: int


@dataclass(slots=True)
class CoreClock:
    """Processor time of the core, by kind of event."""

    ns: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def total_us(self) -> float:
        return self.ns.total() / 1000


class Cluster:
    """One model server and everything around it."""

    def __init__(self, workload: Workload, size: Size, rates: Rates, seed: int = 0, clock: CoreClock | None = None):
        self.workload, self.size, self.rates = workload, size, rates
        self.clock = clock
        self.now_s = 0.0
        self.facts: Counter[str] = Counter()
        self.waits_s: list[float] = []
        self.messages: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._numbers = itertools.count(1)
        self._agenda: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._fronts = [happened.FrontId(f"front{number}".encode()) for number in range(size.fronts)]
        self._arrived_s: dict[RequestId, float] = {}
        self._running: defaultdict[tuple[SlotName, int], dict[RequestId, int]] = defaultdict(dict)
        self._busy_until_s: dict[tuple[SlotName, int], float] = {}
        # Fronts with messages in this turn.
        self._submitting: set[happened.FrontId] = set()
        self._answered: set[happened.FrontId] = set()
        self._poison: set[RequestId] = set()
        self._next_pulse_s = PULSE_S
        self.broker = Broker(_settings(workload, size), 0.0)
        self._carry_out(self.broker.start(0.0))

    # --- running -------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Until every GPU is ready and, if a queue was asked for, busy, with a queue of that length behind."""
        while len(self.broker.models[MODEL].ready) < self.size.gpus:
            self.now_s += self.size.load_s
            self._turn()
        if self.size.queued:
            held = self.workload.concurrency or 2 * self.workload.batch_size
            for _ in range(self.size.queued + held * self.size.gpus):
                self._arrive()
            self._turn()
        self.clear()

    def clear(self) -> None:
        """Counts from here on."""
        self.facts.clear()
        self.messages.clear()
        self.waits_s.clear()

    def end_one(self) -> None:
        """A process with work ends."""
        self._exit(*self._rng.choice([key for key, items in self._running.items() if items]))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        arrivals_per_s = self.size.load * self.workload.requests_per_s * self.size.gpus
        next_arrival_s = self.now_s + self._rng.expovariate(arrivals_per_s)
        deaths_per_turn = self.rates.process_deaths_per_gpu_hour * self.size.gpus / 3600 * self.size.turn_s
        front_deaths_per_turn = self.rates.front_deaths_per_hour * self.size.fronts / 3600 * self.size.turn_s
        while self.now_s < end_s:
            self.now_s += self.size.turn_s
            while next_arrival_s <= self.now_s:
                self._arrive()
                next_arrival_s += self._rng.expovariate(arrivals_per_s)
            if self._rng.random() < deaths_per_turn:
                self.end_one()
            if self._rng.random() < front_deaths_per_turn:
                # It comes back at once, as another.
                number = self._rng.randrange(len(self._fronts))
                self._tell(happened.FrontLeft(self._fronts[number]))
                self._fronts[number] = happened.FrontId(f"front{next(self._numbers)}".encode())
                self.facts["front workers died"] += 1
            self._turn()

    def _turn(self) -> None:
        while self._agenda and self._agenda[0][0] <= self.now_s:
            _, _, action = heapq.heappop(self._agenda)
            self._act(action)
        if self.now_s >= self._next_pulse_s:
            self._next_pulse_s = self.now_s + PULSE_S
            self._pulse()
        self._tell(happened.TimePassed(), more_follow=False)
        self._count_messages()

    def _count_messages(self) -> None:
        """Between a front and the server, all of one turn are one message in each direction."""
        self.messages["submits"] += len(self._submitting)
        self.messages["replies"] += len(self._answered)
        self._submitting.clear()
        self._answered.clear()

    # --- facts ---------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self._rng
        request_id = RequestId(next(self._numbers).to_bytes(16, "big"))
        front = rng.choice(self._fronts)
        self._submitting.add(front)
        self._arrived_s[request_id] = self.now_s
        if self.rates.poison_share and rng.random() < self.rates.poison_share:
            self._poison.add(request_id)
            self.facts["poison arrived"] += 1
        body_bytes = rng.randint(100, 1000)
        self._tell(
            happened.RequestArrived(
                front, request_id, MODEL, "predict", b"", body_bytes // 4, body_bytes,
                self.now_s + self.size.deadline_s, 0, bool(self.workload.pieces_per_s), True,
            )
        )  # fmt: skip
        self.facts["arrived"] += 1
        if self.rates.cancelled_share and rng.random() < self.rates.cancelled_share:
            self._at(self.now_s + rng.uniform(0.0, 10.0), happened.RequestCancelled(front, request_id))

    def _pulse(self) -> None:
        for front in self._fronts:
            self._tell(happened.FrontPulsed(front))
        for replica in self.broker.keeper.replicas():
            if replica.was_ready:
                pulse = happened.ReplicaPulsed(replica.slot, replica.incarnation, int(self.now_s * 10), 0.0, 1 << 30)
                self._tell(pulse)

    def _exit(self, slot: SlotName, incarnation: int) -> None:
        if self._running.pop((slot, incarnation), None) is None:
            return
        self.facts["processes died"] += 1
        self._tell(happened.ReplicaExited(slot, incarnation, -9))

    def _act(self, action: object) -> None:
        match action:
            case do.SpawnReplica(slot=slot, incarnation=incarnation):
                self._running[slot, incarnation] = {}
                concurrency = self.workload.concurrency
                ready = happened.ReplicaPhaseChanged(
                    slot, incarnation, Phase.READY, mixes_parameters=True, concurrency=concurrency
                )
                self._tell(ready)
                if self.workload.pieces_per_s:
                    first_s = self.now_s + self._rng.random() / self.workload.pieces_per_s
                    self._at(first_s, Step(slot, incarnation))
            case do.SendBatch():
                self._finish(action)
            case Step(slot=slot, incarnation=incarnation):
                self._stream(slot, incarnation)
            case happened.RequestCancelled() | happened.ItemFinished():
                self._tell(action)

    def _finish(self, batch: do.SendBatch) -> None:
        """A batch, or one item with continuous batching."""
        key = batch.slot, batch.incarnation
        if key not in self._running:
            return
        if any(entry.id in self._poison for entry in batch.entries):
            self._exit(*key)
            return
        self.messages["results"] += 1
        for entry in batch.entries:
            if self._running[key].pop(entry.id, None) is not None:
                self._tell(happened.ItemFinished(*key, entry.id, entry.attempt, Code.OK, 100, batch_size=1))

    def _stream(self, slot: SlotName, incarnation: int) -> None:
        running = self._running.get((slot, incarnation))
        if running is None:
            return
        self.messages["chunks"] += 1
        for request_id, attempt in list(running.items()):
            self._tell(happened.ChunkArrived(slot, incarnation, request_id, attempt))
        self._at(self.now_s + 1 / self.workload.pieces_per_s, Step(slot, incarnation))

    # --- the core and its orders ---------------------------------------------------------------------------------

    def _at(self, when_s: float, action: object) -> None:
        heapq.heappush(self._agenda, (when_s, next(self._order), action))

    def _tell(self, event: happened.Event, *, more_follow: bool = True) -> None:
        self.facts["events"] += 1
        if self.clock is None:
            effects = self.broker.handle(event, self.now_s, more_follow=more_follow)
        else:
            start_ns = time.thread_time_ns()
            effects = self.broker.handle(event, self.now_s, more_follow=more_follow)
            kind = type(event).__name__
            self.clock.ns[kind] += time.thread_time_ns() - start_ns
            self.clock.calls[kind] += 1
        self._carry_out(effects)

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.SendReply():
                    self._answered.add(effect.front)
                    self._ended(effect.id, effect.code.value)
                case do.ReleasePayload():
                    self._ended(effect.id, "cancelled")
                case do.SendBatch():
                    self._send(effect)
                case do.RelayChunk():
                    self._answered.add(effect.front)
                    self.facts["pieces relayed"] += 1
                case do.SendCancel():
                    running = self._running.get((effect.slot, effect.incarnation), {})
                    for request_id in effect.ids:
                        attempt = running.pop(request_id, None)
                        if attempt is not None:
                            told = happened.ItemFinished(
                                effect.slot, effect.incarnation, request_id, attempt, Code.CANCELLED
                            )
                            self._at(self.now_s, told)
                case do.SpawnReplica():
                    self._at(self.now_s + self.size.load_s, effect)
                case do.DigestPoison():
                    self._tell(happened.PoisonDigested(effect.model, effect.id))
                case _:
                    pass

    def _ended(self, request_id: RequestId, code: str) -> None:
        self.facts[f"ended {code}"] += 1
        del self._arrived_s[request_id]
        self._poison.discard(request_id)

    def _send(self, batch: do.SendBatch) -> None:
        self.messages["batches"] += 1
        running = self._running[batch.slot, batch.incarnation]
        for entry in batch.entries:
            running[entry.id] = entry.attempt
            if entry.attempt == 1:
                self.waits_s.append(self.now_s - self._arrived_s[entry.id])
            else:
                self.facts["sent again"] += 1
        if self.workload.concurrency:
            for entry in batch.entries:
                single = do.SendBatch(batch.slot, batch.incarnation, batch.batch, batch.alone, (entry,))
                self._at(self.now_s + self.workload.run_s * self._rng.uniform(0.5, 1.5), single)
            return
        key = batch.slot, batch.incarnation
        self._busy_until_s[key] = max(self.now_s, self._busy_until_s.get(key, 0.0)) + self.workload.run_s
        self._at(self._busy_until_s[key], batch)


def _settings(workload: Workload, size: Size) -> BrokerSettings:
    model = ModelSettings(
        name=MODEL,
        task="",
        required=True,
        max_batch_size=workload.batch_size,
        max_batch_cost=0,
        max_wait_s=0.0,
        queue_size_max=10 * size.queued + 100_000,
        queue_bytes_max=10**12,
        load_timeout_s=600.0,
        batch_timeout_s=60.0,
    )
    slots = tuple(SlotSettings(SlotName(f"{MODEL}/{number}"), MODEL, "cuda") for number in range(size.gpus))
    return BrokerSettings((model,), slots, parallel_loads=size.gpus)

"""The broker core alone, kept at a queue of constant length: what one request costs it.

Owns a model server's place around the core: it answers the core's orders at once, in turns like those of the real
loop. Pure but for the processor's clock, in `cost_us`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Iterable

from model_worker.broker.effects import Effect, SendBatch, SpawnReplica
from model_worker.broker.events import (
    FrontId,
    ItemFinished,
    ReplicaConnected,
    ReplicaPhaseChanged,
    ReplicaSpawned,
    RequestArrived,
    TimePassed,
)
from model_worker.broker.machine import Broker
from model_worker.broker.settings import BrokerSettings, ModelSettings, SlotSettings
from shared.errors import Code
from shared.messages import Phase, RequestId, SlotName

FRONT = FrontId(b"front")
MODEL = "m"
COST_MAX = 256
DAY_S = 86_400.0


class CoreBench:
    """One model with `replicas` ready replicas, all of them busy, and `queued` requests behind them."""

    def __init__(self, *, replicas: int, queued: int, max_batch_size: int, seed: int = 0) -> None:
        model = ModelSettings(
            name=MODEL,
            task="embedding",
            required=True,
            max_batch_size=max_batch_size,
            max_batch_cost=COST_MAX * max_batch_size,
            max_wait_s=0.0,
            queue_size_max=10_000_000,
            queue_bytes_max=10**12,
            load_timeout_s=DAY_S,
            batch_timeout_s=DAY_S,
        )
        slots = tuple(SlotSettings(SlotName(f"{MODEL}/{number}"), MODEL, "cpu") for number in range(replicas))
        settings = BrokerSettings(
            (model,),
            slots,
            parallel_loads=replicas,
            front_silence_s=DAY_S,
            replica_silence_s=DAY_S,
            replica_silence_kill_s=DAY_S,
        )
        self._now_s = 0.0
        self.broker = Broker(settings, self._now_s)
        self._numbers = itertools.count(1)
        self._chooser = random.Random(seed)
        self._batches: deque[SendBatch] = deque()
        self._take(self.broker.start(self._now_s))
        self._take(self.broker.handle(TimePassed(), self._now_s))
        self.arrive(queued + 2 * replicas * max_batch_size)
        self._settle()
        # Until the queue is as long as was asked for: replicas have taken what they may hold.
        surplus = len(self.broker.models[MODEL].backlog) - queued
        while surplus > 0 and self._batches:
            surplus -= self.complete_batch()
            self._settle()

    def turn(self) -> int:
        """The next batch is reported and as many requests arrive; returns how many."""
        self._now_s += 1e-4
        count = self.complete_batch()
        self.arrive(count)
        self._settle()
        return count

    def cost_us(self, requests: int) -> float:
        """Processor time for each request that arrives, is chosen and ends, over at least this many."""
        done = 0
        start_s = time.process_time()
        while done < requests:
            done += self.turn()
        return (time.process_time() - start_s) / done * 1e6

    def arrive(self, count: int) -> None:
        for _ in range(count):
            number = next(self._numbers)
            cost = self._chooser.randint(1, COST_MAX)
            self._tell(
                RequestArrived(
                    front=FRONT,
                    id=RequestId(number.to_bytes(16, "big")),
                    model=MODEL,
                    operation="predict",
                    batch_key=b"",
                    cost_hint=cost,
                    body_bytes=cost * 4,
                    deadline_s=self._now_s + DAY_S,
                    priority=0,
                    stream=False,
                    retryable=True,
                )
            )

    def complete_batch(self) -> int:
        batch = self._batches.popleft()
        for entry in batch.entries:
            self._tell(ItemFinished(batch.slot, batch.incarnation, entry.id, entry.attempt, Code.OK, cost=100))
        return len(batch.entries)

    def _tell(self, event: RequestArrived | ItemFinished) -> None:
        self._take(self.broker.handle(event, self._now_s, more_follow=True))

    def _settle(self) -> None:
        self._take(self.broker.handle(TimePassed(), self._now_s))

    def _take(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendBatch():
                    self._batches.append(effect)
                case SpawnReplica(slot=slot, incarnation=incarnation):
                    for event in (
                        ReplicaSpawned(slot, incarnation, 1),
                        ReplicaConnected(slot, incarnation),
                        ReplicaPhaseChanged(slot, incarnation, Phase.READY, mixes_parameters=True),
                    ):
                        self._take(self.broker.handle(event, self._now_s, more_follow=True))
                case _:
                    pass

"""One model as the broker keeps it: its queue, its slots, which replicas have credit, what is banned and counted.

Owns the record that the parts of the broker meet in. Refuses decisions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from model_worker.broker.backlog import Backlog
from model_worker.broker.records import (
    STANDING_TRANSITIONS,
    Ban,
    Credit,
    Disuse,
    Failure,
    Replica,
    ReplicaState,
    Slot,
    Standing,
)
from model_worker.broker.rooms import Rooms
from model_worker.broker.settings import ModelSettings
from model_worker.broker.tallies import Pace, Tally
from shared.messages import SlotName

# Bounds of every estimated Retry-After: a client that returns within a second adds to the crowd, and an estimate of
# more than a minute is not worth keeping.
RETRY_AFTER_S_MIN = 1.0
RETRY_AFTER_S_MAX = 60.0


@dataclass(slots=True, eq=False)
class Model:
    """A named entry of the configuration, and everything that belongs to it."""

    settings: ModelSettings
    # In the order of the plan; without those that were taken out of the table and wait for their process's end.
    slots: tuple[Slot, ...]
    # Whether it is to be loaded, and how long nobody has asked for it; None if that does not matter.
    standing: Standing = Standing.SERVING
    disuse: Disuse | None = None
    backlog: Backlog = field(default_factory=Backlog)
    tally: Tally = field(default_factory=Tally)
    pace: Pace = field(default_factory=Pace)
    # Requests that wait (queued or prefetched), and the bytes of their bodies; what the queue limits are about.
    waiting_count: int = 0
    waiting_bytes: int = 0
    # Replicas with credit, the one that got it first in front: work goes to the one that has rested longest.
    idle: dict[Replica, None] = field(default_factory=dict)
    prefetchable: dict[Replica, None] = field(default_factory=dict)
    joinable: Rooms = field(default_factory=Rooms)
    # Replicas that are ready, and slots that are given up: both are asked for with every request that arrives.
    ready: set[Replica] = field(default_factory=set)
    given_up: set[SlotName] = field(default_factory=set)
    # Digests of poison inputs.
    bans: dict[bytes, Ban] = field(default_factory=dict)
    # As the latest READY said: requests with different parameters may share a batch.
    mixes_parameters: bool = False
    # As the latest READY said: how many requests a replica runs at once, if it batches continuously.
    concurrency: int = 0

    @property
    def name(self) -> str:
        return self.settings.name

    def note_credit(self, replica: Replica) -> None:
        """Puts the replica into the pool its credit belongs to, and among those that are ready, if it is. Called after
        everything that can change either."""
        credit = replica.credit
        for pool, wanted in ((self.idle, Credit.IDLE), (self.prefetchable, Credit.PREFETCH)):
            if credit is not wanted:
                pool.pop(replica, None)
            else:
                pool.setdefault(replica)
        self.joinable.note(replica, replica.room if credit is Credit.JOIN else 0)
        if replica.is_ready:
            self.ready.add(replica)
        else:
            self.ready.discard(replica)

    def stand(self, standing: Standing) -> None:
        assert standing in STANDING_TRANSITIONS[self.standing], f"{self.name}: {self.standing} cannot become {standing}"
        self.standing = standing

    def kept_for_suspects(self) -> frozenset[Replica]:
        """Replicas that nobody joins, because requests that must be alone come first, and wait until one is empty.

        One for each of these requests, but of several replicas at most half, counting those that run one already, so
        that the others go on. The emptiest are taken; nobody joins them, so they stay the emptiest.
        """
        suspects = self.backlog.count_alone_ahead()
        if not suspects:
            return frozenset()
        replicas = [slot.replica for slot in self.slots if slot.replica is not None and slot.replica.is_ready]
        taken = sum(replica.running is not None and replica.running.alone for replica in replicas)
        count = min(suspects, max(1, len(replicas) // 2) - taken)
        return frozenset(itertools.islice(self.joinable, max(0, count)))

    @property
    def free_capacity(self) -> int:
        """How many waiting requests could run at once."""
        batches = len(self.idle) * max(1, self.settings.max_batch_size)
        return batches + self.joinable.total

    @property
    def is_failed(self) -> bool:
        """Whether every slot is given up."""
        return len(self.given_up) == len(self.slots)

    @property
    def failure_reason(self) -> str:
        """Why, in one line; of a model that is failed."""
        reasons = [f"{slot.name}: {slot.reason}" for slot in self.slots]
        return "; ".join(reasons) or "no slot is planned for it"

    def failure_retry_after_s(self, now_s: float) -> float:
        """When a failed model may work again; 0.0 if it never will."""
        trials_s = [slot.respawn_s for slot in self.slots if slot.failure is Failure.BREAKER]
        return max(RETRY_AFTER_S_MIN, min(trials_s) - now_s) if trials_s else 0.0

    @property
    def ready_count(self) -> int:
        return len(self.ready)

    @property
    def is_loaded(self) -> bool:
        """Whether any replica holds the model, even one that is not heard at the moment."""
        return any(slot.replica is not None and slot.replica.was_ready for slot in self.slots)

    @property
    def has_work(self) -> bool:
        """Whether a request of it waits, or a replica has not reported all that it was given."""
        return bool(self.backlog) or any(
            replica.running is not None for slot in self.slots for replica in slot.replicas()
        )

    @property
    def is_loading(self) -> bool:
        """Whether a replica loads."""
        states = {replica.state for slot in self.slots for replica in slot.replicas()}
        return ReplicaState.LOADING in states

    def wait_s(self, ahead: int) -> float:
        """The least time that a request with so many waiting ahead of it will wait, by experience."""
        return self.pace.wait_s(ahead, self.ready_count, self.concurrency or self.settings.max_batch_size)

    def observe_continuous(self, duration_s: float, batch_size: int) -> None:
        """Learns from a request that was answered by continuous batching: its whole run counts as a batch."""
        self.pace.observe_batch(duration_s)
        self.tally.batches += 1
        self.tally.batch_size.observe(max(1, batch_size))

    @property
    def retry_after_s(self) -> float:
        """When what waits now will be through, within the bounds above."""
        return min(max(self.wait_s(self.waiting_count), RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

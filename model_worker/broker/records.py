"""The broker's records: requests, batches, replicas, slots and fronts, and the states they pass through.

Owns what is remembered and, as data, which state may follow which. Refuses every decision: `machine` and the parts it
is made of change these records, nobody else does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from model_worker.broker.events import FrontId
from shared.messages import Phase, RequestId, SlotName


class RequestState(Enum):
    """Where an admitted request is."""

    QUEUED = "queued"  # in its model's backlog
    PREFETCHED = "prefetched"  # in a replica, behind the batch that runs
    RUNNING = "running"  # in a replica's running batch
    ENDED = "ended"  # answered, or released without an answer


# The tables hold tuples, not sets: they are looked at several times for each request, and comparing members by identity
# is cheaper than hashing them.
REQUEST_TRANSITIONS: dict[RequestState, tuple[RequestState, ...]] = {
    RequestState.QUEUED: (RequestState.PREFETCHED, RequestState.RUNNING, RequestState.ENDED),
    RequestState.PREFETCHED: (RequestState.RUNNING, RequestState.QUEUED, RequestState.ENDED),
    RequestState.RUNNING: (RequestState.QUEUED, RequestState.ENDED),
    RequestState.ENDED: (),
}

WAITING = (RequestState.QUEUED, RequestState.PREFETCHED)
"""The states in which a request counts against its model's queue limits."""


class ReplicaState(Enum):
    """What the broker takes a model process for. What the process says of itself is its `Phase`."""

    LOADING = "loading"  # spawned, and not READY yet
    READY = "ready"  # loaded and warm
    DRAINING = "draining"  # gets nothing new, and finishes what it holds; told to stop when nobody waits for that
    FAILING = "failing"  # it said that it cannot go on; its exit is awaited
    STOPPING = "stopping"  # told to stop; its exit is awaited
    KILLED = "killed"  # SIGKILL ordered; its exit is awaited
    GONE = "gone"  # exited


REPLICA_TRANSITIONS: dict[ReplicaState, tuple[ReplicaState, ...]] = {
    ReplicaState.LOADING: (ReplicaState.READY, ReplicaState.FAILING, ReplicaState.KILLED, ReplicaState.GONE),
    ReplicaState.READY: (
        ReplicaState.DRAINING,
        ReplicaState.FAILING,
        ReplicaState.STOPPING,
        ReplicaState.KILLED,
        ReplicaState.GONE,
    ),
    ReplicaState.DRAINING: (ReplicaState.FAILING, ReplicaState.STOPPING, ReplicaState.KILLED, ReplicaState.GONE),
    ReplicaState.FAILING: (ReplicaState.STOPPING, ReplicaState.KILLED, ReplicaState.GONE),
    ReplicaState.STOPPING: (ReplicaState.KILLED, ReplicaState.GONE),
    ReplicaState.KILLED: (ReplicaState.GONE,),
    ReplicaState.GONE: (),
}

WORKING = (ReplicaState.READY, ReplicaState.DRAINING)
"""The states in which a replica works on what it holds."""

Cause = Literal["crashed", "hung", "silent", "load_failed", "load_timeout", "spawn_failed", "stopped"]
"""Why an incarnation ended; the keys of `ModelCounters.restarts`."""


class Standing(Enum):
    """Whether a model is to be loaded."""

    SERVING = "serving"  # its slots are filled
    CLOSING = "closing"  # an operator had it unloaded: nobody is let in, and who was finishes first
    UNLOADED = "unloaded"  # its processes end, or have ended; nobody is let in until an operator has it loaded
    IDLE = "idle"  # its processes end, or have ended, because nobody asked for it; the next request has it loaded


STANDING_TRANSITIONS: dict[Standing, tuple[Standing, ...]] = {
    Standing.SERVING: (Standing.CLOSING, Standing.IDLE),
    Standing.CLOSING: (Standing.UNLOADED,),
    Standing.UNLOADED: (Standing.SERVING,),
    Standing.IDLE: (Standing.SERVING, Standing.CLOSING),
}

AT_REST = (Standing.UNLOADED, Standing.IDLE)
"""The standings in which no slot of a model is filled."""


class Credit(Enum):
    """What a replica may be given now."""

    IDLE = "idle"  # a batch, which runs at once
    PREFETCH = "prefetch"  # a full batch, which waits behind the running one
    JOIN = "join"  # single requests, which join those that run
    NONE = "none"


class Failure(Enum):
    """Why a slot is given up."""

    PERMANENT = "permanent"  # the load said that trying again cannot help: for good
    ATTEMPTS = "attempts"  # it never was ready, and all tries are used up: for good
    BREAKER = "breaker"  # it was ready, and keeps dying: tried again after a while


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much one batch may hold; 0 means no limit."""

    size_max: int
    cost_max: int
    """Units: the dearest item's cost times the number of items where the model pads, else what they cost together."""


@dataclass(slots=True, eq=False)
class Request:
    """One admitted request, until it has ended and no replica holds it any more."""

    # As they arrived.
    front: Front = field(repr=False)
    id: RequestId
    model: str
    operation: str
    batch_key: bytes
    body_bytes: int
    deadline_s: float
    priority: int
    stream: bool
    retryable: bool
    arrived_s: float
    # Order of admission; makes every order of requests total.
    sequence: int
    # Lower goes first. Fixed at admission: arrival plus the request's priority in seconds, so that an old request of a
    # low priority overtakes a young one of a high priority, and nothing starves.
    urgency_s: float
    # Padded units that it is expected to cost; fixed at admission, because indexes are sorted by it.
    cost: int
    # What its sender calls it; for logs.
    request_id: str = ""
    state: RequestState = RequestState.QUEUED
    # How often it was sent to a replica. Part of the fence: a result counts only with the present attempt.
    attempt: int = 0
    # When it began to run, by the latest attempt; 0.0 before the first.
    started_s: float = 0.0
    # How many processes ended, or hung, with it inside.
    deaths: int = 0
    # It witnessed a death, so it shares a process with nothing else from now on: the next death has one suspect only.
    alone: bool = False
    # Its front has seen a piece of the answer: it cannot be run again.
    chunked: bool = False
    # Both are set exactly while a replica holds it and it has not ended.
    replica: Replica | None = field(default=None, repr=False)
    batch: Batch | None = field(default=None, repr=False)

    def move(self, state: RequestState) -> None:
        assert state in REQUEST_TRANSITIONS[self.state], f"request {self.id.hex()}: {self.state} cannot become {state}"
        self.state = state

    @property
    def may_run_again(self) -> bool:
        """Whether a fault that it shared with others may be followed by a second run."""
        return self.retryable and not self.chunked and self.deaths == 0


@dataclass(slots=True, eq=False)
class Batch:
    """What one `SendBatch` gave to one replica; or, with continuous batching, all that has joined since it was idle."""

    number: int
    alone: bool
    # How many it has held in all.
    size: int
    # What the replica has not reported yet, in the order sent. Ended requests stay here until the replica reports
    # them: only then is its credit free.
    open: dict[RequestId, Request]
    # When it became the replica's running batch; the time of sending until then.
    started_s: float

    def live_requests(self) -> list[Request]:
        """Those that still wait for an answer from here."""
        return [request for request in self.open.values() if request.batch is self]


@dataclass(slots=True, eq=False)
class Replica:
    """One incarnation of a slot: a model process, from the order to spawn it until its exit."""

    slot: SlotName
    model: str
    incarnation: int
    spawned_s: float
    # When it must have left its state: LOADING for READY, FAILING and STOPPING for its exit. A loop that was late (see
    # `machine`) moves this and the next two forward.
    due_s: float
    # When anything last came from it.
    heard_s: float
    # When its work last moved: a batch started, a forward step was counted, a result or a chunk came.
    progressed_s: float
    # The configured limits; where those say 0, what the process measured when it loaded.
    limits: BatchLimits
    state: ReplicaState = ReplicaState.LOADING
    phase: Phase = Phase.STARTING
    # Of the load, 0.0 to 1.0; -1.0 where unknown.
    progress: float = -1.0
    pid: int = 0
    # A load that was never READY counts against `parallel_loads` until it has exited, whatever its state.
    was_ready: bool = False
    # Not heard for `replica_silence_s`: gets nothing new, and does not count as ready, until it is heard again.
    silent: bool = False
    running: Batch | None = None
    prefetched: Batch | None = None
    # As pulsed; only its changes matter.
    progress_count: int = 0
    memory_bytes: int = 0
    step_items: int = 0
    # Why it ends, if the broker knows before the exit does; the exit code explains the rest.
    cause: Cause | None = None
    reason: str = ""
    # What its load is at, in its own words.
    doing: str = ""
    # What its runtime decided, for `status`.
    choices: dict[str, object] = field(default_factory=dict)
    # Above 0: it batches continuously. Requests join its running batch one by one, while it holds fewer than this.
    concurrency: int = 0

    def move(self, state: ReplicaState) -> None:
        assert state in REPLICA_TRANSITIONS[self.state], (
            f"{self.slot}#{self.incarnation}: {self.state} cannot become {state}"
        )
        self.state = state

    @property
    def is_ready(self) -> bool:
        """READY and heard: what readiness probes count."""
        return self.state is ReplicaState.READY and self.phase is Phase.READY and not self.silent

    @property
    def credit(self) -> Credit:
        if not self.is_ready:
            return Credit.NONE
        if self.concurrency:
            return Credit.JOIN if self.room else Credit.NONE
        if self.running is None:
            return Credit.IDLE
        if self.prefetched is None and not self.running.alone:
            return Credit.PREFETCH
        return Credit.NONE

    @property
    def room(self) -> int:
        """How many requests could join what it runs."""
        if self.running is None:
            return self.concurrency
        return 0 if self.running.alone else max(0, self.concurrency - len(self.running.open))

    def batch_of(self, request_id: RequestId, attempt: int) -> Batch | None:
        """The batch in which it still holds this attempt of the request."""
        for batch in self.batches():
            request = batch.open.get(request_id)
            if request is not None and request.attempt == attempt:
                return batch
        return None

    def batches(self) -> Iterator[Batch]:
        if self.running is not None:
            yield self.running
        if self.prefetched is not None:
            yield self.prefetched

    def live_requests(self) -> list[Request]:
        return [request for batch in self.batches() for request in batch.live_requests()]


@dataclass(slots=True, eq=False)
class Slot:
    """One place on one device; it outlives its replicas."""

    name: SlotName
    model: str
    device: str
    # Incarnations count from 1 and never repeat.
    incarnation: int = 0
    # The process that fills the slot; None while it is vacant.
    replica: Replica | None = None
    # Loads beside it, and takes its place when it is READY; only while an operator has the slot renewed.
    successor: Replica | None = None
    # Was replaced by a successor, and finishes what it holds.
    retired: Replica | None = None
    # It was taken out of the table, and goes with its process.
    is_leaving: bool = False
    # A vacant slot may be filled from here on.
    respawn_s: float = 0.0
    # Whether any incarnation was READY: decides which rule counts its failures.
    ever_ready: bool = False
    # Failed loads, while it never was ready.
    failed_loads: int = 0
    # Ends in a row without a successful item between them, once it was ready, and the times of the latest ones.
    deaths: int = 0
    death_times_s: deque[float] = field(default_factory=deque)
    # The present incarnation is the breaker's trial: its death opens the breaker again at once.
    on_trial: bool = False
    # Set while the slot is given up; a trial lifts it by becoming READY.
    failure: Failure | None = None
    # The latest end in one line, until the next READY; and the latest end of any of its processes.
    reason: str = ""
    last_end: str = ""
    last_cause: Cause | None = None
    # Totals over all incarnations, for `status`.
    loads: int = 0
    batches: int = 0
    requests: int = 0

    @property
    def is_lost_for_good(self) -> bool:
        return self.failure in (Failure.PERMANENT, Failure.ATTEMPTS)

    def replicas(self) -> Iterator[Replica]:
        """Every process of this slot whose end was not seen yet."""
        for replica in (self.replica, self.successor, self.retired):
            if replica is not None:
                yield replica


@dataclass(slots=True, eq=False)
class Front:
    """One connection of a front worker."""

    id: FrontId
    heard_s: float
    # Its admitted requests that have not ended, in order of arrival.
    requests: dict[RequestId, Request] = field(default_factory=dict, repr=False)


@dataclass(slots=True, eq=False)
class Ban:
    """A payload that ended model processes twice, refused for a while."""

    model: str
    digest: bytes
    until_s: float


@dataclass(slots=True, eq=False)
class Disuse:
    """How long nobody has asked for a model that is unloaded after a while without."""

    model: str
    # The latest moment at which a request came or ended, or a process of the model came or went.
    since_s: float = 0.0


@dataclass(slots=True, eq=False)
class Drain:
    """The way to the end, once it was asked for."""

    # When requests that have not ended are given up.
    ends_s: float
    # All requests have ended: the processes are being stopped.
    stopping: bool = False

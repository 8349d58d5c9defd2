"""Every message of the wire protocol as a frozen record, and nothing about how it is encoded.

Owns the vocabulary of `PROTOCOL.md`: the fields, their order (the wire order), their units and their defaults. A
field may be added at the end, with a default, without a new `WIRE_VERSION`; anything else needs one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NewType

from shared.errors import Code

WIRE_VERSION = 1

FRAME_BYTES_MAX = 2**30
"""Largest frame, and largest value in total. A peer that announces a larger frame is disconnected, so the limit has to
lie above every configured body and result; it bounds what one message can make a process allocate."""

RequestId = NewType("RequestId", bytes)
"""16 bytes, unique for ever: 8 random bytes of the front's connection, 8 bytes of counter."""
SlotName = NewType("SlotName", str)
"""The stable name of one place on one device, such as `qa/0`."""


class Kind(IntEnum):
    """The second byte of a message's first frame."""

    FRONT_HELLO = 1
    SUBMIT = 2
    CANCEL = 3
    FRONT_PULSE = 4
    INSPECT = 5
    WELCOME = 16
    REPLY = 17
    CHUNK = 18
    SERVER_PULSE = 19
    SNAPSHOT = 20
    REPLICA_HELLO = 32
    STATE = 33
    RESULT = 34
    REPLICA_CHUNK = 35
    REPLICA_PULSE = 36
    BATCH = 48
    REPLICA_CANCEL = 49
    DRAIN = 50
    STOP = 51


class Phase(StrEnum):
    """What a replica is doing, as it says itself. `ready` is the only phase in which it is given work."""

    STARTING = "starting"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in milliseconds; 0.0 where a stage was not reached."""

    queue_ms: float = 0.0
    prepare_ms: float = 0.0
    forward_ms: float = 0.0
    finish_ms: float = 0.0
    batch_size: int = 0


# --- front -> broker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontHello:
    """A front's first message on a connection, and again after every `Welcome` with a new epoch."""

    front: str
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """One request of a `Submit`; its payload is the next `frame_count` frames of that message."""

    id: RequestId
    model: str
    operation: str
    batch_key: bytes
    cost_hint: int
    remaining_ms: int
    priority: int
    stream: bool
    retryable: bool
    frame_count: int
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    requests: tuple[RequestHeader, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class FrontPulse:
    """Sent every second: the front is alive and waits for `pending` answers. The last one says that it is."""

    pending: int
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks for one `Snapshot` with the same token."""

    token: int


# --- broker -> front ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model as the broker sees it; what readiness, routing and 404 texts are made from."""

    name: str
    task: str
    state: str
    reason: str
    required: bool
    replicas_ready: int
    replicas_total: int
    queued: int
    mixes_parameters: bool = False
    was_ready: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `FrontHello`. A new `epoch` means that the model server is a new one and knows no request."""

    epoch: str
    version: str
    models: tuple[ModelState, ...]


@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """The one final answer to a request; with code `ok` its value is the next `frame_count` frames."""

    id: RequestId
    code: Code
    frame_count: int
    attempt: int = 0
    slot: str = ""
    incarnation: int = 0
    cost: int = 0
    timings: Timings = field(default_factory=Timings)
    message: str = ""
    detail: dict[str, object] = field(default_factory=dict)
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    replies: tuple[ReplyHeader, ...]


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """One piece of a streamed answer, in order from index 0; the final `Reply` ends the stream."""

    id: RequestId
    attempt: int
    index: int
    frame_count: int


@dataclass(frozen=True, slots=True)
class Chunk:
    chunks: tuple[ChunkHeader, ...]


@dataclass(frozen=True, slots=True)
class ServerPulse:
    """Sent to every front each second and at once when a model's state changes."""

    epoch: str
    draining: bool
    models: tuple[ModelState, ...]


@dataclass(frozen=True, slots=True)
class SlotState:
    """One row of `headwaiter status`: the plan beside what was observed."""

    slot: str
    model: str
    device: str
    pid: int
    incarnation: int
    state: str
    reason: str
    loads: int
    restarts: int
    memory_bytes: int
    batches: int
    requests: int
    held: int
    progress: float
    heard_ms_ago: int
    choices: dict[str, object] = field(default_factory=dict)
    steps: int = 0
    step_items: int = 0


@dataclass(frozen=True, slots=True)
class ModelCounters:
    """Totals of one model since this model server started; counters only ever grow."""

    model: str
    admitted: int
    ended: dict[str, int]
    rejected: dict[str, int]
    retried: int
    batches: int
    batch_size_sum: int
    batch_size_buckets: dict[str, int]
    queue_s_sum: float
    queue_s_buckets: dict[str, int]
    forward_s_sum: float
    forward_s_buckets: dict[str, int]
    restarts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything an operator can see, answered to `Inspect`."""

    token: int
    epoch: str
    pid: int
    version: str
    uptime_s: float
    draining: bool
    models: tuple[ModelState, ...]
    slots: tuple[SlotState, ...]
    counters: tuple[ModelCounters, ...]
    fronts: int
    malformed: int


# --- model process -> broker -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaHello:
    """A model process's first message; `incarnation` fences everything that an earlier process of the slot said."""

    slot: str
    incarnation: int
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class State:
    """A change of phase, or progress within one.

    `progress` runs from 0.0 to 1.0 where it is known, else -1.0. With phase `failed`, `detail` is the cause in one
    line and `permanent` says that a new start cannot help. With phase `ready`, `mixes_parameters` tells the broker
    that requests with different parameters may share a batch, `max_batch_cost` and `max_batch_size` are the
    measured limits (0: as configured), and `choices` is what the runtime decided (dtype, padding, task), for
    `status`. With a `concurrency` above 0 the replica takes items one by one, as they arrive, and holds up to so many.
    """

    slot: str
    incarnation: int
    phase: Phase
    progress: float = -1.0
    detail: str = ""
    permanent: bool = False
    mixes_parameters: bool = False
    max_batch_cost: int = 0
    max_batch_size: int = 0
    choices: dict[str, object] = field(default_factory=dict)
    concurrency: int = 0


@dataclass(frozen=True, slots=True)
class ItemResult:
    """How one item of a batch ended; with code `ok` its value is the next `frame_count` frames."""

    id: RequestId
    attempt: int
    code: Code
    frame_count: int
    cost: int = 0
    prepare_ms: float = 0.0
    forward_ms: float = 0.0
    finish_ms: float = 0.0
    batch_size: int = 0
    message: str = ""
    detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """Items that ended, in any order; a batch's credit comes back with its last item."""

    slot: str
    incarnation: int
    results: tuple[ItemResult, ...]


@dataclass(frozen=True, slots=True)
class ReplicaChunk:
    """Pieces of streamed answers: one message for all sequences of a decode step."""

    slot: str
    incarnation: int
    chunks: tuple[ChunkHeader, ...]


@dataclass(frozen=True, slots=True)
class ReplicaPulse:
    """Sent every second by the I/O thread, whatever the main thread does.

    `progress_count` grows with each finished forward step; `running_ms` is how long the present one has been
    running, 0 when idle. `step_items` are the items of all steps of continuous batches: for text, about the tokens.
    """

    slot: str
    incarnation: int
    progress_count: int
    running_ms: int
    memory_bytes: int
    step_items: int = 0


# --- broker -> model process -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request of a `Batch`; its payload is the next `frame_count` frames."""

    id: RequestId
    attempt: int
    operation: str
    remaining_ms: int
    stream: bool
    frame_count: int
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """Work for one replica; `alone` forbids sharing a forward with any other item."""

    batch: int
    alone: bool
    items: tuple[BatchItem, ...]


@dataclass(frozen=True, slots=True)
class ReplicaCancel:
    ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what was sent; nothing new will come."""

    grace_ms: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Exit now, with code 0."""


FrontMessage = FrontHello | Submit | Cancel | FrontPulse | Inspect
ToFrontMessage = Welcome | Reply | Chunk | ServerPulse | Snapshot
ReplicaMessage = ReplicaHello | State | Result | ReplicaChunk | ReplicaPulse
ToReplicaMessage = Batch | ReplicaCancel | Drain | Stop
Message = FrontMessage | ToFrontMessage | ReplicaMessage | ToReplicaMessage

KINDS: dict[type, Kind] = {
    FrontHello: Kind.FRONT_HELLO,
    Submit: Kind.SUBMIT,
    Cancel: Kind.CANCEL,
    FrontPulse: Kind.FRONT_PULSE,
    Inspect: Kind.INSPECT,
    Welcome: Kind.WELCOME,
    Reply: Kind.REPLY,
    Chunk: Kind.CHUNK,
    ServerPulse: Kind.SERVER_PULSE,
    Snapshot: Kind.SNAPSHOT,
    ReplicaHello: Kind.REPLICA_HELLO,
    State: Kind.STATE,
    Result: Kind.RESULT,
    ReplicaChunk: Kind.REPLICA_CHUNK,
    ReplicaPulse: Kind.REPLICA_PULSE,
    Batch: Kind.BATCH,
    ReplicaCancel: Kind.REPLICA_CANCEL,
    Drain: Kind.DRAIN,
    Stop: Kind.STOP,
}

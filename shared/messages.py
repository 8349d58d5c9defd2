"""Every message of the wire protocol as a record, and what each of its fields allows.

Owns the vocabulary of `PROTOCOL.md`: the fields, their order (the wire order), their units, limits and defaults. A
field may be added at the end, with a default, without a new `WIRE_VERSION`; anything else needs one. Refuses to know
frames: `wire.py` encodes and decodes.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NewType, TypeVar

from msgspec import Meta, Struct, field

from shared.errors import Code

WIRE_VERSION = 1

FRAME_BYTES_MAX = 2**30
"""Largest frame, and largest value in total. A peer that announces a larger frame is disconnected, so the limit has to
lie above every configured body and result; it bounds what one message can make a process allocate."""

# A front may wait for 16,384 answers; all of them may be refused in one turn of the broker's loop.
RECORDS_MAX: Final = 2**16
# A value has one frame, and one more for each 64 KiB at least; see `values.py` and FRAME_BYTES_MAX.
FRAMES_MAX: Final = 2**14 + 1
# Names, versions, ids of other systems: nothing that a person reads in one line is longer.
NAME_CHARS_MAX: Final = 256
# Causes and error texts. The encoder cuts longer ones: a report of a failure must not fail on its length.
TEXT_CHARS_MAX: Final = 4096
# `batch_key` is a digest or a few canonical parameters.
KEY_BYTES_MAX: Final = 256
ID_BYTES: Final = 16
# Entries of one map, and levels of maps and arrays in a free-form one.
MAP_ENTRIES_MAX: Final = 4096
MAP_DEPTH_MAX: Final = 8
INT_MAX: Final = 2**63 - 1
INT32_MAX: Final = 2**31 - 1
FLOAT_MAX: Final = 1.7976931348623157e308

RequestId = NewType("RequestId", bytes)
"""16 bytes, unique for ever: 8 random bytes of the front's connection, 8 bytes of counter."""
SlotName = NewType("SlotName", str)
"""The stable name of one place on one device, such as `qa/0`."""

Item = TypeVar("Item")

Id = Annotated[RequestId, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Key = Annotated[bytes, Meta(max_length=KEY_BYTES_MAX)]
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Count = Annotated[int, Meta(ge=0, le=INT_MAX)]
# Milliseconds end at what a C poll timeout can hold.
Count32 = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Signed32 = Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)]
FrameCount = Annotated[int, Meta(ge=0, le=FRAMES_MAX)]
# NaN and infinity are refused: one of them would stay in every sum for ever.
Finite = Annotated[float, Meta(ge=-FLOAT_MAX, le=FLOAT_MAX)]
Several = Annotated[tuple[Item, ...], Meta(max_length=RECORDS_MAX)]
Counts = Annotated[dict[Name, Count], Meta(max_length=MAP_ENTRIES_MAX)]

if TYPE_CHECKING:
    Map = dict[str, object]
else:

    def _map_of(levels: int) -> Any:
        """A free-form map: each level is a type of its own, so that the decoder itself ends the nesting."""
        value = bool | int | float | str | None
        if levels > 1:
            inner = _map_of(levels - 1)
            value = value | inner | Annotated[list[inner.__origin__.__args__[1]], Meta(max_length=RECORDS_MAX)]
        return Annotated[dict[str, value], Meta(max_length=MAP_ENTRIES_MAX)]

    Map = _map_of(MAP_DEPTH_MAX)


class Record(Struct, frozen=True, array_like=True, gc=False):
    """What one message, or one part of it, says: on the wire, the array of its fields in order."""

    def by_name(self) -> dict[str, Any]:
        """For people and JSON: the fields of this record, and of those in it, under their names."""
        return {name: _by_name(getattr(self, name)) for name in self.__struct_fields__}


def _by_name(value: object) -> Any:
    if isinstance(value, tuple):
        return [_by_name(item) for item in value]
    return value.by_name() if isinstance(value, Record) else value


class Kind(IntEnum):
    """The second byte of a message's first frame."""

    FRONT_HELLO = 1
    SUBMIT = 2
    CANCEL = 3
    FRONT_PULSE = 4
    INSPECT = 5
    MANAGE = 6
    WELCOME = 16
    REPLY = 17
    CHUNK = 18
    SERVER_PULSE = 19
    SNAPSHOT = 20
    MANAGED = 21
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


class Timings(Record, frozen=True):
    """Where a request's time went, in milliseconds; 0.0 where a stage was not reached."""

    queue_ms: Finite = 0.0
    prepare_ms: Finite = 0.0
    forward_ms: Finite = 0.0
    finish_ms: Finite = 0.0
    batch_size: Count = 0


# --- front -> broker ---------------------------------------------------------------------------------------------


class FrontHello(Record, frozen=True):
    """A front's first message on a connection, and again after every `Welcome` with a new epoch.

    `is_worker` tells the workers of the HTTP front from clients in other programs.
    """

    front: Name
    pid: Count32
    version: Name
    is_worker: bool = False


class RequestHeader(Record, frozen=True):
    """One request of a `Submit`; its payload is the next `frame_count` frames of that message."""

    id: Id
    model: Name
    operation: Name
    batch_key: Key
    cost_hint: Count
    remaining_ms: Signed32
    priority: Signed32
    stream: bool
    retryable: bool
    frame_count: FrameCount
    request_id: Name = ""
    traceparent: Name = ""


class Submit(Record, frozen=True):
    requests: Several[RequestHeader]


class Cancel(Record, frozen=True):
    ids: Several[Id]


class FrontPulse(Record, frozen=True):
    """Sent every second: the front is alive and waits for `pending` answers. The last one says that it is."""

    pending: Count
    leaving: bool = False


class Inspect(Record, frozen=True):
    """Asks for one `Snapshot` with the same token."""

    token: Count


class Manage(Record, frozen=True):
    """An operator's order; answered with one `Managed` with the same token, once what it began has ended.

    `action` is `reload`, `scale`, `unload` or `load`, which are about `model`, or `drain` or `resume`, which are about
    the whole server; `replicas` is for `scale` alone.
    """

    token: Count
    action: Name
    model: Name = ""
    replicas: Count32 = 0


# --- broker -> front ---------------------------------------------------------------------------------------------


class ModelState(Record, frozen=True):
    """One model as the broker sees it; what readiness, routing and 404 texts are made from."""

    name: Name
    task: Name
    state: Name
    reason: Text
    required: bool
    replicas_ready: Count
    replicas_total: Count
    queued: Count
    mixes_parameters: bool = False
    was_ready: bool = False

    @property
    def answers(self) -> bool:
        """Whether a request would be answered: a replica takes work, or the request would have one loaded."""
        return self.replicas_ready > 0 or self.state == "idle"


class Welcome(Record, frozen=True):
    """The answer to `FrontHello`. A new `epoch` means that the model server is a new one and knows no request."""

    epoch: Name
    version: Name
    models: Several[ModelState]


class ReplyHeader(Record, frozen=True):
    """The one final answer to a request; with code `ok` its value is the next `frame_count` frames."""

    id: Id
    code: Code
    frame_count: FrameCount
    attempt: Count = 0
    slot: Name = ""
    incarnation: Count = 0
    cost: Count = 0
    timings: Timings = field(default_factory=Timings)
    message: Text = ""
    detail: Map = field(default_factory=dict)
    retry_after_ms: Count32 = 0


class Reply(Record, frozen=True):
    replies: Several[ReplyHeader]


class ChunkHeader(Record, frozen=True):
    """One piece of a streamed answer, in order from index 0; the final `Reply` ends the stream."""

    id: Id
    attempt: Count
    index: Count
    frame_count: FrameCount


class Chunk(Record, frozen=True):
    chunks: Several[ChunkHeader]


class ServerPulse(Record, frozen=True):
    """Sent to every front each second and at once when a model's state changes.

    The last one of a server that ends because no model can ever be loaded is `hopeless`: none is to be waited for.
    """

    epoch: Name
    draining: bool
    models: Several[ModelState]
    hopeless: bool = False


class SlotState(Record, frozen=True):
    """One row of `headwaiter status`: the plan beside what was observed."""

    slot: Name
    model: Name
    device: Name
    pid: Count32
    incarnation: Count
    state: Name
    reason: Text
    loads: Count
    restarts: Count
    memory_bytes: Count
    batches: Count
    requests: Count
    held: Count
    progress: Finite
    heard_ms_ago: Annotated[int, Meta(ge=-1, le=INT_MAX)]
    choices: Map = field(default_factory=dict)
    steps: Count = 0
    step_items: Count = 0


class ModelCounters(Record, frozen=True):
    """Totals of one model since this model server started; counters only ever grow."""

    model: Name
    admitted: Count
    ended: Counts
    rejected: Counts
    retried: Count
    batches: Count
    batch_size_sum: Count
    batch_size_buckets: Counts
    queue_s_sum: Finite
    queue_s_buckets: Counts
    forward_s_sum: Finite
    forward_s_buckets: Counts
    restarts: Counts


class DeviceState(Record, frozen=True):
    """A device that the plan has put slots on; `memory_bytes` is its whole memory, 0 where that cannot be told."""

    device: Name
    name: Name
    memory_bytes: Count


class Trouble(Record, frozen=True):
    """Something that went wrong, and how often, the last time `seconds_ago`; `event` is a code or an event of the log.

    `text` is the cause of the last time. What a model says about a request is not in it: it may quote the request.
    """

    event: Name
    slot: Name
    text: Text
    count: Count
    seconds_ago: Finite


class Snapshot(Record, frozen=True):
    """Everything an operator can see, answered to `Inspect`."""

    token: Count
    epoch: Name
    pid: Count32
    version: Name
    uptime_s: Finite
    draining: bool
    models: Several[ModelState]
    slots: Several[SlotState]
    counters: Several[ModelCounters]
    fronts: Count
    malformed: Count
    clients: Count = 0
    devices: Several[DeviceState] = ()
    troubles: Several[Trouble] = ()


class Managed(Record, frozen=True):
    """How what a `Manage` ordered has ended: `done`, `refused` (nothing was changed) or `failed`, and in one line what
    happened, or why not and what to do about it."""

    token: Count
    outcome: Name
    text: Text


# --- model process -> broker -------------------------------------------------------------------------------------


class ReplicaHello(Record, frozen=True):
    """A model process's first message; `incarnation` fences everything that an earlier process of the slot said."""

    slot: Name
    incarnation: Count
    pid: Count32
    version: Name


class State(Record, frozen=True):
    """A change of phase, or progress within one.

    `progress` runs from 0.0 to 1.0 where it is known, else -1.0. With phase `failed`, `detail` is the cause in one
    line and `permanent` says that a new start cannot help. With phase `ready`, `mixes_parameters` tells the broker
    that requests with different parameters may share a batch, `pads` that a batch costs its dearest item times the
    number of items, and not the sum of its items, `max_batch_cost` and `max_batch_size` are the measured limits (0: as
    configured), and `choices` is what the runtime decided (dtype, padding, task), for
    `status`. With a `concurrency` above 0 the replica takes items one by one, as they arrive, and holds up to so many.
    """

    slot: Name
    incarnation: Count
    phase: Phase
    progress: Finite = -1.0
    detail: Text = ""
    permanent: bool = False
    mixes_parameters: bool = False
    max_batch_cost: Count = 0
    max_batch_size: Count = 0
    choices: Map = field(default_factory=dict)
    concurrency: Count = 0
    pads: bool = True


class ItemResult(Record, frozen=True):
    """How one item of a batch ended; with code `ok` its value is the next `frame_count` frames."""

    id: Id
    attempt: Count
    code: Code
    frame_count: FrameCount
    cost: Count = 0
    prepare_ms: Finite = 0.0
    forward_ms: Finite = 0.0
    finish_ms: Finite = 0.0
    batch_size: Count = 0
    message: Text = ""
    detail: Map = field(default_factory=dict)


class Result(Record, frozen=True):
    """Items that ended, in any order; a batch's credit comes back with its last item."""

    slot: Name
    incarnation: Count
    results: Several[ItemResult]


class ReplicaChunk(Record, frozen=True):
    """Pieces of streamed answers: one message for all sequences of a decode step."""

    slot: Name
    incarnation: Count
    chunks: Several[ChunkHeader]


class ReplicaPulse(Record, frozen=True):
    """Sent every second by the I/O thread, whatever the main thread does.

    `progress_count` grows with each finished forward step; `running_ms` is how long the present one has been
    running, 0 when idle. `step_items` are the items of all steps of continuous batches: for text, about the tokens.
    """

    slot: Name
    incarnation: Count
    progress_count: Count
    running_ms: Count
    memory_bytes: Count
    step_items: Count = 0


# --- broker -> model process -------------------------------------------------------------------------------------


class BatchItem(Record, frozen=True):
    """One request of a `Batch`; its payload is the next `frame_count` frames."""

    id: Id
    attempt: Count
    operation: Name
    remaining_ms: Signed32
    stream: bool
    frame_count: FrameCount
    request_id: Name = ""
    traceparent: Name = ""


class Batch(Record, frozen=True):
    """Work for one replica; `alone` forbids sharing a forward with any other item."""

    batch: Count
    alone: bool
    items: Several[BatchItem]


class ReplicaCancel(Record, frozen=True):
    ids: Several[Id]


class Drain(Record, frozen=True):
    """Finish what was sent; nothing new will come."""

    grace_ms: Count32


class Stop(Record, frozen=True):
    """Exit now, with code 0."""


FrontMessage = FrontHello | Submit | Cancel | FrontPulse | Inspect | Manage
ToFrontMessage = Welcome | Reply | Chunk | ServerPulse | Snapshot | Managed
ReplicaMessage = ReplicaHello | State | Result | ReplicaChunk | ReplicaPulse
ToReplicaMessage = Batch | ReplicaCancel | Drain | Stop
Message = FrontMessage | ToFrontMessage | ReplicaMessage | ToReplicaMessage

KINDS: dict[type, Kind] = {
    FrontHello: Kind.FRONT_HELLO,
    Submit: Kind.SUBMIT,
    Cancel: Kind.CANCEL,
    FrontPulse: Kind.FRONT_PULSE,
    Inspect: Kind.INSPECT,
    Manage: Kind.MANAGE,
    Welcome: Kind.WELCOME,
    Reply: Kind.REPLY,
    Chunk: Kind.CHUNK,
    ServerPulse: Kind.SERVER_PULSE,
    Snapshot: Kind.SNAPSHOT,
    Managed: Kind.MANAGED,
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

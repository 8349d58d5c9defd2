"""What happened: the only things the broker core reacts to.

Every event is a past-tense fact, made by the shell from a decoded message, a process notice or the clock. Times are
absolute seconds on the shell's monotonic clock; the core never asks for one.
"""

from __future__ import annotations

from typing import NewType

from msgspec import Struct, field

from shared.errors import Code
from shared.messages import Phase, RequestId, SlotName

FrontId = NewType("FrontId", bytes)
"""A front's ZeroMQ routing id; fresh for every connection."""


class Fact(Struct, frozen=True, gc=False):
    """Made several times for each request, so it is cheap: never part of a cycle, and unknown to the collector."""


class FrontJoined(Fact, frozen=True):
    front: FrontId


class FrontPulsed(Fact, frozen=True):
    front: FrontId


class FrontLeft(Fact, frozen=True):
    """The front cannot be reached any more, or said that it leaves (silence is noticed by the core itself)."""

    front: FrontId
    reason: str = "unreachable"


class RequestArrived(Fact, frozen=True):
    front: FrontId
    id: RequestId
    model: str
    operation: str
    batch_key: bytes
    cost_hint: int
    body_bytes: int
    deadline_s: float
    priority: int
    stream: bool
    retryable: bool
    digest: bytes = b""
    """Of the payload; the shell computes it only for a model that has refused digests."""
    request_id: str = ""
    """What its sender calls it; for logs."""


class RequestCancelled(Fact, frozen=True):
    front: FrontId
    id: RequestId


class ReplicaSpawned(Fact, frozen=True):
    slot: SlotName
    incarnation: int
    pid: int


class SpawnFailed(Fact, frozen=True):
    slot: SlotName
    incarnation: int
    reason: str


class ReplicaConnected(Fact, frozen=True):
    slot: SlotName
    incarnation: int


class ReplicaPhaseChanged(Fact, frozen=True):
    """A `State` message: a new phase, or progress within one; the fields are those of the message."""

    slot: SlotName
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
    pads: bool = True


class ReplicaPulsed(Fact, frozen=True):
    slot: SlotName
    incarnation: int
    progress_count: int
    running_s: float
    memory_bytes: int
    step_items: int = 0


class ItemFinished(Fact, frozen=True):
    slot: SlotName
    incarnation: int
    id: RequestId
    attempt: int
    code: Code
    cost: int = 0
    prepare_ms: float = 0.0
    forward_ms: float = 0.0
    finish_ms: float = 0.0
    batch_size: int = 0
    message: str = ""
    detail: dict[str, object] = field(default_factory=dict)


class ChunkArrived(Fact, frozen=True):
    slot: SlotName
    incarnation: int
    id: RequestId
    attempt: int


class ReplicaExited(Fact, frozen=True):
    """The process is gone; negative codes are signals, as in `multiprocessing`."""

    slot: SlotName
    incarnation: int
    exit_code: int


class PoisonDigested(Fact, frozen=True):
    """The digest that `DigestPoison` asked for."""

    model: str
    digest: bytes


class DrainRequested(Fact, frozen=True):
    grace_s: float


class ManageRequested(Fact, frozen=True):
    """A `Manage` message; `front` and `token` say whom its `SendManaged` is for."""

    front: FrontId
    token: int
    action: str
    model: str = ""
    replicas: int = 0


class TimePassed(Fact, frozen=True):
    """Nothing happened, but `wake_at_s` was reached."""


Event = (
    FrontJoined
    | FrontPulsed
    | FrontLeft
    | RequestArrived
    | RequestCancelled
    | ReplicaSpawned
    | SpawnFailed
    | ReplicaConnected
    | ReplicaPhaseChanged
    | ReplicaPulsed
    | ItemFinished
    | ChunkArrived
    | ReplicaExited
    | PoisonDigested
    | DrainRequested
    | ManageRequested
    | TimePassed
)

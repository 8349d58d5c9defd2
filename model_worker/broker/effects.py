"""What to do: orders of the broker core to its shell, carried out in the order given."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from model_worker.broker.events import FrontId
from shared.errors import Code
from shared.messages import RequestId, SlotName, Timings


class Order(Struct, frozen=True, gc=False):
    """As cheap as a `Fact`, and for the same reason."""


class SendReply(Order, frozen=True):
    """The final answer. The shell forgets the request's payload after sending it.

    With `relay` the reply carries the value frames of the item being handled (the `ItemFinished` that caused this
    effect); otherwise it has none.
    """

    front: FrontId
    id: RequestId
    code: Code
    relay: bool = False
    message: str = ""
    detail: dict[str, object] = field(default_factory=dict)
    retry_after_s: float = 0.0
    attempt: int = 0
    slot: str = ""
    incarnation: int = 0
    cost: int = 0
    timings: Timings = field(default_factory=Timings)


class RelayChunk(Order, frozen=True):
    """Pass the frames of the `ChunkArrived` being handled on to this front."""

    front: FrontId
    id: RequestId


class ReleasePayload(Order, frozen=True):
    """Forget a payload without answering (the request was cancelled, or its front is gone)."""

    id: RequestId


class BatchEntry(Order, frozen=True):
    id: RequestId
    attempt: int
    operation: str
    deadline_s: float
    stream: bool


class SendBatch(Order, frozen=True):
    slot: SlotName
    incarnation: int
    batch: int
    alone: bool
    entries: tuple[BatchEntry, ...]


class SendCancel(Order, frozen=True):
    slot: SlotName
    incarnation: int
    ids: tuple[RequestId, ...]


class SendDrain(Order, frozen=True):
    """Nothing new will come; what it holds is due within `grace_s`."""

    slot: SlotName
    incarnation: int
    grace_s: float


class SendStop(Order, frozen=True):
    slot: SlotName
    incarnation: int


class SpawnReplica(Order, frozen=True):
    slot: SlotName
    incarnation: int


class KillReplica(Order, frozen=True):
    """SIGKILL; with `dump_stacks` the shell first has the process write its stacks to the log."""

    slot: SlotName
    incarnation: int
    reason: str
    dump_stacks: bool = False


class DigestPoison(Order, frozen=True):
    """Compute the payload's digest before its reply is sent, and report it as `PoisonDigested`."""

    id: RequestId
    model: str


class SendManaged(Order, frozen=True):
    """The one answer to a `ManageRequested`."""

    front: FrontId
    token: int
    outcome: Literal["done", "refused", "failed"]
    text: str


class Log(Order, frozen=True):
    """An event for the log: `event` in snake case, past tense, with key=value fields."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, object] = field(default_factory=dict)


class StopServer(Order, frozen=True):
    """Everything has ended: leave the loop with this exit code. `hopeless`: because no model can ever be loaded."""

    exit_code: int
    reason: str
    hopeless: bool = False


Effect = (
    SendReply
    | RelayChunk
    | ReleasePayload
    | SendBatch
    | SendCancel
    | SendDrain
    | SendStop
    | SpawnReplica
    | KillReplica
    | DigestPoison
    | SendManaged
    | Log
    | StopServer
)

"""What peers say, as events for the broker core.

Owns the translation of decoded messages into facts, and the check that a peer may say what it says. Decides nothing,
sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from model_worker.broker import events as happened
from model_worker.broker.events import FrontId
from model_worker.outbox import Replica
from model_worker.payloads import Payload
from shared import messages as say
from shared.errors import ProtocolError


def from_front(front: FrontId, message: say.Message) -> Iterator[happened.Event]:
    """The events of a front's message; a `Submit` has payloads and goes through `request_arrived`.

    Raises:
        ProtocolError: a front may not say this.
    """
    match message:
        case say.Cancel():
            for request_id in message.ids:
                yield happened.RequestCancelled(front, request_id)
        case say.FrontHello() | say.FrontPulse():
            yield happened.FrontPulsed(front)
        case _:
            raise ProtocolError(f"a front sent {type(message).__name__}, which is not a front's message")


def request_arrived(
    front: FrontId, header: say.RequestHeader, payload: Payload, digest: bytes, now_s: float
) -> happened.RequestArrived:
    return happened.RequestArrived(
        front=front,
        id=header.id,
        model=header.model,
        operation=header.operation,
        batch_key=header.batch_key,
        cost_hint=header.cost_hint,
        body_bytes=payload.size_bytes,
        deadline_s=now_s + header.remaining_ms / 1000,
        priority=header.priority,
        stream=header.stream,
        retryable=header.retryable,
        digest=digest,
        request_id=header.request_id,
    )


def manage_requested(front: FrontId, order: say.Manage) -> happened.ManageRequested:
    return happened.ManageRequested(front, order.token, order.action, order.model, order.replicas)


def from_replica(replica: Replica, message: say.Message) -> happened.Event:
    """The event of a replica's message; `Result` and `ReplicaChunk` have frames and go through functions of their own.

    Raises:
        ProtocolError: a replica may not say this.
    """
    slot, incarnation = replica
    match message:
        case say.ReplicaPulse():
            return happened.ReplicaPulsed(
                slot,
                incarnation,
                message.progress_count,
                message.running_ms / 1000,
                message.memory_bytes,
                message.step_items,
            )
        case say.State():
            return happened.ReplicaPhaseChanged(
                slot=slot,
                incarnation=incarnation,
                phase=message.phase,
                progress=message.progress,
                detail=message.detail,
                permanent=message.permanent,
                mixes_parameters=message.mixes_parameters,
                max_batch_cost=message.max_batch_cost,
                max_batch_size=message.max_batch_size,
                choices=message.choices,
                concurrency=message.concurrency,
                pads=message.pads,
            )
        case _:
            raise ProtocolError(f"a replica sent {type(message).__name__}, which is not a replica's message")


def item_finished(replica: Replica, result: say.ItemResult) -> happened.ItemFinished:
    slot, incarnation = replica
    return happened.ItemFinished(
        slot=slot,
        incarnation=incarnation,
        id=result.id,
        attempt=result.attempt,
        code=result.code,
        cost=result.cost,
        prepare_ms=result.prepare_ms,
        forward_ms=result.forward_ms,
        finish_ms=result.finish_ms,
        batch_size=result.batch_size,
        message=result.message,
        detail=result.detail,
    )


def chunk_arrived(replica: Replica, chunk: say.ChunkHeader) -> happened.ChunkArrived:
    slot, incarnation = replica
    return happened.ChunkArrived(slot, incarnation, chunk.id, chunk.attempt)

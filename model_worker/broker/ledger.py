"""The ledger of admitted requests: each is in exactly one place, and each ends exactly once.

Owns the life of a request between admission and its end, and everything that has to change with it: queue, queue
limits, deadline timer, front, counters. Refuses to decide which request goes where, or why one ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from model_worker.broker.admission import Refusal
from model_worker.broker.effects import Effect, ReleasePayload, SendCancel, SendReply
from model_worker.broker.events import ItemFinished, RequestArrived
from model_worker.broker.models import Model
from model_worker.broker.records import WAITING, WORKING, Batch, Front, Replica, ReplicaState, Request, RequestState
from model_worker.broker.timers import Timers
from shared.errors import Code
from shared.messages import RequestId, Timings

# Cancels are of use only to a process that still works on its batches.
_HEEDS_CANCEL = (*WORKING, ReplicaState.FAILING)


class Ledger:
    """All admitted requests that have not ended."""

    def __init__(self, models: Mapping[str, Model], timers: Timers[object], effects: list[Effect]) -> None:
        self.requests: dict[RequestId, Request] = {}
        self._models = models
        self._timers = timers
        self._effects = effects
        self._sequence = 0
        # Cancels of this turn, to be sent as one message per replica.
        self._cancels: dict[Replica, list[RequestId]] = {}

    def refuse(self, event: RequestArrived, refusal: Refusal) -> None:
        """Answers a request that was not admitted."""
        model = self._models.get(event.model)
        if model is not None:
            model.tally.rejected[refusal.code.value] += 1
        self._effects.append(
            SendReply(
                event.front,
                event.id,
                refusal.code,
                message=refusal.message,
                retry_after_s=refusal.retry_after_s,
            )
        )

    def admit(self, event: RequestArrived, front: Front, urgency_s: float, now_s: float) -> None:
        model = self._models[event.model]
        self._sequence += 1
        request = Request(
            front=front,
            id=event.id,
            model=event.model,
            operation=event.operation,
            batch_key=event.batch_key,
            body_bytes=event.body_bytes,
            deadline_s=event.deadline_s,
            priority=event.priority,
            stream=event.stream,
            retryable=event.retryable,
            arrived_s=now_s,
            sequence=self._sequence,
            urgency_s=urgency_s,
            cost=event.cost_hint if event.cost_hint > 0 else model.pace.cost(event.body_bytes),
            request_id=event.request_id,
        )
        self.requests[request.id] = request
        front.requests[request.id] = request
        model.tally.admitted += 1
        model.waiting_count += 1
        model.waiting_bytes += request.body_bytes
        model.backlog.add(request)
        self._timers.set(request, request.deadline_s)

    def assign(
        self, requests: Iterable[Request], batch: Batch, replica: Replica, state: RequestState, now_s: float
    ) -> None:
        """Gives requests that have just been taken from the backlog, and put into the batch, to a replica."""
        for request in requests:
            request.attempt += 1
            request.started_s = now_s
            request.replica, request.batch = replica, batch
            self._move(request, state)

    def start(self, batch: Batch) -> None:
        """The prefetched batch runs now."""
        for request in batch.live_requests():
            request.started_s = batch.started_s
            self._move(request, RequestState.RUNNING)

    def requeue_alone(self, request: Request) -> None:
        """Back to its old place in the queue: the process that held it came to grief, and it may be the reason."""
        model = self._models[request.model]
        request.deaths += 1
        request.alone = True
        request.replica = request.batch = None
        self._move(request, RequestState.QUEUED)
        model.backlog.add(request)
        model.tally.retried += 1

    def answer(self, request: Request, code: Code, message: str, retry_after_s: float = 0.0) -> None:
        """Ends it with an answer of the broker's own."""
        replica = request.replica
        self._effects.append(
            SendReply(
                request.front.id,
                request.id,
                code,
                message=message,
                retry_after_s=retry_after_s,
                attempt=request.attempt,
                slot=replica.slot if replica else "",
                incarnation=replica.incarnation if replica else 0,
            )
        )
        self._end(request, code)

    def relay(self, request: Request, event: ItemFinished) -> None:
        """Ends it with the answer of its replica."""
        model = self._models[request.model]
        batch = request.batch
        assert batch is not None
        queue_s = request.started_s - request.arrived_s
        model.tally.queue_s.observe(queue_s)
        if event.forward_ms > 0:
            model.tally.forward_s.observe(event.forward_ms / 1000)
        timings = Timings(
            queue_ms=queue_s * 1000,
            prepare_ms=event.prepare_ms,
            forward_ms=event.forward_ms,
            finish_ms=event.finish_ms,
            batch_size=event.batch_size or batch.size,
        )
        self._effects.append(
            SendReply(
                request.front.id,
                request.id,
                event.code,
                relay=event.code is Code.OK,
                message=event.message,
                detail=event.detail,
                attempt=request.attempt,
                slot=event.slot,
                incarnation=event.incarnation,
                cost=event.cost,
                timings=timings,
            )
        )
        self._end(request, event.code)

    def release(self, requests: Iterable[Request]) -> None:
        """Ends them without an answer: nobody waits for one."""
        for request in requests:
            self._effects.append(ReleasePayload(request.id))
            self._end(request, Code.CANCELLED)

    def send_cancels(self) -> None:
        """Tells replicas which of their items ended early; called once at the end of each turn."""
        for replica, ids in self._cancels.items():
            if replica.state in _HEEDS_CANCEL:
                self._effects.append(SendCancel(replica.slot, replica.incarnation, tuple(ids)))
        self._cancels.clear()

    def _end(self, request: Request, code: Code) -> None:
        model = self._models[request.model]
        if request.state is RequestState.QUEUED:
            model.backlog.remove(request)
        if request.replica is not None and request.batch is not None:
            if request.id in request.batch.open:  # else the replica has reported it
                self._cancels.setdefault(request.replica, []).append(request.id)
            request.replica = request.batch = None
        self._move(request, RequestState.ENDED)
        model.tally.ended[code.value] += 1
        self._timers.clear(request)
        del self.requests[request.id]
        del request.front.requests[request.id]

    def _move(self, request: Request, state: RequestState) -> None:
        change = (state in WAITING) - (request.state in WAITING)
        if change:
            model = self._models[request.model]
            model.waiting_count += change
            model.waiting_bytes += change * request.body_bytes
        request.move(state)

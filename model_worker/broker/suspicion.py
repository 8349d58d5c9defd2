"""What becomes of requests when the process that holds them comes to grief, and who is to blame.

Owns the rule of suspicion and the bans that follow from it.

When a process dies or hangs, any request inside may be the reason. Each has witnessed a death, and runs next time
alone: in a batch of its own, with nothing behind it. If that process ends as well, the reason is known: the request is
poison, it is refused, and its digest is banned. So poison ends two processes at most, and a batch-mate is never blamed.
A request that may have had an effect already (it ran and is not `retryable`, or its front has seen a chunk) is not run
again.

A hang is noticed before the process ends, so that answers which are certain need not wait for the exit: a request that
is the last one open in the hung batch is the reason, and those that may not run again will not. They get theirs at
once; the others are run again, alone, after the exit. So a request that hangs by itself costs one process, one that
hangs in company costs two.
"""

from __future__ import annotations

from collections.abc import Mapping

from model_worker.broker.admission import POISON_MESSAGE
from model_worker.broker.effects import DigestPoison, Effect, Log
from model_worker.broker.events import ItemFinished
from model_worker.broker.ledger import Ledger
from model_worker.broker.models import Model
from model_worker.broker.records import Ban, Replica, Request, RequestState
from model_worker.broker.timers import Timers
from shared.errors import Code

# Each ban costs two model processes, so only an attack or a broken model gets here; the oldest bans go first.
BANS_MAX = 1024


class Suspicion:
    """Judges the requests of processes that died, hung, or told of a fault."""

    def __init__(
        self, models: Mapping[str, Model], ledger: Ledger, timers: Timers[object], effects: list[Effect]
    ) -> None:
        self._models = models
        self._ledger = ledger
        self._timers = timers
        self._effects = effects

    def shared_a_fault(self, request: Request, event: ItemFinished) -> None:
        """The replica reported `replica_fault`: the item was in a batch with what ended the process, or is it."""
        if request.may_run_again:
            self._ledger.requeue_alone(request)
        else:
            message = event.message or "the model failed on the batch that this input was in"
            self._ledger.answer(request, Code.MODEL_ERROR, message)

    def hung(self, replica: Replica, reason: str) -> None:
        """The running batch stands still, and the process is about to be killed."""
        batch = replica.running
        assert batch is not None
        is_sole_suspect = len(batch.open) == 1
        for request in batch.live_requests():
            if is_sole_suspect or not request.may_run_again:
                self._ledger.answer(request, Code.DEADLINE_EXCEEDED, f"model process {replica.slot} {reason}")

    def witnessed_death(self, request: Request, replica: Replica, reason: str) -> None:
        """The process ended with the request inside."""
        if request.alone:
            fields: dict[str, object] = {
                "request_id": request.request_id,
                "model": request.model,
                "reason": reason,
            }
            self._effects.append(Log("error", "request_poisoned", fields))
            self._effects.append(DigestPoison(request.id, request.model))
            self._ledger.answer(request, Code.POISON_INPUT, f"{POISON_MESSAGE}: {reason}")
        elif request.chunked or (request.state is RequestState.RUNNING and not request.retryable):
            message = f"model process {replica.slot} ended while it ran this request: {reason}"
            self._ledger.answer(request, Code.MODEL_CRASHED, message)
        else:
            self._ledger.requeue_alone(request)

    def ban(self, model: Model, digest: bytes, until_s: float) -> None:
        """Refuses this payload for a while; again and longer, if it was banned already."""
        known = model.bans.pop(digest, None)
        if known is not None:
            self._timers.clear(known)
        elif len(model.bans) >= BANS_MAX:
            self._timers.clear(model.bans.pop(next(iter(model.bans))))
        ban = model.bans[digest] = Ban(model.name, digest, until_s)
        self._timers.set(ban, until_s)

    def lift_ban(self, ban: Ban) -> None:
        del self._models[ban.model].bans[ban.digest]

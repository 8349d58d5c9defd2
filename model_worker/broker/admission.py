"""The door: whether a request that arrives is let in, and if not, what its sender is told.

Owns every reason to refuse on arrival, in the order they are looked at. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from model_worker.broker.events import RequestArrived
from model_worker.broker.models import Model
from model_worker.broker.records import Standing
from model_worker.broker.words import duration
from shared.errors import Code, ModelFailed, UnknownModel

# Until the next model server, or the next replica, may be there: a supervisor restarts within a second, a small model
# loads within a few.
DRAINING_RETRY_AFTER_S = 5.0
LOADING_RETRY_AFTER_S = 5.0

POISON_MESSAGE = "this input ended the model process twice"


@dataclass(frozen=True, slots=True)
class Refusal:
    code: Code
    message: str
    retry_after_s: float = 0.0


def refuse_at_door(
    models: Mapping[str, Model], event: RequestArrived, urgency_s: float, now_s: float, *, closed: str
) -> Refusal | None:
    """The reason not to admit the request, or None. `closed` is why nobody is let in, if nobody is."""
    if closed:
        return Refusal(Code.DRAINING, closed, DRAINING_RETRY_AFTER_S)
    model = models.get(event.model)
    if model is None:
        unknown = UnknownModel(event.model, models)
        return Refusal(unknown.code, unknown.message)
    if model.standing in (Standing.CLOSING, Standing.UNLOADED):
        text = f"model {model.name!r} was unloaded by an operator, and takes no requests until it is loaded again"
        return Refusal(Code.MODEL_LOADING, text)
    if model.is_failed:
        return failed(model, now_s)
    ban = model.bans.get(event.digest) if event.digest else None
    if ban is not None:
        seconds = round(ban.until_s - now_s)
        return Refusal(Code.POISON_INPUT, f"{POISON_MESSAGE}; it is refused for another {seconds} s")
    if event.deadline_s <= now_s:
        return Refusal(
            Code.DEADLINE_EXCEEDED, f"the deadline had passed {duration(now_s - event.deadline_s)} before arrival"
        )
    return _over_limits(model, event) or _too_late(model, event, urgency_s, now_s)


def failed(model: Model, now_s: float) -> Refusal:
    """What requests of a failed model are told, new ones and queued ones."""
    error = ModelFailed(model.name, model.failure_reason)
    return Refusal(error.code, error.message, model.failure_retry_after_s(now_s))


def _over_limits(model: Model, event: RequestArrived) -> Refusal | None:
    settings = model.settings
    if event.body_bytes > settings.queue_bytes_max:
        return Refusal(
            Code.TOO_LARGE,
            f"the body of {event.body_bytes} bytes is larger than the whole queue of model {model.name!r} may be: "
            f"raise queue_bytes_max ({settings.queue_bytes_max})",
        )
    # What idle replicas can take at once does not wait; they have work already unless the queue is nearly empty.
    if model.waiting_count >= settings.queue_size_max + model.free_capacity:
        return Refusal(
            Code.OVERLOADED,
            f"{model.waiting_count} requests wait for model {model.name!r}: its queue is full",
            model.retry_after_s,
        )
    if model.waiting_bytes + event.body_bytes > settings.queue_bytes_max:
        return Refusal(
            Code.OVERLOADED,
            f"{model.waiting_bytes} bytes wait for model {model.name!r}: {event.body_bytes} more would exceed its "
            f"queue_bytes_max ({settings.queue_bytes_max})",
            model.retry_after_s,
        )
    return None


def _too_late(model: Model, event: RequestArrived, urgency_s: float, now_s: float) -> Refusal | None:
    remaining_s = event.deadline_s - now_s
    if model.wait_s(model.waiting_count) <= remaining_s:
        return None
    # Looked at more closely only now: a more urgent request has fewer ahead of it. Prefetched ones are ahead of all.
    prefetched = model.waiting_count - len(model.backlog)
    wait_s = model.wait_s(model.backlog.count_ahead(urgency_s) + prefetched)
    if wait_s <= remaining_s:
        return None
    return Refusal(
        Code.OVERLOADED,
        f"the wait for model {model.name!r} is at least {duration(wait_s)}, more than the {duration(remaining_s)} left",
        model.retry_after_s,
    )

"""What is told of each request beside the counters, where somebody wants it: a line in the log, and spans.

Owns what stands in the line and how a request's spans hang together. Of a request it tells names, numbers and times;
never its inputs, its answer, a header that may hold a key, or the part of its address behind the question mark.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import Scope

from frontend import guards
from frontend.guards import Headers
from frontend.pending import Answer
from frontend.responses import CLIENT_CLOSED_REQUEST
from shared.logs import log_event

if TYPE_CHECKING:
    from frontend.spans import FrontSpans, RequestSpan

logger = logging.getLogger("frontend")


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer of a model, with the front's own clock around it; in nanoseconds since the epoch."""

    answer: Answer
    asked_ns: int
    answered_ns: int

    @property
    def total_ms(self) -> float:
        return (self.answered_ns - self.asked_ns) / 1e6

    @property
    def hop_ms(self) -> float:
        """What no stage accounts for: the way there and back through the sockets, and waiting between the stages."""
        timings = self.answer.timings
        staged_ms = timings.queue_ms + timings.prepare_ms + timings.forward_ms + timings.finish_ms
        return max(0.0, self.total_ms - staged_ms)


@dataclass(slots=True)
class Visit:
    """One request on its way."""

    request_id: str
    method: str
    route: str
    traceparent: str
    """What the model server is told: the context of the request's own span, or the one that it has come with."""
    span: RequestSpan | None
    asked: list[Asked] = field(default_factory=list)
    error: str = ""
    """The code that the request was refused with."""

    def answered(self, answers: Sequence[Answer], asked_ns: int) -> None:
        """Notes what models have answered; several that were asked at once have come as one."""
        now_ns = time.time_ns()
        for answer in answers:
            self.asked.append(Asked(answer, asked_ns, now_ns))

    @property
    def slowest(self) -> Asked | None:
        """The answer that the others had to wait for."""
        return max(self.asked, key=lambda asked: asked.total_ms - asked.hop_ms, default=None)


class Visits:
    """Begins and ends visits. There is none of these objects where nothing is to be told."""

    def __init__(self, *, log_requests: bool, spans: FrontSpans | None) -> None:
        self._log_requests = log_requests
        self._spans = spans

    def begin(self, scope: Scope, route: str, request_id: str, headers: Headers) -> Visit:
        method = scope["method"]
        if self._spans is None:
            return Visit(request_id, method, route, guards.traceparent(headers), None)
        span = self._spans.begin(scope, headers, route, request_id)
        return Visit(request_id, method, route, span.traceparent, span)

    def end(self, visit: Visit, model: str, status: int, duration_s: float, body_bytes: int) -> None:
        if visit.span is not None:
            visit.span.end(visit, model, status)
        if self._log_requests:
            log_event(logger, "info", "request_ended", **_fields(visit, model, status, duration_s, body_bytes))


def _fields(visit: Visit, model: str, status: int, duration_s: float, body_bytes: int) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": visit.request_id,
        "method": visit.method,
        "route": visit.route,
        "model": model,
        "status": status,
        "body_bytes": body_bytes,
        "total_ms": round(duration_s * 1000, 3),
    }
    if visit.error:
        fields["error"] = visit.error
    elif status == CLIENT_CLOSED_REQUEST:
        fields["error"] = "client_gone"
    if (slowest := visit.slowest) is not None:
        timings = slowest.answer.timings
        fields |= {
            "slot": slowest.answer.slot,
            "attempt": slowest.answer.attempt,
            "batch_size": timings.batch_size,
            "queue_ms": round(timings.queue_ms, 3),
            "prepare_ms": round(timings.prepare_ms, 3),
            "forward_ms": round(timings.forward_ms, 3),
            "finish_ms": round(timings.finish_ms, 3),
            "hop_ms": round(slowest.hop_ms, 3),
        }
    if len(visit.asked) > 1:
        fields["questions"] = len(visit.asked)
    if visit.traceparent:
        fields["trace_id"] = visit.traceparent.split("-")[1]
    return fields

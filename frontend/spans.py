"""The spans of the HTTP side: one for each request, by the semantic conventions for HTTP servers, and its waits.

Owns their names and attributes. How long a request has waited is what the model server has measured; its span begins
when the front has sent the request, which is a fraction of a millisecond before the waiting did. What happens in a
model process is told by that process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.types import Scope

from frontend.guards import Headers
from frontend.responses import CLIENT_CLOSED_REQUEST
from shared.tracing import Tracing, written

if TYPE_CHECKING:
    from frontend.visits import Visit

# Others may hold keys, or anything.
PROPAGATED = (b"traceparent", b"tracestate", b"baggage", b"b3", b"x-b3-traceid", b"x-b3-spanid", b"x-b3-sampled")


class FrontSpans:
    """Makes them."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self.close = tracing.close

    def begin(self, scope: Scope, headers: Headers, route: str, request_id: str) -> RequestSpan:
        carrier = {name.decode(): headers[name].decode("latin-1") for name in PROPAGATED if name in headers}
        attributes: dict[str, str | int] = {
            "http.request.method": scope["method"],
            "http.route": route,
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
            "headwaiter.request_id": request_id,
        }
        if (server := scope.get("server")) is not None:
            attributes["server.address"], attributes["server.port"] = server[0], server[1] or 0
        if (client := scope.get("client")) is not None:
            attributes["client.address"] = client[0]
        if (agent := headers.get(b"user-agent")) is not None:
            attributes["user_agent.original"] = agent.decode("latin-1")
        span = self._tracing.tracer.start_span(
            f"{scope['method']} {route}",
            context=propagate.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=time.time_ns(),
        )
        return RequestSpan(self._tracing, span)


class RequestSpan:
    """That of one request."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self.traceparent = written(span.get_span_context())

    def context(self) -> context.Context:
        """For spans that somebody else makes within the request."""
        return trace.set_span_in_context(self._span)

    def end(self, visit: Visit, model: str, status: int) -> None:
        span = self._span
        if span.is_recording():
            self._describe(visit, model, status)
            self._tell_waits(visit)
        span.end(time.time_ns())

    def _describe(self, visit: Visit, model: str, status: int) -> None:
        span = self._span
        if model:
            span.set_attribute("headwaiter.model", model)
        if status == CLIENT_CLOSED_REQUEST:
            # No response was sent.
            span.set_attribute("error.type", "client_gone")
        else:
            span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_attribute("error.type", visit.error or str(status))
            span.set_status(Status(StatusCode.ERROR))
        elif visit.error:
            span.set_attribute("error.type", visit.error)
        if (slowest := visit.slowest) is not None:
            timings = slowest.answer.timings
            span.set_attributes(
                {
                    "headwaiter.slot": slowest.answer.slot,
                    "headwaiter.attempt": slowest.answer.attempt,
                    "headwaiter.batch_size": timings.batch_size,
                    "headwaiter.queue_ms": timings.queue_ms,
                    "headwaiter.prepare_ms": timings.prepare_ms,
                    "headwaiter.forward_ms": timings.forward_ms,
                    "headwaiter.finish_ms": timings.finish_ms,
                    "headwaiter.hop_ms": slowest.hop_ms,
                }
            )

    def _tell_waits(self, visit: Visit) -> None:
        for asked in visit.asked:
            queue_ns = int(asked.answer.timings.queue_ms * 1e6)
            wait = self._tracing.tracer.start_span(
                "queue",
                context=self.context(),
                start_time=asked.asked_ns,
                attributes={"headwaiter.slot": asked.answer.slot},
            )
            wait.end(min(asked.asked_ns + queue_ns, asked.answered_ns))

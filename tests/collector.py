"""A collector of spans for tests: OTLP over HTTP, as the standard exporter speaks it."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.local_server import served_by


class CollectedSpan:
    """One span, in plain values."""

    def __init__(self, span: Any, resource: dict[str, Any]) -> None:
        self.name: str = span.name
        self.kind: int = span.kind
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.links: list[tuple[str, str]] = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        self.attributes = _plain(span.attributes)
        self.status: int = span.status.code
        self.start_ns: int = span.start_time_unix_nano
        self.end_ns: int = span.end_time_unix_nano
        self.resource = resource


class Collector:
    """What has arrived."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[CollectedSpan] = []

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource_spans in request.resource_spans:
            resource = _plain(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                self._spans.extend(CollectedSpan(span, resource) for span in scope_spans.spans)

    def of(self, trace_id: str, name: str = "") -> list[CollectedSpan]:
        """Those of one trace, by name if one is given."""
        return [span for span in list(self._spans) if span.trace_id == trace_id and name in ("", span.name)]


def _plain(attributes: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    collected = Collector()

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collected.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

    with served_by(Taker) as collected.endpoint:
        yield collected

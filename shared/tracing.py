"""OpenTelemetry, for whichever program sends spans: set up once, by the standard `OTEL_…` variables.

Owns the provider, where its spans go, and how trace contexts are written on the wire. Nothing of the library is
imported before `start`: who does not trace pays nothing. Refuses to know what is traced.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
from typing import TYPE_CHECKING

from shared.errors import ConfigurationError
from shared.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanContext, Tracer

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
EXPORTERS = ("otlp", "console", "none")
PROTOCOL = "http/protobuf"
# What is still to be sent when a process ends gets this long; a collector that is not there must not hold up an end.
FLUSH_S = 1.0
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


class Tracing:
    """The spans of one process."""

    def __init__(self, instance: str, processor: SpanProcessor | None) -> None:
        """`instance` tells the processes of one service apart. Without a `processor` spans are made and go nowhere."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        named = OTELResourceDetector().detect().attributes
        own = {"service.name": "headwaiter", "service.version": VERSION, "service.instance.id": instance}
        self._provider = TracerProvider(resource=Resource.create({**own, **named}))
        if processor is not None:
            self._provider.add_span_processor(processor)
        self.tracer: Tracer = self._provider.get_tracer("headwaiter", VERSION)

    def close(self) -> None:
        """Sends what there is, within `FLUSH_S`; may be called twice."""
        # The library's own limit is that of an export, with its tries: ten seconds.
        ending = threading.Thread(target=self._shut_down, name="traces", daemon=True)
        ending.start()
        ending.join(FLUSH_S)

    def _shut_down(self) -> None:
        # A program's end is no place to fail for a span.
        with contextlib.suppress(Exception):
            self._provider.shutdown()


def check_tracing(enabled: bool) -> None:
    """
    Raises:
        ConfigurationError: spans are wanted, and cannot be sent from here.
    """
    if not enabled:
        return
    if missing := [package for package in PACKAGES if not _is_installed(package)]:
        raise ConfigurationError(
            f"tracing.enabled = true: this Python has no {' and no '.join(missing)}: install "
            "'headwaiter[tracing]', or set tracing.enabled to false"
        )
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or EXPORTERS[0]
    if exporter not in EXPORTERS:
        raise ConfigurationError(f"OTEL_TRACES_EXPORTER = {exporter!r}: set it to one of {', '.join(EXPORTERS)}")
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable) or PROTOCOL
        if exporter == "otlp" and protocol != PROTOCOL:
            raise ConfigurationError(f"{variable} = {protocol!r}: set it to {PROTOCOL!r}, the one that is spoken here")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def start(instance: str) -> Tracing:
    """Tracing as the environment describes it.

    Raises:
        ConfigurationError: see `check_tracing`.
    """
    check_tracing(True)
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or EXPORTERS[0]
    return Tracing(instance, None if exporter == "none" else _processor(exporter))


def _processor(exporter: str) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    sink: SpanExporter
    if exporter == "console":
        sink = ConsoleSpanExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        sink = OTLPSpanExporter()
    return BatchSpanProcessor(sink)


def written(context: SpanContext) -> str:
    """A trace context as its header; empty for one that is no context."""
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def read_sampled(traceparent: str) -> SpanContext | None:
    """The context in a header, if its trace is one that is recorded."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or not int(match[3], 16) & _SAMPLED:
        return None
    from opentelemetry.trace import SpanContext, TraceFlags

    context = SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=TraceFlags(_SAMPLED))
    return context if context.is_valid else None

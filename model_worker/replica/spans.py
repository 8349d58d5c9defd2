"""The spans of a model process: one for each batch that it has computed, and one for each request in it.

Owns their names and how they hang together. A request's `forward` belongs to the request's own trace. A `batch` serves
several traces: it belongs to that of the request that came first, is linked to every request it served, and each
`forward` is linked to it. Of requests whose traces are not recorded nothing is told. Refuses to measure: the stages do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry import context, trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode

from model_worker.replica.jobs import Job
from shared.tracing import Tracing, read_sampled


class ReplicaSpans:
    """Tells them. Main thread only; sending is done on a thread of the library's."""

    def __init__(self, tracing: Tracing, slot: str, model: str) -> None:
        self._tracer = tracing.tracer
        self.close = tracing.close
        self._attributes = {"headwaiter.slot": slot, "headwaiter.model": model}

    def batch(self, jobs: Sequence[Job], started_s: float, ended_s: float, error: str = "") -> None:
        """One forward, and the streams that it began; `error` is why it has failed. Times are of `perf_counter`."""
        traced = [(job, parent) for job in jobs if (parent := read_sampled(job.traceparent)) is not None]
        if not traced:
            return
        now_ns, now_s = time.time_ns(), time.perf_counter()
        started_ns, ended_ns = (now_ns - int((now_s - moment_s) * 1e9) for moment_s in (started_s, ended_s))
        batch = self._tracer.start_span(
            "batch",
            context=_below(traced[0][1]),
            links=[Link(parent) for _, parent in traced],
            start_time=started_ns,
            attributes={
                **self._attributes,
                "headwaiter.batch_size": len(jobs),
                "headwaiter.batch_cost": max(job.cost for job in jobs) * len(jobs),
            },
        )
        if error:
            batch.set_status(Status(StatusCode.ERROR, error))
        batch.end(ended_ns)
        for job, parent in traced:
            self._forward(job, parent, started_ns, ended_ns, [Link(batch.get_span_context())])

    def steps(self, job: Job) -> None:
        """One item of a continuous batch, which has just ended. Its steps have followed one another."""
        parent = read_sampled(job.traceparent)
        if parent is not None:
            ended_ns = time.time_ns()
            self._forward(job, parent, ended_ns - int(job.forward_ms * 1e6), ended_ns, ())

    def _forward(self, job: Job, parent: SpanContext, started_ns: int, ended_ns: int, links: Sequence[Link]) -> None:
        forward = self._tracer.start_span(
            "forward",
            context=_below(parent),
            links=links,
            start_time=started_ns,
            attributes={
                **self._attributes,
                "headwaiter.attempt": job.attempt,
                "headwaiter.batch_size": job.batch_size,
                "headwaiter.steps": job.steps or 1,
            },
        )
        forward.end(ended_ns)


def _below(parent: SpanContext) -> context.Context:
    return trace.set_span_in_context(NonRecordingSpan(parent))

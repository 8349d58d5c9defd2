"""The spans of each side by themselves, with the library's own exporter in memory; and that nothing of it is there
where nobody traces."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from frontend.pending import Answer
from frontend.spans import FrontSpans
from frontend.visits import Visit, Visits
from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.forward_stage import Progress
from model_worker.replica.host_stages import Limits
from model_worker.replica.jobs import Job
from model_worker.replica.spans import ReplicaSpans
from model_worker.replica.stages import Stages
from model_worker.runtimes.base import Model
from shared import tracing, values
from shared.errors import ConfigurationError
from shared.messages import ChunkHeader, ItemResult, RequestId, Timings
from shared.tracing import Tracing
from tests.command_line import ECHO, headwaiter, only_line, write_config
from tests.stub_models import Quiet
from tests.topology import ROOT

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/models/m",
    "scheme": "http",
    "http_version": "1.1",
    "server": ("127.0.0.1", 8080),
    "client": ("127.0.0.1", 50000),
    "query_string": b"key=hidden",
}


@pytest.fixture
def memory() -> Iterator[tuple[Tracing, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    started = Tracing("test", SimpleSpanProcessor(exporter))
    yield started, exporter
    started.close()


def visited(started: Tracing, headers: dict[bytes, bytes], status: int = 200, **answers: Any) -> Visit:
    visits = Visits(log_requests=False, spans=FrontSpans(started))
    visit = visits.begin(SCOPE, "/models/{name}", "an id", headers)
    if answers:
        visit.answered([Answer(1, Timings(**answers), "m/0", 2)], asked_ns=1)
    visits.end(visit, "m", status, 0.5, 10)
    return visit


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_span_of_a_request_follows_the_conventions_for_servers(memory: tuple[Tracing, InMemorySpanExporter]) -> None:
    started, exporter = memory
    visit = visited(started, {b"traceparent": PARENT.encode(), b"user-agent": b"x"}, queue_ms=1.0, batch_size=4)
    spans = by_name(exporter)
    request, queue = spans["POST /models/{name}"], spans["queue"]
    assert request.kind is SpanKind.SERVER
    assert request.parent
    assert (request.context.trace_id, request.parent.span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    assert visit.traceparent == f"00-{'a' * 32}-{request.context.span_id:016x}-01"
    assert request.attributes
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["user_agent.original"] == "x"
    assert (request.attributes["server.port"], request.attributes["headwaiter.attempt"]) == (8080, 2)
    assert "hidden" not in str(request.to_json())
    assert queue.parent
    assert queue.parent.span_id == request.context.span_id
    assert (queue.start_time, queue.end_time) == (1, 1_000_001)


@pytest.mark.parametrize("broken", [b"", b"00-xyz", b"00-" + b"0" * 32 + b"-" + b"b" * 16 + b"-01"])
def test_request_without_a_good_context_begins_a_trace_of_its_own(
    broken: bytes, memory: tuple[Tracing, InMemorySpanExporter]
) -> None:
    started, exporter = memory
    visited(started, {b"traceparent": broken})
    (request,) = exporter.get_finished_spans()
    assert request.parent is None


@pytest.mark.parametrize(
    ("status", "code", "attributes"),
    [
        (500, StatusCode.ERROR, {"http.response.status_code": 500, "error.type": "500"}),
        (404, StatusCode.UNSET, {"http.response.status_code": 404}),
        (499, StatusCode.UNSET, {"error.type": "client_gone"}),
    ],
)
def test_only_what_is_the_servers_fault_is_an_error(
    status: int, code: StatusCode, attributes: dict[str, Any], memory: tuple[Tracing, InMemorySpanExporter]
) -> None:
    started, exporter = memory
    visited(started, {}, status)
    (request,) = exporter.get_finished_spans()
    assert request.status.status_code is code
    assert request.attributes
    assert attributes.items() <= request.attributes.items()
    assert ("http.response.status_code" in request.attributes) == (status != 499)


class Outlet:
    def result(self, job: Job, result: ItemResult, frames: object) -> None:
        """Nobody waits for it."""

    def chunk(self, chunk: ChunkHeader, frames: object) -> None:
        """Nobody waits for it."""

    def flush(self) -> None:
        """Nothing is held back."""

    def dying(self, reason: str) -> None:
        raise AssertionError(reason)


def leave(code: ReplicaExit, reason: str, error: BaseException | None = None) -> NoReturn:
    raise AssertionError(reason)


def test_retried_batch_has_a_span_for_each_forward(memory: tuple[Tracing, InMemorySpanExporter]) -> None:
    started, exporter = memory

    class Grumpy(Quiet):
        def forward(self, items: Any) -> Any:
            if "bad" in items:
                raise ValueError("bad")
            return items

    compute(Grumpy(), ReplicaSpans(started, "m/0", "m"), ["good", "bad"])
    batches = [span for span in exporter.get_finished_spans() if span.name == "batch"]
    # Both together, and then one by one.
    assert [(len(batch.links), batch.status.status_code) for batch in batches] == [
        (2, StatusCode.ERROR),
        (1, StatusCode.UNSET),
        (1, StatusCode.ERROR),
    ]
    assert [batch.status.description for batch in batches if batch.status.description] == ["ValueError"] * 2


def compute(model: Model, spans: ReplicaSpans, inputs: list[object]) -> None:
    stages = Stages(model, Limits(0, 8), Outlet(), Progress(), leave, spans)
    jobs = [
        Job(
            id=RequestId(number.to_bytes(16, "big")),
            attempt=1,
            operation="predict",
            stream=False,
            deadline_s=1e12,
            payload=values.pack([value, {}]),
            traceparent=f"00-{number:032x}-{number:016x}-01",
        )
        for number, value in enumerate(inputs, start=1)
    ]
    stages.submit(jobs)
    stages.end()
    stages.serve()


def test_end_does_not_wait_for_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000000")
        monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
        monkeypatch.setattr(tracing, "FLUSH_S", 0.05)
        started = tracing.start("test")
        started.tracer.start_span("a").end()
        closing = threading.Thread(target=started.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()


def test_nothing_of_the_library_is_loaded_where_nobody_traces(tmp_path: Path) -> None:
    config = write_config(tmp_path, ECHO)
    # FastAPI itself may import the library's interface, which does nothing.
    code = (
        "import json, sys, model_worker.replica.process\n"
        "from frontend.app import create_app\n"
        "create_app()\n"
        "ours = ('opentelemetry.sdk', 'opentelemetry.exporter', 'frontend.spans', 'model_worker.replica.spans')\n"
        "print(json.dumps([name for name in sys.modules if name.startswith(ours)]))"
    )
    variables = os.environ | {"HEADWAITER_CONFIG": str(config)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_tracing_without_its_packages_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "exporter" in name else found(name))
    with pytest.raises(ConfigurationError, match=r"no opentelemetry\.exporter\S+: install 'headwaiter\[tracing\]'"):
        tracing.check_tracing(True)
    tracing.check_tracing(False)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "one of otlp, console, none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/"),
    ],
)
def test_variable_that_asks_for_what_is_not_there_is_refused(
    variable: str, value: str, words: str, tmp_path: Path
) -> None:
    write_config(tmp_path, ECHO, tracing={"enabled": True}, http={"port": 0})
    done = headwaiter("plan", cwd=tmp_path, variables={variable: value})
    assert done.returncode == 78
    line = only_line(done.stderr)
    assert f"{variable} = {value!r}" in line
    assert words in line

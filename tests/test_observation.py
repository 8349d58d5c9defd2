"""What a real service tells of its requests, over the real wire: spans to a collector, and lines in its logs."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.collector import CollectedSpan, Collector, collector
from tests.topology import Service, wait_for

KEY = "s3cret-key"
SECRET = "the-dark-secret-of-the-sender"
SERVER = 2  # opentelemetry.proto: SPAN_KIND_SERVER
ERROR = 2  # opentelemetry.proto: STATUS_CODE_ERROR
TIMINGS = ("queue_ms", "prepare_ms", "forward_ms", "finish_ms", "hop_ms")
MODELS: list[dict[str, Any]] = [
    {"name": "quiet", "model": "tests.stub_models:Quiet", "device": "cpu"},
    # Waits until it has three.
    {"name": "trio", "model": "tests.stub_models:Quiet", "device": "cpu", "max_batch_size": 3, "max_wait_ms": 30_000},
    {"name": "counting", "model": "tests.stub_models:Counting", "device": "cpu"},
    {"name": "obedient", "model": "tests.obedient_model:Obedient", "device": "cpu"},
]


@dataclass(frozen=True)
class Observed:
    service: Service
    collector: Collector

    def ask(
        self, model: str, inputs: object, *, trace_id: str = "", sampled: bool = True, path: str = "", **body: object
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": trace_id or secrets.token_hex(16)}
        if trace_id:
            headers["traceparent"] = f"00-{trace_id}-{'b' * 16}-{'01' if sampled else '00'}"
        content: object = {"inputs": inputs, **body} if not path else inputs
        return self.service.http.post(path or f"/models/{model}", json=content, headers=headers)

    def line(self, request_id: str) -> dict[str, Any]:
        """What the front's log says of a request."""

        def find() -> dict[str, Any] | None:
            lines = [json.loads(line) for line in self.service.log("front.log").splitlines() if request_id in line]
            return next((line for line in lines if line["event"] == "request_ended"), None)

        return wait_for(find, "the request has its line")

    def spans(self, trace_id: str, name: str, count: int = 1) -> list[CollectedSpan]:
        return wait_for(
            lambda: found if len(found := self.collector.of(trace_id, name)) >= count else None,
            f"{count} spans {name!r} arrive",
        )


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    with collector() as collected, pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("OTEL_")]:
            patch.delenv(variable)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
        sections: dict[str, dict[str, Any]] = {
            "server": {"parallel_loads": 4},
            "http": {"api_keys": [KEY], "routers": ["tests.own_router:router"]},
            "logging": {"requests": True, "format": "json"},
            "tracing": {"enabled": True},
        }
        with Service(MODELS, workers=1, **sections) as service:
            yield Observed(service.wait_ready(), collected)


# --- spans -----------------------------------------------------------------------------------------------------------


def test_trace_of_a_request_goes_on_from_its_sender_to_the_model_process(observed: Observed) -> None:
    trace = secrets.token_hex(16)
    assert observed.ask("quiet", SECRET, trace_id=trace).status_code == 200
    (request,) = observed.spans(trace, "POST /models/{name}")
    (queue,), (forward,), (batch,) = (observed.spans(trace, name) for name in ("queue", "forward", "batch"))
    assert request.parent_id == "b" * 16
    assert {span.parent_id for span in (queue, forward, batch)} == {request.span_id}
    assert batch.links == [(trace, request.span_id)]
    assert forward.links == [(trace, batch.span_id)]
    assert request.start_ns <= queue.start_ns <= queue.end_ns <= request.end_ns
    assert request.start_ns <= forward.start_ns <= forward.end_ns <= request.end_ns
    assert request.kind == SERVER
    expected = {
        "http.request.method": "POST",
        "http.route": "/models/{name}",
        "http.response.status_code": 200,
        "url.path": "/models/quiet",
        "url.scheme": "http",
        "headwaiter.model": "quiet",
        "headwaiter.slot": "quiet/0",
        "headwaiter.attempt": 1,
        "headwaiter.batch_size": 1,
    }
    assert expected.items() <= request.attributes.items()
    assert {span.resource["service.name"] for span in (request, batch)} == {"headwaiter"}
    assert request.resource["deployment.environment.name"] == "tests"
    assert batch.resource["service.instance.id"] == "quiet/0-1"
    assert SECRET not in str([vars(span) for span in observed.collector.of(trace)])


def test_batch_is_one_span_that_is_linked_to_every_request_it_served(observed: Observed) -> None:
    traces = [secrets.token_hex(16) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda trace: observed.ask("trio", 1, trace_id=trace, sampled=trace != traces[2]), traces)
        assert [answer.status_code for answer in answers] == [200] * 3
    requests = [observed.spans(trace, "POST /models/{name}")[0] for trace in traces[:2]]
    forwards = [observed.spans(trace, "forward")[0] for trace in traces[:2]]
    (batch,) = [batch for trace in traces[:2] for batch in observed.collector.of(trace, "batch")]
    assert sorted(batch.links) == sorted((request.trace_id, request.span_id) for request in requests)
    assert batch.attributes["headwaiter.batch_size"] == 3
    for forward in forwards:
        assert forward.links == [(batch.trace_id, batch.span_id)]
        assert forward.attributes["headwaiter.batch_size"] == 3
    assert not observed.collector.of(traces[2]), "its sender does not record it"


def test_continuous_batch_tells_of_each_item_how_long_its_steps_took(observed: Observed) -> None:
    trace = secrets.token_hex(16)
    assert observed.ask("counting", {"to": 4}, trace_id=trace, stream=True).status_code == 200
    (forward,) = observed.spans(trace, "forward")
    assert forward.attributes["headwaiter.steps"] == 4
    assert not observed.collector.of(trace, "batch")


def test_what_an_own_route_asks_belongs_to_its_own_span(observed: Observed) -> None:
    trace = secrets.token_hex(16)
    answered = observed.ask("", [1, 2], trace_id=trace, path="/twice")
    assert (answered.status_code, answered.json()) == (200, [1, 2])
    (request,) = observed.spans(trace, "POST /twice")
    assert {forward.parent_id for forward in observed.spans(trace, "forward", 2)} == {request.span_id}


@pytest.mark.parametrize(
    ("inputs", "status", "error", "span_status"),
    [({"do": "nothing of the kind"}, 422, "invalid_input", 0), ({"do": "fail"}, 500, "model_error", ERROR)],
)
def test_failed_request_says_how_in_its_span_and_its_line(
    observed: Observed, inputs: object, status: int, error: str, span_status: int
) -> None:
    trace = secrets.token_hex(16)
    assert observed.ask("obedient", inputs, trace_id=trace).status_code == status
    (request,) = observed.spans(trace, "POST /models/{name}")
    assert request.attributes["http.response.status_code"] == status
    assert request.attributes["error.type"] == error
    assert request.status == span_status
    line = observed.line(trace)
    assert (line["status"], line["error"], line["trace_id"]) == (status, error, trace)


# --- lines -----------------------------------------------------------------------------------------------------------


def test_line_of_a_request_names_it_its_model_its_slot_and_where_its_time_went(observed: Observed) -> None:
    request_id = secrets.token_hex(16)
    assert observed.ask("quiet", 1, trace_id=request_id).status_code == 200
    line = observed.line(request_id)
    expected = {
        "level": "info",
        "program": "frontend",
        "request_id": request_id,
        "method": "POST",
        "route": "/models/{name}",
        "model": "quiet",
        "status": 200,
        "slot": "quiet/0",
        "attempt": 1,
        "batch_size": 1,
        "body_bytes": len(b'{"inputs":1}'),
    }
    assert expected.items() <= line.items()
    assert all(line[name] >= 0 for name in TIMINGS)
    assert sum(line[name] for name in TIMINGS) <= line["total_ms"] + 0.1
    assert "error" not in line


def test_stream_and_own_route_have_lines_as_well(observed: Observed) -> None:
    stream, own = secrets.token_hex(16), secrets.token_hex(16)
    assert observed.ask("counting", {"to": 2}, trace_id=stream, stream=True).status_code == 200
    assert observed.line(stream)["slot"] == "counting/0"
    assert observed.ask("", [1], trace_id=own, path="/twice").status_code == 200
    line = observed.line(own)
    assert (line["route"], line["status"], line["model"]) == ("/twice", 200, "")


def test_neither_keys_nor_inputs_are_ever_in_a_line(observed: Observed) -> None:
    ids = [secrets.token_hex(16) for _ in range(5)]
    observed.ask("obedient", {"do": "echo", "value": SECRET}, trace_id=ids[0])
    observed.ask("obedient", SECRET, trace_id=ids[1])
    observed.ask("obedient", {"do": SECRET}, trace_id=ids[2])
    observed.ask("", [SECRET], trace_id=ids[3], path=f"/twice?key={SECRET}")
    headers = {"Authorization": f"Bearer {SECRET}", "X-Request-Id": ids[4]}
    assert observed.service.http.post("/models/obedient", json={}, headers=headers).status_code == 401
    lines = [observed.line(request_id) for request_id in ids]
    assert [line["status"] for line in lines] == [200, 422, 422, 422, 401]
    for log in ("front.log", "server.log"):
        text = observed.service.log(log)
        assert SECRET not in text
        assert KEY not in text

"""The promises hold below other people's middleware too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from tests.fronts import Front, raw_request
from tests.stub_broker import Piece, Request, Step, StubBroker, echo, silent
from tests.topology import wait_for


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    front = Front()
    try:
        yield front.start_bare_uvicorn(app="tests.wrapped_app:app")
    finally:
        front.__exit__(None, None, None)


@pytest.fixture(scope="module")
def broker(front: Front) -> Iterator[StubBroker]:
    with StubBroker(front.run_dir) as started:
        front.wait_ready()
        yield started


def test_answer_passes(front: Front, broker: StubBroker) -> None:
    broker.behave = echo
    answer = front.ask("x")
    assert (answer.status_code, answer.json()["inputs"], answer.headers["x-wrapped"]) == (200, "x", "yes")


def test_client_that_leaves_is_still_noticed(front: Front, broker: StubBroker) -> None:
    broker.behave = silent
    with front.connect() as connection:
        connection.sendall(raw_request("/models/echo", b'{"inputs": 1}', "X-Request-Id: gone"))
        wait_for(lambda: broker.requests[-1:] and broker.requests[-1].header.request_id == "gone", "it is there")
    wait_for(lambda: broker.requests[-1].header.id in broker.cancelled, "the server is told", 5)


def test_first_event_of_a_stream_is_not_held_back(front: Front, broker: StubBroker) -> None:
    broker.behave = lambda request: [Piece(value="first")]
    with front.client.stream("POST", f"{front.url}/models/echo", json={"inputs": 1, "stream": True}) as answer:
        assert "first" in next(answer.iter_text())


def test_client_that_leaves_a_stream_is_still_noticed(front: Front, broker: StubBroker) -> None:
    def slow(request: Request) -> Sequence[Step]:
        return [Piece(0.02, index, index) for index in range(100)]

    broker.behave = slow
    with front.client.stream("POST", f"{front.url}/models/echo", json={"inputs": 1, "stream": True}) as answer:
        next(answer.iter_text())
    wait_for(lambda: broker.requests[-1].header.id in broker.cancelled, "the server is told", 5)


def test_too_large_body_is_still_refused_in_our_words(front: Front, broker: StubBroker) -> None:
    answer = front.post("/models/echo", content=iter([b" " * 2**20] * 40))
    assert (answer.status_code, json.loads(answer.content)["error_type"]) == (413, "too_large")

"""Pages of other origins: what a browser is told of which of them may read answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.fronts import Front
from tests.stub_broker import Piece, StubBroker, echo

OWN, OTHER = "https://chat.example.org", "https://elsewhere.example.org"
KEY = "s3cret-key"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with Front(cors_origins=[OWN], api_keys=[KEY]) as started, StubBroker(started.run_dir) as broker:
        broker.behave = echo
        yield started.wait_ready()


def ask(front: Front, origin: str, key: str = KEY) -> httpx.Response:
    return front.ask("x", headers={"Origin": origin, "Authorization": f"Bearer {key}"})


def preflight(front: Front, origin: str, path: str = "/models/echo") -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    return front.client.options(front.url + path, headers=headers)


def test_a_page_of_a_listed_origin_may_read_the_answer(front: Front) -> None:
    answer = ask(front, OWN)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, OWN)
    assert "access-control-allow-credentials" not in answer.headers
    assert {"retry-after", "x-request-id"} <= set(answer.headers["access-control-expose-headers"].lower().split(", "))


def test_a_browser_that_asks_first_needs_no_key(front: Front) -> None:
    for path in ("/models/echo", "/v1/chat/completions"):
        answer = preflight(front, OWN, path)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, OWN)
        assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].split(", "))


def test_refusals_can_be_read_too(front: Front) -> None:
    answer = ask(front, OWN, key="wrong")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, OWN)


def test_pages_of_other_origins_are_told_nothing(front: Front) -> None:
    assert "access-control-allow-origin" not in ask(front, OTHER).headers
    assert preflight(front, OTHER).status_code == 400


def test_without_the_key_in_the_configuration_there_is_no_middleware_and_no_such_header() -> None:
    with Front() as front, StubBroker(front.run_dir) as broker:
        broker.behave = echo
        front.wait_ready()
        answer = ask(front, OWN)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert preflight(front, OWN).status_code == 405


def test_any_page_may_ask_where_the_star_says_so_and_streams_come_piece_by_piece() -> None:
    with Front(cors_origins=["*"]) as front, StubBroker(front.run_dir) as broker:
        broker.behave = lambda request: [Piece(value="first")]
        front.wait_ready()
        question = {"inputs": 1, "stream": True}
        with front.client.stream(
            "POST", f"{front.url}/models/echo", json=question, headers={"Origin": OTHER}
        ) as answer:
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "first" in next(answer.iter_text())

"""The hot routes' way around FastAPI's layers: what comes out is what comes out of the way through them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.fronts import Front, read_response
from tests.stub_broker import StubBroker, model_state
from tests.topology import free_port, wait_for

MODELS = (model_state("echo"), model_state("a/b"), model_state("two words"), model_state("é"))
BODY = b'{"inputs": 1}'
PATHS = [
    "/models/echo",
    "/models/echo/",
    "/models/echo?inputs=2&stream=true",
    "/models/echo?",
    "/models/echo%3Fx",
    "/models/%65cho",
    "/models/a/b",
    "/models/a%2Fb",
    "/models/two%20words",
    "/models/two+words",
    "/models/%C3%A9",
    "/models/%ff",
    "/models/%",
    "/models/ech%00o",
    "/models//echo",
    "//models/echo",
    "/models/../models/echo",
    "/models/./echo",
    "/models/",
    "/models",
    "/MODELS/echo",
    "/modelsecho",
    "/",
    "//",
    "/?a=b",
    "/ai",
    "/ai/",
    "/ai/models/echo",
    "/ai/ai/models/echo",
    "/livez",
    "/none",
    "http://elsewhere/models/echo",
]
METHODS = ["POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "post", "BREW"]


@contextmanager
def fronts(*flags: str) -> Iterator[tuple[Front, Front]]:
    """One that goes the short way, and one that middleware sends the long way."""
    with ExitStack() as stack:
        started = []
        for app in ("frontend.app:app", "tests.wrapped_app:app"):
            front = stack.enter_context(unstarted()).start_bare_uvicorn(*flags, app=app)
            stack.enter_context(StubBroker(front.run_dir, models=MODELS))
            started.append(front.wait_ready())
        yield started[0], started[1]


@contextmanager
def unstarted() -> Iterator[Front]:
    front = Front(models=tuple(model.name for model in MODELS[:1]))
    try:
        yield front
    finally:
        front.__exit__(None, None, None)


@pytest.fixture(scope="module", params=[(), ("--root-path", "/ai")], ids=["at the root", "below a proxy's path"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Front, Front]]:
    with fronts(*request.param) as both:
        yield both


def ask(front: Front, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, what the headers say about the answer, and its body."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(BODY)}\r\n\r\n"
    with front.connect() as connection:
        connection.sendall(head.encode() + BODY)
        if method == "HEAD":
            answer = b""
            while part := connection.recv(65536):
                answer += part
            return int(answer.split()[1]), {}, answer.partition(b"\r\n\r\n")[2]
        status, headers, body = read_response(connection)
    return status, {name: headers.get(name, "") for name in ("content-type", "allow", "connection")}, body


@pytest.mark.parametrize("path", PATHS)
def test_short_way_and_long_way_give_the_same_answer(pair: tuple[Front, Front], path: str) -> None:
    short, long = pair
    for method in METHODS:
        assert ask(short, method, path) == ask(long, method, path), method


def test_comparison_is_of_two_ways_and_answers_are_real(pair: tuple[Front, Front]) -> None:
    for front, is_long in zip(pair, (False, True), strict=True):
        answer = front.post("/models/a/b", content=BODY)
        assert (answer.status_code, answer.json()["model"]) == (200, "a/b")
        assert ("x-wrapped" in answer.headers) is is_long


def test_front_answers_below_a_path_it_is_mounted_at() -> None:
    with unstarted() as front, StubBroker(front.run_dir, models=MODELS):
        port = free_port()
        front.spawn([sys.executable, "-m", "uvicorn", "tests.mounted_app:app", "--port", str(port)])
        front.url = f"http://127.0.0.1:{port}"
        wait_for(lambda: front.probe("/ai/readyz") == 200, "it is ready")
        for path, model in (("/ai/models/echo", "echo"), ("/ai/models/a%2Fb?x=1", "a/b")):
            status, _, body = ask(front, "POST", path)
            assert (status, json.loads(body)["model"]) == (200, model)
        assert ask(front, "GET", "/ai/models/a/b")[0] == 200
        assert ask(front, "POST", "/models/echo")[0] == 404
        status, headers, body = ask(front, "PUT", "/ai/models/echo")
        assert (status, headers["allow"]) == (405, "GET, HEAD, POST"), body

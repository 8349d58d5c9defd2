"""Routes of the user's own in the front workers: guarded as all others, and refused before anything is started."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.__main__ import ExitCode
from shared.errors import Code
from tests.command_line import ECHO, document, headwaiter, only_line, write_config
from tests.fronts import Front
from tests.stub_broker import Answer, Fail, Piece, Request, Step, StubBroker
from tests.topology import ROOT, children, toml_value, wait_for

KEY = "s3cret-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SHOP = '''
"""A router with a bit of everything."""
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from headwaiter import ModelClient, headwaiter_client

Client = Annotated[ModelClient, Depends(headwaiter_client)]


@asynccontextmanager
async def lifespan(app):
    yield {"opened": True}


router = APIRouter(prefix="/shop", tags=["shop"], lifespan=lifespan)


@router.post("/ask")
async def ask(body: dict, client: Client, request: Request):
    """Asks twice."""
    answers = [await client.predict("echo", body["inputs"]) for _ in range(2)]
    return {"answers": answers, "opened": request.state.opened}


@router.post("/size")
async def size(request: Request):
    return len(await request.body())


@router.get("/pieces")
async def pieces(client: Client):
    return StreamingResponse((str(piece) async for piece in client.stream("echo", 1)), media_type="text/plain")


@router.get("/broken")
async def broken():
    raise RuntimeError("a bug of the shop's")


nested = APIRouter(prefix="/deep")


@nested.get("/{number:int}")
async def number(number: int):
    return number


router.include_router(nested)
'''


def behave(request: Request) -> list[Step]:
    if request.inputs == "fail":
        return [Fail(code=Code.OVERLOADED, message="too much", retry_after_ms=2000)]
    if request.header.stream:
        return [Piece(value=request.inputs), Answer()]
    return [Answer(value=request.inputs)]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Front, StubBroker]]:
    front = Front(routers=["shop:router"], api_keys=[KEY], body_bytes_max=4096)
    (front.directory / "shop.py").write_text(SHOP)
    with front, StubBroker(front.run_dir, behave=behave) as broker:
        front.wait_ready()
        yield front, broker


def ask(front: Front, body: object, **headers: str) -> httpx.Response:
    return front.post("/shop/ask", json=body, headers=HEADERS | headers)


def test_route_asks_over_the_workers_own_connection_with_what_its_caller_has_said(
    served: tuple[Front, StubBroker],
) -> None:
    front, broker = served
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    said = {"X-Request-Id": "mine", "X-Request-Priority": "-3", "X-Request-Timeout": "7", "traceparent": trace}
    answered = ask(front, {"inputs": [1]}, **said)
    assert answered.json() == {"answers": [[1], [1]], "opened": True}
    assert answered.headers["x-request-id"] == "mine"
    for request in broker.requests[-2:]:
        header = request.header
        assert (header.request_id, header.priority, header.traceparent) == ("mine", -3, trace)
        assert 0 < header.remaining_ms <= 7000
    assert front.get("/shop/pieces", headers=HEADERS).text == "1"
    assert front.get("/shop/deep/17", headers=HEADERS).json() == 17
    assert broker.front_count == 1, "no other connection was opened"


def test_route_is_guarded_as_every_other(served: tuple[Front, StubBroker]) -> None:
    front, broker = served
    before = len(broker.requests)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        refused = front.post("/shop/ask", json={"inputs": 1}, headers=headers)
        assert (refused.status_code, refused.json()["error_type"]) == (401, "unauthorized")
    too_large = front.post("/shop/size", content=b"x" * 5000, headers=HEADERS)
    assert (too_large.status_code, too_large.json()["error_type"]) == (413, "too_large")
    bomb = front.post("/shop/size", content=gzip.compress(b"x" * 5000), headers=HEADERS | {"Content-Encoding": "gzip"})
    assert bomb.status_code == 413
    packed = front.post(
        "/shop/size", content=gzip.compress(b"x" * 4000), headers=HEADERS | {"Content-Encoding": "gzip"}
    )
    assert packed.json() == 4000
    assert ask(front, {"inputs": 1}, **{"X-Request-Timeout": "never"}).status_code == 400
    assert len(broker.requests) == before


def test_what_goes_wrong_in_a_route_is_answered_in_headwaiters_words(served: tuple[Front, StubBroker]) -> None:
    front, _ = served
    refused = ask(front, {"inputs": "fail"})
    assert (refused.status_code, refused.json()) == (429, {"error": "too much", "error_type": "overloaded"})
    assert refused.headers["retry-after"] == "2"
    assert ask(front, [1]).json()["error_type"] == "invalid_input"
    broken = front.get("/shop/broken", headers=HEADERS)
    assert (broken.status_code, broken.json()["error_type"]) == (500, "internal")
    wait_for(lambda: "a bug of the shop's" in front.log(), "the log has the cause")
    wrong = front.get("/shop/ask", headers=HEADERS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert front.get("/shop/deep/x", headers=HEADERS).status_code == 404


def test_route_is_described_and_counted(served: tuple[Front, StubBroker]) -> None:
    front, _ = served
    description = front.get("/openapi.json").json()
    assert {path for path in description["paths"] if path.startswith("/shop")} == {
        *("/shop/ask", "/shop/size", "/shop/pieces", "/shop/broken", "/shop/deep/{number}")
    }
    operation = description["paths"]["/shop/ask"]["post"]
    assert (operation["description"], operation["security"]) == ("Asks twice.", [{"bearer": []}])
    assert "/models/echo" in description["paths"]
    assert front.get("/shop/deep/17").status_code == 401
    assert [ask(front, {"inputs": inputs}).status_code for inputs in (1, "fail")] == [200, 429]
    metrics = front.get("/metrics").text
    for code, route in (("401", "/shop/deep/{number}"), ("200", "/shop/ask"), ("429", "/shop/ask")):
        assert f'headwaiter_requests_total{{code="{code}",model="",route="{route}"}}' in metrics


# --- what is refused -------------------------------------------------------------------------------------------------

ROUTER = "from fastapi import APIRouter, FastAPI\nrouter = APIRouter()\n"
POST = "@router.post('{}')\nasync def route(): ...\n"
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # The module, the attribute that is asked for, and what the one line has to say.
    "imports_torch": (f"{ROUTER}import torch", "router", ("it imports torch", "class of your own")),
    "imports_nothing": ("import no_such_package", "router", ("there is no module 'no_such_package'",)),
    "raises": ("raise ValueError('a bug\\nin two lines')", "router", ("ValueError: a bug in two lines",)),
    "is_no_python": ("def", "router", ("SyntaxError",)),
    "lacks_it": (ROUTER, "ruoter", ("defines no 'ruoter' (did you mean 'router'?)",)),
    "is_an_application": (f"{ROUTER}app = FastAPI()", "app", ("is a FastAPI", "has to be a fastapi.APIRouter")),
    "is_empty": (ROUTER, "router", ("has no routes",)),
    "takes_a_models_path": (
        ROUTER + POST.format("/models/{name}/explain"),
        "router",
        ("POST /models/{name}/explain", "collides with headwaiter's own /models/"),
    ),
    "takes_everything": (ROUTER + POST.format("/{anything:path}"), "router", ("POST /{anything:path}", "collides")),
    "takes_a_probe": (ROUTER + POST.format("/x").replace("post('/x')", "get('/livez')"), "router", ("GET /livez",)),
    "takes_a_number_of_a_chat": (ROUTER + POST.format("/v1/{n:int}"), "router", ()),
    "has_a_socket": (f"{ROUTER}@router.websocket('/ws')\nasync def ws(): ...", "router", ("WebSocket", "/ws")),
    "has_a_mount": (f"{ROUTER}{POST.format('/x')}router.mount('/m', FastAPI())", "router", ("has a Mount",)),
    "does_without_torch": (
        f"{ROUTER}try:\n    import torch\nexcept ImportError:\n    torch = None\n{POST.format('/x')}",
        "router",
        (),
    ),
}
TRY_ALL = """
import json, os, sys
from pathlib import Path
from frontend.app import create_app
from shared.config import Config
from shared.errors import ConfigurationError

said = {}
for name in json.loads(sys.argv[1]):
    os.environ["HEADWAITER_HTTP__ROUTERS"] = json.dumps([name])
    try:
        create_app(Config.load())
        said[name] = ""
    except ConfigurationError as error:
        said[name] = str(error)
print(json.dumps({"said": said, "torch": "torch" in sys.modules}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the application says to each of the cases: in a process of its own, because this one has torch loaded."""
    directory = tmp_path_factory.mktemp("routers")
    config = write_config(directory, ECHO, top={"run_dir": directory / "run", "python_path": [directory, ROOT]})
    for module, (code, _, _) in CASES.items():
        (directory / f"{module}.py").write_text(code)
    names = [f"{module}:{attribute}" for module, (_, attribute, _) in CASES.items()] + ["is_not_there:router"]
    command = [sys.executable, "-c", TRY_ALL, json.dumps(names)]
    variables = os.environ | {"HEADWAITER_CONFIG": str(config), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", CASES)
def test_router_that_cannot_be_served_is_refused_in_one_line(module: str, said: dict[str, Any]) -> None:
    _, attribute, words = CASES[module]
    line = said["said"][f"{module}:{attribute}"]
    assert "\n" not in line
    assert bool(line) == bool(words), line
    for text in words:
        assert text in line


def test_module_that_is_not_there_is_named_with_where_it_was_looked_for(said: dict[str, Any]) -> None:
    line = said["said"]["is_not_there:router"]
    assert "there is no module 'is_not_there'" in line
    assert "python_path" in line
    assert not said["torch"], "what was refused is not there either"


def test_nothing_is_half_started_with_a_router_that_cannot_be_served() -> None:
    front = Front(routers=["gone:router"])
    try:
        process = front.spawn([sys.executable, "-P", "-m", "frontend"])
        assert process.wait(30) == ExitCode.CONFIGURATION
        line = only_line(front.log())
        assert line.startswith("headwaiter: http.routers: 'gone:router': there is no module 'gone'")
        assert not children(process.pid)
        assert not (front.run_dir / "metrics").exists()
    finally:
        front.__exit__(None, None, None)


@pytest.mark.parametrize("command", ["check", "serve"])
def test_command_finds_the_wrong_router_before_anything_starts(command: str, tmp_path: Path) -> None:
    write_config(tmp_path, ECHO, http={"port": 0, "routers": ["gone:router"]})
    arguments = ["check", "--json"] if command == "check" else ["serve"]
    done = headwaiter(*arguments, cwd=tmp_path)
    assert done.returncode == 78
    if command == "check":
        (told,) = [finding for finding in document(done) if finding["point"] == "routers"]
        assert told["outcome"] == "fail"
        text = told["detail"]
    else:
        text = only_line(done.stderr)
    assert "http.routers: 'gone:router': there is no module 'gone'" in text


@pytest.mark.parametrize("router", ["shop", "shop:", ":router", "shop/router:x", "shop:a.b"])
def test_name_of_a_router_has_one_form(router: str, tmp_path: Path) -> None:
    (tmp_path / "headwaiter.toml").write_text(f"[http]\nrouters = [{toml_value(router)}]\n")
    done = headwaiter("config", cwd=tmp_path)
    assert done.returncode == 78
    assert "my_module:router" in only_line(done.stderr)

"""What a hostile client cannot do: forge or colour a log, read a file, import a module, nest or list without end."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests import tiny_models
from tests.topology import ROOT, Service, wait_for

KEY = "s3cret-key-of-this-test"
ADMIN_KEY = "s3cret-admin-key-of-this-test"
FORGED = "\r\n2026-01-31 10:00:00.000 ERROR model_worker forged_event \x1b[31mred\x1b[0m \u202eright-to-left\x00"
# A time, a level, a program and an event, or a line that belongs to a traceback or to a refusal.
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [A-Z]+ \S+ [\w.]+( |$)|    |headwaiter: ")


@contextmanager
def obedient_service() -> Iterator[Service]:
    model = {"name": "m", "model": "tests.obedient_model:Obedient", "device": "cpu"}
    with Service([model], http={"api_keys": [KEY], "admin_keys": [ADMIN_KEY]}, logging={"level": "debug"}) as started:
        started.http.headers["Authorization"] = f"Bearer {KEY}"
        yield started.wait_ready()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with obedient_service() as started:
        yield started


@pytest.fixture
def doomed_service() -> Iterator[Service]:
    """For a test that ends its model process so often that the others would find the model given up."""
    with obedient_service() as started:
        yield started


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tiny_models.save(tmp_path_factory.mktemp("model"), "BertModel", positions=64)
    with Service([{"name": "m", "model": str(directory), "task": "embedding", "device": "cpu"}]) as started:
        yield started.wait_ready()


def test_nothing_a_client_sends_forges_a_line_of_the_log_or_reaches_a_terminal(doomed_service: Service) -> None:
    service = doomed_service
    raw = f"mine{FORGED}"
    failed = service.ask("m", {"do": "fail", "text": FORGED})
    assert failed.status_code == 500
    service.ask("m", {"do": raw})
    service.ask("m", {"do": "echo"}, parameters={raw: raw})
    service.ask(quote(f"nobody{FORGED}"), {"do": "echo"})
    # No client library sends such headers, so they are written as they are. Escapes end the connection; bytes that a
    # terminal takes for the beginning of one, or for a change of direction, arrive.
    for name in (b"X-Request-Id", b"X-Amzn-Trace-Id", b"traceparent", b"X-Request-Timeout", b"Authorization"):
        assert _post(service, b"%s: mine\x1b[31m" % name, {"do": "echo"}).startswith(b"HTTP/1.1 400 ")
        _post(service, b"%s: mine\x9b31m\xe2\x80\xae" % name, {"do": "exit", "label": name.decode()})
    wait_for(lambda: "request_poisoned request_id=mine31m" in service.log("server.log"), "one is told by its id")
    for log in ("server.log", "front.log"):
        text = (service.directory / log).read_bytes().decode()
        lines = text.split("\n")[:-1]
        assert [line for line in lines if not LINE.match(line)] == []
        assert not re.search(r"^\S+ \S+ \S+ \S+ forged_event", text, re.MULTILINE)
        assert all(line.isprintable() for line in lines)


def _post(service: Service, header: bytes, inputs: object) -> bytes:
    """The whole answer to a request with this header line."""
    body = json.dumps({"inputs": inputs}).encode()
    head = b"POST /models/m HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.sendall(head % (KEY.encode(), header) + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"\x1b" not in answer
    return answer


def test_no_key_is_in_any_log_or_answer_or_command_line(service: Service) -> None:
    for header in (KEY, f"Bearer {KEY}x", f"Basic {KEY}"):
        refused = service.http.get("/status", headers={"Authorization": header})
        assert refused.status_code == 401
        assert KEY not in refused.text
    administration = service.http.post("/admin/resume", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert administration.status_code == 200, administration.text
    assert service.server is not None
    pids = (service.server.pid, *service.front_workers(), *service.model_pids().values())
    shown = [service.http.get(path).text for path in ("/status", "/openapi.json")] + [administration.text]
    shown += [service.log("server.log"), service.log("front.log")]
    shown += [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    for key in (KEY, ADMIN_KEY):
        assert not [text for text in shown if key in text]


@pytest.mark.parametrize(("depth", "status"), [(40, 200), (80, 422), (900, 422), (5_000, 400), (1_000_000, 400)])
def test_nesting_is_bounded(service: Service, depth: int, status: int) -> None:
    value = "[" * depth + "]" * depth
    body = '{"inputs": {"do": "echo", "value": ' + value + "}}"
    answer = service.http.post("/models/m", content=body)
    assert answer.status_code == status, answer.text[:200]
    assert service.ask("m", {"do": "echo", "value": 1}).json() == 1


def test_numbers_of_any_length_cost_no_time(service: Service) -> None:
    for number in ("9" * 100_000, "1e" + "9" * 1000, "-" + "0." + "3" * 100_000):
        answer = service.http.post("/models/m", content='{"inputs": {"do": "echo", "value": ' + number + "}}")
        assert answer.status_code in (200, 400, 422)


def test_more_inputs_than_one_request_may_have_are_refused_before_they_are_looked_at(embedding: Service) -> None:
    refused = embedding.ask("m", ["a"] * 200_000)
    assert (refused.status_code, refused.json()["error_type"]) == (422, "invalid_input")
    assert "200000 entries" in refused.json()["error"]
    assert len(embedding.ask("m", ["a", "b"]).json()) == 2


@pytest.mark.parametrize("name", ["trust_remote_code", "model", "revision", "torch_dtype", "device", "cache_dir"])
def test_a_request_sets_nothing_that_belongs_to_the_configuration(embedding: Service, name: str) -> None:
    refused = embedding.ask("m", "text", parameters={name: True})
    assert refused.status_code == 422
    assert name in refused.json()["error"]


@pytest.mark.parametrize(
    "name", ["../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/m", "tests.obedient_model:Obedient", "$(id)"]
)
def test_a_models_name_in_a_path_is_looked_up_and_nothing_else(service: Service, name: str) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        body = b'{"inputs": 1}'
        head = f"POST /models/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"root:" not in answer


def test_no_code_of_ours_runs_a_shell_or_text_or_a_pickle() -> None:
    forbidden = (
        "shell=True",
        "os.system(",
        "os.popen(",
        "eval(",
        "exec(",
        "marshal",
        "yaml.load",
        "weights_only=False",
    )
    for folder in ("shared", "frontend", "model_worker"):
        for file in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\w+\.eval\(\)", "", file.read_text())
            for words in forbidden:
                assert words not in text, f"{file.relative_to(ROOT)} has {words}"
            for call in re.findall(r"torch\.load\([^)]*\)", text):
                assert "weights_only=True" in call


def test_no_limit_of_time_is_measured_by_the_wall_clock() -> None:
    """So that a clock that is set, or jumps, changes the times in the log and nothing else."""
    clocks = re.compile(r"\btime\.time\(|datetime\.now\(|datetime\.utcnow\(|CLOCK_REALTIME")
    # What OpenAI's answers call `created` is the time of day, and is only shown.
    dated = ROOT / "frontend/surfaces/openai"
    for folder in ("shared", "frontend", "model_worker"):
        for file in (ROOT / folder).rglob("*.py"):
            if dated in file.parents:
                continue
            assert not clocks.search(file.read_text()), f"{file.relative_to(ROOT)} asks for the time of day"


def test_weights_that_are_no_pickles_come_first(tmp_path: Path) -> None:
    """Where both are there the pickled ones are not even opened."""
    directory = tiny_models.save(tmp_path / "model", "BertModel", positions=64)
    (directory / "pytorch_model.bin").write_bytes(b"no pickle, and no archive either")
    model: dict[str, Any] = {"name": "m", "model": str(directory), "task": "embedding", "device": "cpu"}
    with Service([model]) as service:
        service.wait_ready()
        assert service.ask("m", "text").status_code == 200

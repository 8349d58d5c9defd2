"""The applications of `examples/after` under the servers that people use, its routes in the front workers, and that all
answer as the applications before them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from examples import made_models
from tests.serving import descendants
from tests.topology import ROOT, Service, free_port, stop, wait_for

SERVERS = {
    "uvicorn": ["uvicorn", "--workers", "4", "--port"],
    "gunicorn": ["gunicorn", "--workers", "2", "--worker-class", "uvicorn_worker.UvicornWorker", "--bind"],
}
PROMPTS = ["The owner of the red hat is", "A waiter carries"]
PAIR = {"question": "Who owns the red hat?", "context": "The owner of the red hat is Kate. It is on the table."}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("made")
    shapes = {"gpt": "gpt-neo", "qa": "roberta-qa"}
    return {name: made_models.make(shape, directory / name) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def service(made: dict[str, Path]) -> Iterator[Service]:
    tasks = {"gpt": "text-generation", "qa": "question-answering"}
    models = [
        {"name": name, "model": directory, "task": tasks[name], "device": "cpu"} for name, directory in made.items()
    ]
    routers = {"routers": ["examples.after.routes:router"]}
    with Service(models, server={"parallel_loads": 2}, http=routers) as service:
        yield service.wait_ready()


@contextmanager
def running(server: str, module: str, service: Service) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """One application under one server."""
    port = free_port()
    address = str(port) if server == "uvicorn" else f"127.0.0.1:{port}"
    command = [sys.executable, "-m", *SERVERS[server], address, f"examples.after.{module}:app"]
    # gunicorn keeps a control socket below the home directory.
    variables = {"HEADWAITER_CONFIG": str(service.config_file), "HOME": str(service.directory)}
    log = service.directory / f"{server}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=stream, stderr=stream)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, headers={"Connection": "close"}) as client:
            wait_for(lambda: process.poll() is not None or answers(client), f"{server} answers")
            assert process.poll() is None, log.read_text()
            yield client, process
    except BaseException:
        print(log.read_text())
        raise
    finally:
        stop(process)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def before(module: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """The application as it was written, in this process."""
    monkeypatch.setenv("MODEL", str(model))
    return TestClient(importlib.import_module(f"examples.before.{module}").app)


def post(client: Any, path: str, body: object) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("server", SERVERS)
def test_workers_of_an_application_answer_as_its_pipeline_did_and_hold_no_model(
    server: str, service: Service, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [{"text": prompt, "max_new_tokens": 6} for prompt in PROMPTS]
    old = before("generation", made["gpt"], monkeypatch)
    expected = [post(old, "/generate", body) for body in bodies]
    pids = service.model_pids()
    with running(server, "generation", service) as (client, process):
        for _ in range(4):
            assert [post(client, "/generate", body) for body in bodies] == expected
        refused = client.post("/generate", json={"text": "hat " * 400})
        assert (refused.status_code, refused.json()["error_type"]) == (422, "invalid_input")
        family = [process.pid, *descendants(process.pid)]
        assert len(family) > 2
        assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in family)
        assert stop(process) == 0
    assert service.model_pids() == pids
    assert {slot["loads"] for slot in service.slots().values()} == {1}


@pytest.mark.parametrize("module", ["answers", "blocking"])
def test_question_answering_finds_what_the_application_before_found(
    module: str, service: Service, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not fork: this process has threads, and that is what the story is about.
    monkeypatch.setenv("START_METHOD", "spawn")
    expected = post(before("answers", made["qa"], monkeypatch), "/answer", PAIR)
    with running("uvicorn", module, service) as (client, process):
        answer = post(client, "/answer", PAIR)
        assert {key: answer[key] for key in ("answer", "start", "end")} == {
            key: expected[key] for key in ("answer", "start", "end")
        }
        assert answer["score"] == pytest.approx(expected["score"], rel=1e-3)
        refused = client.post("/answer", json={"question": "", "context": "x"})
        assert (refused.status_code, refused.json()["error_type"]) == (422, "invalid_input")
        assert stop(process) == 0


def test_routes_in_the_front_workers_answer_as_both_applications_did(
    service: Service, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"text": PROMPTS[0], "max_new_tokens": 6}
    assert post(service.http, "/generate", body) == post(
        before("generation", made["gpt"], monkeypatch), "/generate", body
    )
    monkeypatch.setenv("START_METHOD", "spawn")
    expected = post(before("answers", made["qa"], monkeypatch), "/answer", PAIR)
    answer = post(service.http, "/answer", PAIR)
    assert {key: answer[key] for key in ("answer", "start", "end")} == {
        key: expected[key] for key in ("answer", "start", "end")
    }
    refused = service.http.post("/generate", json={"text": "hat " * 400})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "invalid_input")
    assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in service.front_workers())


def test_application_whose_tree_has_a_folder_called_shared_is_told_what_to_do(tmp_path: Path, service: Service) -> None:
    code = (ROOT / "examples" / "after" / "answers.py").read_text()
    (tmp_path / "shop" / "shared").mkdir(parents=True)
    (tmp_path / "shop" / "shared" / "__init__.py").write_text("PRICE = 3\n")
    (tmp_path / "shop" / "app.py").write_text(f"from shop.shared import PRICE\n{code}")
    variables = os.environ | {"HEADWAITER_CONFIG": str(service.config_file)}

    def start(where: Path, target: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", f"import uvicorn.importer as i; i.import_from_string('{target}')"]
        return subprocess.run(command, cwd=where, env=variables, capture_output=True, text=True)

    # Started in the folder itself, its `shared` comes before headwaiter's.
    (tmp_path / "shop" / "flat.py").write_text(code)
    refused = start(tmp_path / "shop", "flat:app")
    assert refused.returncode == 1
    assert "headwaiter needs its own package 'shared'" in refused.stderr.splitlines()[-1]
    # As a part of a package it is another name.
    answered = start(tmp_path, "shop.app:app")
    assert answered.returncode == 0, answered.stderr

"""A real service under an operator's orders, given as commands and over HTTP, while clients go on asking."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from model_worker.commands.exits import Exit
from tests.command_line import ECHO, headwaiter
from tests.topology import Service, alive, journal_lines, wait_for

ADMIN_KEY = "s3cret-admin-key"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operator") / "journal"


@pytest.fixture(scope="module")
def service(journal: Path) -> Iterator[Service]:
    # A load takes so long that the command which waits for it looks at it more than once.
    echo = {**ECHO, "options": {"load_seconds": 0.6}}
    other = {**ECHO, "name": "other", "options": {"journal": str(journal)}}
    with Service([echo, other], http={"admin_keys": [ADMIN_KEY]}) as started:
        yield started.wait_ready()


@contextmanager
def asking(service: Service) -> Iterator[list[httpx.Response]]:
    """Four clients that ask without a pause, from the first answer on, until the end of the block."""
    answers: list[httpx.Response] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            answers.append(service.ask("echo", {"do": "square", "number": 7}))

    clients = [threading.Thread(target=keep_asking) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        wait_for(lambda: answers, "they ask")
        yield answers
        before = len(answers)
        wait_for(lambda: len(answers) > before + len(clients), "they ask on")
    finally:
        stop.set()
        for client in clients:
            client.join()


def order(service: Service, path: str, **options: object) -> httpx.Response:
    return service.http.post(f"/admin/{path}", headers=ADMIN, **options)  # type: ignore[arg-type]


def test_a_reload_under_load_costs_nobody_an_answer(service: Service) -> None:
    before = service.slots()["echo/0"]
    with asking(service) as answers:
        completed = headwaiter("reload", "echo", cwd=service.directory)
        assert completed.returncode == Exit.OK, completed.stderr
    after = service.slots()["echo/0"]
    assert after["incarnation"] > before["incarnation"]
    assert not alive(before["pid"])
    assert {(answer.status_code, answer.text) for answer in answers} == {(200, "49")}
    *changes, told = completed.stdout.splitlines()
    assert told == "model 'echo' is loaded afresh: echo/0"
    assert changes
    assert all(line.startswith("echo/0 on cpu: ") for line in changes), changes


def test_a_model_grows_and_shrinks_over_http_without_costing_an_answer(service: Service) -> None:
    with asking(service) as answers:
        grown = order(service, "models/echo/scale", json={"replicas": 2})
        assert grown.status_code == 200, grown.text
        assert "2 replicas" in grown.json()["text"]
        pids = [pid for name, pid in service.model_pids().items() if name.startswith("echo/")]
        assert len(pids) == 2
        shrunk = order(service, "models/echo/scale", json={"replicas": 1})
        assert shrunk.status_code == 200, shrunk.text
    left = [pid for name, pid in service.model_pids().items() if name.startswith("echo/")]
    assert [pid for pid in pids if alive(pid)] == left
    assert {(answer.status_code, answer.text) for answer in answers} == {(200, "49")}


def test_a_drain_lets_requests_finish_and_nobody_in_until_resume(service: Service, journal: Path) -> None:
    running = service.ask_later("other", {"do": "sleep", "seconds": 1.5, "label": "drained"})
    wait_for(lambda: any(line[3] == "drained" for line in journal_lines(journal, "forwarded")), "it runs")
    told = order(service, "drain?timeout_s=0.1")
    assert (told.status_code, told.json()["outcome"]) == (202, "goes_on")
    assert not running.done()
    wait_for(lambda: service.probe("/readyz") == 503, "the fronts know")
    refused = service.ask("echo", {"do": "echo"})
    assert (refused.status_code, refused.json()["error_type"]) == (503, "draining")
    # What was ordered is under way already, and says so, or has ended by now.
    again = headwaiter("drain", cwd=service.directory)
    assert again.returncode in (Exit.OK, Exit.REFUSED), again.stderr
    assert running.result(30).status_code == 200
    assert headwaiter("drain", cwd=service.directory).returncode == Exit.OK
    assert headwaiter("status", cwd=service.directory).returncode == Exit.NOT_READY
    resumed = headwaiter("resume", cwd=service.directory)
    assert (resumed.returncode, resumed.stdout) == (Exit.OK, "the model server lets requests in again\n")
    wait_for(lambda: service.probe("/readyz") == 200, "the fronts know")
    assert service.ask("echo", {"do": "echo", "value": 1}).text == "1"


def test_a_model_is_unloaded_and_loaded_again(service: Service) -> None:
    pid = service.model_pids()["other/0"]
    gone = service.http.post("/v2/repository/models/other/unload", headers=ADMIN)
    assert (gone.status_code, gone.content) == (200, b"")
    assert not alive(pid)
    assert service.ask("other", {"do": "echo"}).status_code == 503
    assert service.ask("echo", {"do": "echo"}).status_code == 200
    refused = order(service, "models/other/reload")
    assert (refused.status_code, refused.json()["error_type"]) == (409, "refused")
    assert headwaiter("reload", "other", cwd=service.directory).returncode == Exit.REFUSED
    loaded = headwaiter("load", "other", cwd=service.directory)
    assert (loaded.returncode, loaded.stdout.splitlines()[-1]) == (Exit.OK, "model 'other' is loaded: 1 replica")
    assert service.ask("other", {"do": "echo", "value": 1}).text == "1"


def test_what_does_not_fit_is_refused_and_changes_nothing(service: Service) -> None:
    pids = service.model_pids()
    refused = headwaiter("scale", "echo", "5000", cwd=service.directory)
    assert refused.returncode == Exit.REFUSED
    assert re.match(r"headwaiter: replicas = 5000 is more than", refused.stderr)
    assert service.model_pids() == pids

"""The clients where people put them: in an application with several workers, in forked ones, in a plain script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.stub_broker import StubBroker
from tests.topology import ROOT, Service, free_port, stop, wait_for

DOCUMENT = (ROOT / "docs" / "client.md").read_text()


def example(name: str) -> str:
    """A program of the document."""
    found = re.search(rf"```python\n# {name}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found, f"docs/client.md has no {name}"
    return found[1]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    model = {"name": "obedient", "model": "tests.obedient_model:Obedient", "device": "cpu"}
    with Service([model]) as started:
        yield started.wait_ready()


def environment(service: Service) -> dict[str, str]:
    return os.environ | {"HEADWAITER_CONFIG": str(service.config_file), "PYTHONPATH": str(ROOT)}


def counts(service: Service) -> tuple[int, int]:
    """Front workers, and clients in other programs."""
    status = service.status()
    return status["fronts"], status["clients"]


def test_example_application_answers_from_each_of_its_workers(service: Service) -> None:
    with tempfile.TemporaryDirectory(prefix="hw-") as directory, httpx.Client(timeout=30) as http:
        Path(directory, "app.py").write_text(example("app.py"))
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", "app:app", "--workers", "4", "--port", str(port)]
        log = Path(directory, "log")
        with log.open("wb") as output:
            program = subprocess.Popen(command, cwd=directory, env=environment(service), stdout=output, stderr=output)
        try:
            wait_for(lambda: log.read_text().count("Application startup complete") == 4, "four workers")
            url = f"http://127.0.0.1:{port}"

            def ask(path: str, inputs: object) -> httpx.Response:
                return http.post(url + path, json={"inputs": inputs}, headers={"Connection": "close"})

            # They are told apart from our front's worker.
            wait_for(lambda: counts(service) == (1, 4), "each has a client of its own")
            for number in range(40):
                assert ask("/ask/obedient", {"do": "echo", "value": number}).json() == number
            refused = ask("/ask/obedient", "no such thing")
            assert (refused.status_code, refused.json()["error_type"]) == (422, "invalid_input")
            assert ask("/ask/none", 1).status_code == 404
            assert ask("/tell/obedient", {"do": "echo", "value": "all of it"}).text == "all of it"
        finally:
            stop(program)
        assert "Traceback" not in log.read_text()


def test_example_script_prints_what_it_should(service: Service) -> None:
    command = [sys.executable, "-W", "always", "-c", example("batch.py"), "obedient"]
    done = subprocess.run(command, env=environment(service), capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["1", "4950", "whole", "invalid_input"], "")


def test_client_made_before_a_fork_is_opened_by_each_child_and_their_ids_differ() -> None:
    code = """
import asyncio, os, sys
from headwaiter import ModelClient
client = ModelClient(sys.argv[1])

async def work():
    async with client:
        answers = await asyncio.gather(*(client.predict("echo", [os.getpid(), n]) for n in range(300)))
        assert [answer["inputs"] for answer in answers] == [[os.getpid(), n] for n in range(300)]

children = []
for _ in range(3):
    if not (child := os.fork()):
        asyncio.run(work())
        os._exit(0)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""
    with tempfile.TemporaryDirectory(prefix="hw-") as directory, StubBroker(Path(directory, "run")) as broker:
        command = [sys.executable, "-c", code, str(Path(directory, "run"))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stdout == "[0, 0, 0]\n", done.stderr
        assert len({request.header.id for request in broker.requests}) == 900


def test_client_opened_before_a_fork_is_refused_in_the_child() -> None:
    code = """
import asyncio, os, sys
from headwaiter import ModelClient

async def work():
    async with ModelClient(sys.argv[1]) as client:
        await client.predict("echo", 1)
        if not (child := os.fork()):
            for use in (lambda: client.submit("echo", 1), client.open):
                try:
                    use()
                except Exception as error:
                    print(type(error).__name__, error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print((await client.predict("echo", 2))["inputs"])

asyncio.run(work())
"""
    with tempfile.TemporaryDirectory(prefix="hw-") as directory, StubBroker(Path(directory, "run")):
        command = [sys.executable, "-c", code, str(Path(directory, "run"))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    *refusals, parent = done.stdout.splitlines()
    assert (len(refusals), parent) == (2, "2"), done.stderr
    assert all(re.match("UsageError .* opened by process .* inherited by fork", line) for line in refusals)

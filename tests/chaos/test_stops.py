"""Stops, asked for in every way: in order, with the code that says so, within their bounds, and without remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from model_worker.commands.exits import Exit
from tests.chaos.test_nothing_is_left import GRACE_S, PHASES, running, started, streaming
from tests.command_line import COMMAND, ECHO, environment, write_config
from tests.serving import descendants, short_directory
from tests.topology import Service, alive, free_port, wait_for

COUNTING = {"name": "count", "model": "tests.stub_models:Counting", "device": "cpu", "options": {"step_s": 0.01}}
OBEDIENT = {"name": "m", "model": "tests.obedient_model:Obedient", "device": "cpu"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("program", ["server", "front"])
def test_a_program_told_to_stop_finishes_what_it_has_and_exits_with_0(program: str, number: signal.Signals) -> None:
    with Service([OBEDIENT, COUNTING], server={"grace_s": GRACE_S}, http={"grace_s": GRACE_S}) as service:
        service.wait_ready()
        process = service.server if program == "server" else service.front
        assert process is not None
        pids = [process.pid, *descendants(process.pid)]
        short = service.ask_later("m", {"do": "square", "number": 12, "seconds": 0.5})
        body = {"inputs": {"to": 10**9}, "stream": True}
        with service.http.stream("POST", "/models/count", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "data: 1"
            wait_for(lambda: service.slots()["m/0"]["held"], "the other request runs")
            process.send_signal(number)
            # What can end within the grace does; what cannot is told so, in its own stream.
            assert short.result(30).json() == 144
            assert [line for line in lines if line][-2] == "event: error"
        assert process.wait(30) == 0
        wait_for(lambda: not any(alive(pid) for pid in pids), "nothing is left", 5)


@pytest.mark.parametrize("phase", [running, streaming])
def test_serve_told_to_stop_is_bounded_by_its_graces_whatever_its_models_do(phase: object) -> None:
    assert callable(phase)
    with started(PHASES[phase]) as (service, gate):
        phase(service, gate)
        pids = service.everything()
        service.signal(signal.SIGTERM)
        assert service.wait_end() == Exit.OK
        assert not any(alive(pid) for pid in pids)
        assert service.left_files() == []
        # The web workers first, while models still answer; then the models.
        log = service.error
        assert log.index("front_stopped") < log.index("server_stopped")


def test_model_process_told_to_stop_directly_is_replaced(tmp_path: Path) -> None:
    with Service([OBEDIENT]) as service:
        before = service.wait_ready().model_pids()["m/0"]
        os.kill(before, signal.SIGTERM)
        wait_for(lambda: service.model_pids()["m/0"] not in (0, before), "another holds the slot")
        assert service.ask("m", {"do": "square", "number": 3}).json() == 9


@pytest.mark.skipif(shutil.which("unshare") is None or os.getuid() != 0, reason="only root makes a namespace")
def test_serve_as_the_first_process_of_a_container_reaps_and_stops() -> None:
    with short_directory() as directory:
        port = free_port()
        write_config(directory, ECHO, http={"port": port, "workers": 1, "grace_s": GRACE_S})
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *COMMAND, "serve"]
        with (directory / "log").open("wb") as log:
            outside = subprocess.Popen(command, cwd=directory, env=environment(), stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: _is_ready(url, outside), "it is ready", 60)
            [first] = [pid for pid in descendants(outside.pid) if b"\0serve\0" in _command(pid)]
            assert _inner_pid(first) == 1
            # What a model has started and left becomes a child of the first process, who has to bury it.
            helpers = httpx.post(f"{url}/models/echo", json={"inputs": {"do": "helpers"}}).json()
            assert len(helpers) == 2
            inner = {_inner_pid(pid): pid for pid in descendants(first)}
            [replica] = {_parent(inner[helper]) for helper in helpers}
            os.kill(replica, signal.SIGKILL)
            wait_for(lambda: not any(Path(f"/proc/{inner[helper]}").exists() for helper in helpers), "they are buried")
            wait_for(lambda: _is_ready(url, outside), "it is ready again", 60)
            pids = descendants(outside.pid)
            os.kill(first, signal.SIGTERM)
            assert outside.wait(60) == Exit.OK
            assert not any(alive(pid) for pid in pids)
            assert "stopped" in (directory / "log").read_text().splitlines()[-1]
        finally:
            # --kill-child: the namespace goes with it.
            outside.kill()
            outside.wait()


def _is_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _inner_pid(pid: int) -> int:
    """The number of a process in its own namespace."""
    return int(_status(pid, "NSpid").split()[-1])


def _parent(pid: int) -> int:
    return int(_status(pid, "PPid"))


def _status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2] for line in lines if line.startswith(f"{name}:"))

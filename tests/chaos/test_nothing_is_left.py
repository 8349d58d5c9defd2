"""Whoever is killed in whatever phase: nothing of ours is left a moment later, and the next start works."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import write_config
from tests.serving import Serving, closing, short_directory
from tests.topology import alive, children, free_port, wait_for

# What is promised for the way out once nothing is waited for any more, after the grace that the configuration gives.
GONE_S = 5.0
GRACE_S = 1
ENDLESS = 10**9


def loading(service: Serving, gate: Path) -> None:
    wait_for(lambda: ": loading" in service.out, "it loads", 60)


def warming(service: Serving, gate: Path) -> None:
    wait_for(lambda: "warming" in service.out, "it is warmed up", 60)


def running(service: Serving, gate: Path) -> None:
    service.wait_ready()
    _send(service, {"inputs": {"do": "hold_gil", "seconds": 600}})
    wait_for(lambda: _is_busy(service), "it runs")


def streaming(service: Serving, gate: Path) -> None:
    service.wait_ready()
    stream = _send(service, {"inputs": {"to": ENDLESS}, "stream": True})
    while b"data: 3" not in stream.recv(4096):
        pass


def draining(service: Serving, gate: Path) -> None:
    running(service, gate)
    service.signal(signal.SIGTERM)
    service.wait_for_words("SIGTERM: stopping")


PHASES: dict[Callable[[Serving, Path], None], dict[str, Any]] = {
    loading: {"model": "tests.stub_models:SlowLoader", "options": {"release": "GATE"}},
    warming: {"model": "tests.stub_models:Sleeper", "options": {"examples": ["GATE"]}},
    running: {"model": "tests.obedient_model:Obedient"},
    streaming: {"model": "tests.stub_models:Counting", "options": {"step_s": 0.01}},
    draining: {"model": "tests.obedient_model:Obedient"},
}


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        (loading, "serve"),
        (warming, "supervisord"),
        (running, "serve"),
        (streaming, "supervisord"),
        (draining, "supervisord"),
        (draining, "model_worker"),
    ],
)
def test_nothing_is_left_whoever_is_killed_in_whatever_phase(
    phase: Callable[[Serving, Path], None], victim: str
) -> None:
    with started(PHASES[phase]) as (service, gate):
        phase(service, gate)
        pids = service.everything()
        os.kill(pid_of(service, victim), signal.SIGKILL)
        service.wait_end()
        wait_for(lambda: not any(alive(pid) for pid in pids), f"all of {pids} are gone", GONE_S + 3 * GRACE_S)
        assert not _open_by_anybody(service.run_directory)
        gate.touch()
        with closing(Serving(cwd=service.cwd)) as following:
            following.wait_ready()
            assert following.everything()


@contextmanager
def started(model: dict[str, Any]) -> Iterator[tuple[Serving, Path]]:
    with short_directory() as directory:
        gate = directory / "gate"
        options = json.loads(json.dumps(model.get("options", {})).replace("GATE", str(gate)))
        write_config(
            directory,
            {"name": "m", "device": "cpu", **model, "options": options},
            http={"port": free_port(), "workers": 1, "grace_s": GRACE_S},
            server={"grace_s": GRACE_S, "stop_timeout_s": GRACE_S},
        )
        with closing(Serving(cwd=directory)) as service:
            yield service, gate


def pid_of(service: Serving, victim: str) -> int:
    match victim:
        case "serve":
            return service.process.pid
        case "supervisord":
            return service.supervisord
    # supervisord does not say so while it stops.
    mark = f"\0-m\0{victim}\0".encode()
    programs = [pid for pid in children(service.supervisord) if mark in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return programs[0]


def _send(service: Serving, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody waits for here."""
    host, _, port = service.wait_ready().removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /models/m HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    connection.sendall(head + content)
    _OPEN.append(connection)
    return connection


# Open for as long as the test, which must end without anybody closing them.
_OPEN: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _close_connections() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def _is_busy(service: Serving) -> bool:
    """Whether the model process is in its endless call: it holds the GIL, so it uses no processor and says nothing."""
    [pid] = service.model_pids()
    names = {Path(f"/proc/{pid}/task/{task}/wchan").read_text() for task in os.listdir(f"/proc/{pid}/task")}
    return any("nanosleep" in name for name in names)


def _open_by_anybody(directory: Path) -> list[str]:
    """Descriptors and mappings of live processes below the directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                found += [str(file) for file in (process / "fd").iterdir() if str(directory) in os.readlink(file)]
            except OSError:
                continue
    return found

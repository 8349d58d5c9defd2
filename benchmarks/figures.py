"""Prints the figures that the documents quote: `python -m benchmarks.figures`. Takes about two minutes.

Everything is measured in one run on one machine, so ratios mean something and absolute times mean little. Talks to
loopback only, and ends what it starts.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.inputs import ECHO_BODY
from benchmarks.load_generator import echo_round
from benchmarks.machine import family, pss_mib
from benchmarks.systems import ECHO_MODEL, MINILM_MODEL, PEERS, minilm_directory
from tests.topology import ROOT, Service, free_port, stop, wait_for

ROUNDS = 3
SECONDS_PER_ROUND = 4
CONNECTIONS = 64

SLEEPER = {"name": "m", "model": "tests.obedient_model:Obedient", "device": "cpu"}


@contextmanager
def uvicorn(target: str, workers: int, **environment: str) -> Iterator[tuple[int, str]]:
    """A plain uvicorn with the usual arguments; gives its pid and base URL."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        target,
        "--port",
        str(port),
        "--workers",
        str(workers),
        "--no-access-log",
        "--app-dir",
        str(PEERS),
    ]
    if target.endswith("()"):
        command[3] = target.removesuffix("()")
        command.append("--factory")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: _answers(url), f"{target} answers", 120)
            yield process.pid, url
        finally:
            stop(process)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/docs").status_code == 200
    except httpx.TransportError:
        return False


def front_import() -> None:
    code = (
        "import time; t = time.perf_counter(); import frontend.app; import sys; "
        "print(time.perf_counter() - t, 'torch' in sys.modules)"
    )
    took = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.split()
        for _ in range(ROUNDS)
    ]
    print(f"front worker import: {statistics.median(float(t[0]) for t in took):.2f} s, torch imported: {took[0][1]}")


def memory() -> None:
    text = "The quick brown fox jumps over the lazy dog"
    with Service([MINILM_MODEL], workers=4) as service:
        service.wait_ready(120)
        for _ in range(40):
            assert service.ask("minilm", text).status_code == 200
        assert service.server
        assert service.front
        workers = service.front_workers()
        print(f"front worker PSS: {max(map(pss_mib, workers)):.0f} MiB (largest of {len(workers)})")
        mapped = any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (*workers, service.server.pid))
        print(f"libtorch mapped in a front worker or the model server: {mapped}")
        ours = sum(pss_mib(pid) for root in (service.server.pid, service.front.pid) for pid in family(root))
    with uvicorn("plain:minilm()", 4, MINILM_DIRECTORY=minilm_directory()) as (pid, url):
        with httpx.Client() as client:
            for _ in range(40):
                client.post(url + "/models/minilm", json={"inputs": text}, headers={"Connection": "close"}, timeout=120)
        recipe = sum(pss_mib(member) for member in family(pid))
    print(f"4 fronts + 1 MiniLM process: {ours:.0f} MiB; ", end="")
    print(f"recipe with 4 workers: {recipe:.0f} MiB; ratio {recipe / ours:.2f}")


def livez_under_load() -> None:
    with Service([SLEEPER]) as service:
        service.wait_ready()
        running = service.ask_later("m", {"do": "hold_gil", "seconds": 10})
        took_ms = []
        end_s = time.monotonic() + 8
        while time.monotonic() < end_s:
            start_s = time.perf_counter()
            assert service.http.get("/livez").status_code == 200
            took_ms.append((time.perf_counter() - start_s) * 1000)
            time.sleep(0.005)
        assert not running.done()
        assert running.result(60).status_code == 200
    took_ms.sort()
    print(
        f"/livez while a 10 s forward holds the GIL: p99 {took_ms[int(len(took_ms) * 0.99)]:.1f} ms of {len(took_ms)}"
    )


def echo() -> None:
    ours, plain = [], []
    with Service([ECHO_MODEL], workers=2) as service, uvicorn("plain:echo", 1) as (_, url):
        port = int(url.rpartition(":")[2])
        service.wait_ready()
        for _ in range(ROUNDS):
            ours.append(_echo_rate(service.port))
            plain.append(_echo_rate(port))
    mine, theirs = statistics.median(ours), statistics.median(plain)
    print(f"echo, {CONNECTIONS} connections: headwaiter (2 fronts, whole path) {mine:.0f}/s; ", end="")
    print(f"plain FastAPI + pydantic (1 worker, no hop) {theirs:.0f}/s; ratio {mine / theirs:.2f}")


def _echo_rate(port: int) -> float:
    return echo_round(port, "/models/echo", ECHO_BODY, CONNECTIONS, SECONDS_PER_ROUND)["requests_per_s"]


def main() -> None:
    for figure in (front_import, memory, livez_under_load, echo):
        figure()


if __name__ == "__main__":
    main()

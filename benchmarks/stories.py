"""The applications of the two stories, before and after, on this machine in one run: `python -m benchmarks.stories`.

Prints answers per second, what was lost, the memory of all processes together, and how long `/health` took meanwhile.
Takes about two minutes. The models are tiny, so the times are those of the machinery around them; read rows against
each other. Each copy computes with one thread, before and after: models of this size gain nothing from a second one,
which on a machine that does other things as well makes them wait for each other. Talks to loopback only, and ends what
it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from examples.made_models import make_apart
from tests.topology import ROOT, Service, free_port, wait_for

CLIENTS = 16
# A caller that waits longer than this has lost its answer.
PATIENCE_S = 5.0
PROBE_PAUSE_S = 0.02
START_S = 120.0
GENERATE = ("/generate", {"text": "The owner of the red hat is", "max_new_tokens": 16})
ANSWER = (
    "/answer",
    {"question": "Who owns the hat?", "context": "The owner of the red hat is Kate. It is on a table."},
)


@dataclass(frozen=True, slots=True)
class Row:
    """One application under load."""

    what: str
    workers: int
    copies: int
    answered: int
    lost: int
    seconds: float
    memory_mib: float
    health_ms: list[float]
    health_lost: int
    """Probes that got no answer in time."""

    def cells(self) -> list[str]:
        took = sorted(self.health_ms)
        # A probe that was lost took longer than any that was answered.
        rank = int((len(took) + self.health_lost) * 0.99)
        p99 = f"{took[rank]:.0f} ms" if rank < len(took) else f"> {PATIENCE_S:g} s"
        return [
            self.what,
            str(self.workers),
            str(self.copies),
            f"{self.answered / self.seconds:.0f}",
            str(self.lost),
            f"{self.memory_mib:.0f} MiB",
            p99,
            str(self.health_lost),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stories", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load for each row")
    seconds: float = parser.parse_args().seconds
    out = Console(highlight=False, width=100)
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{CLIENTS} clients, {seconds:g} s each")
    table.add_column("APPLICATION")
    for heading in ("WORKERS", "COPIES", "ANSWERS/S", "LOST", "MEMORY", "/health P99", "PROBES LOST"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory(prefix="stories-") as directory:
        made = {name: make_apart(shape, Path(directory) / name) for name, shape in MODELS.items()}
        for row in measure(made, seconds):
            out.print(f"measured: {' '.join(row.cells())}", style="dim")
            table.add_row(*row.cells())
    out.print(table)


MODELS = {"gpt": "gpt-neo", "qa": "roberta-qa"}
TASKS = {"gpt": "text-generation", "qa": "question-answering"}


def measure(made: dict[str, Path], seconds: float) -> Iterator[Row]:
    for what, workers, model, request in (
        ("before.generation", 4, "gpt", GENERATE),
        ("before.answers", 1, "qa", ANSWER),
        ("before.answers", 4, "qa", ANSWER),
    ):
        with uvicorn(what, workers, {"MODEL": str(made[model]), "OMP_NUM_THREADS": "1"}) as (pid, url):
            yield asyncio.run(load(what, workers, workers, url, request, [pid], seconds))
    for what, workers, model, request in (
        ("after.generation", 4, "gpt", GENERATE),
        ("after.answers", 1, "qa", ANSWER),
        ("after.blocking", 1, "qa", ANSWER),
    ):
        entry = {"name": model, "model": made[model], "task": TASKS[model], "device": "cpu", "cores": 1}
        with Service([entry]) as service:
            service.wait_ready()
            variables = {"HEADWAITER_CONFIG": str(service.config_file)}
            with uvicorn(what, workers, variables) as (pid, url):
                # headwaiter's own front counts as well, although this application does not need it.
                pids = [pid, *(program.pid for program in (service.server, service.front) if program)]
                yield asyncio.run(load(what, workers, 1, url, request, pids, seconds))


@contextmanager
def uvicorn(module: str, workers: int, variables: dict[str, str]) -> Iterator[tuple[int, str]]:
    """`examples.{module}:app`, with all of its workers up; gives pid and base URL."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", f"examples.{module}:app", "--port", str(port), "--no-access-log"]
    with tempfile.NamedTemporaryFile("rb") as log:
        process = subprocess.Popen(
            [*command, "--workers", str(workers)],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=log.file.fileno(),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            up = b"Application startup complete"
            wait_for(
                lambda: Path(log.name).read_bytes().count(up) >= workers, f"{module} has {workers} workers", START_S
            )
            yield process.pid, f"http://127.0.0.1:{port}"
        finally:
            # An application that hangs does not stop when it is told to, nor do the children it waits for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def load(
    what: str, workers: int, copies: int, url: str, request: tuple[str, dict[str, Any]], pids: list[int], seconds: float
) -> Row:
    """Closed-loop clients and one prober, for so many seconds."""
    path, body = request
    answered = lost = health_lost = 0
    health_ms: list[float] = []
    memory_mib = 0.0
    # Each client keeps its connection, as a proxy in front would.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        with contextlib.suppress(httpx.TransportError):
            await client.post(path, json=body)
        end_s = time.monotonic() + seconds

        async def ask() -> None:
            nonlocal answered, lost
            while time.monotonic() < end_s:
                try:
                    response = await client.post(path, json=body)
                except httpx.TransportError:
                    lost += 1
                    await asyncio.sleep(PROBE_PAUSE_S)
                else:
                    answered += response.status_code == 200
                    lost += response.status_code != 200

        async def probe() -> None:
            nonlocal health_lost
            while time.monotonic() < end_s:
                start_s = time.perf_counter()
                try:
                    await client.get("/health")
                except httpx.TransportError:
                    health_lost += 1
                else:
                    health_ms.append((time.perf_counter() - start_s) * 1000)
                await asyncio.sleep(PROBE_PAUSE_S)

        async def weigh() -> None:
            nonlocal memory_mib
            await asyncio.sleep(seconds * 0.7)
            memory_mib = await asyncio.to_thread(pss_mib, pids)

        await asyncio.gather(*(ask() for _ in range(CLIENTS)), probe(), weigh())
    return Row(what, workers, copies, answered, lost, seconds, memory_mib, health_ms, health_lost)


def pss_mib(roots: list[int]) -> float:
    """Memory of the processes and all below them, shared pages counted in proportion."""
    total_kib = 0
    for root in roots:
        # Children come and go while this looks.
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
                with contextlib.suppress(OSError):
                    smaps = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                    total_kib += sum(map(int, re.findall(r"^Pss:\s+(\d+)", smaps, re.MULTILINE)))
    return total_kib / 1024


if __name__ == "__main__":
    main()

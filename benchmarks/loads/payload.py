"""Large payloads: 5 MB of bytes in, 10 MB of float32 out, between a client's process and a model process.

Compared with bare ZeroMQ sockets that pass the same bytes through the same number of processes, with a relay in C: the
kernel's copies are the same, so the ratio is what headwaiter adds. `python -m benchmarks.loads.payload relay|answer …`
are those processes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from benchmarks.run import Run
from benchmarks.summary import percentile
from frontend.client import ModelClient
from tests.topology import ROOT, Service, stop

LOAD = "payload"
CASE = "5 MB in, 10 MB out"
IN_BYTES = 5_000_000
OUT_FLOATS = 2_500_000
HEADWAITER = "headwaiter, ModelClient to model"
BARE = "bare ZeroMQ through a relay"
MODEL = {
    "name": "enlarge",
    "model": "benchmarks.models:Enlarge",
    "device": "cpu",
    "options": {"floats": OUT_FLOATS},
}


def measure(run: Run) -> None:
    image = os.urandom(IN_BYTES)
    requests = 10 if run.quick else 60
    with Service([MODEL]) as service, _bare() as socket:
        service.wait_ready()
        for number in range(1, run.rounds + 1):
            took_ms = asyncio.run(_through_headwaiter(str(service.directory / "run"), image, requests))
            run.record(LOAD, CASE, HEADWAITER, number, _values(took_ms))
            run.record(LOAD, CASE, BARE, number, _values(_through_bare(socket, image, requests)))


def _values(took_ms: list[float]) -> dict[str, float]:
    own = took_ms[len(took_ms) // 4 :]  # the first ones pay for fresh memory
    return {"p50_ms": percentile(own, 0.5), "p99_ms": percentile(own, 0.99)}


async def _through_headwaiter(run_directory: str, image: bytes, requests: int) -> list[float]:
    took_ms = []
    async with ModelClient(run_directory) as client:
        for _ in range(requests):
            start_s = time.perf_counter()
            answer = await client.predict("enlarge", image)
            took_ms.append((time.perf_counter() - start_s) * 1000)
            assert getattr(answer, "nbytes", 0) == OUT_FLOATS * 4
    return took_ms


def _through_bare(socket: zmq.Socket[bytes], image: bytes, requests: int) -> list[float]:
    took_ms = []
    for _ in range(requests):
        start_s = time.perf_counter()
        socket.send(image, copy=False)
        answer = socket.recv(copy=False)
        took_ms.append((time.perf_counter() - start_s) * 1000)
        assert len(answer.buffer) == OUT_FLOATS * 4
    return took_ms


@contextmanager
def _bare() -> Iterator[zmq.Socket[bytes]]:
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as directory:
        front, back = (f"ipc://{directory}/{name}" for name in ("front", "back"))
        base = [sys.executable, "-m", "benchmarks.loads.payload"]
        started = [
            subprocess.Popen([*base, *arguments], cwd=ROOT) for arguments in (["relay", front, back], ["answer", back])
        ]
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(front)
        try:
            yield socket
        finally:
            context.destroy(linger=0)
            for process in started:
                stop(process)


def _relay(front: str, back: str) -> None:
    context = zmq.Context()
    incoming, outgoing = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    incoming.bind(front)
    outgoing.bind(back)
    zmq.proxy(incoming, outgoing)


def _answer(back: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(back)
    answer = bytes(OUT_FLOATS * 4)
    while True:
        peer, _ = socket.recv_multipart(copy=False)
        socket.send_multipart([peer, answer], copy=False)


if __name__ == "__main__":
    if sys.argv[1] == "relay":
        _relay(*sys.argv[2:])
    else:
        _answer(*sys.argv[2:])

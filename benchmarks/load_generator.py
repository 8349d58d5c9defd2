"""Closed-loop clients: each connection sends its next request when it has the answer to the last one.

Owns two generators. `wrk` for loads whose answers take microseconds, where the generator must cost nothing; `lanes`,
an asyncio client, for loads of which each single answer is looked at. Both talk HTTP/1.1 with keep-alive to loopback.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.summary import percentile

ANSWER_TIMEOUT_S = 120.0
# What is open at the end of a window is waited for, so that it is not computed in the window of the next system.
REST_TIMEOUT_S = 30.0
_UNITS_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}


class LoadFailed(Exception):
    """A system did not answer as it should, so there is nothing to measure."""


class NoAnswer(LoadFailed):
    """Not one answer came within the window, which is no fault: the window may be short and the machine busy."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer."""

    lane: int
    body: int
    """Which of the bodies was sent."""
    sent_s: float
    took_s: float


def echo_round(port: int, path: str, body: bytes, connections: int, seconds: float) -> dict[str, float]:
    """`requests_per_s`, `p50_ms` and `p99_ms` of one round, by `wrk` where it is installed.

    Raises:
        LoadFailed: some answer was not 200, or there was none (`NoAnswer`).
    """
    if shutil.which("wrk"):
        return _wrk_round(f"http://127.0.0.1:{port}{path}", body, connections, seconds)
    exchanges = lanes(port, path, [body], [_forever(0)] * connections, seconds=seconds)
    return rates(exchanges, seconds)


def generator_name() -> str:
    return "wrk, one thread" if shutil.which("wrk") else "asyncio, one thread"


def rates(exchanges: Sequence[Exchange], seconds: float) -> dict[str, float]:
    took_ms = [exchange.took_s * 1000 for exchange in exchanges]
    if not took_ms:
        raise NoAnswer(f"no answer within {seconds:g} s")
    return {
        "requests_per_s": len(took_ms) / seconds,
        "p50_ms": percentile(took_ms, 0.5),
        "p99_ms": percentile(took_ms, 0.99),
    }


def _wrk_round(url: str, body: bytes, connections: int, seconds: float) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(f'wrk.method = "POST"\nwrk.body = [==[{body.decode()}]==]\n')
        script.write('wrk.headers["Content-Type"] = "application/json"\n')
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s", "--latency"]
        command += ["-s", script.name, url]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return read_wrk(out)


def read_wrk(text: str) -> dict[str, float]:
    """The figures in what `wrk --latency` prints.

    Raises:
        LoadFailed: it counted errors, or no answers.
    """
    found = re.search(r"Requests/sec:\s+([\d.]+)", text)
    latencies = {share: _milliseconds(text, share) for share in ("50%", "99%")}
    if found is None or "Non-2xx" in text or "Socket errors" in text or float(found[1]) == 0:
        raise LoadFailed(f"wrk says:\n{text}")
    return {"requests_per_s": float(found[1]), "p50_ms": latencies["50%"], "p99_ms": latencies["99%"]}


def _milliseconds(text: str, share: str) -> float:
    match = re.search(rf"^\s*{share}\s+([\d.]+)(us|ms|s|m)$", text, re.MULTILINE)
    if match is None:
        raise LoadFailed(f"wrk says:\n{text}")
    return float(match[1]) * _UNITS_MS[match[2]]


# --- the asyncio client ------------------------------------------------------------------------------------------


def lanes(
    port: int,
    path: str,
    bodies: Sequence[bytes],
    plan: Sequence[Iterator[int]],
    *,
    seconds: float,
    warm_up_s: float = 0.0,
) -> list[Exchange]:
    """What was answered in `seconds` after the warm-up, while one connection for each entry of `plan` kept asking.

    An entry gives the numbers of the bodies that its connection sends; several entries may be one and the same
    iterator. A connection whose entry ends stops asking. The load is steady from the end of the warm-up to the end of
    the window; what is open then is answered, and not counted.

    Raises:
        LoadFailed: some answer was not 200, or a connection broke off.
    """
    return asyncio.run(_lanes(port, path, bodies, plan, seconds, warm_up_s))


async def _lanes(
    port: int, path: str, bodies: Sequence[bytes], plan: Sequence[Iterator[int]], seconds: float, warm_up_s: float
) -> list[Exchange]:
    requests = [_request(path, body) for body in bodies]
    start_s = time.perf_counter() + warm_up_s
    end_s = start_s + seconds
    exchanges: list[Exchange] = []
    tasks = [
        asyncio.create_task(_lane(port, number, requests, entry, start_s, end_s, exchanges))
        for number, entry in enumerate(plan)
    ]
    try:
        async with asyncio.timeout(warm_up_s + seconds + REST_TIMEOUT_S):
            await asyncio.gather(*tasks)
    except TimeoutError:
        pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return exchanges


async def _lane(
    port: int,
    number: int,
    requests: Sequence[bytes],
    entry: Iterator[int],
    start_s: float,
    end_s: float,
    exchanges: list[Exchange],
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for body in entry:
            sent_s = time.perf_counter()
            if sent_s >= end_s:
                return
            writer.write(requests[body])
            await _read_answer(reader)
            now_s = time.perf_counter()
            if start_s <= now_s <= end_s:
                exchanges.append(Exchange(number, body, sent_s, now_s - sent_s))
    finally:
        writer.close()


async def ask(port: int, path: str, body: bytes | None = None) -> bytes:
    """One answer's body, over a connection of its own; without a body it is a GET.

    Raises:
        LoadFailed: the answer is not 200.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request(path, body))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await _read_answer(reader)
    finally:
        writer.close()


@asynccontextmanager
async def open_answer(port: int, path: str, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """What stands behind the head of an answer that comes in `chunks`. Whoever leaves early closes the connection.

    Raises:
        LoadFailed: the answer is not 200, or the connection broke off.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request(path, body))
        await _read_head(reader)
        yield reader
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise LoadFailed(f"a connection broke off: {error}") from error
    finally:
        writer.close()


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The pieces of an answer whose length is not known beforehand, as the server has cut them."""
    while size := int(await reader.readline() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await _read_head(reader)
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if length is not None:
            return await reader.readexactly(int(length[1]))
        return b"".join([part async for part in chunks(reader)])
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise LoadFailed(f"a connection broke off: {error}") from error


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise LoadFailed(f"an answer begins with {head[:60]!r}")
    return head


def _request(path: str, body: bytes | None) -> bytes:
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: benchmark\r\n\r\n".encode()
    head = f"POST {path} HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def _forever(number: int) -> Iterator[int]:
    while True:
        yield number


def in_turn(numbers: Iterable[int]) -> Iterator[int]:
    """The numbers over and over, for several connections that share them."""
    held = list(numbers)
    while True:
        yield from held

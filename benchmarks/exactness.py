"""Are the totals of `/metrics` exact? Sends requests over several front workers, kills some under them, and compares.

    python -m benchmarks.exactness                    10,000 requests, four workers, one killed half-way
    python -m benchmarks.exactness --kills 3

The client keeps count of its own: of a request it knows that it was answered, to the last byte, or that its connection
broke off. docs/monitoring.md says which bound holds for what is counted, and why. Exits with 0 if it does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.topology import Service, wait_for

MODEL = {"name": "quiet", "model": "tests.stub_models:Quiet", "device": "cpu"}
BODY = b'{"inputs":1}'
REQUEST = b"POST /models/%b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
# A scrape is answered by whichever worker accepts it; so many of them meet each worker.
SCRAPES = 20


@dataclass(slots=True)
class Count:
    """What the client knows."""

    answered: int = 0
    cut: int = 0
    """Broke off before the last byte of an answer."""
    killed: int = 0

    def allows(self, counted: float) -> bool:
        return self.answered - self.killed <= counted <= self.answered + self.cut

    def __str__(self) -> str:
        return f"{self.answered} answered, {self.cut} cut off by {self.killed} kills"


async def ask(port: int, model: str) -> bool:
    """One request on a connection of its own; whether the whole answer has come."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(REQUEST % (model.encode(), len(BODY), BODY))
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        finally:
            writer.close()
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    if not head.startswith(b"HTTP/1.1 200 "):
        raise AssertionError(f"an answer that was not to be expected: {head!r}")
    return True


async def load(port: int, model: str, *, requests: int, at_once: int, kill: Callable[[], None], kills: int) -> Count:
    """Sends them all, and calls `kill` so often, in equal distances."""
    count = Count()
    moments = {requests * number // (kills + 1) for number in range(1, kills + 1)}
    numbers = iter(range(requests))

    async def lane(own: Iterator[int]) -> None:
        for number in own:
            if number in moments:
                kill()
                count.killed += 1
            if await ask(port, model):
                count.answered += 1
            else:
                count.cut += 1

    await asyncio.gather(*(lane(numbers) for _ in range(at_once)))
    return count


def total(scrape: str, family: str, **labels: str) -> float:
    """The sum of a family's samples with these labels."""
    return sum(
        sample.value
        for found in text_string_to_metric_families(scrape)
        for sample in found.samples
        if sample.name == family and labels.items() <= sample.labels.items()
    )


def settled(scrape: Callable[[], str], model: str) -> float:
    """What is counted once nothing is under way any more; every worker says the same.

    Raises:
        AssertionError: they do not.
    """
    wait_for(lambda: total(scrape(), "headwaiter_inflight_requests") == 0, "nothing is under way")
    texts = [scrape() for _ in range(SCRAPES)]
    counted = {total(text, "headwaiter_requests_total", model=model, code="200") for text in texts}
    assert len(counted) == 1, f"workers disagree: {sorted(counted)}"
    (durations,) = {total(text, "headwaiter_request_duration_seconds_count", model=model) for text in texts}
    (everything,) = {total(text, "headwaiter_requests_total", model=model) for text in texts}
    # A kill may fall between the two.
    assert abs(durations - everything) <= 1, (durations, everything)
    return counted.pop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=32)
    arguments = parser.parse_args()
    with Service([MODEL], workers=arguments.workers) as service:
        service.wait_ready()
        wait_for(lambda: len(service.front_workers()) == arguments.workers, "all workers are there")

        def kill() -> None:
            os.kill(service.front_workers()[0], signal.SIGKILL)

        count = asyncio.run(
            load(
                service.port,
                MODEL["name"],
                requests=arguments.requests,
                at_once=arguments.at_once,
                kill=kill,
                kills=arguments.kills,
            )
        )
        wait_for(lambda: len(service.front_workers()) == arguments.workers, "what was killed is replaced")
        counted = settled(lambda: service.http.get("/metrics", headers={"Connection": "close"}).text, MODEL["name"])
    holds = count.allows(counted)
    print(f"client:   {count}")
    print(f"/metrics: {counted:.0f}, the same at each of {SCRAPES} scrapes")
    print(
        f"bound:    {count.answered - count.killed} ≤ {counted:.0f} ≤ {count.answered + count.cut} "
        f"{'holds' if holds else 'DOES NOT HOLD'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

"""The totals of the front workers beside a client's own count, to the request, while workers are killed under it."""

from __future__ import annotations

import asyncio
import os
import signal

from benchmarks.exactness import Count, load, settled
from tests.fronts import Front
from tests.stub_broker import StubBroker
from tests.topology import wait_for

WORKERS = 4


def test_what_is_counted_is_what_was_answered_but_for_what_a_kill_has_cut() -> None:
    with Front(workers=WORKERS) as front, StubBroker(front.run_dir):
        front.wait_ready()
        wait_for(lambda: len(front.workers()) == WORKERS, "all workers are there")
        port = int(front.url.rpartition(":")[2])

        def kill() -> None:
            # The oldest, which is at work: a replacement may not have begun.
            os.kill(front.workers()[0], signal.SIGKILL)

        def counted() -> float:
            return settled(lambda: front.get_once("/metrics")[2].decode(), "echo")

        quiet = asyncio.run(load(port, "echo", requests=300, at_once=16, kill=kill, kills=0))
        assert counted() == quiet.answered == 300
        count = asyncio.run(load(port, "echo", requests=600, at_once=16, kill=kill, kills=2))
        assert (count.answered + count.cut, count.killed) == (600, 2)
        assert count.allows(counted() - 300), count


def test_bound_is_as_narrow_as_the_document_says() -> None:
    count = Count(answered=100, cut=3, killed=1)
    assert [counted for counted in range(90, 110) if count.allows(counted)] == [99, 100, 101, 102, 103]

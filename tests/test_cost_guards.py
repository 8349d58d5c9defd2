"""What a request costs, guarded without a clock: calls of Python functions, messages, and ratios in one process.

The bounds have room for a change, and none for another order of growth. A bound that is reached is a reason to
measure (`make bench`), and then to mend the code or to raise the bound knowingly.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.broker_core import CoreBench
from benchmarks.scale.cluster import Cluster, Rates, Size
from benchmarks.scale.study import WRITING
from frontend.client import ModelClient
from shared.errors import Code
from shared.messages import (
    Batch,
    BatchItem,
    ItemResult,
    Message,
    Reply,
    ReplyHeader,
    RequestHeader,
    RequestId,
    Result,
    Submit,
    Timings,
)
from shared.wire import decode, encode
from tests.stub_broker import StubBroker

RECORDS = 32
IDS = [RequestId(bytes([number]) * 16) for number in range(RECORDS)]
MESSAGES: dict[str, Message] = {
    "submit": Submit(tuple(RequestHeader(own, "m", "predict", b"", 0, 60_000, 0, False, True, 1) for own in IDS)),
    "batch": Batch(1, False, tuple(BatchItem(own, 1, "predict", 60_000, False, 1) for own in IDS)),
    "result": Result("m/0", 1, tuple(ItemResult(own, 1, Code.OK, 1, 1, 0.1, 0.1, 0.1, RECORDS) for own in IDS)),
    "reply": Reply(tuple(ReplyHeader(own, Code.OK, 1, 1, "m/0", 1, 1, Timings(0.1, 0.1, 0.1, 0.1, 1)) for own in IDS)),
}


class Counter:
    """A profile function that counts calls of Python functions; those written in C are not counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"


def calls(work: Callable[[], object]) -> int:
    """How many Python functions `work` calls, on this thread."""
    counter = Counter()
    sys.setprofile(counter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counter.calls - 1  # `work` itself


@pytest.mark.parametrize("kind", MESSAGES)
def test_encoding_and_decoding_a_record_takes_few_calls(kind: str) -> None:
    message = MESSAGES[kind]
    frames = [b"x"] * RECORDS
    parts = encode(message, frames)
    assert calls(lambda: encode(message, frames)) / RECORDS < 1
    assert calls(lambda: decode(parts)) / RECORDS < 1


def calls_per_request(queued: int, *, replicas: int = 1, max_batch_size: int = 8) -> float:
    bench = CoreBench(replicas=replicas, queued=queued, max_batch_size=max_batch_size)
    bench.turn()
    done = 0

    def some_turns() -> None:
        nonlocal done
        while done < 200:
            done += bench.turn()

    return calls(some_turns) / done


def test_the_core_makes_few_calls_for_a_request() -> None:
    assert calls_per_request(1_000) < 140


def test_calls_for_a_request_do_not_grow_with_the_queue() -> None:
    assert calls_per_request(20_000) < 1.3 * calls_per_request(500)


def test_calls_for_a_request_do_not_grow_with_the_replicas() -> None:
    assert calls_per_request(500, replicas=100) < 1.3 * calls_per_request(500)


def calls_per_event(gpus: int) -> float:
    cluster = Cluster(WRITING, Size(gpus=gpus, fronts=4, queued=50, turn_s=0.5), Rates())
    cluster.fill()
    cluster.run(WRITING.run_s)
    cluster.clear()
    made = calls(lambda: cluster.run(WRITING.run_s))
    return made / cluster.facts["events"]


def test_calls_for_a_request_that_joins_do_not_grow_with_the_replicas() -> None:
    assert calls_per_event(100) < 1.3 * calls_per_event(5)


def test_choosing_a_batch_costs_about_the_same_in_a_long_queue() -> None:
    """A ratio of processor times in one process, the best of several each, so that a busy machine does not matter.

    The queue is a hundred times as long. Twice the time is for processor caches, which the short one fits into.
    """
    short = CoreBench(replicas=1, queued=1_000, max_batch_size=32)
    long = CoreBench(replicas=1, queued=100_000, max_batch_size=32)
    backlogs = [bench.broker.models["m"].backlog for bench in (short, long)]
    limits = next(iter(short.broker.keeper.replicas())).limits

    def choose_s(backlog: Any) -> float:
        start_s = time.process_time()
        chosen = [backlog.take(limits) for _ in range(4)]
        took_s = time.process_time() - start_s
        for batch in chosen:
            for request in batch:
                backlog.add(request)
        return took_s

    best = [min(choose_s(backlog) for _ in range(30)) for backlog in backlogs]
    assert best[1] < 3 * best[0]


def test_requests_of_one_turn_leave_a_front_in_one_message_and_few_calls(tmp_path: Path) -> None:
    count = 256

    async def ask_all(client: ModelClient) -> None:
        await asyncio.gather(*(client.predict("echo", number) for number in range(count)))

    async def main() -> float:
        async with ModelClient(tmp_path) as client:
            await client.predict("echo", "once, so that there is a connection")
            await ask_all(client)
            sys.setprofile(counter := Counter())
            try:
                await ask_all(client)
            finally:
                sys.setprofile(None)
            return counter.calls / count

    with StubBroker(tmp_path) as broker:
        assert asyncio.run(main()) < 200
        assert len(broker.received(Submit)) == 3

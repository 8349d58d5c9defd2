"""The broker core alone: what a request costs it, whatever the length of the queue and the number of replicas."""

from __future__ import annotations

from benchmarks.broker_core import CoreBench
from benchmarks.run import Run

LOAD = "core"
QUEUED = (1, 1_000, 100_000)
REPLICAS = (1, 10, 1_000)
SYSTEM = "broker core"
REQUESTS = 10_000


def measure(run: Run) -> None:
    requests = 2_000 if run.quick else REQUESTS
    for replicas in REPLICAS:
        for queued in QUEUED:
            values = {}
            for size in (1, 32):
                bench = CoreBench(replicas=replicas, queued=queued, max_batch_size=size)
                for number in range(1, run.rounds + 1):
                    values[number, size] = bench.cost_us(requests)
            for number in range(1, run.rounds + 1):
                both = {"cpu_us": values[number, 32], "cpu_single_us": values[number, 1]}
                run.record(LOAD, f"queued={queued} replicas={replicas}", SYSTEM, number, both)

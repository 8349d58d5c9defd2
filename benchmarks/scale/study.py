"""The scenarios of the scale study, and what is kept of each.

`facts` are drawn from seeds and the same on every machine; `measured` are processor times of the machine that ran it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.scale.cluster import Cluster, CoreClock, Rates, Size, Workload
from benchmarks.summary import percentile

SHORT = Workload("short texts", run_s=0.05, batch_size=32)
ANSWERING = Workload("question answering", run_s=0.2, batch_size=16)
WRITING = Workload("generation, answers whole", run_s=8.0, concurrency=32)
STREAMING = Workload("generation, streamed", run_s=8.0, concurrency=32, pieces_per_s=20.0)

LARGE = Size(gpus=1000, fronts=200, queued=100_000)
# Workload, and how many seconds of its time are enough for some hundred thousand events.
LARGE_RUNS = ((SHORT, 0.4), (ANSWERING, 2.0), (WRITING, 12.0), (STREAMING, 0.5))

RATES = Rates(
    process_deaths_per_gpu_hour=1 / 500,
    poison_share=1e-7,
    cancelled_share=0.01,
    front_deaths_per_hour=1 / 24,
)
FACTOR = 100.0
FAILING_S = 60.0

# One process dies under full load.
DEATH_GPUS = (8, 100)
BEFORE_S, AFTER_S = 40.0, 60.0

# One broker of a thousand GPUs, or several, each with its share of them and of what arrives.
SHARDS = ((1, 30.0, 1), (8, 60.0, 1), (125, 120.0, 8))
SHARED_LOAD = 0.95

Say = Callable[[str], None]


def run(say: Say) -> dict[str, Any]:
    return {
        "large": {workload.name: large(workload, seconds, LARGE, say) for workload, seconds in LARGE_RUNS},
        "failing": {str(factor): failing(factor, LARGE, FAILING_S, say) for factor in (0.0, FACTOR)},
        "deaths": {str(gpus): death(gpus) for gpus in DEATH_GPUS},
        "shards": {str(count): sharded(count, seconds, samples, say) for count, seconds, samples in SHARDS},
    }


def large(workload: Workload, seconds: float, size: Size, say: Say) -> dict[str, Any]:
    """Full load and a long queue: what a request needs, in events, messages and processor time."""
    say(f"{size.gpus} GPUs, {workload.name}")
    cluster = Cluster(workload, size, Rates())
    cluster.fill()
    # What began together ends together at first. Pieces of streams come evenly from the beginning.
    cluster.run(0.1 if workload.pieces_per_s else 2 * workload.run_s)
    cluster.clear()
    cluster.clock = clock = CoreClock()
    cluster.run(seconds)
    facts = cluster.facts
    requests = facts["ended ok"]
    return {
        "facts": {
            "requests_per_s_and_gpu": workload.requests_per_s,
            "seconds": seconds,
            "requests": requests,
            "pieces": facts["pieces relayed"],
            "events": facts["events"],
            "queued_at_end": len(cluster.broker.models["m"].backlog),
            "messages": dict(sorted(cluster.messages.items())),
        },
        "measured": {
            "core_us": clock.total_us,
            "piece_us": clock.ns["ChunkArrived"] / 1000 / max(1, clock.calls["ChunkArrived"]),
            "pulses_us": (clock.ns["FrontPulsed"] + clock.ns["ReplicaPulsed"]) / 1000,
        },
    }


def failing(factor: float, size: Size, seconds: float, say: Say) -> dict[str, Any]:
    """A while with failures, so many times as often as they are."""
    say(f"{size.gpus} GPUs, {seconds:g} s, failures {factor:g} times as often")
    rates = RATES.times(factor) if factor else Rates()
    cluster = Cluster(WRITING, size, rates, seed=1)
    cluster.fill()
    cluster.run(2 * WRITING.run_s)
    cluster.clear()
    open_before = len(cluster.broker.ledger.requests)
    cluster.run(seconds)
    cluster.broker.validate(cluster.now_s)
    facts = cluster.facts
    ended = {key.removeprefix("ended "): count for key, count in sorted(facts.items()) if key.startswith("ended ")}
    open_after = len(cluster.broker.ledger.requests)
    return {
        "facts": {
            "arrived": facts["arrived"],
            "ended": ended,
            "lost": open_before + facts["arrived"] - sum(ended.values()) - open_after,
            "processes_died": facts["processes died"],
            "fronts_died": facts["front workers died"],
            "sent_again": facts["sent again"],
        }
    }


def death(gpus: int) -> dict[str, Any]:
    """One process ends under full load: what the others do in the time after it."""
    cluster = Cluster(WRITING, Size(gpus=gpus, fronts=4, queued=60 * gpus), Rates(), seed=2)
    cluster.fill()
    cluster.run(BEFORE_S)
    cluster.end_one()
    windows = []
    for _ in range(round(AFTER_S / 5)):
        cluster.clear()
        cluster.run(5.0)
        windows.append(cluster.facts["ended ok"] / (5.0 * gpus * WRITING.requests_per_s))
    cluster.broker.validate(cluster.now_s)
    return {
        "facts": {
            "kept": round(sum(windows) / len(windows), 3),
            "worst": round(min(windows), 3),
        }
    }


def sharded(count: int, seconds: float, samples: int, say: Say) -> dict[str, Any]:
    """What arrives is dealt at random to so many model servers: how long it waits there."""
    say(f"{count} model servers")
    waits_s: list[float] = []
    for sample in range(samples):
        size = Size(LARGE.gpus // count, max(1, LARGE.fronts // count), queued=0, load=SHARED_LOAD)
        cluster = Cluster(WRITING, size, Rates(), seed=10 + sample)
        cluster.fill()
        cluster.run(3 * WRITING.run_s)
        cluster.clear()
        cluster.run(seconds)
        waits_s += cluster.waits_s
    return {
        "facts": {
            "requests": len(waits_s),
            "waited_share": round(sum(wait_s > 0.0 for wait_s in waits_s) / len(waits_s), 4),
            "p50_s": round(percentile(waits_s, 0.5), 3),
            "p99_s": round(percentile(waits_s, 0.99), 3),
        }
    }

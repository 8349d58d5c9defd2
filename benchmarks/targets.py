"""The goals of the project's speed and memory, and how far they are reached. Pure.

Each goal is a bound on one figure. The figure's median decides; its spread is shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.summary import Figure, Results, figure
from benchmarks.systems import TRANSFORMERS_SERVE

OURS_2, OURS = "headwaiter, 2 fronts", "headwaiter"
OFFLINE, IN_PROCESS = "offline, sorted by length", "in process, one by one"
STATIC = "offline, static batches"
PLAIN, RAW = "FastAPI + pydantic, no hop", "raw ASGI, no hop"

Finder = Callable[[Results], Figure | None]


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    bound: Literal["at least", "at most"]
    goal: float
    unit: str
    """`x` for a ratio."""
    find: Finder


@dataclass(frozen=True, slots=True)
class Verdict:
    target: Target
    figure: Figure | None

    @property
    def reached(self) -> bool:
        if self.figure is None:
            return False
        median, goal = self.figure.median, self.target.goal
        return median >= goal if self.target.bound == "at least" else median <= goal

    @property
    def text(self) -> str:
        if self.figure is None:
            return "not measured"
        if self.reached:
            return "reached"
        return f"missed by {abs(self.figure.median / self.target.goal - 1):.0%}"


def _ratio(load: str, case: str, value: str, ours: str, other: str) -> Finder:
    return lambda results: results.ratio(load, case, value, ours, other)


def _best_ratio(load: str, case: str, value: str, ours: str, others: tuple[str, ...]) -> Finder:
    """Against the best of the others, each judged by its median."""

    def find(results: Results) -> Figure | None:
        found = [ratio for other in others if (ratio := results.ratio(load, case, value, ours, other))]
        return min(found, key=lambda ratio: ratio.median, default=None)

    return find


def _worst_rate(cases: tuple[str, ...], other: str) -> Finder:
    """Of generated tokens, in that of the cases which looks worst for us."""

    def find(results: Results) -> Figure | None:
        found = [ratio for case in cases if (ratio := results.ratio("generation", case, "tokens_per_s", OURS, other))]
        # Some cases alone would say nothing about the worst.
        return min(found, key=lambda ratio: ratio.median) if len(found) == len(cases) else None

    return find


def _worst_wait(values: tuple[str, ...]) -> Finder:
    """Of the times of a stream, that which looks worst for us beside `transformers serve`."""

    def find(results: Results) -> Figure | None:
        ratios = [results.ratio("streams", "SmolLM2 c=16", value, OURS, TRANSFORMERS_SERVE) for value in values]
        found = [ratio for ratio in ratios if ratio]
        return max(found, key=lambda ratio: ratio.median, default=None)

    return find


def _steps_in_vain(results: Results) -> Figure | None:
    return results.figure("leaving", "GPT-J c=1", OURS, "steps")


def _fairness(results: Results) -> Figure | None:
    slow = results.by_round("fairness", "c=64", OURS, "long_p99_ms")
    usual = results.by_round("fairness", "c=64", OURS, "long_p50_ms")
    return figure(slow[number] / usual[number] for number in slow)


def _growth(results: Results) -> Figure | None:
    """The process that grows most."""
    own = [sample for sample in results.samples if sample.load == "growth"]
    return figure([max(max(sample.values.values()) for sample in own)] if own else [])


def _front_worker(results: Results) -> Figure | None:
    cases = results.cases("memory")
    return figure(
        value for case in cases for value in results.by_round("memory", case, OURS, "front_worker_mib").values()
    )


def _further_front(results: Results) -> Figure | None:
    """What each front beyond the first adds to all front processes together."""
    sizes = {fronts: results.by_round("memory", f"fronts={fronts}", OURS, "front_mib").get(1) for fronts in (1, 2, 4)}
    one, two, four = sizes[1], sizes[2], sizes[4]
    if one is None or two is None or four is None:
        return None
    return figure([two - one, (four - two) / 2])


def _core(results: Results) -> Figure | None:
    return figure(
        value
        for replicas in (1, 10, 1000)
        for value in results.by_round("core", f"queued=100000 replicas={replicas}", "broker core", "cpu_us").values()
    )


def _cases(model: str, *connections: int) -> tuple[str, ...]:
    return tuple(f"{model} c={count}" for count in connections)


TARGETS = (
    Target("echo, 64 connections: over FastAPI + pydantic without a hop", "at least", 1.6, "x",
           _ratio("echo", "c=64", "requests_per_s", OURS_2, PLAIN)),
    Target("echo, 64 connections: over the better LitServe", "at least", 10, "x",
           _best_ratio("echo", "c=64", "requests_per_s", OURS_2, ("LitServe", "LitServe, batches of 32"))),
    Target("echo, 64 connections: over mosec without batches", "at least", 1.6, "x",
           _ratio("echo", "c=64", "requests_per_s", OURS_2, "mosec")),
    Target("echo, 1 connection: median latency over raw ASGI without a hop", "at most", 3, "x",
           _ratio("echo", "c=1", "p50_ms", OURS_2, RAW)),
    Target("embeddings, 64 connections: share of the offline limit", "at least", 0.85, "x",
           _ratio("embedding", "c=64", "requests_per_s", OURS, OFFLINE)),
    Target("embeddings, 64 connections: over the better LitServe", "at least", 3, "x",
           _best_ratio("embedding", "c=64", "requests_per_s", OURS, ("LitServe", "LitServe, batches of 32"))),
    Target("embeddings, 64 connections: over the better mosec", "at least", 3, "x",
           _best_ratio("embedding", "c=64", "requests_per_s", OURS, ("mosec", "mosec, batches of 32"))),
    Target("embeddings, 64 connections: over the recipe with 4 workers", "at least", 25, "x",
           _ratio("embedding", "c=64", "requests_per_s", OURS, "recipe, def, 4 workers")),
    Target("embeddings, 1 connection: median latency over the model in process", "at most", 1.15, "x",
           _ratio("embedding", "c=1", "p50_ms", OURS, IN_PROCESS)),
    Target("question answering, 32 connections: share of the offline limit", "at least", 0.85, "x",
           _ratio("answering", "c=32", "requests_per_s", OURS, OFFLINE)),
    Target("text generation, SmolLM2, 8 to 32 connections: share of static batches", "at least", 0.9, "x",
           _worst_rate(_cases("SmolLM2", 8, 16, 32), STATIC)),
    Target("text generation, GPT-J's shape, 8 to 32 connections: share of static batches", "at least", 0.9, "x",
           _worst_rate(_cases("GPT-J", 8, 16, 32), STATIC)),
    Target("text generation, SmolLM2, 1 to 32 connections: over transformers serve", "at least", 1, "x",
           _worst_rate(_cases("SmolLM2", 1, 8, 16, 32), TRANSFORMERS_SERVE)),
    Target("text generation, GPT-J's shape, 1 to 32 connections: over transformers serve", "at least", 1, "x",
           _worst_rate(_cases("GPT-J", 1, 8, 16, 32), TRANSFORMERS_SERVE)),
    Target("text streams, 16 connections: first token over transformers serve, the worse of median and p99",
           "at most", 1, "x", _worst_wait(("first_p50_ms", "first_p99_ms"))),
    Target("text streams, 16 connections: between tokens over transformers serve, the worse of median and p99",
           "at most", 1, "x", _worst_wait(("between_p50_ms", "between_p99_ms"))),
    Target("text streams: steps computed for a client that has left", "at most", 2, "", _steps_in_vain),
    Target("longest text among short ones, 64 connections: its p99 over its median", "at most", 3, "x", _fairness),
    Target("memory of a front worker", "at most", 80, "MiB", _front_worker),
    Target("memory of each further front", "at most", 60, "MiB", _further_front),
    Target("broker core: processor time per request, 100,000 queued", "at most", 40, "µs", _core),
    Target("memory growth for each 1,000 requests, the worst process", "at most", 1, "MiB", _growth),
)  # fmt: skip


def verdicts(results: Results) -> list[Verdict]:
    return [Verdict(target, target.find(results)) for target in TARGETS]

"""Runs worlds on all cores for as long as told, and counts what was tried.

Each process takes every n-th seed. The first failure ends all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.world import World

REPORT_S = 1.0
PROGRESS_S = 15.0
# A process reports each second; this is a machine that does something else.
LOST_S = 120.0


@dataclass
class Tally:
    """What was run."""

    seeds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    answers: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, world: World) -> None:
        self.seeds += 1
        self.events += world.events
        self.virtual_s += world.clock.now_s
        self.answers += len(world.checker.ended)
        self.faults.update(world.faults.by_kind())

    def merge(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.answers += other.answers
        self.faults.update(other.faults)


def soak(minutes: float, first_seed: int, processes: int, say: Callable[[str], None]) -> tuple[Tally, int | None]:
    """What was run, and the first seed that failed, if one did."""
    context = multiprocessing.get_context("spawn")
    reports: multiprocessing.Queue[tuple[Tally, int | None]] = context.Queue()
    end_s = time.monotonic() + minutes * 60
    workers = [
        context.Process(target=_work, args=(first_seed + number, processes, minutes * 60, reports), daemon=True)
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        return _gather(reports, workers, end_s, say)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _gather(
    reports: multiprocessing.Queue[tuple[Tally, int | None]],
    workers: list[multiprocessing.context.SpawnProcess],
    end_s: float,
    say: Callable[[str], None],
) -> tuple[Tally, int | None]:
    total, started_s = Tally(), time.monotonic()
    said_s = heard_s = started_s
    while any(worker.is_alive() for worker in workers) or not reports.empty():
        try:
            tally, failed_seed = reports.get(timeout=REPORT_S)
        except queue.Empty:
            if time.monotonic() > heard_s + LOST_S:
                raise RuntimeError(f"nothing was heard of the soak's processes for {LOST_S:.0f} s") from None
            continue
        heard_s = time.monotonic()
        total.merge(tally)
        if failed_seed is not None:
            return total, failed_seed
        if heard_s > said_s + PROGRESS_S:
            said_s = heard_s
            left_s = max(0.0, end_s - heard_s)
            say(f"{summary(total, heard_s - started_s)}; another {left_s:.0f} s")
    return total, None


def summary(tally: Tally, took_s: float) -> str:
    return (
        f"{tally.seeds:,} seeds, {tally.events:,} events ({tally.events / took_s:,.0f} each second), "
        f"{tally.answers:,} requests, {tally.virtual_s / 3600:,.1f} hours of theirs, "
        f"{tally.faults.total():,} faults, no promise broken"
    )


def _work(seed: int, stride: int, seconds: float, reports: multiprocessing.Queue[tuple[Tally, int | None]]) -> None:
    parent, end_s = os.getppid(), time.monotonic() + seconds
    tally, reported_s = Tally(), time.monotonic()
    while time.monotonic() < end_s and os.getppid() == parent:
        world = World(seed)
        try:
            world.run()
        except Exception:
            reports.put((tally, seed))
            return
        tally.add(world)
        seed += stride
        if time.monotonic() > reported_s + REPORT_S:
            reports.put((tally, None))
            tally, reported_s = Tally(), time.monotonic()
    reports.put((tally, None))

"""Admission to a dense cache: exact for what is known, and never too little for what is not."""

from __future__ import annotations

import random

from model_worker.runtimes.continuous.admission import Demand, peak_cells


def simulated(demands: list[Demand], delays: list[int]) -> int:
    """Rows x columns, step by step; each row comes after its delay and ends when its steps are done."""
    peak = 0
    for step in range(200):
        widths = [
            demand.tokens + min(max(step - delay, 0), demand.steps)
            for demand, delay in zip(demands, delays, strict=True)
            if delay <= step <= delay + demand.steps
        ]
        peak = max(peak, len(widths) * max(widths, default=0))
    return peak


def test_the_peak_is_that_of_a_run_to_the_end() -> None:
    chance = random.Random(0)
    for _ in range(300):
        demands = [Demand(chance.randrange(1, 40), chance.randrange(0, 60)) for _ in range(chance.randrange(1, 8))]
        assert peak_cells(demands) == simulated(demands, [0] * len(demands))


def test_rows_that_end_early_or_come_late_need_no_more() -> None:
    """A delay is added to the steps of whoever comes late."""
    chance = random.Random(1)
    for _ in range(300):
        demands = [Demand(chance.randrange(1, 40), chance.randrange(0, 60)) for _ in range(chance.randrange(1, 8))]
        delays = [chance.randrange(0, 30) for _ in demands]
        early = [Demand(demand.tokens, chance.randrange(demand.steps + 1)) for demand in demands]
        promised = [Demand(demand.tokens, demand.steps + delay) for demand, delay in zip(demands, delays, strict=True)]
        assert simulated(early, delays) <= peak_cells(promised)


def test_nobody_needs_nothing() -> None:
    assert peak_cells([]) == 0

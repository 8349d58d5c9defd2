"""How much one forward should hold: measured once, before a model serves.

Owns the search for `max_batch_cost` where the configuration names none: forwards of more and more padded units are
timed, and the fewest units that are about as fast as any, and hold a few items, become the limit. Fewer are better,
because short items wait padded beside long ones, and everybody waits for the end of a forward. Refuses to compare by a
single look, to make a slow load slower, and to take longer than its budget. Main thread only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from model_worker.replica import accelerator, faults, returns
from model_worker.replica.host_stages import Limits
from model_worker.runtimes.base import Model
from shared.logs import log_event

logger = logging.getLogger("model_worker")

# All forwards of one calibration together. A model whose forwards take microseconds is through after a few.
BUDGET_S = 3.0
# Who waited so long for a load has no patience left for figures.
SLOW_LOAD_S = 60.0
# Speeds that are no further apart count as equal. What a smaller batch loses so, it makes up for: it is padded less.
TOLERANCE = 0.05
# Batches that are measured are full. Those that are served end where the next item does not fit, half an item short on
# average. So the limit has room for so many of the largest sample, if that is as fast.
ROOM_FOR = 4
# The least of so many runs is the time of a shape: whatever disturbs the machine only ever adds to it.
RUNS = 5
# More while the two least are further apart than this share. If they stay so, something else keeps the machine busy,
# and the figures would be about that.
DISAGREEMENT_MAX = 0.1
RUNS_MAX = 40
# So often in a row, twice as much may be no faster before more is not tried.
FLAT_DOUBLINGS = 2
# 4,096 of the largest sample: more is beyond any batch.
DOUBLINGS_MAX = 12

Clock = Callable[[], float]
"""Seconds, monotonic; a test passes its own."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found."""

    max_batch_cost: int
    """Padded units; 0: nothing was found, and `reason` says why."""
    seconds: float = 0.0
    speeds: Mapping[int, float] = field(default_factory=dict)
    """By cost: items per second, as a share of what the best cost has."""
    reason: str = ""

    @property
    def text(self) -> str:
        """In a few words, for `headwaiter status`."""
        if self.reason:
            return f"not measured: {self.reason}"
        speeds = ", ".join(f"{cost}: {speed:.0%}" for cost, speed in self.speeds.items())
        return f"measured in {self.seconds:.1f} s ({speeds})"


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    inputs: object
    parameters: dict[str, object]
    cost: int


Shape = tuple[_Sample, int]
"""A sample, and how many of it share a forward."""


def calibrate(model: Model, limits: Limits, load_s: float, *, clock: Clock = time.perf_counter) -> Calibration:
    """Measures a loaded model with its own samples. `limits` are those without calibration: `max_batch_size` holds
    here as well, and `max_batch_cost` stays the answer where nothing speaks against it.

    Raises:
        Exception: whatever a sample fails with, unless it is a lack of memory.
    """
    requests = returns.samples_of(model)
    if not requests:
        return Calibration(0, reason="the model offers no samples")
    if load_s > SLOW_LOAD_S:
        return Calibration(0, reason=f"the load took {load_s:.0f} s")
    by_cost: dict[int, _Sample] = {}
    for inputs, parameters in requests:
        cost = returns.cost_of(model, model.prepare(inputs, dict(parameters)))
        by_cost.setdefault(max(1, cost), _Sample(inputs, parameters, max(1, cost)))
    samples = tuple(by_cost[cost] for cost in sorted(by_cost))
    own_cost = model.max_batch_cost
    # A model that splits batches by itself must not do so here.
    model.max_batch_cost = 0
    try:
        return _Search(model, samples, limits, clock).run()
    finally:
        model.max_batch_cost = own_cost


class _Search:
    """One calibration."""

    def __init__(self, model: Model, samples: tuple[_Sample, ...], limits: Limits, clock: Clock) -> None:
        self._model = model
        self._samples = samples
        self._limits = limits
        self._clock = clock
        self._started_s = clock()
        # The two least seconds of each shape so far, the least first.
        self._seconds: dict[Shape, tuple[float, float]] = {}
        # Tried to the end, in order.
        self._costs: list[int] = []
        # Of the latest shape: what the next one will take is guessed from it.
        self._unit_s = 0.0
        self._ended_by: Literal["", "time", "room", "memory"] = ""

    def run(self) -> Calibration:
        self._explore()
        own_cost = self._limits.max_batch_cost
        if self._ended_by == "time" and (len(self._costs) < 2 or self._costs[-1] < own_cost):
            return self._nothing(f"there is no time for batches of {own_cost or 'two sizes'}")
        self._repeat()
        if len(self._costs) < 2:
            return self._nothing(f"there is no {self._ended_by} for batches of two sizes")
        if not self._agrees:
            return self._nothing("the machine is busy with something else")
        speeds = self._speeds()
        best = max(speeds.values())
        shares = {cost: speed / best for cost, speed in speeds.items()}
        fast = [cost for cost, share in shares.items() if share >= 1 - TOLERANCE]
        roomy = [cost for cost in fast if cost >= ROOM_FOR * self._samples[-1].cost]
        chosen = roomy[0] if roomy else fast[-1]
        if chosen == self._costs[-1] and self._ended_by in ("time", "room"):
            # As far as could be seen, more is better.
            chosen = max(chosen, own_cost)
        return Calibration(chosen, self._spent_s, shares)

    def _nothing(self, reason: str) -> Calibration:
        return Calibration(0, self._spent_s, reason=reason)

    @property
    def _spent_s(self) -> float:
        return self._clock() - self._started_s

    @property
    def _pass_s(self) -> float:
        """What one more run of each shape takes."""
        return sum(least for least, _ in self._seconds.values())

    def _explore(self) -> None:
        """Tries twice as much each time, until that is not faster any more, or cannot be."""
        smallest = (self._samples[0], 1)
        # Twice: the very first forward of a process does much that no other does.
        if not (self._run(smallest) and self._run(smallest)):
            return
        self._unit_s = self._seconds.pop(smallest)[0] / smallest[0].cost
        cost = self._samples[-1].cost
        while len(self._costs) <= DOUBLINGS_MAX and self._try(cost):
            cost *= 2

    def _try(self, cost: int) -> bool:
        """Measures batches of so many units; whether to go on with more."""
        shapes = [shape for shape in self._shapes(cost) if shape not in self._seconds]
        if not shapes:
            self._ended_by = "room"
            return False
        for number, shape in enumerate(shapes):
            if not self._fits_into_budget(shapes[number:]):
                self._ended_by = "time"
                return False
            # The first run of a shape also makes its kernels and buffers.
            if not (self._run(shape) and self._run(shape)):
                return False
            self._unit_s = self._seconds[shape][0] / (shape[0].cost * shape[1])
        self._costs.append(cost)
        return not self._is_flat()

    def _repeat(self) -> None:
        """Runs all shapes in turn, so that what disturbs one disturbs its neighbours alike."""
        for number in range(2, RUNS_MAX):
            if self._spent_s + self._pass_s > BUDGET_S or (number >= RUNS and self._agrees):
                return
            for shape in list(self._seconds):
                if not self._run(shape):
                    self._seconds.pop(shape)
                    self._costs = [cost for cost in self._costs if shape not in self._shapes(cost)]

    @property
    def _agrees(self) -> bool:
        return all(second <= least * (1 + DISAGREEMENT_MAX) for least, second in self._seconds.values())

    def _shapes(self, cost: int) -> list[Shape]:
        size_max = self._limits.max_batch_size
        sizes = [max(1, cost // sample.cost) for sample in self._samples]
        return [
            (sample, min(size, size_max) if size_max else size)
            for sample, size in zip(self._samples, sizes, strict=True)
        ]

    def _fits_into_budget(self, shapes: list[Shape]) -> bool:
        """Whether all runs of these shapes, and those that are still due of the others, would end in time."""
        expected_s = RUNS * sum(self._unit_s * sample.cost * count for sample, count in shapes)
        return self._spent_s + expected_s + (RUNS - 2) * self._pass_s <= BUDGET_S

    def _run(self, shape: Shape) -> bool:
        """Times the shape once more; False if there is no memory for it."""
        try:
            seconds = self._time(shape)
        except Exception as error:
            if not faults.is_out_of_memory(error):
                raise
            log_event(logger, "info", "calibration_short_of_memory", error=faults.describe(error))
        else:
            least, second = self._seconds.get(shape, (math.inf, math.inf))
            self._seconds[shape] = (min(least, seconds), min(second, max(least, seconds)))
            return True
        # Only here: until the error is gone, its stack keeps the tensors of the failed forward alive.
        accelerator.release_memory()
        self._ended_by = "memory"
        return False

    def _time(self, shape: Shape) -> float:
        """Seconds of one forward of this shape."""
        sample, count = shape
        items = [self._model.prepare(sample.inputs, dict(sample.parameters)) for _ in range(count)]
        started_s = self._clock()
        outputs = returns.one_output_per_item(self._model, items)
        accelerator.synchronize()
        seconds = self._clock() - started_s
        for output in outputs:
            if isinstance(output, Exception):
                raise output
        return max(seconds, 1e-9)

    def _speeds(self) -> dict[int, float]:
        """By cost, how fast batches of all samples are: 1.0 if each of them is as fast as at its best."""
        per_item_s = {shape: least / shape[1] for shape, (least, _) in self._seconds.items()}
        best_s = {
            sample.cost: min(seconds for (other, _), seconds in per_item_s.items() if other is sample)
            for sample in self._samples
        }
        return {
            cost: len(self._samples) / sum(per_item_s[shape] / best_s[shape[0].cost] for shape in self._shapes(cost))
            for cost in self._costs
        }

    def _is_flat(self) -> bool:
        """Whether the latest doublings brought nothing."""
        speeds = list(self._speeds().values())
        before, latest = speeds[:-FLAT_DOUBLINGS], speeds[-FLAT_DOUBLINGS:]
        return bool(before) and max(latest) <= max(before) * (1 + TOLERANCE)

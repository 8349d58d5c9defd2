"""What the broker counts and what it learns: totals for operators, and estimates of cost and pace.

Owns the counters of one model, the bounds of their histograms, and the smoothing of its estimates. Refuses to decide
anything by them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from shared.messages import ModelCounters

# Upper bounds of the histograms. Dashboards and alerts are written against them: moving one breaks those.
BATCH_SIZE_BOUNDS: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS_BOUNDS: tuple[float, ...] = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60,
)  # fmt: skip

# Weight of the newest sample: about the last twenty batches count, enough to follow a change of traffic within seconds.
SMOOTHING = 0.1
# Before anything was measured: four bytes a token, as for English text.
UNITS_PER_BYTE_AT_FIRST = 0.25


class Histogram:
    """A sum, and counts by upper bound."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> dict[str, int]:
        """Cumulative, keyed by upper bound as text, the last one `+Inf`: the `le` label of Prometheus."""
        buckets = {}
        total = 0
        for bound, count in zip([*map(_label, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets[bound] = total
        return buckets


class Tally:
    """Totals of one model since the broker started; they only ever grow."""

    __slots__ = (
        "admitted", "batch_size", "batches", "ended", "forward_s", "queue_s", "rejected", "restarts", "retried",
    )  # fmt: skip

    def __init__(self) -> None:
        self.admitted = 0
        # By code; `cancelled` counts those released without an answer.
        self.ended: Counter[str] = Counter()
        # Refused on arrival, by code. Not part of `admitted` or `ended`.
        self.rejected: Counter[str] = Counter()
        # Sent to a replica once more.
        self.retried = 0
        self.batches = 0
        self.batch_size = Histogram(BATCH_SIZE_BOUNDS)
        # From arrival to the start of the batch it was answered from; answered ones only.
        self.queue_s = Histogram(SECONDS_BOUNDS)
        # As the replica measured it, per item.
        self.forward_s = Histogram(SECONDS_BOUNDS)
        # Replacements spawned, by what ended the incarnation before.
        self.restarts: Counter[str] = Counter()

    def totals(self, model: str) -> ModelCounters:
        return ModelCounters(
            model=model,
            admitted=self.admitted,
            ended=dict(self.ended),
            rejected=dict(self.rejected),
            retried=self.retried,
            batches=self.batches,
            batch_size_sum=int(self.batch_size.sum),
            batch_size_buckets=self.batch_size.buckets(),
            queue_s_sum=self.queue_s.sum,
            queue_s_buckets=self.queue_s.buckets(),
            forward_s_sum=self.forward_s.sum,
            forward_s_buckets=self.forward_s.buckets(),
            restarts=dict(self.restarts),
        )


class Pace:
    """What experience says about one model: what a byte costs, how long a batch takes, how many fit into one."""

    __slots__ = ("_batch_s", "_body_bytes", "_cost", "_full_size")

    def __init__(self) -> None:
        # Smoothed cost and bytes per item; their quotient weighs long items more than a mean of quotients would.
        self._cost = 0.0
        self._body_bytes = 0.0
        # Smoothed seconds from the start of a batch to its last result; None until one has ended.
        self._batch_s: float | None = None
        # Smoothed size of batches that a limit closed; None until there was one.
        self._full_size: float | None = None

    @property
    def units_per_byte(self) -> float:
        return self._cost / self._body_bytes if self._body_bytes else UNITS_PER_BYTE_AT_FIRST

    def cost(self, body_bytes: int) -> int:
        """Padded units a body of this size is expected to cost; at least 1."""
        return max(1, round(body_bytes * self.units_per_byte))

    def wait_s(self, ahead: int, replicas: int, size_max: int) -> float:
        """The least time until `ahead` waiting requests are through; 0.0 while nothing was measured.

        Deliberately short: only whole full batches count, small batches pull the measured time down, and the batches
        that run now are left out. So a refusal for this reason is rarely wrong.
        """
        full_size = self._full_size or size_max
        if self._batch_s is None or replicas == 0 or full_size == 0:
            return 0.0
        return ahead // full_size * self._batch_s / replicas

    def observe_item(self, body_bytes: int, cost: int) -> None:
        if body_bytes > 0 and cost > 0:
            weight = SMOOTHING if self._body_bytes else 1.0
            self._cost += weight * (cost - self._cost)
            self._body_bytes += weight * (body_bytes - self._body_bytes)

    def observe_batch(self, duration_s: float) -> None:
        self._batch_s = _smooth(self._batch_s, duration_s)

    def observe_full_batch(self, size: int) -> None:
        self._full_size = _smooth(self._full_size, float(size))


def _smooth(before: float | None, sample: float) -> float:
    return sample if before is None else before + SMOOTHING * (sample - before)


def _label(bound: float) -> str:
    return f"{bound:g}"

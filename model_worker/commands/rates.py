"""How fast things go, from two snapshots of one model server: what counters gained, as rates and percentiles.

Owns that arithmetic alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shared.messages import ModelCounters, SlotState, Snapshot

Pair = tuple[float | None, float | None]
"""Median and 95th percentile in seconds; None where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Rates:
    """One model between two snapshots."""

    answered_per_s: float
    otherwise_per_s: float
    """Requests that ended in another way, those refused on arrival among them."""
    wait_s: Pair
    forward_s: Pair
    batch_size: float | None
    tokens_per_s: float | None
    """About; None for a model that does not batch continuously."""


def rates(now: Snapshot, before: Snapshot | None) -> dict[str, Rates]:
    """By model, in configuration order. Without `before`, over the life of the model server."""
    elapsed_s = max(now.uptime_s - (before.uptime_s if before else 0.0), 1e-9)
    past = {counters.model: counters for counters in before.counters} if before else {}
    tokens = _tokens(now, before)
    return {
        counters.model: _rates(counters, past.get(counters.model), tokens.get(counters.model), elapsed_s)
        for counters in now.counters
    }


def _rates(now: ModelCounters, before: ModelCounters | None, tokens: int | None, elapsed_s: float) -> Rates:
    answered = now.ended.get("ok", 0) - (before.ended.get("ok", 0) if before else 0)
    ended = _total(now) - (_total(before) if before else 0)
    batches = now.batches - (before.batches if before else 0)
    batched = now.batch_size_sum - (before.batch_size_sum if before else 0)
    wait = _gained(now.queue_s_buckets, before.queue_s_buckets if before else {})
    forward = _gained(now.forward_s_buckets, before.forward_s_buckets if before else {})
    return Rates(
        answered_per_s=answered / elapsed_s,
        otherwise_per_s=(ended - answered) / elapsed_s,
        wait_s=(quantile(wait, 0.5), quantile(wait, 0.95)),
        forward_s=(quantile(forward, 0.5), quantile(forward, 0.95)),
        batch_size=batched / batches if batches else None,
        tokens_per_s=None if tokens is None else tokens / elapsed_s,
    )


def _total(counters: ModelCounters) -> int:
    return sum(counters.ended.values()) + sum(counters.rejected.values())


def _gained(now: Mapping[str, int], before: Mapping[str, int]) -> dict[float, int]:
    return {math.inf if bound == "+Inf" else float(bound): now[bound] - before.get(bound, 0) for bound in now}


def _tokens(now: Snapshot, before: Snapshot | None) -> dict[str, int]:
    """What continuous batches made, by model. A process counts from its start, so a new one has made all it says."""
    past = {(slot.slot, slot.incarnation): slot.step_items for slot in before.slots} if before else {}
    tokens: dict[str, int] = {}
    for slot in now.slots:
        if _is_continuous(slot):
            gained = slot.step_items - past.get((slot.slot, slot.incarnation), 0)
            tokens[slot.model] = tokens.get(slot.model, 0) + gained
    return tokens


def _is_continuous(slot: SlotState) -> bool:
    return slot.step_items > 0 or str(slot.choices.get("batching", "")).startswith("continuous")


def quantile(cumulative: Mapping[float, int], share: float) -> float | None:
    """The value below which `share` of what was counted lies, as if values were spread evenly within a bucket.

    `cumulative` are counts by upper bound, the last one infinite; what lies beyond all others counts as the last of
    them. None if nothing was counted.

    >>> quantile({1.0: 2, 2.0: 4, math.inf: 4}, 0.75)
    1.5
    """
    bounds = sorted(cumulative)
    total = cumulative[bounds[-1]] if bounds else 0
    if total == 0:
        return None
    low, below = 0.0, 0
    for bound in bounds:
        count = cumulative[bound]
        if count >= total * share:
            return low if math.isinf(bound) else low + (bound - low) * (total * share - below) / (count - below)
        low, below = bound, count
    return low

"""Splits prepared items into micro-batches by their true costs.

Owns the choice of which items share a `forward`. Pure: it knows positions, costs and groups, not the items, and it
refuses to import anything that computes, waits or sends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from model_worker.batch_cost import FORWARD_PRICE_SHARE

# What one more forward is worth at most, in lengths of the longest item: a limit that nobody measured, or none, says
# little about what a forward costs, and one long item must not make all short ones as dear as itself.
FORWARD_PRICE_IN_LONGEST_ITEMS = 4


def split(
    costs: Sequence[int],
    groups: Sequence[Hashable],
    *,
    max_batch_cost: int,
    max_batch_size: int,
    pads: bool = True,
) -> list[list[int]]:
    """Deals the positions `0 … len(costs) - 1` into micro-batches; each position appears once.

    A micro-batch holds one group only and keeps `n <= max_batch_size` and, for its cost, `<= max_batch_cost`; 0 means
    no limit. An item that is over the budget by itself gets a micro-batch of its own.

    With `pads` a micro-batch costs `max(cost) * n` and is sorted by cost; within a group the split is the one with the
    least sum of these, each micro-batch counted with the price of a forward, and the cheapest come first. Takes time
    in proportion to the number of items times the size of the largest micro-batch.

    Without, it costs the sum of its items, which stay in order: as many share one as fit.
    """
    by_group: dict[Hashable, list[int]] = {}
    for position, group in enumerate(groups):
        by_group.setdefault(group, []).append(position)
    batches = []
    for positions in by_group.values():
        if not pads:
            batches += _split_in_order(positions, costs, max_batch_cost, max_batch_size)
            continue
        positions.sort(key=costs.__getitem__)
        batches += _split_sorted(positions, [costs[position] for position in positions], max_batch_cost, max_batch_size)
    return batches


def _split_sorted(positions: list[int], costs: list[int], max_batch_cost: int, max_batch_size: int) -> list[list[int]]:
    count = len(positions)
    longest = costs[-1]
    price: float = FORWARD_PRICE_IN_LONGEST_ITEMS * longest
    if max_batch_cost:
        price = min(price, FORWARD_PRICE_SHARE * max_batch_cost)
    fits = _fits(count, longest, max_batch_cost, max_batch_size)
    if fits and (count - 1) * (longest - costs[0]) <= price:
        # No split can save more padding than that, so none can pay for one more forward.
        return [positions]
    # Some best split of a sorted sequence cuts it into runs: `best[end]` is the least total for the first `end`
    # items, and `start_of[end]` is where the last run of that split begins.
    best = [0.0]
    start_of = [0]
    for end in range(1, count + 1):
        cost = costs[end - 1]
        least, least_start = best[end - 1] + cost, end - 1
        for start in range(end - 2, -1, -1):
            size = end - start
            if not _fits(size, cost, max_batch_cost, max_batch_size):
                break
            total = best[start] + cost * size
            if total <= least:
                least, least_start = total, start
        best.append(least + price)
        start_of.append(least_start)
    batches = []
    end = count
    while end:
        batches.append(positions[start_of[end] : end])
        end = start_of[end]
    return batches[::-1]


def _split_in_order(
    positions: list[int], costs: Sequence[int], max_batch_cost: int, max_batch_size: int
) -> list[list[int]]:
    batches: list[list[int]] = []
    total = 0
    for position in positions:
        total += costs[position]
        is_full = max_batch_size and batches and len(batches[-1]) >= max_batch_size
        if not batches or is_full or (max_batch_cost and total > max_batch_cost):
            batches.append([])
            total = costs[position]
        batches[-1].append(position)
    return batches


def _fits(size: int, cost: int, max_batch_cost: int, max_batch_size: int) -> bool:
    return (not max_batch_cost or cost * size <= max_batch_cost) and (not max_batch_size or size <= max_batch_size)

"""Splits prepared items into micro-batches by their true padded costs.

Owns the choice of which items share a `forward`. Pure: it knows positions, costs and groups, not the items, and it
refuses to import anything that computes, waits or sends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# What one more forward is worth, in lengths of the longest item: a micro-batch is split only where that saves more
# padding than this. Lower, and batches of slightly different lengths fall into slivers; higher, and one long item
# makes all short ones as dear as itself.
FORWARD_PRICE_IN_LONGEST_ITEMS = 4


def split(
    costs: Sequence[int], groups: Sequence[Hashable], *, max_batch_cost: int, max_batch_size: int
) -> list[list[int]]:
    """Deals the positions `0 … len(costs) - 1` into micro-batches; each position appears once.

    A micro-batch holds one group only, is sorted by cost, and keeps `max(cost) * n <= max_batch_cost` and
    `n <= max_batch_size`; 0 means no limit. An item that is over the budget by itself gets a micro-batch of its own.
    Within a group the split is the one with the least `sum of max(cost) * n` over its micro-batches, each counted
    with a fixed price, and the cheapest come first. Takes time in proportion to the number of items times the size
    of the largest micro-batch.
    """
    by_group: dict[Hashable, list[int]] = {}
    for position, group in enumerate(groups):
        by_group.setdefault(group, []).append(position)
    batches = []
    for positions in by_group.values():
        positions.sort(key=costs.__getitem__)
        batches += _split_sorted(positions, [costs[position] for position in positions], max_batch_cost, max_batch_size)
    return batches


def _split_sorted(positions: list[int], costs: list[int], max_batch_cost: int, max_batch_size: int) -> list[list[int]]:
    count = len(positions)
    longest = costs[-1]
    fits = _fits(count, longest, max_batch_cost, max_batch_size)
    if fits and (count - 1) * (longest - costs[0]) <= FORWARD_PRICE_IN_LONGEST_ITEMS * longest:
        # No split can save more padding than that, so none can pay for one more forward.
        return [positions]
    # Some best split of a sorted sequence cuts it into runs: `best[end]` is the least total for the first `end`
    # items, and `start_of[end]` is where the last run of that split begins.
    price = FORWARD_PRICE_IN_LONGEST_ITEMS * longest
    best = [0]
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


def _fits(size: int, cost: int, max_batch_cost: int, max_batch_size: int) -> bool:
    return (not max_batch_cost or cost * size <= max_batch_cost) and (not max_batch_size or size <= max_batch_size)

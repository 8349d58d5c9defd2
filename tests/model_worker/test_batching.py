"""Micro-batches hold every item once, keep their budgets, and waste as little padding as any split could."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_worker.batch_cost import FORWARD_PRICE_SHARE
from model_worker.runtimes.batching import FORWARD_PRICE_IN_LONGEST_ITEMS, split

costs_and_groups = st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["a", "b", None])), max_size=40)
limits = st.tuples(st.integers(0, 600), st.integers(0, 12))


@given(costs_and_groups, limits)
def test_each_item_is_in_exactly_one_micro_batch(items: list[tuple[int, str | None]], limit: tuple[int, int]) -> None:
    batches = split(
        [cost for cost, _ in items], [group for _, group in items], max_batch_cost=limit[0], max_batch_size=limit[1]
    )
    assert sorted(position for batch in batches for position in batch) == list(range(len(items)))
    assert all(batches)


@given(costs_and_groups, limits)
def test_budgets_hold_unless_an_item_is_over_them_alone(
    items: list[tuple[int, str | None]], limit: tuple[int, int]
) -> None:
    max_batch_cost, max_batch_size = limit
    costs = [cost for cost, _ in items]
    batches = split(costs, [group for _, group in items], max_batch_cost=max_batch_cost, max_batch_size=max_batch_size)
    for batch in batches:
        longest = max(costs[position] for position in batch)
        assert len(batch) == 1 or not max_batch_cost or longest * len(batch) <= max_batch_cost
        assert not max_batch_size or len(batch) <= max_batch_size


@given(costs_and_groups, limits)
def test_a_micro_batch_is_sorted_by_cost_and_holds_one_group(
    items: list[tuple[int, str | None]], limit: tuple[int, int]
) -> None:
    costs = [cost for cost, _ in items]
    groups = [group for _, group in items]
    for batch in split(costs, groups, max_batch_cost=limit[0], max_batch_size=limit[1]):
        assert [costs[position] for position in batch] == sorted(costs[position] for position in batch)
        assert len({groups[position] for position in batch}) == 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 150), st.integers(0, 5))
def test_no_other_split_is_cheaper(costs: list[int], max_batch_cost: int, max_batch_size: int) -> None:
    batches = split(costs, [None] * len(costs), max_batch_cost=max_batch_cost, max_batch_size=max_batch_size)
    price: float = FORWARD_PRICE_IN_LONGEST_ITEMS * max(costs)
    if max_batch_cost:
        price = min(price, FORWARD_PRICE_SHARE * max_batch_cost)
    ordered = sorted(costs)
    totals = []
    for cuts in range(len(costs)):
        for inner in combinations(range(1, len(costs)), cuts):
            edges = [0, *inner, len(costs)]
            runs = [ordered[start:end] for start, end in pairwise(edges)]
            if all(_allowed(run, max_batch_cost, max_batch_size) for run in runs):
                totals.append(sum(run[-1] * len(run) + price for run in runs))
    total = sum(max(costs[at] for at in batch) * len(batch) + price for batch in batches)
    assert total == pytest.approx(min(totals))


def _allowed(run: list[int], max_batch_cost: int, max_batch_size: int) -> bool:
    if len(run) == 1:
        return True
    return (not max_batch_cost or run[-1] * len(run) <= max_batch_cost) and (
        not max_batch_size or len(run) <= max_batch_size
    )


def test_equal_items_that_fit_stay_together() -> None:
    assert split([1] * 32, [None] * 32, max_batch_cost=0, max_batch_size=32) == [list(range(32))]


def test_a_long_item_does_not_make_short_ones_as_dear_as_itself() -> None:
    batches = split([10] * 15 + [1000] + [10] * 16, [None] * 32, max_batch_cost=0, max_batch_size=32)
    assert [len(batch) for batch in batches] == [31, 1]
    assert batches[1] == [15]


def test_a_forward_costs_a_share_of_the_budget_and_no_more_padding_than_that_is_put_up_with() -> None:
    costs = [10, 10, 14, 14]
    assert split(costs, [None] * 4, max_batch_cost=160, max_batch_size=0) == [[0, 1, 2, 3]]  # 8 of padding, price 8
    assert split(costs, [None] * 4, max_batch_cost=140, max_batch_size=0) == [[0, 1], [2, 3]]  # 8 of padding, price 7


@given(costs_and_groups, limits)
def test_without_padding_items_stay_in_order_and_share_while_their_sum_fits(
    items: list[tuple[int, str | None]], limit: tuple[int, int]
) -> None:
    costs, groups = [cost for cost, _ in items], [group for _, group in items]
    batches = split(costs, groups, max_batch_cost=limit[0], max_batch_size=limit[1], pads=False)
    assert sorted(position for batch in batches for position in batch) == list(range(len(items)))
    for batch in batches:
        assert batch == sorted(batch)
        assert len({groups[at] for at in batch}) == 1
        assert len(batch) == 1 or not limit[0] or sum(costs[at] for at in batch) <= limit[0]
        assert len(batch) == 1 or not limit[1] or len(batch) <= limit[1]
    for batch, following in pairwise(batches):
        if groups[batch[0]] == groups[following[0]]:
            too_dear = limit[0] and sum(costs[at] for at in batch) + costs[following[0]] > limit[0]
            assert too_dear or (limit[1] and len(batch) == limit[1])


def test_an_item_over_the_budget_runs_alone() -> None:
    assert split([5, 900, 6], [None] * 3, max_batch_cost=100, max_batch_size=8) == [[0, 2], [1]]


def test_nothing_splits_into_nothing() -> None:
    assert split([], [], max_batch_cost=10, max_batch_size=10) == []

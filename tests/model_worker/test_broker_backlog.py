"""The queue of one model: order, choice of a batch, and that both stay cheap when it is long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.batch_cost import FORWARD_PRICE_SHARE
from model_worker.broker.backlog import Backlog
from model_worker.broker.events import FrontId
from model_worker.broker.records import BatchLimits, Front, Request
from tests.broker_history import request_id

UNLIMITED = BatchLimits(0, 0)
FRONT = Front(FrontId(b"front"), 0.0)


def queued(
    number: int,
    *,
    cost: int = 1,
    urgency_s: float | None = None,
    operation: str = "predict",
    batch_key: bytes = b"",
    alone: bool = False,
) -> Request:
    return Request(
        front=FRONT,
        id=request_id(number),
        model="qa",
        operation=operation,
        batch_key=batch_key,
        body_bytes=0,
        deadline_s=1.0,
        priority=0,
        stream=False,
        retryable=True,
        arrived_s=0.0,
        sequence=number,
        urgency_s=float(number) if urgency_s is None else urgency_s,
        cost=cost,
        alone=alone,
        deaths=int(alone),
    )


def backlog_of(*requests: Request) -> Backlog:
    backlog = Backlog()
    for request in requests:
        backlog.add(request)
    return backlog


def numbers(requests: list[Request]) -> list[int]:
    return [request.sequence for request in requests]


def test_the_most_urgent_request_is_in_the_batch_with_its_nearest_in_cost() -> None:
    backlog = backlog_of(
        queued(1, cost=50), queued(2, cost=1), queued(3, cost=45), queued(4, cost=52), queued(5, cost=90)
    )
    assert numbers(backlog.take(BatchLimits(3, 0))) == [1, 4, 3]
    assert numbers(backlog.take(BatchLimits(3, 0))) == [2, 5]


def test_the_batch_stays_within_the_padded_cost() -> None:
    backlog = backlog_of(*(queued(number, cost=cost) for number, cost in enumerate([100, 101, 300, 100, 102], 1)))
    assert numbers(backlog.take(BatchLimits(0, 400))) == [1, 4, 2]  # 3 x 101; a fourth would make 4 x 102


def test_a_neighbour_that_is_too_dear_does_not_keep_cheaper_ones_out() -> None:
    backlog = backlog_of(queued(1, cost=100), queued(2, cost=101), queued(3, cost=98), queued(4, cost=95))
    assert numbers(backlog.take(BatchLimits(0, 201))) == [1, 3]


def test_what_would_mostly_be_padded_waits_for_a_batch_of_its_kind() -> None:
    costs = [170, 28, 160, 27, 150, 26]
    backlog = backlog_of(*(queued(number, cost=cost) for number, cost in enumerate(costs, start=1)))
    assert numbers(backlog.take(BatchLimits(0, 1000))) == [1, 3, 5]
    assert numbers(backlog.take(BatchLimits(0, 1000))) == [2, 4, 6]


def test_a_queue_that_fits_into_one_batch_is_one() -> None:
    backlog = backlog_of(queued(1, cost=170), queued(2, cost=28), queued(3, cost=5))
    assert numbers(backlog.take(BatchLimits(0, 510))) == [1, 2, 3]


def test_where_nothing_is_padded_the_most_urgent_go_while_their_sum_fits() -> None:
    backlog = backlog_of(*(queued(number, cost=cost) for number, cost in enumerate([170, 28, 160, 27, 150, 26], 1)))
    backlog.arrange(mixes_parameters=False, pads=False)
    backlog.validate()
    assert backlog.fills(queued(1, cost=170), BatchLimits(0, 560))
    assert not backlog.fills(queued(1, cost=170), BatchLimits(0, 561))
    assert numbers(backlog.take(BatchLimits(0, 358))) == [1, 2, 3]
    assert numbers(backlog.take(BatchLimits(2, 358))) == [4, 5]
    backlog.validate()


def test_a_head_that_exceeds_the_limit_goes_by_itself() -> None:
    backlog = backlog_of(queued(1, cost=1000), queued(2, cost=1000), queued(3))
    assert numbers(backlog.take(BatchLimits(0, 100))) == [1]


def test_among_equal_costs_the_more_urgent_goes_first_on_both_sides() -> None:
    backlog = backlog_of(
        queued(1, cost=5), *(queued(n, cost=4) for n in (2, 3, 4)), *(queued(n, cost=6) for n in (5, 6, 7))
    )
    assert numbers(backlog.take(BatchLimits(6, 0))) == [1, 2, 3, 4, 5, 6]


def test_requests_that_must_run_alone_neither_have_company_nor_are_it() -> None:
    backlog = backlog_of(queued(1), queued(2, alone=True), queued(3))
    assert numbers(backlog.take(UNLIMITED)) == [1, 3]
    backlog.add(queued(4))
    assert numbers(backlog.take(UNLIMITED)) == [2]
    assert numbers(backlog.take(UNLIMITED)) == [4]


def test_the_queue_can_be_left_from_anywhere() -> None:
    requests = [queued(number, cost=number % 3, alone=number == 4) for number in range(8)]
    backlog = backlog_of(*requests)
    for request in (requests[4], requests[0], requests[7], requests[3]):
        backlog.remove(request)
        backlog.validate()
    assert numbers(list(backlog)) == [1, 2, 5, 6]


def test_mixing_parameters_sorts_what_is_queued_anew() -> None:
    backlog = backlog_of(queued(1, batch_key=b"a"), queued(2, batch_key=b"b"), queued(3, operation="other"))
    assert not backlog.fills(queued(1, batch_key=b"a"), BatchLimits(2, 0))
    backlog.arrange(mixes_parameters=True, pads=True)
    backlog.validate()
    assert numbers(backlog.take(UNLIMITED)) == [1, 2]
    backlog.arrange(mixes_parameters=False, pads=True)
    backlog.add(queued(4, operation="other", batch_key=b"x"))
    assert numbers(backlog.take(UNLIMITED)) == [3]


def test_those_ahead_are_counted_by_urgency() -> None:
    backlog = backlog_of(*(queued(number, urgency_s=float(number)) for number in (10, 20, 30)))
    assert [backlog.count_ahead(urgency_s) for urgency_s in (5.0, 10.0, 25.0, 99.0)] == [0, 1, 2, 3]


def padded_batch(head: Request, mates: list[Request], size_max: int, cost_max: int) -> list[Request]:
    """What fits: nearest in cost first."""
    batch = [head]
    for mate in sorted(mates, key=lambda r: (abs(r.cost - head.cost), r.cost > head.cost, r.urgency_s, r.sequence)):
        dearest = max(request.cost for request in [*batch, mate])
        if size_max and len(batch) >= size_max:
            break
        if not cost_max or dearest * (len(batch) + 1) <= cost_max:
            batch.append(mate)
    return batch


def unpadded_batch(head: Request, mates: list[Request], size_max: int, cost_max: int) -> list[Request]:
    """What fits: the most urgent first."""
    batch = [head]
    for mate in sorted(mates, key=lambda r: (r.urgency_s, r.sequence)):
        too_dear = cost_max and sum(request.cost for request in [*batch, mate]) > cost_max
        if too_dear or (size_max and len(batch) >= size_max):
            break
        batch.append(mate)
    return batch


def usefulness(batch: list[Request], cost_max: int) -> float:
    """The share of a padded forward, with its own price, that is neither padding nor price."""
    costs = [request.cost for request in batch]
    return sum(costs) / (max(costs) * len(costs) + FORWARD_PRICE_SHARE * cost_max)


ITEMS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 3), st.sampled_from([b"a", b"b"]), st.booleans()),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150)
@given(ITEMS, st.integers(0, 6), st.integers(0, 120), st.booleans())
def test_taking_agrees_with_a_plain_reading_of_the_rule(
    items: list[tuple[int, int, bytes, bool]], size_max: int, cost_max: int, pads: bool
) -> None:
    limits = BatchLimits(size_max, cost_max)
    left = [
        queued(number, cost=cost, urgency_s=float(urgency), batch_key=key, alone=alone and number % 5 == 0)
        for number, (cost, urgency, key, alone) in enumerate(items)
    ]
    backlog = backlog_of(*left)
    backlog.arrange(mixes_parameters=False, pads=pads)
    while left:
        head = min(left, key=lambda request: (request.urgency_s, request.sequence))
        mates = [r for r in left if r is not head and r.batch_key == head.batch_key and not (r.alone or head.alone)]
        expected = fitting = (padded_batch if pads else unpadded_batch)(head, mates, size_max, cost_max)
        if pads and cost_max and len(fitting) <= len(mates):
            sizes = range(1, len(fitting) + 1)
            expected = fitting[: max(sizes, key=lambda size: (usefulness(fitting[:size], cost_max), size))]
        full = backlog.fills(head, limits)
        too_dear = 0 < cost_max < head.cost
        assert full == (head.alone or too_dear or len(fitting) <= len(mates) or len(fitting) == size_max)
        assert backlog.take(limits) == expected
        backlog.validate()
        left = [request for request in left if request not in expected]
    assert len(backlog) == 0


class CountedCost(int):
    """A cost that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountedCost.comparisons += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        CountedCost.comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("limits", [BatchLimits(16, 0), BatchLimits(16, 9000), BatchLimits(0, 9000)])
def test_choosing_a_batch_from_a_long_queue_compares_hardly_more_than_from_a_short_one(limits: BatchLimits) -> None:
    def comparisons_per_batch(length: int) -> float:
        rng = random.Random(length)
        backlog = backlog_of(*(queued(n, cost=CountedCost(rng.randint(1, 2000))) for n in range(length)))
        CountedCost.comparisons = 0
        for turn in range(20):
            head = backlog.head
            assert head is not None
            backlog.fills(head, limits)
            for request in backlog.take(limits):
                backlog.add(queued(length * (turn + 2) + request.sequence, cost=request.cost))
        return CountedCost.comparisons / 20

    # A hundred times longer is 1.7 times as many doublings.
    assert comparisons_per_batch(50_000) < 2.5 * comparisons_per_batch(500)


def test_many_neighbours_that_are_too_dear_cost_nothing() -> None:
    dear = [queued(number, cost=CountedCost(400)) for number in range(10, 20_010)]
    backlog = backlog_of(
        queued(1, cost=CountedCost(300)),
        queued(2, cost=CountedCost(299)),
        queued(3, cost=CountedCost(298)),
        queued(4, cost=CountedCost(297)),
        *dear,
    )
    CountedCost.comparisons = 0
    assert numbers(backlog.take(BatchLimits(0, 1000))) == [1, 2, 3]
    assert CountedCost.comparisons < 500

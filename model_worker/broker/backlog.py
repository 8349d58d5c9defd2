"""The queue of one model: who is next, and who goes with it.

Owns the order of queued requests and the choice of a batch; every operation is O(log n) in the length of the queue.
Refuses to know about replicas, deadlines or time.

The most urgent request is always in the batch, so nothing starves, whatever its cost. Where a model pads, a batch costs
as much as its dearest item times the number of items, so its company is chosen by cost: mates of equal cost waste
nothing, and those that would waste more than a further forward costs wait for a batch of their own kind. Where a model
does not pad, the next most urgent are as good company as any.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import accumulate

from sortedcontainers import SortedList

from model_worker.batch_cost import FORWARD_PRICE_SHARE
from model_worker.broker.records import BatchLimits, Request

GroupKey = tuple[str, bytes]
"""Requests share a batch only within a group: operation, and batch key unless the model mixes parameters."""
UrgencyEntry = tuple[float, int, Request]
"""Urgency, sequence, request."""
GroupEntry = tuple[int, float, int, Request]
"""Cost, urgency, sequence, request: by cost, and the more urgent first among equals. Where the model does not pad, the
first is 0 for all. Sequences differ, so requests themselves are never compared."""


class Backlog:
    """The queued requests of one model, indexed by urgency and, within each group, in the order of their company."""

    def __init__(self) -> None:
        # Those that may share a batch, and those that must run alone: urgency, sequence, request.
        self._sharing: SortedList[UrgencyEntry] = SortedList()
        self._alone: SortedList[UrgencyEntry] = SortedList()
        # Those that may share a batch. Requests that must run alone are in no group; empty groups are deleted.
        self._groups: dict[GroupKey, SortedList[GroupEntry]] = {}
        self._mixes_parameters = False
        self._pads = True

    def __len__(self) -> int:
        return len(self._sharing) + len(self._alone)

    def __iter__(self) -> Iterator[Request]:
        """By urgency."""
        return (request for _, _, request in heapq.merge(self._sharing, self._alone))

    @property
    def head(self) -> Request | None:
        """The most urgent one."""
        if self._alone and (not self._sharing or self._alone[0] < self._sharing[0]):
            return self._alone[0][2]
        return self.first_to_share

    @property
    def first_to_share(self) -> Request | None:
        """The most urgent one that may share a batch."""
        return self._sharing[0][2] if self._sharing else None

    def count_ahead(self, urgency_s: float) -> int:
        """How many are at least as urgent."""
        bound = (urgency_s, math.inf)
        return self._sharing.bisect_right(bound) + self._alone.bisect_right(bound)  # type: ignore[arg-type]

    def count_alone_ahead(self) -> int:
        """How many that must run alone are more urgent than any that may share."""
        return self._alone.bisect_left(self._sharing[0]) if self._sharing else len(self._alone)

    def add(self, request: Request) -> None:
        self._order_of(request).add((request.urgency_s, request.sequence, request))
        if not request.alone:
            key = self._key(request)
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = SortedList()
            group.add(self._entry(request))

    def remove(self, request: Request) -> None:
        self._order_of(request).remove((request.urgency_s, request.sequence, request))
        if not request.alone:
            key = self._key(request)
            group = self._groups[key]
            group.remove(self._entry(request))
            if not group:
                del self._groups[key]

    def fills(self, head: Request, limits: BatchLimits) -> bool:
        """Whether a limit, and not the end of the queue, would close the head's batch."""
        if head.alone:
            return True
        group = self._groups[self._key(head)]
        if limits.size_max and len(group) >= limits.size_max:
            return True
        # If the whole group fits, it is the batch; if not, a limit closes it.
        if not limits.cost_max:
            return False
        if self._pads:
            return group[-1][0] * len(group) > limits.cost_max
        return any(total > limits.cost_max for total in accumulate(entry[3].cost for entry in group))

    def take(self, limits: BatchLimits) -> list[Request]:
        """Removes the next batch: the head, and the company that suits it while the limits allow.

        A head that costs more than the limit goes by itself.
        """
        head = self.head
        assert head is not None, "an empty queue has no batch to give"
        chosen = [head]
        if not head.alone:
            chosen.extend(self._company(head, limits) if self._pads else self._followers(head, limits))
        for request in chosen:
            self.remove(request)
        return chosen

    def arrange(self, *, mixes_parameters: bool, pads: bool) -> None:
        """Whether batch keys do not keep requests apart, and whether the model pads; sorts the queue anew, O(n log n),
        when that changes."""
        if (mixes_parameters, pads) == (self._mixes_parameters, self._pads):
            return
        self._mixes_parameters, self._pads = mixes_parameters, pads
        entries: dict[GroupKey, list[GroupEntry]] = {}
        for request in self:
            if not request.alone:
                entries.setdefault(self._key(request), []).append(self._entry(request))
        self._groups = {key: SortedList(group) for key, group in entries.items()}

    def validate(self) -> None:
        """Raises AssertionError if the two indexes disagree."""
        requests = list(self)
        entries = [(request.urgency_s, request.sequence) for request in requests]
        assert entries == sorted(entries), "backlog: order broken"
        assert all(request.alone for _, _, request in self._alone), "backlog: one that may share is to be alone"
        assert not any(request.alone for _, _, request in self._sharing), "backlog: one that must be alone is to share"
        grouped = {(key, entry) for key, group in self._groups.items() for entry in group}
        expected = {(self._key(r), self._entry(r)) for r in requests if not r.alone}
        assert grouped == expected, "backlog: the groups do not hold what the queue holds"
        assert sum(map(len, self._groups.values())) == len(expected), "backlog: a request is in a group twice"
        assert all(self._groups.values()), "backlog: an empty group is kept"
        assert all(list(group) == sorted(group) for group in self._groups.values()), "backlog: a group is out of order"

    def _order_of(self, request: Request) -> SortedList[UrgencyEntry]:
        return self._alone if request.alone else self._sharing

    def _key(self, request: Request) -> GroupKey:
        return request.operation, b"" if self._mixes_parameters else request.batch_key

    def _entry(self, request: Request) -> GroupEntry:
        return request.cost if self._pads else 0, request.urgency_s, request.sequence, request

    def _followers(self, head: Request, limits: BatchLimits) -> Iterator[Request]:
        """The others of the head's group that go with it where nothing is padded: the next in urgency."""
        group = self._groups[self._key(head)]
        total = 0
        for _, _, _, request in group.islice(0, limits.size_max or None):
            total += request.cost
            if request is head:
                continue
            if limits.cost_max and total > limits.cost_max:
                return
            yield request

    def _company(self, head: Request, limits: BatchLimits) -> list[Request]:
        """The others of the head's group that go with it where items are padded.

        If the whole group fits, that is all of it. Otherwise there will be further batches: of the neighbours, in the
        order of their distance, so many go along as leave the least of the forward to padding and to its own price.
        """
        neighbours = list(self._neighbours(head, limits))
        if not limits.cost_max or len(neighbours) + 1 == len(self._groups[self._key(head)]):
            return neighbours
        price = FORWARD_PRICE_SHARE * limits.cost_max
        useful = dearest = head.cost
        best, best_size = useful / (dearest + price), 1
        for size, request in enumerate(neighbours, start=2):
            useful += request.cost
            dearest = max(dearest, request.cost)
            share = useful / (dearest * size + price)
            if share >= best:
                best, best_size = share, size
        return neighbours[: best_size - 1]

    def _neighbours(self, head: Request, limits: BatchLimits) -> Iterator[Request]:
        """The nearest in cost first, and the cheaper first among equals, while the limits allow."""
        size_max = limits.size_max or math.inf
        cost_max = limits.cost_max or math.inf
        group = self._groups[self._key(head)]
        cheaper = self._cheaper(group, head)
        dearer = (entry[3] for entry in group.irange(minimum=self._entry(head), inclusive=(False, True)))
        below, above = next(cheaper, None), next(dearer, None)
        size, dearest = 1, head.cost
        while size < size_max and dearest * (size + 1) <= cost_max:
            if above is not None and above.cost * (size + 1) > cost_max:
                above = None  # and so are all that are still dearer; a cheaper one may fit
            if below is not None and (above is None or head.cost - below.cost <= above.cost - head.cost):
                yield below
                below = next(cheaper, None)
            elif above is not None:
                yield above
                dearest = above.cost
                above = next(dearer, None)
            else:
                return
            size += 1

    def _cheaper(self, group: SortedList[GroupEntry], head: Request) -> Iterator[Request]:
        # From the dearest cost down, but within one cost from the most urgent up.
        end = group.bisect_left(self._entry(head))
        while end > 0:
            start = group.bisect_left((group[end - 1][0],))  # type: ignore[arg-type]
            for entry in group.islice(start, end):
                yield entry[3]
            end = start

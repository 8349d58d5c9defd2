"""One timer per subject, earliest first.

Owns when to wake up. Refuses to know what a ring means: whoever takes it looks at the subject, and sets it again if it
came too early. That makes timers that mostly move later (a silence limit that every pulse extends) nearly free: they
are left alone, ring once too early, and are set again.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

# Cleared entries stay in the heap until they surface. Beyond this many, and more than the live ones, it is rebuilt.
STALE_ENTRIES_MAX = 64


class Timers(Generic[T]):
    """`set`, `advance` and `clear` cost O(log n) amortised; the heap holds at most 2n + `STALE_ENTRIES_MAX` entries."""

    def __init__(self) -> None:
        # (time, order of setting, subject); the order makes equal times ring first-set-first.
        self._heap: list[tuple[float, int, T]] = []
        # The one entry of each subject that counts; others of it in the heap are stale.
        self._entries: dict[T, tuple[float, int, T]] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, subject: T) -> bool:
        return subject in self._entries

    @property
    def next_s(self) -> float | None:
        """When the earliest one rings."""
        return self._heap[0][0] if self._heap else None

    def set(self, subject: T, at_s: float) -> None:
        """Rings at `at_s`, and at no other time."""
        self._sequence += 1
        entry = (at_s, self._sequence, subject)
        self._entries[subject] = entry
        heapq.heappush(self._heap, entry)
        self._drop_stale()

    def advance(self, subject: T, at_s: float) -> None:
        """Rings at `at_s` or earlier."""
        entry = self._entries.get(subject)
        if entry is None or at_s < entry[0]:
            self.set(subject, at_s)

    def clear(self, subject: T) -> None:
        if self._entries.pop(subject, None) is not None:
            self._drop_stale()

    def pop_due(self, now_s: float) -> T | None:
        """Takes the earliest one that is due, if there is one."""
        if not self._heap or self._heap[0][0] > now_s:
            return None
        _, _, subject = heapq.heappop(self._heap)
        del self._entries[subject]
        self._drop_stale()
        return subject

    def at_s(self, subject: T) -> float | None:
        entry = self._entries.get(subject)
        return entry[0] if entry is not None else None

    def validate(self) -> None:
        """Raises AssertionError if the heap has lost an entry, shows a stale one first, or has grown without bound."""
        heap = self._heap
        assert all(heap[(index - 1) // 2] <= heap[index] for index in range(1, len(heap))), "timers: heap order broken"
        live = {id(entry) for entry in heap} & {id(entry) for entry in self._entries.values()}
        assert len(live) == len(self._entries), "timers: an entry is not in the heap"
        assert not heap or self._is_live(heap[0]), "timers: a stale entry is first"
        assert len(heap) <= 2 * len(self._entries) + STALE_ENTRIES_MAX, "timers: too many stale entries"

    def _is_live(self, entry: tuple[float, int, T]) -> bool:
        return self._entries.get(entry[2]) is entry

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + STALE_ENTRIES_MAX:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)

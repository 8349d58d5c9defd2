"""Which replicas that batch continuously have room, and how much.

Owns the order of these replicas; every operation is O(log n) in their number, but for those about suspects. Refuses to
decide who joins whom.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sortedcontainers import SortedList

from model_worker.broker.records import Replica

Entry = tuple[int, int, Replica]
"""The negative of the room, order of coming, replica: the roomiest first, and of several that which waits the longest.
Orders differ, so replicas themselves are never compared."""


class Rooms:
    """Replicas with room, the roomiest first."""

    def __init__(self) -> None:
        self._entries: dict[Replica, Entry] = {}
        self._by_room: SortedList[Entry] = SortedList()
        self._order = 0
        # How many requests all of them could take.
        self.total = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Replica]:
        """The roomiest first."""
        return (replica for _, _, replica in self._by_room)

    def __contains__(self, replica: object) -> bool:
        return replica in self._entries

    def note(self, replica: Replica, room: int) -> None:
        """It has so much room now; 0: none."""
        known = self._entries.get(replica)
        if known is not None:
            if -known[0] == room:
                return
            self._by_room.remove(known)
            del self._entries[replica]
            self.total += known[0]
        if room:
            self._order += 1
            entry = self._entries[replica] = (-room, self._order, replica)
            self._by_room.add(entry)
            self.total += room

    def roomiest(self, but: Collection[Replica] = ()) -> Replica | None:
        """The one with the most room that is none of these."""
        return next((replica for replica in self if replica not in but), None)

    @property
    def empty(self) -> Replica | None:
        """One that runs nothing."""
        return next((replica for replica in self if replica.running is None), None)

"""The way of batches to the main thread, and who prepares them: whichever of two threads has nothing better to do.

    I/O thread --put--> arrived --prepare--> prepared --take--> main thread

While the main thread computes, the prepare thread prepares what comes next. While it waits, it prepares by itself: to
wake one thread instead of two is most of what a request costs that meets an idle process.

Owns both queues and the order in them: one batch is prepared at a time, in the order of arrival. Refuses to know what
preparing is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from model_worker.replica.jobs import Job

Prepare = Callable[[list[Job]], list[list[Job]]]
"""A batch to micro-batches; none, if every item of it has ended."""


class Intake:
    """What was sent to the process and is not computed yet."""

    def __init__(self, prepare: Prepare, *, arrived_max: int, prepared_max: int) -> None:
        self._prepare = prepare
        self.arrived_max = arrived_max
        self._prepared_max = prepared_max
        # Everything below is read and written under the lock, but for `is_empty`.
        lock = self._lock = threading.Lock()
        self._main_may_go = threading.Condition(lock)
        self._helper_may_go = threading.Condition(lock)
        self._arrived: deque[list[Job]] = deque()
        # Somebody prepares what was taken from `_arrived` and has not come to `_prepared` yet.
        self._is_preparing = False
        self._prepared: deque[list[Job]] = deque()
        # The main thread computes nothing; it may have been woken already.
        self._main_waits = False
        self._has_ended = False

    # --- I/O thread ----------------------------------------------------------------------------------------------

    def put(self, batches: Iterable[list[Job]]) -> bool:
        """Takes batches in; False if too much waits already. Never blocks."""
        with self._lock:
            if len(self._arrived) >= self.arrived_max:
                return False
            self._arrived.extend(batches)
            self._wake()
        return True

    def end(self) -> None:
        """Nothing more will be put: `take` ends when what was put has been taken."""
        with self._lock:
            self._has_ended = True
            self._wake()

    # --- main thread ---------------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether nothing waits that could be computed next."""
        # In the order in which a batch goes from one to the next, so that none is missed without the lock.
        return not (self._arrived or self._is_preparing or self._prepared)

    def take(self, *, wait: bool) -> list[Job] | None:
        """The next micro-batch. None: there is none now; or, if it was to `wait` for one, there will be none."""
        while True:
            with self._lock:
                if wait:
                    self._main_waits = True
                    self._main_may_go.wait_for(self._main_can_go)
                    self._main_waits = False
                if self._prepared:
                    micro_batch = self._prepared.popleft()
                    # There is room for another one.
                    self._wake()
                    return micro_batch
                if not (wait and self._arrived):
                    return None
                batch = self._begin()
            self._prepare_and_add(batch)

    # --- prepare thread ------------------------------------------------------------------------------------------

    def help(self) -> None:
        """Prepares what the main thread has no time for, until the end."""
        while True:
            with self._lock:
                self._helper_may_go.wait_for(self._helper_can_go)
                if not self._arrived:
                    return
                batch = self._begin()
            self._prepare_and_add(batch)

    # --- both ----------------------------------------------------------------------------------------------------

    def _begin(self) -> list[Job]:
        self._is_preparing = True
        return self._arrived.popleft()

    def _prepare_and_add(self, batch: list[Job]) -> None:
        micro_batches = self._prepare(batch)
        with self._lock:
            self._prepared.extend(micro_batches)
            self._is_preparing = False
            self._wake()

    def _main_can_go(self) -> bool:
        return bool(self._prepared) or (not self._is_preparing and (bool(self._arrived) or self._has_ended))

    def _helper_can_go(self) -> bool:
        if not self._arrived:
            return self._has_ended
        # An idle main thread takes what has arrived by itself, unless something is prepared for it.
        is_main_busy = bool(self._prepared) or not self._main_waits
        return is_main_busy and not self._is_preparing and len(self._prepared) < self._prepared_max

    def _wake(self) -> None:
        if self._main_waits and self._main_can_go():
            self._main_may_go.notify()
        if self._helper_can_go():
            self._helper_may_go.notify()

"""From the main thread to the finish thread, and out of the process when the device is lost.

    main thread --computed--> finish thread --> outlet
            \\______ what is short ______________/

Owns the order of what is told of a job: what goes through here cannot overtake what went before. And who tells it. The
main thread does so by itself where the finish thread has done all it was given, the work is short, and, for whole
answers, nothing else is to be computed: waking a thread, and sharing the interpreter's lock with it, costs more then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Full, Queue
from typing import NoReturn

from model_worker.replica.host_stages import FinishStage
from model_worker.replica.jobs import Answers, Job

COMPUTED_ORDERS_MAX = 8
# How long computed results may take to be finished before the process goes on, or ends, without them.
LAST_RESULTS_S = 5.0
# What takes longer than this is left to the finish thread: it would hold up the next step, or the forward of what
# arrives meanwhile. Waking a thread takes some tenths of a millisecond until both have the interpreter's lock again.
SHORT_S = 0.001
# What an item is taken to need before the first was seen.
LONG_S = 1.0

Order = Callable[[], None]
"""Tells something of one or more jobs."""


class Handover:
    """What the main thread leaves to the finish thread, or does at once. Main thread only, but for `run`."""

    def __init__(self, finish: FinishStage, answers: Answers) -> None:
        self._finish = finish
        self._answers = answers
        self._computed: Queue[tuple[Order, int] | None] = Queue(COMPUTED_ORDERS_MAX)
        # Orders left to the finish thread, and those it has done. Each is written by one thread alone.
        self._left_count = 0
        self._done_count = 0
        # The longest that an item of an order took, whichever thread did it; what was long is forgotten by halves.
        self._item_s = LONG_S

    def put(self, order: Order, items: int = 1) -> None:
        """Has something told of so many jobs. Blocks while the finish thread has too much before it."""
        if self._is_short(items):
            self._do(order, items)
            self._finish.flush()
        else:
            self._leave(order, items)

    def outputs(self, pairs: list[tuple[Job, object]], is_idle: Callable[[], bool]) -> None:
        """Has jobs ended with their outputs: here, as long as nothing else is to be computed, and the others there."""
        done = 0
        while done < len(pairs) and self._is_short(1) and is_idle():
            self._do(partial(self._finish.outputs, pairs[done : done + 1]), 1)
            done += 1
        if done < len(pairs):
            self._leave(partial(self._finish.outputs, pairs[done:]), len(pairs) - done)
        else:
            self._finish.flush()

    def wait_until_finished(self) -> None:
        """Until the finish thread has done all it was given, or `LAST_RESULTS_S` have passed."""
        if self._is_all_done:
            return
        done = threading.Event()
        try:
            self._computed.put((done.set, 1), timeout=LAST_RESULTS_S)
        except Full:
            return
        done.wait(LAST_RESULTS_S)

    def lose_device(self, jobs: Sequence[Job], error: BaseException) -> NoReturn:
        """Ends the process, after everything that was computed before; one of `jobs` is to blame."""
        self.wait_until_finished()
        self._answers.lose_device(jobs, len(jobs), error)

    def end(self) -> None:
        """Nothing more will be put: `run` ends when all is done."""
        self._computed.put(None)

    def run(self) -> None:
        """Does what is left to it, until the end. Finish thread only."""
        while (left := self._computed.get()) is not None:
            self._do(*left)
            self._finish.flush()
            self._done_count += 1

    @property
    def _is_all_done(self) -> bool:
        return self._done_count == self._left_count

    def _is_short(self, items: int) -> bool:
        return self._is_all_done and self._item_s * items <= SHORT_S

    def _leave(self, order: Order, items: int) -> None:
        self._left_count += 1
        self._computed.put((order, items))

    def _do(self, order: Order, items: int) -> None:
        started_s = time.perf_counter()
        order()
        self._item_s = max((time.perf_counter() - started_s) / items, self._item_s / 2)

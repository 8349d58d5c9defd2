"""From the main thread to the finish thread, and out of the process when the device is lost.

    main thread --computed--> finish thread --> outlet
             \\__ short answers, while idle __/

Owns the order of what is told of a job: what goes through here cannot overtake what went before. And who finishes whole
answers: the main thread itself, where nothing else is to be computed, what it does is short, and the finish thread has
done all it was given; waking that costs more then. Between the steps of streams it never does: they would wait for it.
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
# An answer that takes longer than this is left to the finish thread: it would hold up the forward of what arrives
# meanwhile. Waking a thread takes some tenths of a millisecond, until both have had the interpreter's lock again.
SHORT_S = 0.001
# What an answer is taken to need before the first was seen.
LONG_S = 1.0

Order = Callable[[], None]
"""Work for the finish thread."""


class Handover:
    """What the main thread leaves to the finish thread, or finishes at once. Main thread only, but for `run`."""

    def __init__(self, finish: FinishStage, answers: Answers) -> None:
        self._finish = finish
        self._answers = answers
        self._computed: Queue[Order | None] = Queue(COMPUTED_ORDERS_MAX)
        # Orders left to the finish thread, and those it has done. Each is written by one thread alone.
        self._left_count = 0
        self._done_count = 0
        # The longest that an answer took, whichever thread finished it; what was long is forgotten by halves.
        self._answer_s = LONG_S

    def put(self, order: Order) -> None:
        """Leaves something to the finish thread. Blocks while that has too much before it."""
        self._left_count += 1
        self._computed.put(order)

    def outputs(self, pairs: list[tuple[Job, object]], is_idle: Callable[[], bool]) -> None:
        """Has jobs ended with their outputs: here, as long as nothing else is to be computed, and the others there."""
        here = 0
        while here < len(pairs) and self._is_all_done and self._answer_s <= SHORT_S and is_idle():
            self._end(pairs[here : here + 1])
            here += 1
        if here < len(pairs):
            self.put(partial(self._end, pairs[here:]))
        else:
            self._finish.flush()

    def wait_until_finished(self) -> None:
        """Until the finish thread has done all it was given, or `LAST_RESULTS_S` have passed."""
        if self._is_all_done:
            return
        done = threading.Event()
        try:
            self._computed.put(done.set, timeout=LAST_RESULTS_S)
        except Full:
            return
        self._left_count += 1
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
        while (order := self._computed.get()) is not None:
            order()
            self._finish.flush()
            self._done_count += 1

    @property
    def _is_all_done(self) -> bool:
        return self._done_count == self._left_count

    def _end(self, pairs: list[tuple[Job, object]]) -> None:
        started_s = time.perf_counter()
        self._finish.outputs(pairs)
        self._answer_s = max((time.perf_counter() - started_s) / len(pairs), self._answer_s / 2)

"""From the main thread to the finish thread, and out of the process when the device is lost.

Owns the order of what is told of a job: what goes through here cannot overtake what went before. Main thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Full, Queue
from typing import NoReturn

from model_worker.replica.jobs import Answers, Job

# How long computed results may take to be finished before the process goes on, or ends, without them.
LAST_RESULTS_S = 5.0

Order = Callable[[], None]
"""Work for the finish thread."""


class Handover:
    """What the main thread leaves to the finish thread."""

    def __init__(self, computed: Queue[Order | None], answers: Answers) -> None:
        self._computed = computed
        self._answers = answers

    def put(self, order: Order) -> None:
        """Blocks while the finish thread has too much before it."""
        self._computed.put(order)

    def wait_until_finished(self) -> None:
        """Until the finish thread has done all it was given, or `LAST_RESULTS_S` have passed."""
        done = threading.Event()
        try:
            self._computed.put(done.set, timeout=LAST_RESULTS_S)
        except Full:
            return
        done.wait(LAST_RESULTS_S)

    def lose_device(self, jobs: Sequence[Job], error: BaseException) -> NoReturn:
        """Ends the process, after everything that was computed before; one of `jobs` is to blame."""
        self.wait_until_finished()
        self._answers.lose_device(jobs, len(jobs), error)

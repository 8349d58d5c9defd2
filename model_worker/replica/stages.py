"""The three stages that every item of a batch goes through: prepare, forward, finish.

    I/O thread --arrived--> prepare thread --prepared--> main thread --computed--> finish thread --> outlet
                            decode, check,               forward, or steps,        plain values,
                            tokenise, split              nothing else              encode

Owns the threads and the bounded queues between them. An error is either an item's, and ends that item, or the
process's, and ends the process: a thread never dies alone. Refuses sockets: batches come in by `submit` and results
go out through an `Outlet`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue, SimpleQueue
from typing import TYPE_CHECKING

from model_worker.replica import faults
from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.forward_stage import ForwardStage, Progress
from model_worker.replica.handover import Handover, Order
from model_worker.replica.host_stages import FinishStage, Limits, PrepareStage
from model_worker.replica.jobs import Answers, Job, Leave, Outlet
from model_worker.replica.step_stage import StepStage
from model_worker.runtimes.base import Model
from shared.errors import Code

if TYPE_CHECKING:
    from model_worker.replica.spans import ReplicaSpans

# The broker gives a replica one running and one prefetched batch; more than this is a fault of the broker's, and is
# refused rather than stored.
ARRIVED_BATCHES_MAX = 16
# Deep enough to hide a hiccup of the next stage, shallow enough that a cancelled item is still ahead of its forward.
PREPARED_BATCHES_MAX = 4
COMPUTED_ORDERS_MAX = 8


class Stages:
    """Runs one loaded and warmed model."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        outlet: Outlet,
        progress: Progress,
        leave: Leave,
        spans: ReplicaSpans | None = None,
    ) -> None:
        self._outlet = outlet
        self._leave = leave
        self._answers = Answers(outlet, leave)
        self._arrived: SimpleQueue[list[Job] | None] = SimpleQueue()
        self._is_continuous = model.continuous_batching
        # All that a continuous batch may hold can join at its next step: where fewer fit, a burst trickles in.
        concurrency = limits.concurrency(model)
        self._prepared: Queue[list[Job] | None] = Queue(max(PREPARED_BATCHES_MAX, concurrency))
        self._computed: Queue[Order | None] = Queue(COMPUTED_ORDERS_MAX)
        self._prepare = PrepareStage(model, limits, self._answers)
        self._finish = FinishStage(model, self._answers, outlet)
        handover = Handover(self._computed, self._answers)
        self._forward = ForwardStage(model, self._answers, self._finish, handover, progress, spans)
        self._steps = StepStage(model, limits, self._answers, self._finish, handover, progress, spans)
        model.is_wanted = self._steps.is_wanted if self._is_continuous else self._forward.is_wanted
        # Of a continuous batch, each item may arrive as a batch of its own.
        self._arrived_max = max(ARRIVED_BATCHES_MAX, concurrency)

    def submit(self, jobs: list[Job]) -> None:
        """Takes one batch in; never blocks. I/O thread only."""
        if self._arrived.qsize() < self._arrived_max:
            self._arrived.put(jobs)
            return
        for job in jobs:
            message = f"this model process already holds {self._arrived_max} batches that wait"
            self._answers.fail(job, Code.OVERLOADED, message)
        self._outlet.flush()

    def end(self) -> None:
        """No more batches will come: `serve` returns when those that came are answered. I/O thread only."""
        self._arrived.put(None)

    def serve(self) -> None:
        """Computes until `end`. Main thread only; the other two stages get threads of their own."""
        finish = self._start("finish", self._run_finish)
        self._start("prepare", self._run_prepare)
        if self._is_continuous:
            self._steps.serve(self._prepared)
        else:
            while (jobs := self._prepared.get()) is not None:
                self._forward.compute(jobs)
        self._computed.put(None)
        finish.join()

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run_guarded, args=(work, self._leave), name=name, daemon=True)
        thread.start()
        return thread

    def _run_prepare(self) -> None:
        while (jobs := self._arrived.get()) is not None:
            if self._is_continuous:
                # One by one: the first may join a step while the last is still being read.
                for job in jobs:
                    if self._prepare.prepare(job):
                        self._prepared.put([job])
                self._outlet.flush()
                continue
            micro_batches = self._prepare.split(jobs)
            self._outlet.flush()
            for micro_batch in micro_batches:
                self._prepared.put(micro_batch)
        self._prepared.put(None)

    def _run_finish(self) -> None:
        while (order := self._computed.get()) is not None:
            order()
            self._outlet.flush()


def run_guarded(work: Callable[[], None], leave: Leave) -> None:
    """Runs a thread's work; whatever it raises ends the process."""
    try:
        work()
    except BaseException as error:
        name = threading.current_thread().name
        if faults.ends_process(error):
            text = f"the model's code raised {faults.describe(error)} on the {name} thread"
            leave(ReplicaExit.MODEL_EXITED, text, error)
        leave(ReplicaExit.INTERNAL_ERROR, f"{faults.describe(error)} on the {name} thread", error)

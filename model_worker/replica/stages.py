"""The three stages that every item of a batch goes through: prepare, forward, finish.

    I/O thread --arrived--> prepare thread --prepared--> main thread --computed--> finish thread --> outlet
                            decode, check,               forward, or steps         plain values,
                            tokenise, split                                        encode

So it is under load: while the main thread computes, the next batch is prepared and the last one is finished beside it.
Where nothing else is to be computed, the main thread prepares, and finishes short answers, by itself, because each
thread that is woken costs more than most items do:

    I/O thread --arrived--> main thread --> outlet

Who prepares is decided by `Intake`, who finishes by `Handover`; prepare and finish are never entered twice at once.

Owns the threads. An error is either an item's, and ends that item, or the process's, and ends the process: a thread
never dies alone. Refuses sockets: batches come in by `submit` and results go out through an `Outlet`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from model_worker.replica import faults
from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.forward_stage import ForwardStage, Progress
from model_worker.replica.handover import Handover
from model_worker.replica.host_stages import FinishStage, Limits, PrepareStage
from model_worker.replica.intake import Intake
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
        self._is_continuous = model.continuous_batching
        self._prepare = PrepareStage(model, limits, self._answers)
        # All that a continuous batch may hold can join at its next step: where fewer fit, a burst trickles in. And each
        # of its items may arrive as a batch of its own.
        concurrency = limits.concurrency(model)
        self._intake = Intake(
            self._prepared_batch,
            arrived_max=max(ARRIVED_BATCHES_MAX, concurrency),
            prepared_max=max(PREPARED_BATCHES_MAX, concurrency),
        )
        finish = FinishStage(model, self._answers, outlet)
        self._handover = Handover(finish, self._answers)
        self._forward = ForwardStage(
            model, self._answers, finish, self._handover, progress, self._intake.is_empty, spans
        )
        self._steps = StepStage(model, limits, self._answers, finish, self._handover, progress, spans)
        model.is_wanted = self._steps.is_wanted if self._is_continuous else self._forward.is_wanted

    def submit(self, jobs: list[Job]) -> None:
        """Takes one batch in; never blocks. I/O thread only."""
        # Of a continuous batch one by one: the first may join a step while the last is still being read.
        if self._intake.put([[job] for job in jobs] if self._is_continuous else [jobs]):
            return
        for job in jobs:
            message = f"this model process already holds {self._intake.arrived_max} batches that wait"
            self._answers.fail(job, Code.OVERLOADED, message)
        self._outlet.flush()

    def end(self) -> None:
        """No more batches will come: `serve` returns when those that came are answered. I/O thread only."""
        self._intake.end()

    def serve(self) -> None:
        """Computes until `end`. Main thread only; the other two threads are started here."""
        finish = self._start("finish", self._handover.run)
        self._start("prepare", self._intake.help)
        if self._is_continuous:
            self._steps.serve(self._intake)
        else:
            while (jobs := self._intake.take(wait=True)) is not None:
                self._forward.compute(jobs)
        self._handover.end()
        finish.join()

    def _prepared_batch(self, jobs: list[Job]) -> list[list[Job]]:
        if self._is_continuous:
            micro_batches = [[job] for job in jobs if self._prepare.prepare(job)]
        else:
            micro_batches = self._prepare.split(jobs)
        # Those that have ended already.
        self._outlet.flush()
        return micro_batches

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run_guarded, args=(work, self._leave), name=name, daemon=True)
        thread.start()
        return thread


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

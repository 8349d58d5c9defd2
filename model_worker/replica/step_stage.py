"""The forward stage of a model that batches continuously: items join and leave its batch between any two steps.

Owns who joins when, that nothing is computed for which nobody waits, and what happens when a step fails. Refuses to
know what a step does, and how many tokens fit: that is the model's.

A step that raises leaves its items in an unknown state, so all of them are made to leave. One that was alone fails
with the error. Of several, any may be innocent: those of which nothing was sent yet begin again, one at a time, or,
where memory was short, half as many at once; the others wait until these are through. A stream of which a piece was
sent cannot begin again, and fails.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from model_worker.replica import accelerator, faults, returns
from model_worker.replica.forward_stage import Progress
from model_worker.replica.handover import Handover
from model_worker.replica.host_stages import SEQUENCES_WITHOUT_LIMIT, FinishStage, Limits
from model_worker.replica.intake import Intake
from model_worker.replica.jobs import Answers, Job
from model_worker.runtimes.base import Model
from model_worker.runtimes.base import Progress as Entry
from shared.logs import log_event

if TYPE_CHECKING:
    from model_worker.replica.spans import ReplicaSpans

logger = logging.getLogger("model_worker")


class StepStage:
    """Items to pieces and outputs. Main thread only; nothing else ever enters `Model.step`."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        answers: Answers,
        finish: FinishStage,
        handover: Handover,
        progress: Progress,
        spans: ReplicaSpans | None = None,
    ) -> None:
        self._model = model
        self._size_max = limits.max_batch_size or SEQUENCES_WITHOUT_LIMIT
        self._answers = answers
        self._finish = finish
        self._handover = handover
        self._progress = progress
        self._spans = spans
        # Prepared, in the order of arrival.
        self._waiting: deque[Job] = deque()
        # What has joined and not ended, by the identity of the items.
        self._running: dict[int, Job] = {}
        # Those that were in a step that failed, until they end; and the part of them that does not run at present.
        self._suspects: set[Job] = set()
        self._again: deque[Job] = deque()
        self._again_size_max = 1

    def serve(self, intake: Intake) -> None:
        """Computes what comes until the end, and then what is left."""
        while self._take_in(intake):
            self._drop_unwanted()
            self._let_join()
            if self._running:
                self._step()

    def is_wanted(self, item: object) -> bool:
        """Whether anybody still waits for this item. Called by the model, inside `step`."""
        job = self._running.get(id(item))
        return job is None or job.wanted

    # --- coming and going ----------------------------------------------------------------------------------------

    def _take_in(self, intake: Intake) -> bool:
        """Takes what has been prepared, and waits for something if there is nothing else to do; False at the end."""
        while True:
            is_idle = not (self._running or self._waiting or self._again)
            jobs = intake.take(wait=is_idle)
            if jobs is None:
                return not is_idle
            self._waiting.extend(jobs)

    def _drop_unwanted(self) -> None:
        for job in [job for job in self._running.values() if not job.wanted]:
            self._let_go(job)
            self._forget(job)
            # Handed over, so that its end cannot overtake its pieces.
            self._handover.put(partial(self._finish.drop, job))
        for queue in (self._waiting, self._again):
            dropped = [job for job in queue if self._answers.drop_unwanted(job)]
            for job in dropped:
                queue.remove(job)
                self._suspects.discard(job)
            if dropped:
                self._finish.flush()

    def _let_join(self) -> None:
        queue, size_max = (self._again, self._again_size_max) if self._suspects else (self._waiting, self._size_max)
        while queue and len(self._running) < size_max:
            job = queue[0]
            try:
                if not self._has_room(job):
                    return
                queue.popleft()
                self._model.join(job.item)
            except BaseException as error:
                if queue and queue[0] is job:
                    queue.popleft()
                self._refuse(job, error)
            else:
                self._running[id(job.item)] = job

    def _has_room(self, job: Job) -> bool:
        # One object may be the item of several jobs: a short text, a small number. They take turns.
        if id(job.item) in self._running:
            return False
        if self._model.can_join(job.item):
            return True
        if self._running:
            return False
        raise returns.WrongReturn(self._model, "can_join", False, "there is room for any item while nothing runs")

    def _refuse(self, job: Job, error: BaseException) -> None:
        """Ends a job that did not come in."""
        if faults.is_device_fault(error):
            self._handover.lose_device([*self._running.values(), job], error)
        self._suspects.discard(job)
        self._answers.refuse(job, "join", error)
        self._finish.flush()

    def _let_go(self, job: Job) -> None:
        try:
            self._model.leave(job.item)
        except Exception as error:
            if faults.is_device_fault(error):
                self._handover.lose_device(list(self._running.values()), error)
            # What the failure is about goes its way already; what is left to tell is the model's author.
            log_event(logger, "warning", "leave_failed", request_id=job.request_id, error=faults.describe(error))

    def _forget(self, job: Job) -> None:
        del self._running[id(job.item)]
        self._suspects.discard(job)

    # --- steps ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        jobs = list(self._running.values())
        started_s = time.perf_counter()
        self._progress.begin_step()
        try:
            entries = self._compute(jobs, started_s)
        except BaseException as error:
            short_of_memory = faults.is_out_of_memory(error)
            self._fail(jobs, error)
        else:
            self._hand_over(entries)
            return
        if short_of_memory:
            # Only here: until the error is gone, its stack keeps the tensors of the failed step alive.
            accelerator.release_memory()

    def _compute(self, jobs: list[Job], started_s: float) -> list[Entry]:
        try:
            entries = returns.progress_of(self._model)
            accelerator.synchronize()
        finally:
            step_ms = (time.perf_counter() - started_s) * 1000
            for job in jobs:
                job.forward_ms += step_ms
                job.steps += 1
                job.step_items += len(jobs)
            self._progress.end_step()
        self._check(entries)
        return entries

    def _hand_over(self, entries: list[Entry]) -> None:
        self._progress.step_items += len(entries)
        pieces: list[tuple[Job, object]] = []
        ends: list[tuple[Job, object]] = []
        for entry in entries:
            job = self._running[id(entry.item)]
            if entry.piece is not None and job.stream:
                job.piece_made = True
                pieces.append((job, entry.piece))
            if entry.ended:
                job.batch_size = round(job.step_items / job.steps)
                self._forget(job)
                ends.append((job, entry.output))
                if self._spans is not None:
                    self._spans.steps(job)
        if pieces or ends:
            self._handover.put(partial(self._finish.progress, pieces, ends))
        if any(job.alone for job, _ in ends):
            # Its results touch the device once more: the next step's faults must not be taken for its own.
            self._handover.wait_until_finished()

    def _check(self, entries: list[Entry]) -> None:
        """Before anything is done with them: a step counts as a whole, or has failed."""
        ended: set[int] = set()
        for entry in entries:
            if id(entry.item) not in self._running or id(entry.item) in ended:
                raise returns.WrongReturn(self._model, "step", entry.item, "what moves has joined, and has not ended")
            if isinstance(entry.output, Exception) and faults.is_device_fault(entry.output):
                raise entry.output
            if entry.ended:
                ended.add(id(entry.item))

    def _fail(self, jobs: list[Job], error: BaseException) -> None:
        if faults.ends_process(error):
            raise error
        if faults.is_device_fault(error):
            self._handover.lose_device(jobs, error)
        for job in self._running.values():
            self._let_go(job)
        may_repeat = len(jobs) > 1 and not isinstance(error, returns.WrongReturn)
        repeated = [job for job in self._running.values() if may_repeat and not job.piece_made]
        for job in self._running.values():
            job.batch_size = len(jobs)
            if job not in repeated:
                self._suspects.discard(job)
                self._handover.put(partial(self._finish.refuse, job, error))
        self._running.clear()
        self._suspects.update(repeated)
        self._again.extendleft(reversed(repeated))
        self._again_size_max = len(jobs) // 2 if may_repeat and faults.is_out_of_memory(error) else 1
        fields = {"batch_size": len(jobs), "repeated": len(repeated), "error": faults.describe(error)}
        log_event(logger, "warning", "step_failed", **fields)

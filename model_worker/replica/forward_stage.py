"""The forward stage: items to outputs, on the main thread, one forward at a time.

Owns what happens when a forward fails: one by one, halved, or the end of the process; and the stepping of streams.
Refuses everything that can be done beside the device: that is `host_stages.py`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from model_worker.replica import accelerator, faults, returns
from model_worker.replica.handover import Handover, Order
from model_worker.replica.host_stages import FinishStage
from model_worker.replica.jobs import Answers, Job
from model_worker.runtimes.base import Model
from shared.logs import log_event

if TYPE_CHECKING:
    from model_worker.replica.spans import ReplicaSpans

logger = logging.getLogger("model_worker")

MEMORY_SAMPLE_S = 1.0

Stream = tuple[Job, Iterator[object]]


@dataclass(slots=True)
class Progress:
    """What a pulse reports. Written by the main thread, read by the I/O thread; each field is one plain value."""

    step_count: int = 0
    """Forward steps that ended, well or not."""
    step_items: int = 0
    """Items of all steps of continuous batches together."""
    running_since_s: float | None = None
    """Monotonic start of the present forward step."""
    device_bytes: int = 0
    """Device memory held, as last sampled; 0 on a CPU."""
    sampled_at_s: float = 0.0

    def begin_step(self) -> None:
        self.running_since_s = time.monotonic()

    def end_part(self) -> None:
        """A long forward goes on, and shows it."""
        self.running_since_s = time.monotonic()
        self.step_count += 1

    def end_step(self) -> None:
        self.running_since_s = None
        self.step_count += 1
        # Asking the allocator takes its lock, which a hung device may hold: never on the I/O thread.
        if time.monotonic() - self.sampled_at_s >= MEMORY_SAMPLE_S:
            self.sample_memory()

    def sample_memory(self) -> None:
        self.device_bytes = accelerator.reserved_bytes()
        self.sampled_at_s = time.monotonic()


class ForwardStage:
    """Items to outputs. Main thread only; nothing else ever enters `Model.forward`."""

    def __init__(
        self,
        model: Model,
        answers: Answers,
        finish: FinishStage,
        handover: Handover,
        progress: Progress,
        is_idle: Callable[[], bool],
        spans: ReplicaSpans | None = None,
    ) -> None:
        """`is_idle`: whether no other micro-batch is there or on its way."""
        self._model = model
        self._answers = answers
        self._finish = finish
        self._handover = handover
        self._progress = progress
        self._is_idle = is_idle
        self._spans = spans
        # What is left to try of the present micro-batch.
        self._again: deque[list[Job]] = deque()
        # The jobs of the present forward, by the identity of their items.
        self._present: dict[int, list[Job]] = {}

    def compute(self, jobs: list[Job]) -> None:
        """Ends every job of a micro-batch, or hands its output over to be finished."""
        self._again.append(jobs)
        while self._again:
            batch = [job for job in self._again.popleft() if not self._answers.drop_unwanted(job)]
            if batch:
                self._again.extendleft(reversed(self._attempt(batch)))
            self._finish.flush()

    def is_wanted(self, item: object) -> bool:
        """Whether anybody still waits for this item of the present forward. Called by the model, inside `forward`."""
        jobs = self._present.get(id(item))
        return jobs is None or any(job.wanted for job in jobs)

    def _attempt(self, batch: list[Job]) -> list[list[Job]]:
        """One forward; returns what to try in its place if it failed."""
        started_s = time.perf_counter()
        try:
            outputs = self._step(batch, started_s)
        except BaseException as error:
            if self._spans is not None:
                self._spans.batch(batch, started_s, time.perf_counter(), type(error).__name__)
            short_of_memory = faults.is_out_of_memory(error)
            again = self._after_failure(batch, error)
        else:
            self._hand_over(batch, outputs, started_s)
            return []
        if short_of_memory:
            # Only here: until the error is gone, its stack keeps the tensors of the failed forward alive.
            accelerator.release_memory()
        return again

    def _step(self, batch: list[Job], started_s: float) -> list[object]:
        for job in batch:
            # One object may be the item of several jobs: a short text, a small number.
            self._present.setdefault(id(job.item), []).append(job)
        self._progress.begin_step()
        try:
            outputs = returns.one_output_per_item(self._model, [job.item for job in batch])
            accelerator.synchronize()
        finally:
            forward_ms = (time.perf_counter() - started_s) * 1000
            for job in batch:
                job.forward_ms = forward_ms
                job.batch_size = len(batch)
            self._present.clear()
            self._progress.end_step()
        for output in outputs:
            if isinstance(output, Exception) and faults.is_device_fault(output):
                raise output
        return outputs

    def _after_failure(self, batch: list[Job], error: BaseException) -> list[list[Job]]:
        if faults.ends_process(error):
            raise error
        if faults.is_device_fault(error):
            self._handover.lose_device(batch, error)
        if len(batch) == 1 or isinstance(error, returns.WrongOutputs):
            for job in batch:
                self._answers.refuse(job, "forward", error)
            return []
        if faults.is_out_of_memory(error):
            event = "batch_halved"
            middle = len(batch) // 2
            again = [batch[:middle], batch[middle:]]
        else:
            event = "batch_retried_one_by_one"
            again = [[job] for job in batch]
        log_event(logger, "warning", event, batch_size=len(batch), error=faults.describe(error))
        return again

    def _hand_over(self, batch: list[Job], outputs: list[object], started_s: float) -> None:
        ended_s = time.perf_counter()
        whole: list[tuple[Job, object]] = []
        streams: list[Stream] = []
        for job, output in zip(batch, outputs, strict=True):
            if isinstance(output, Exception):
                self._answers.refuse(job, "forward", output)
            elif isinstance(output, Iterator):
                streams.append((job, output))
            else:
                whole.append((job, output))
        if whole:
            self._handover.outputs(whole, lambda: not (streams or self._again) and self._is_idle())
        while streams:
            streams = self._advance(streams)
            ended_s = time.perf_counter()
        if self._spans is not None:
            self._spans.batch(batch, started_s, ended_s)
        if any(job.alone for job in batch):
            # Its results touch the device once more: the next forward's faults must not be taken for its own.
            self._handover.wait_until_finished()

    def _advance(self, streams: list[Stream]) -> list[Stream]:
        """One step of every stream; returns those that go on. What is said of a stream is handed over, so that its
        end cannot overtake its chunks."""
        going_on = []
        pieces: list[tuple[Job, object]] = []
        endings: list[Order] = []
        for job, stream in streams:
            if not job.wanted:
                endings.append(partial(self._finish.drop, job))
                self._close(job, stream)
                continue
            started_s = time.perf_counter()
            self._progress.begin_step()
            try:
                piece = next(stream)
                accelerator.synchronize()
            except StopIteration as stop:
                endings.append(partial(self._finish.end_of_stream, job, stop.value))
            except BaseException as error:
                if faults.ends_process(error):
                    raise
                if faults.is_device_fault(error):
                    self._handover.lose_device([job for job, _ in streams], error)
                endings.append(partial(self._finish.refuse, job, error))
            else:
                pieces.append((job, piece))
                going_on.append((job, stream))
            finally:
                job.forward_ms += (time.perf_counter() - started_s) * 1000
                self._progress.end_step()
        if pieces:
            self._handover.put(partial(self._finish.pieces, pieces))
        for ending in endings:
            self._handover.put(ending)
        return going_on

    def _close(self, job: Job, stream: Iterator[object]) -> None:
        close = getattr(stream, "close", None)
        if close is None:
            return
        try:
            close()
        except Exception as error:
            # Its request has ended already; what is left to tell is the model's author.
            log_event(logger, "warning", "stream_close_failed", request_id=job.request_id, error=faults.describe(error))

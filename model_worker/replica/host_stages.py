"""The two stages that run beside the device: prepare (payload to item) and finish (output to encoded value).

Owns what may happen to one item there. Neither stage ever enters `forward`, neither is entered twice at once, and
neither knows queues, or which thread it runs on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from model_worker.replica import returns
from model_worker.replica.jobs import Answers, Job, Outlet
from model_worker.runtimes import batching
from model_worker.runtimes.base import Model
from shared import values
from shared.errors import Code, ProtocolError, RequestError
from shared.messages import ChunkHeader

PREDICT = "predict"
# Results of a micro-batch leave as one message, unless finishing them takes longer than this: then in several, each
# sent as soon as the item in hand is finished.
HAND_OVER_S = 0.005
# Of a continuous batch whose size nobody has limited.
SEQUENCES_WITHOUT_LIMIT = 32
# How many more items wait, prepared, for a place in a continuous batch, as a share of its size. What waits here cannot
# go to another replica.
PREPARED_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward may hold; 0 means no limit."""

    max_batch_cost: int
    max_batch_size: int

    def concurrency(self, model: Model) -> int:
        """How many items are held at once by a model that batches continuously: those that share its steps, and a few
        that are prepared to take the places of those that end. 0: the model computes whole batches."""
        if not model.continuous_batching:
            return 0
        size = self.max_batch_size or SEQUENCES_WITHOUT_LIMIT
        return size + math.ceil(size * PREPARED_SHARE)


class PrepareStage:
    """Payloads to items and micro-batches. One thread at a time: a tokenizer is not safe to share."""

    def __init__(self, model: Model, limits: Limits, answers: Answers) -> None:
        self._model = model
        self._limits = limits
        self._answers = answers

    def split(self, jobs: list[Job]) -> list[list[Job]]:
        """Prepares a batch and splits what is left of it into micro-batches."""
        ready = [job for job in jobs if self.prepare(job)]
        shared = [job for job in ready if not job.alone]
        micro_batches = batching.split(
            [job.cost for job in shared],
            [job.group for job in shared],
            max_batch_cost=self._limits.max_batch_cost,
            max_batch_size=self._limits.max_batch_size,
            pads=self._model.pads,
        )
        return [
            *([shared[position] for position in positions] for positions in micro_batches),
            *([job] for job in ready if job.alone),
        ]

    def prepare(self, job: Job) -> bool:
        """Makes the item; False if the job has ended instead."""
        if self._answers.drop_unwanted(job):
            return False
        started_s = time.perf_counter()
        try:
            job.item = self._make_item(job)
            job.cost = returns.cost_of(self._model, job.item)
            job.group = returns.group_of(self._model, job.item)
        except BaseException as error:
            self._answers.refuse(job, "prepare", error)
            return False
        job.prepare_ms = (time.perf_counter() - started_s) * 1000
        return True

    def _make_item(self, job: Job) -> object:
        payload, job.payload = job.payload, []
        try:
            pair = values.unpack(payload)
        except ProtocolError as error:
            raise RequestError(f"the payload cannot be read: {error}", code=Code.BAD_REQUEST) from None
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], dict)):
            raise RequestError("the payload is not a pair of inputs and parameters", code=Code.BAD_REQUEST)
        if job.operation == PREDICT:
            return self._model.prepare(*pair)
        if job.operation in self._model.operations:
            return self._model.prepare_operation(job.operation, *pair)
        known = ", ".join([PREDICT, *self._model.operations])
        raise RequestError(f"operation {job.operation!r} is not one of this model's: {known}", code=Code.BAD_REQUEST)


class FinishStage:
    """Outputs to encoded values. One thread at a time, but for `flush`."""

    def __init__(self, model: Model, answers: Answers, outlet: Outlet) -> None:
        self._model = model
        self._answers = answers
        self._outlet = outlet
        self.flush = outlet.flush

    def outputs(self, pairs: list[tuple[Job, object]]) -> None:
        """Ends each job with its output's value."""
        handed_over_s = time.perf_counter()
        for job, output in pairs:
            if self._answers.drop_unwanted(job):
                continue
            if job.stream:
                # The model does not stream: all of its answer is the one piece.
                self.pieces([(job, output)])
                self.end_of_stream(job, None)
            else:
                self._end(job, partial(self._model.finish, output))
            now_s = time.perf_counter()
            if now_s - handed_over_s >= HAND_OVER_S:
                self._outlet.flush()
                handed_over_s = now_s

    def pieces(self, pairs: list[tuple[Job, object]]) -> None:
        """Sends, or keeps, one piece of each stream."""
        for job, piece in pairs:
            if job.ended:
                continue
            try:
                value = self._model.finish(piece)
                if job.stream:
                    frames = returns.packed(self._model, value)
                    self._outlet.chunk(ChunkHeader(job.id, job.attempt, job.chunk_count, len(frames)), frames)
                    job.chunk_count += 1
                else:
                    job.pieces.append(value)
            except BaseException as error:
                self._answers.refuse(job, "finish", error)

    def end_of_stream(self, job: Job, returned: object) -> None:
        """Ends the job with what its generator returned, else with its pieces, if they were not sent before."""
        if job.ended:
            return
        if returned is not None:
            self._end(job, partial(self._model.finish, returned))
        else:
            self._end(job, lambda: None if job.stream else job.pieces)

    def progress(self, pieces: list[tuple[Job, object]], ends: list[tuple[Job, object]]) -> None:
        """What one step of a continuous batch did: pieces of streams, then whole answers, or exceptions."""
        self.pieces(pieces)
        for job, output in ends:
            if self._answers.drop_unwanted(job):
                continue
            if isinstance(output, Exception):
                self._answers.refuse(job, "forward", output)
            else:
                self._end(job, partial(self._finished, output))

    def _finished(self, output: object) -> object:
        return None if output is None else self._model.finish(output)

    def drop(self, job: Job) -> None:
        self._answers.drop_unwanted(job)

    def refuse(self, job: Job, error: BaseException) -> None:
        """Ends a stream whose generator raised, unless one of its pieces has ended it already."""
        if not job.ended:
            self._answers.refuse(job, "forward", error)

    def _end(self, job: Job, make_value: Callable[[], object]) -> None:
        started_s = time.perf_counter()
        try:
            frames = returns.packed(self._model, make_value())
        except BaseException as error:
            self._answers.refuse(job, "finish", error)
            return
        job.finish_ms += (time.perf_counter() - started_s) * 1000
        self._answers.succeed(job, frames)

"""One item on its way through a model process, and how it ends: exactly once, with one result.

Owns the record that the stages pass on, and the making of results from values and errors. Refuses to know threads,
queues or sockets: results go to an `Outlet`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from typing_extensions import Buffer

from model_worker.replica import faults
from model_worker.replica.exit_codes import ReplicaExit
from shared.errors import Code, RequestError
from shared.logs import log_event
from shared.messages import ChunkHeader, ItemResult, RequestId

logger = logging.getLogger("model_worker")

# Places whose stack was logged; past this many the memory of them starts anew rather than growing for ever.
LOGGED_PLACES_MAX = 1000


@dataclass(slots=True, eq=False)
class Job:
    """One item of a batch. One thread at a time owns it, in the order of the stages."""

    id: RequestId
    attempt: int
    operation: str
    stream: bool
    deadline_s: float
    """On this process's monotonic clock; past it nobody waits for the answer."""
    payload: list[Buffer]
    """The frames of the packed pair of inputs and parameters; emptied when they are unpacked."""
    alone: bool = False
    """The broker forbids sharing a forward: an earlier batch with this item in it ended badly."""
    request_id: str = ""
    traceparent: str = ""
    cancelled: bool = False
    """Set by the I/O thread at any time; looked at before each stage."""
    ended: bool = False
    """Set with the result, by the thread that gives it."""
    item: object = None
    """What `Model.prepare` made."""
    cost: int = 0
    group: Hashable = None
    prepare_ms: float = 0.0
    forward_ms: float = 0.0
    """Of the micro-batch's forward, or of all steps of a stream."""
    finish_ms: float = 0.0
    batch_size: int = 0
    """Items in the micro-batch."""
    pieces: list[object] = field(default_factory=list)
    """What a generator yielded, for a request that does not stream."""
    chunk_count: int = 0
    piece_made: bool = False
    """Something of its answer is on its way to whoever asked, so it cannot be computed anew."""
    steps: int = 0
    """Steps of a continuous batch that it was part of."""
    step_items: int = 0
    """Items in all of these steps together."""

    @property
    def wanted(self) -> bool:
        return not (self.ended or self.cancelled or time.monotonic() >= self.deadline_s)


class Outlet(Protocol):
    """Where results go. Every method may be called from any thread, and none blocks."""

    def result(self, job: Job, result: ItemResult, frames: Sequence[Buffer]) -> None: ...

    def chunk(self, chunk: ChunkHeader, frames: Sequence[Buffer]) -> None: ...

    def flush(self) -> None:
        """What was handed over is to leave now."""

    def dying(self, reason: str) -> None:
        """Nothing can be computed here any more. Told before every result that is handed over afterwards."""


class Leave(Protocol):
    """Ends the process with a named code, once everything handed over has left."""

    def __call__(self, code: ReplicaExit, reason: str, error: BaseException | None = None) -> NoReturn:
        """`reason` and the stack of `error` go to the log, in the one line that tells of the end."""


class Answers:
    """Ends jobs. Called by whichever thread owns the job."""

    def __init__(self, outlet: Outlet, leave: Leave) -> None:
        self._outlet = outlet
        self._leave = leave
        self._logged: set[tuple[str, str, int]] = set()

    def succeed(self, job: Job, frames: Sequence[Buffer]) -> None:
        self._end(job, Code.OK, frames, "", {})

    def fail(self, job: Job, code: Code, message: str, detail: Mapping[str, object] | None = None) -> None:
        self._end(job, code, (), message, dict(detail or {}))

    def refuse(self, job: Job, stage: str, error: BaseException) -> None:
        """Ends the job with its own error: one line for the sender, the stack, once, for the log.

        Raises:
            SystemExit, KeyboardInterrupt: the error itself, where it is one of these: it asks for the process's end.
        """
        if faults.ends_process(error):
            raise error
        if faults.is_device_fault(error):
            # Outside `forward`, what broke the device may be the forward on the main thread.
            self.lose_device([job], 1 if job.alone else 2, error)
        if isinstance(error, RequestError):
            self.fail(job, error.code, faults.describe(error), error.detail)
        else:
            self._log(job, stage, error)
            self.fail(job, faults.code_of(error), faults.describe(error))

    def lose_device(self, jobs: Sequence[Job], suspects: int, error: BaseException) -> NoReturn:
        """Blames the one suspect or doubts several, then ends the process: nothing on this device can work any more."""
        reason = faults.describe(error)
        # First of all: for the credit of these results the broker would send more work, and blame it for the end.
        self._outlet.dying(reason)
        code, text = device_fault_code(suspects), device_fault_text(error)
        for job in jobs:
            if not job.ended:
                self.fail(job, code, text)
        self._leave(ReplicaExit.DEVICE_FAULT, reason, error)

    def drop_unwanted(self, job: Job) -> bool:
        """Ends the job if nobody waits for it any more; True if it has ended."""
        if not job.ended and job.cancelled:
            self.fail(job, Code.CANCELLED, "cancelled before it was done")
        elif not job.wanted and not job.ended:
            self.fail(job, Code.DEADLINE_EXCEEDED, "the deadline passed before it was done")
        return job.ended

    def _end(self, job: Job, code: Code, frames: Sequence[Buffer], message: str, detail: dict[str, object]) -> None:
        assert not job.ended, f"{job.id.hex()} was about to be answered twice"
        job.ended = True
        result = ItemResult(
            id=job.id,
            attempt=job.attempt,
            code=code,
            frame_count=len(frames),
            cost=job.cost,
            prepare_ms=job.prepare_ms,
            forward_ms=job.forward_ms,
            finish_ms=job.finish_ms,
            batch_size=job.batch_size,
            message=message,
            detail=detail,
        )
        self._outlet.result(job, result, frames)

    def _log(self, job: Job, stage: str, error: BaseException) -> None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        file, line = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ("", 0)
        place = (type(error).__name__, file, line)
        is_new = place not in self._logged
        if len(self._logged) >= LOGGED_PLACES_MAX:
            self._logged.clear()
        self._logged.add(place)
        # The stack of the first error from a place tells all that those of the next thousand would.
        log_event(
            logger,
            "error" if is_new else "warning",
            "item_failed",
            stage=stage,
            request_id=job.request_id or job.id.hex(),
            error=faults.describe(error),
            **({"exception": error} if is_new else {}),
        )


def device_fault_code(suspects: int) -> Code:
    """One item alone is to blame; each of several may be innocent, and the broker tries it again, alone."""
    return Code.MODEL_ERROR if suspects == 1 else Code.REPLICA_FAULT


def device_fault_text(error: BaseException) -> str:
    return f"the device failed on this input and is being replaced: {faults.first_line(error)}"

"""The model process's line to the broker: a DEALER socket, the thread that listens to it, and a lock around it.

Owns what is sent (HELLO, STATE, RESULT, CHUNK, PULSE) and the way out of the process, which must not be taken before
everything handed over has left. Refuses to compute: it hands batches to the stages and never waits for them.

The I/O thread makes the socket, waits for what arrives, and closes it. Any thread sends, because waking another one
for it costs more than to send. A ZeroMQ socket may be used by one thread after another where there is a full fence
between them, which the lock is; nobody holds it while waiting for something. The file descriptor that the I/O thread
waits for tells of changes alone, and whoever sends may take a change in by it: so whoever has used the socket wakes
the I/O thread, if there is something to receive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import zmq

from model_worker.replica import faults
from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.forward_stage import Progress
from model_worker.replica.jobs import Job
from model_worker.replica.stages import Stages
from model_worker.specs import ReplicaSpec
from shared.errors import Code, ProtocolError
from shared.logs import Level, RateLimiter, log_event
from shared.messages import (
    Batch,
    ChunkHeader,
    Drain,
    ItemResult,
    Message,
    Phase,
    ReplicaCancel,
    ReplicaChunk,
    ReplicaHello,
    ReplicaPulse,
    RequestId,
    Result,
    State,
    Stop,
)
from shared.sockets import Buffer, connect_dealer, drain, fresh_routing_id, has_message, send
from shared.version import VERSION
from shared.wire import decode, encode, split_frames

logger = logging.getLogger("model_worker")

# Twice a second, so that a hang is known, and its stacks are written, within a second of its limit.
PULSE_S = 0.5
# Messages taken in before results get their turn to leave.
MESSAGES_PER_TURN_MAX = 100
# The broker is on this host and reads all the time: what has not left by then never will.
FLUSH_S = 2.0


class BrokerLink:
    """The socket and its outbox. An `Outlet` for the stages: its public methods may be called on any thread."""

    def __init__(self, spec: ReplicaSpec, progress: Progress) -> None:
        self._spec = spec
        self._progress = progress
        self._stages: Stages | None = None
        self._thread = threading.Thread(target=self._run_guarded, name="io", daemon=True)
        self._leaving = threading.Lock()
        # Held for a moment, to put something into the outbox or to take it out: everything up to the next lock.
        self._lock = threading.Lock()
        # What has arrived and has no result yet.
        self._open: dict[RequestId, Job] = {}
        self._states: list[State] = []
        self._results: list[ItemResult] = []
        self._result_frames: list[Buffer] = []
        self._chunks: list[ChunkHeader] = []
        self._chunk_frames: list[Buffer] = []
        # Held while the socket is used; there is none before the HELLO and after the end.
        self._socket_lock = threading.Lock()
        self._socket: zmq.Socket[bytes] | None = None
        # Called on the way out of an orderly end.
        self.before_exit: Callable[[], None] | None = None
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        # Only the I/O thread touches these.
        self._is_draining = False
        self._malformed = RateLimiter(logger, "warning", "message_malformed")

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Blocks for the rest of the process's life."""
        self._thread.join()

    def serve(self, stages: Stages) -> None:
        """From now on batches go to `stages`; before, they are refused."""
        self._stages = stages

    # --- handing over, on any thread -----------------------------------------------------------------------------

    def state(self, state: State) -> None:
        """Reports a phase, or progress within one; an unsent report of the same phase is replaced."""
        with self._lock:
            if self._states and self._states[-1].phase is state.phase:
                self._states.pop()
            self._states.append(state)
        self.flush()

    def result(self, job: Job, result: ItemResult, frames: Sequence[Buffer]) -> None:
        with self._lock:
            if self._open.get(job.id) is job:
                del self._open[job.id]
            self._results.append(result)
            self._result_frames.extend(frames)

    def chunk(self, chunk: ChunkHeader, frames: Sequence[Buffer]) -> None:
        with self._lock:
            self._chunks.append(chunk)
            self._chunk_frames.extend(frames)

    def flush(self) -> None:
        if not (self._states or self._chunks or self._results):
            # What another thread puts there, it flushes itself.
            return
        with self._socket_lock:
            if self._socket is not None:
                self._send_outbox(self._socket)
                self._look_for_more(self._socket)

    def dying(self, reason: str) -> None:
        self.state(State(self._spec.slot, self._spec.incarnation, Phase.FAILED, detail=reason))

    def leave(self, code: ReplicaExit, reason: str, error: BaseException | None = None) -> NoReturn:
        """Ends the process, at once for whatever else runs in it; what was handed over leaves first.

        Nothing else in the log tells of the cause, so `error` is what to show the stack of.
        """
        if not self._leaving.acquire(blocking=False):
            # Another thread is on its way out, and takes this one along.
            threading.Event().wait()
        level: Level = "info" if code is ReplicaExit.STOPPED else "error"
        # The model's code may have broken the log as well; the way out does not depend on it.
        with contextlib.suppress(Exception):
            log_event(
                logger,
                level,
                "replica_left",
                slot=self._spec.slot,
                incarnation=self._spec.incarnation,
                exit_code=int(code),
                cause=code.name.lower(),
                reason=reason,
                **({} if error is None else {"exception": error}),
            )
        if threading.current_thread() is not self._thread:
            if code not in (ReplicaExit.STOPPED, ReplicaExit.LOAD_FAILED):
                self.dying(reason)
            self.flush()
            self._is_closing = True
            self._wake()
            self._thread.join(FLUSH_S)
        if self.before_exit is not None and code is ReplicaExit.STOPPED:
            self.before_exit()
        for stream in (sys.stdout, sys.stderr):
            # Neither a closed or full pipe of the log's must keep the process alive, nor whatever the model's code has
            # put in the stream's place.
            with contextlib.suppress(Exception):
                stream.flush()
        # Neither `atexit` handlers nor the interpreter's own end could be relied on: the main thread may sit in a
        # forward that never returns.
        os._exit(code)

    # --- the I/O thread ------------------------------------------------------------------------------------------

    def _run_guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.leave(ReplicaExit.INTERNAL_ERROR, f"{faults.describe(error)} on the io thread", error)

    def _run(self) -> None:
        context = zmq.Context(io_threads=1)
        socket = connect_dealer(context, self._spec.endpoint, fresh_routing_id())
        slot, incarnation = self._spec.slot, self._spec.incarnation
        send(socket, encode(ReplicaHello(slot, incarnation, os.getpid(), VERSION)))
        poller = select.poll()
        poller.register(socket.FD, select.POLLIN)
        poller.register(self._wakeup, select.POLLIN)
        with self._socket_lock:
            self._socket = socket
            self._send_outbox(socket)
            self._look_for_more(socket)
        next_pulse_s = time.monotonic() + PULSE_S
        must_stop = False
        while not must_stop:
            # Rounded up: waking a fraction of a millisecond early would spin.
            ready = poller.poll(max(0, int((next_pulse_s - time.monotonic()) * 1000) + 1))
            if any(descriptor == self._wakeup for descriptor, _ in ready):
                os.eventfd_read(self._wakeup)
            must_stop = self._take_in(socket) or self._is_closing
            now_s = time.monotonic()
            if now_s >= next_pulse_s:
                with self._socket_lock:
                    send(socket, encode(self._pulse(now_s)))
                    self._look_for_more(socket)
                next_pulse_s = now_s + PULSE_S
        self.flush()
        with self._socket_lock:
            self._socket = None
            socket.close()
        # Waits until what was sent has left, or for the socket's linger time.
        context.term()
        if not self._is_closing:
            self.leave(ReplicaExit.STOPPED, "told to stop")

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _look_for_more(self, socket: zmq.Socket[bytes]) -> None:
        """After every use of the socket, under its lock: nothing else would tell of what it has taken in."""
        if has_message(socket):
            self._wake()

    def _take_in(self, socket: zmq.Socket[bytes]) -> bool:
        """Handles what has arrived; True if the process is to stop."""
        with self._socket_lock:
            arrived = list(drain(socket, MESSAGES_PER_TURN_MAX))
            if len(arrived) == MESSAGES_PER_TURN_MAX:
                self._wake()
        for parts in arrived:
            try:
                message, frames = decode(parts)
                if isinstance(message, Stop):
                    return True
                self._handle(message, frames)
            except ProtocolError as error:
                self._malformed.log(reason=str(error))
        return False

    def _handle(self, message: Message, frames: list[Buffer]) -> None:
        match message:
            case Batch():
                self._batch_arrived(message, frames)
            case ReplicaCancel():
                for request_id in message.ids:
                    job = self._open.get(request_id)
                    if job is not None:
                        job.cancelled = True
            case Drain():
                if self._is_draining:
                    return
                self._is_draining = True
                self.state(State(self._spec.slot, self._spec.incarnation, Phase.DRAINING))
                if self._stages is not None:
                    self._stages.end()
            case _:
                raise ProtocolError(f"a broker does not send {type(message).__name__} to a model process")

    def _batch_arrived(self, batch: Batch, frames: list[Buffer]) -> None:
        now_s = time.monotonic()
        jobs = [
            Job(
                id=item.id,
                attempt=item.attempt,
                operation=item.operation,
                stream=item.stream,
                deadline_s=now_s + item.remaining_ms / 1000,
                payload=payload,
                alone=batch.alone,
                request_id=item.request_id,
                traceparent=item.traceparent,
            )
            for item, payload in split_frames(batch.items, frames)
        ]
        with self._lock:
            self._open.update((job.id, job) for job in jobs)
        if self._stages is not None and not self._is_draining:
            self._stages.submit(jobs)
            return
        code, message = Code.MODEL_LOADING, "the model is not ready yet"
        if self._is_draining:
            code, message = Code.DRAINING, "this model process takes no new work"
        for job in jobs:
            self.result(job, ItemResult(job.id, job.attempt, code, 0, message=message), ())
        self.flush()

    def _send_outbox(self, socket: zmq.Socket[bytes]) -> None:
        with self._lock:
            states, self._states = self._states, []
            chunks, self._chunks = self._chunks, []
            chunk_frames, self._chunk_frames = self._chunk_frames, []
            results, self._results = self._results, []
            result_frames, self._result_frames = self._result_frames, []
        slot, incarnation = self._spec.slot, self._spec.incarnation
        for state in states:
            send(socket, encode(state))
        # Before the results, which end their streams.
        if chunks:
            send(socket, encode(ReplicaChunk(slot, incarnation, tuple(chunks)), chunk_frames))
        if results:
            send(socket, encode(Result(slot, incarnation, tuple(results)), result_frames))

    def _pulse(self, now_s: float) -> ReplicaPulse:
        running_since_s = self._progress.running_since_s
        return ReplicaPulse(
            slot=self._spec.slot,
            incarnation=self._spec.incarnation,
            progress_count=self._progress.step_count,
            running_ms=0 if running_since_s is None else max(1, int((now_s - running_since_s) * 1000)),
            memory_bytes=self._progress.device_bytes or resident_bytes(),
            step_items=self._progress.step_items,
        )


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, shared pages included."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

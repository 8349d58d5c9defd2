"""A model server for the fronts' tests: a real ROUTER on a thread, the real wire, and any behaviour a test asks for.

It keeps what fronts send, and answers each request as its `behave` says. Stopping it and starting another one in the
same run directory is a restart: the new one has a new epoch and knows nothing.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from shared.errors import Code
from shared.messages import (
    Cancel,
    Chunk,
    ChunkHeader,
    DeviceState,
    FrontHello,
    FrontPulse,
    Inspect,
    Manage,
    Managed,
    Message,
    ModelCounters,
    ModelState,
    Reply,
    ReplyHeader,
    RequestHeader,
    ServerPulse,
    SlotState,
    Snapshot,
    Submit,
    Timings,
    Trouble,
    Welcome,
)
from shared.sockets import Buffer, RunDirectory, bind_router, drain, send
from shared.values import pack, unpack
from shared.wire import decode, encode, split_frames

PULSE_S = 0.2
MessageType = TypeVar("MessageType", bound=Message)


@dataclass(frozen=True)
class Step:
    """One thing the stub does for a request, `after_s` seconds after the step before it."""

    after_s: float = 0.0


@dataclass(frozen=True)
class Answer(Step):
    value: object = None


@dataclass(frozen=True)
class Fail(Step):
    code: Code = Code.MODEL_ERROR
    message: str = "the stub was told to fail"
    detail: dict[str, object] = field(default_factory=dict)
    retry_after_ms: int = 0


@dataclass(frozen=True)
class Piece(Step):
    value: object = None
    index: int = 0


@dataclass(frozen=True)
class Raw(Step):
    """Frames sent as they are, whatever they mean."""

    parts: Sequence[bytes] = ()


@dataclass(frozen=True)
class Request:
    header: RequestHeader
    inputs: Any
    parameters: dict[str, Any]


Behaviour = Callable[[Request], Sequence[Step]]


def echo(request: Request) -> Sequence[Step]:
    """Answers at once, with what was asked."""
    return [Answer(value={"model": request.header.model, "inputs": request.inputs, "parameters": request.parameters})]


def silent(request: Request) -> Sequence[Step]:
    return []


Management = Callable[[Manage], Sequence[tuple[float, Managed]]]
"""What becomes of an order: how it ends, and how many seconds later; nothing, for one that never does."""


def obey(order: Manage) -> Sequence[tuple[float, Managed]]:
    """Does at once what it is told."""
    return [(0.0, Managed(order.token, "done", f"{order.action} {order.model} {order.replicas}"))]


def end_with(outcome: str, text: str, after_s: float = 0.0) -> Management:
    return lambda order: [(after_s, Managed(order.token, outcome, text))]


def model_state(name: str, **changes: Any) -> ModelState:
    values: dict[str, Any] = {
        "name": name,
        "task": "echo",
        "state": "ready",
        "reason": "",
        "required": True,
        "replicas_ready": 1,
        "replicas_total": 1,
        "queued": 0,
        "was_ready": True,
    }
    return ModelState(**(values | changes))


class StubBroker:
    """Runs while entered. All attributes may be set at any time; they count from the next message on."""

    def __init__(
        self, run_dir: Path, *, models: Sequence[ModelState] = (model_state("echo"),), behave: Behaviour = echo
    ) -> None:
        self.epoch = secrets.token_hex(4)
        self.models = tuple(models)
        self.behave = behave
        self.manage: Management = obey
        self.draining = False
        self.slots: tuple[SlotState, ...] = ()
        self.answers_inspect = True
        self.after_look: Callable[[], None] = lambda: None
        self.choices: dict[str, dict[str, Any]] = {}
        self.devices: tuple[DeviceState, ...] = ()
        self.troubles: tuple[Trouble, ...] = ()
        self.says_welcome = True
        self.pulses = True
        self.run_directory = RunDirectory(run_dir)
        self.run_directory.prepare()
        self._received: list[Message] = []
        self._requests: list[Request] = []
        self._orders: list[tuple[bytes, Manage]] = []
        self._submit_sizes: list[int] = []
        self._fronts: dict[bytes, FrontHello | None] = {}
        self._due: list[tuple[float, int, bytes, list[Buffer]]] = []
        self._order = itertools.count()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._fault: BaseException | None = None
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stub broker", daemon=True)

    # --- for the test's thread -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._bound.wait(10), "the stub broker did not bind"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends like a killed model server: the socket goes, and so does everything it knew."""
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._fault is not None:
            raise self._fault

    def received(self, kind: type[MessageType]) -> list[MessageType]:
        return [message for message in list(self._received) if isinstance(message, kind)]

    @property
    def requests(self) -> list[Request]:
        """Every request in the order of arrival; one that was sent twice is there twice."""
        return list(self._requests)

    @property
    def cancelled(self) -> set[bytes]:
        return {request_id for cancel in self.received(Cancel) for request_id in cancel.ids}

    @property
    def front_count(self) -> int:
        """Fronts that have said HELLO."""
        return sum(hello is not None for hello in list(self._fronts.values()))

    def answer_with(self, *steps: Step) -> None:
        """From now on, to every request."""
        self.behave = lambda request: list(steps)

    @contextmanager
    def counting(self) -> Iterator[list[Request]]:
        """The requests that reach the model server in the block; filled at its end."""
        before = len(self.requests)
        counted: list[Request] = []
        yield counted
        counted += self.requests[before:]

    def tell_all(self, *parts: Buffer) -> None:
        """Sends these frames to every front, now."""

        def job() -> None:
            for front in self._fronts:
                send(self._socket, [front, *parts])

        self._jobs.put(job)

    def forget(self) -> None:
        """Everything received until now, and how orders are to end."""
        self._received, self._orders, self.manage = [], [], obey

    def end_orders(self, outcome: str, text: str) -> None:
        """Ends those that were given until now and that `manage` left open."""
        left_open, self._orders = self._orders, []

        def job() -> None:
            for front, order in left_open:
                self._say(front, Managed(order.token, outcome, text))

        self._jobs.put(job)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context(io_threads=1)
        try:
            path = Path(self.run_directory.front_endpoint.removeprefix("ipc://"))
            path.unlink(missing_ok=True)
            self._socket = bind_router(context, self.run_directory.front_endpoint)
            self._bound.set()
            next_pulse_s = 0.0
            while not self._stop.is_set():
                self._socket.poll(5)
                for parts in drain(self._socket, 1000):
                    self._take(bytes(parts[0]), parts[1:])
                while not self._jobs.empty():
                    self._jobs.get()()
                now_s = time.monotonic()
                while self._due and self._due[0][0] <= now_s:
                    _, _, front, parts = heapq.heappop(self._due)
                    send(self._socket, [front, *parts])
                if self.pulses and now_s >= next_pulse_s:
                    next_pulse_s = now_s + PULSE_S
                    for front in self._fronts:
                        self._say(front, ServerPulse(self.epoch, self.draining, self.models))
        except BaseException as fault:
            self._fault = fault
        finally:
            self._socket.close(linger=0)
            context.term()

    def _say(self, front: bytes, message: Message, frames: Sequence[Buffer] = ()) -> None:
        send(self._socket, [front, *encode(message, frames)])

    def _take(self, front: bytes, parts: Sequence[Buffer]) -> None:
        message, frames = decode(parts)
        self._received.append(message)
        is_front = not isinstance(message, (Inspect, Manage))
        if (is_front and front not in self._fronts) or isinstance(message, FrontHello):
            self._fronts[front] = message if isinstance(message, FrontHello) else None
            if self.says_welcome:
                self._say(front, Welcome(self.epoch, "stub", self.models))
        match message:
            case Submit():
                for header, payload in split_frames(message.requests, frames):
                    inputs, parameters = unpack(payload)
                    request = Request(header, inputs, parameters)
                    self._requests.append(request)
                    self._schedule(front, request)
            case Inspect():
                if self.answers_inspect:
                    self._say(front, self._snapshot(message.token))
                    self.after_look()
            case Manage():
                ends = self.manage(message)
                if not ends:
                    self._orders.append((front, message))
                for after_s, managed in ends:
                    at_s = time.monotonic() + after_s
                    heapq.heappush(self._due, (at_s, next(self._order), front, encode(managed)))
            case FrontHello() | FrontPulse() | Cancel():
                pass
            case _:
                raise AssertionError(f"a front sent {message}")

    def _schedule(self, front: bytes, request: Request) -> None:
        at_s = time.monotonic()
        for step in self.behave(request):
            at_s += step.after_s
            heapq.heappush(self._due, (at_s, next(self._order), front, _parts(request.header, step)))

    def _snapshot(self, token: int) -> Snapshot:
        names = [model.name for model in self.models]
        return Snapshot(
            token=token,
            epoch=self.epoch,
            pid=os.getpid(),
            version="stub",
            uptime_s=12.5,
            draining=self.draining,
            models=self.models,
            slots=self.slots or tuple(slot_state(name, self.choices.get(name, {})) for name in names),
            counters=tuple(_counters(name) for name in names),
            fronts=len(self._fronts),
            malformed=0,
            devices=self.devices,
            troubles=self.troubles,
        )


def _parts(header: RequestHeader, step: Step) -> list[Buffer]:
    match step:
        case Answer(value=value):
            frames = pack(value)
            timings = Timings(queue_ms=1.0, prepare_ms=2.0, forward_ms=3.0, finish_ms=4.0, batch_size=1)
            return encode(Reply((ReplyHeader(header.id, Code.OK, len(frames), timings=timings),)), frames)
        case Piece(value=value, index=index):
            frames = pack(value)
            return encode(Chunk((ChunkHeader(header.id, 0, index, len(frames)),)), frames)
        case Fail():
            reply = ReplyHeader(
                header.id,
                step.code,
                0,
                message=step.message,
                detail=step.detail,
                retry_after_ms=step.retry_after_ms,
            )
            return encode(Reply((reply,)))
        case Raw(parts=parts):
            return list(parts)
    raise AssertionError(step)


def slot_state(model: str, choices: dict[str, Any] | None = None, **changes: Any) -> SlotState:
    values: dict[str, Any] = {
        "slot": f"{model}/0",
        "model": model,
        "device": "cpu",
        "pid": 4242,
        "incarnation": 1,
        "state": "ready",
        "reason": "",
        "loads": 1,
        "restarts": 0,
        "memory_bytes": 2**20,
        "batches": 3,
        "requests": 5,
        "held": 0,
        "progress": 1.0,
        "heard_ms_ago": 250,
        "choices": choices or {},
    }
    return SlotState(**(values | changes))


def _counters(model: str) -> ModelCounters:
    return ModelCounters(
        model=model,
        admitted=5,
        ended={"ok": 4, "model_error": 1},
        rejected={"overloaded": 2},
        retried=1,
        batches=3,
        batch_size_sum=5,
        batch_size_buckets={"1": 2, "2": 2, "4": 3, "+Inf": 3},
        queue_s_sum=0.5,
        queue_s_buckets={"0.1": 2, "1": 5, "+Inf": 5},
        forward_s_sum=1.5,
        forward_s_buckets={"0.1": 0, "1": 5, "+Inf": 5},
        restarts={"exited": 1},
    )

"""`ModelClient`: asks models for answers, from any asyncio program on the host.

Owns the requests that wait, their deadlines, and what becomes of them when the model server goes away and comes back.
The front workers use it; so can any FastAPI application, in its lifespan, in place of a `pipeline(...)`. Refuses
HTTP, and every thread but the event loop's.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Self, Unpack

from frontend.calls import Call, Order, StreamCall
from frontend.connection import Connection
from frontend.errands import Errands
from frontend.link import Aftermath, unavailable
from frontend.outgoing import RequestOptions, new_request
from frontend.pending import Answer, PendingRequest, PendingTable
from shared.config import Config, HttpConfig
from shared.errors import Code, ModelFailed, ProtocolError, RequestError, UsageError
from shared.frames import frames_bytes
from shared.messages import (
    Cancel,
    Chunk,
    ChunkHeader,
    Managed,
    Message,
    ModelState,
    Reply,
    ReplyHeader,
    RequestId,
    Snapshot,
    Submit,
)
from shared.sockets import Buffer, RunDirectory
from shared.values import unpack
from shared.wire import split_frames

# Memory safety of one front. The queues that users notice are the models' own, at the model server, which refuses
# with a better reason long before these are reached; they only fill while there is no server to send to.
PENDING_COUNT_MAX = 16_384
PENDING_BYTES_MAX = 512 * 2**20
# One message to the model server: small enough that its loop is not held up by one front.
SUBMIT_COUNT_MAX = 256
SUBMIT_BYTES_MAX = 8 * 2**20
# The model server answers at the deadline. If that answer is lost, the wait ends this much later.
DEADLINE_SLACK_S = 0.2
# How far apart two looks at the deadlines are at least: each look is at all requests.
DEADLINES_APART_S = 0.02
INSPECT_TIMEOUT_S = 2.0
# How often a client that holds no requests any more looks for the model server.
LOOK_EVERY_S = 0.25


class ModelClient:
    """A connection to the model server of this host.

        async with ModelClient() as client:
            vector = await client.predict("minilm", "a sentence")

    `source` is a `Config`, a run directory, or None for the configuration that `Config.load` finds. The server need
    not run yet, and may be restarted: requests are held and sent again, as long as their deadlines allow. Belongs to
    the event loop and the process that opened it; make one for each.

    Every method but `open` and `close` raises `UsageError` when called from elsewhere.
    """

    def __init__(self, source: Config | str | os.PathLike[str] | None = None, *, is_front_worker: bool = False) -> None:
        """`is_front_worker` is for the workers of the HTTP front, which `headwaiter status` counts by themselves."""
        self._is_front_worker = is_front_worker
        if source is None or isinstance(source, Config):
            config = source or Config.load()
            self._run_directory = RunDirectory(config.run_directory)
            self._timeout_s = config.http.request_timeout_s
            self._configured = tuple(model.name for model in config.models)
        else:
            self._run_directory = RunDirectory(source)
            self._timeout_s = HttpConfig().request_timeout_s
            self._configured = ()
        self._pending = PendingTable(count_max=PENDING_COUNT_MAX, bytes_max=PENDING_BYTES_MAX)
        self._errands = Errands()
        self._met_server = asyncio.Event()
        # The halves of a request id: one that no other connection has, and one that counts. The first is drawn anew at
        # opening: an object that was made before a fork is opened by each child.
        self._id_prefix = b""
        self._counter = itertools.count()
        self._cancels: list[RequestId] = []
        self._flush_handle: asyncio.Handle | None = None
        # The next look at deadlines, and when it is; one timer for all requests, most of which never need it.
        self._deadline_handle: asyncio.TimerHandle | None = None
        self._deadline_look_s = math.inf
        # Set once requests are not held any more: the next look at whether there is a server.
        self._look_handle: asyncio.TimerHandle | None = None
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    # --- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def open(self) -> None:
        """Connects, on the running event loop. Returns at once, whether a model server is there or not.

        Raises:
            UsageError: it is open already.
            ConfigurationError: the run directory's path cannot hold sockets.
        """
        if self._connection is not None:
            self._check_process()
            raise UsageError("this ModelClient is open already: make one for each event loop")
        self._connection = Connection(
            self._run_directory.front_endpoint,
            deliver=self._deliver,
            reopened=self._reopened,
            lost_hope=self._lost_hope,
            pending_count=self._pending.__len__,
            is_worker=self._is_front_worker,
        )
        self._loop = asyncio.get_running_loop()
        # Of this opening, as everything that a task waits for: it belongs to the event loop that it was used on.
        self._met_server = asyncio.Event()
        self._pid = os.getpid()
        self._id_prefix = os.urandom(8)

    def close(self) -> None:
        """Ends every open request with `server_unavailable`, here and at the model server. May be called twice."""
        connection = self._connection
        if connection is None or self._pid != os.getpid():
            return
        self._connection = None
        for handle in (self._flush_handle, self._look_handle, self._deadline_handle):
            if handle is not None:
                handle.cancel()
        self._flush_handle = self._look_handle = self._deadline_handle = None
        self._deadline_look_s = math.inf
        for request in self._pending:
            self._give_up(request, unavailable("this front stops"))
        self._met_server.set()
        self._errands.close()
        self._send_cancels(connection)
        connection.close()

    def stop_holding(self) -> None:
        """From now on, no request waits for a model server that is not there: it ends with `server_unavailable` within
        half a second. For a program that was told to stop, and finishes what it has. May be called twice."""
        self._opened()
        if self._look_handle is None:
            self._look_for_server(was_up=True)

    def _look_for_server(self, was_up: bool) -> None:
        # One look alone may fall between the end of a welcome and the next one.
        is_up = self._opened().link.is_up
        if not was_up and not is_up:
            for request in self._pending:
                self._give_up(request, unavailable("this front stops, and the model server is not there"))
        self._look_handle = self._opened_loop().call_later(LOOK_EVERY_S, self._look_for_server, is_up)

    def _opened(self) -> Connection:
        if self._connection is None:
            raise UsageError("this ModelClient is not open: use `async with ModelClient(...) as client:`")
        self._check_process()
        try:
            if self._loop is not asyncio.get_running_loop():
                raise UsageError("this ModelClient belongs to another event loop: make one in this loop")
        except RuntimeError:
            raise UsageError("a ModelClient is used from coroutines, on the event loop that opened it") from None
        return self._connection

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"this ModelClient was opened by process {self._pid} and inherited by fork: open one in this process, "
                "such as in the application's lifespan"
            )

    def _opened_loop(self) -> asyncio.AbstractEventLoop:
        self._opened()
        assert self._loop is not None
        return self._loop

    # --- requests ------------------------------------------------------------------------------------------------

    async def predict(
        self,
        model: str,
        inputs: object,
        parameters: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> object:
        """One answer of `model`. Cancelling the awaiting task gives the request up everywhere.

        Raises:
            RequestError: the request ended without an answer; its `code` says how.
        """
        call = self.submit(model, inputs, parameters, **options)
        try:
            return (await call).value
        finally:
            call.abandon()

    async def stream(
        self,
        model: str,
        inputs: object,
        parameters: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[object, None]:
        """The pieces of one answer, as they are made. Closing the iterator gives the request up everywhere.

        Raises:
            RequestError: the stream broke off, or never began; the pieces so far are not a whole answer.
        """
        async with aclosing(self.submit_stream(model, inputs, parameters, **options).values()) as values:
            async for value in values:
                yield value

    def submit(
        self,
        model: str,
        inputs: object,
        parameters: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Call:
        """Puts a request on its way and returns at once; `await` the call, or `abandon` it.

        Raises:
            RequestError: `invalid_input` (the inputs cannot be sent), `overloaded` (too much waits here already), or
                `model_failed` (the model server has ended, because no model can ever be loaded).
        """
        loop = self._opened_loop()
        call = Call(self._next_id(), loop, self._abandon)
        self._register(call, loop, model, inputs, parameters, options)
        return call

    def submit_stream(
        self,
        model: str,
        inputs: object,
        parameters: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> StreamCall:
        """As `submit`, for an answer in pieces: iterate over the call's `values()`, or `abandon` it."""
        loop = self._opened_loop()
        call = StreamCall(self._next_id(), loop, self._abandon)
        self._register(call, loop, model, inputs, parameters, options)
        return call

    def _next_id(self) -> RequestId:
        return RequestId(self._id_prefix + next(self._counter).to_bytes(8, "big"))

    def _register(
        self,
        call: Call | StreamCall,
        loop: asyncio.AbstractEventLoop,
        model: str,
        inputs: object,
        parameters: Mapping[str, object] | None,
        options: RequestOptions,
    ) -> None:
        request = new_request(call, model, inputs, parameters, options, timeout_s=self._timeout_s, now_s=loop.time())
        assert self._connection is not None
        if self._connection.link.hopeless:
            raise self._failed(model)
        self._pending.admit(request)
        if request.deadline_s < self._deadline_look_s:
            self._look_at_deadlines_at(request.deadline_s)
        self._flush_soon()

    # --- what the model server is like ---------------------------------------------------------------------------

    def models(self) -> tuple[ModelState, ...]:
        """Every model as the model server last described it; empty until one was heard."""
        return self._opened().link.models

    def model_names(self) -> tuple[str, ...]:
        """The names that the model server serves; those of the configuration until one was heard."""
        link = self._opened().link
        return link.model_names if link.was_ever_up else self._configured

    def ready(self, model: str) -> bool:
        """Whether `model` answers requests, by news no older than 3 s: one that is idle is loaded for the next one."""
        if not self.server_heard() or self.server_draining():
            return False
        return any(state.name == model and state.answers for state in self.models())

    async def wait_for_server(self, timeout_s: float) -> bool:
        """Returns as soon as the model server has been heard once, the client is closed, or `timeout_s` seconds have
        passed; whether it was heard."""
        link = self._opened().link
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._met_server.wait()
        return link.was_ever_up

    def server_heard(self) -> bool:
        """Whether the model server was heard within the last 3 s."""
        return self._opened().link.is_fresh(asyncio.get_running_loop().time())

    def server_draining(self) -> bool:
        """Whether the model server said that it takes no new requests: it is about to stop, or was told to drain."""
        return self._opened().link.draining

    def pending_count(self) -> int:
        """Requests of this client that wait for an answer."""
        return len(self._pending)

    def malformed_count(self) -> int:
        """Messages from the model server that could not be read, since this client was opened."""
        return self._opened().malformed_count

    async def inspect(self, timeout_s: float = INSPECT_TIMEOUT_S) -> Snapshot:
        """Everything the model server has to tell an operator.

        Raises:
            RequestError: `server_unavailable`, if there is no answer in `timeout_s` seconds.
        """
        return await self._errands.inspect(self._opened(), timeout_s)

    def manage(self, action: str, model: str = "", replicas: int = 0) -> Order:
        """Gives the model server an operator's order, as `Manage` has them, and returns at once; `await` the order for
        how it ended, or `abandon` it. It is carried out in either case.

        Raises:
            RequestError: `server_unavailable`: there is nobody to give it to.
        """
        return self._errands.manage(self._opened(), action, model, replicas)

    # --- sending -------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        # Everything that is submitted in one turn of the event loop goes out in one message.
        if self._flush_handle is None and self._loop is not None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_handle = None
        connection = self._connection
        assert connection is not None
        while connection.link.is_up and self._pending.unsent_count:
            self._send_requests(connection)
        if self._cancels:
            self._send_cancels(connection)

    def _send_requests(self, connection: Connection) -> None:
        now_s = asyncio.get_running_loop().time()
        requests = self._pending.take_unsent(count_max=SUBMIT_COUNT_MAX, bytes_max=SUBMIT_BYTES_MAX)
        message = Submit(tuple(request.header(now_s) for request in requests))
        if not connection.send(message, [frame for request in requests for frame in request.payload]):
            self._pending.put_back(requests)

    def _send_cancels(self, connection: Connection) -> None:
        # If there is no connection, the server that had the requests is gone, or cancels them for our silence.
        ids, self._cancels = tuple(self._cancels), []
        if ids:
            connection.send(Cancel(ids))

    # --- ending requests -----------------------------------------------------------------------------------------

    def _abandon(self, request_id: RequestId) -> None:
        request = self._pending.get(request_id)
        if request is not None:
            self._give_up(request, RequestError("nobody waits for the answer any more", code=Code.CANCELLED))

    def _give_up(self, request: PendingRequest, error: RequestError) -> None:
        """Ends a request on this side before the model server has answered it."""
        if not self._pending.is_unsent(request.id):
            self._cancels.append(request.id)
            if self._connection is not None:
                self._flush_soon()
        self._pending.remove(request.id)
        request.waiter.fail(error)

    def _look_at_deadlines_at(self, time_s: float) -> None:
        if self._deadline_handle is not None:
            self._deadline_handle.cancel()
        self._deadline_look_s = time_s
        self._deadline_handle = self._opened_loop().call_at(time_s, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        self._deadline_handle, self._deadline_look_s = None, math.inf
        now_s = self._opened_loop().time()
        next_s = math.inf
        for request in self._pending:
            given_up_s = request.deadline_s
            if now_s >= given_up_s and self._opened().link.is_up:
                given_up_s += DEADLINE_SLACK_S
            if now_s < given_up_s:
                next_s = min(next_s, given_up_s)
            else:
                self._give_up(request, self._too_late(request))
        if next_s < math.inf:
            self._look_at_deadlines_at(max(next_s, now_s + DEADLINES_APART_S))

    def _too_late(self, request: PendingRequest) -> RequestError:
        if not self._opened().link.is_up:
            return unavailable()
        text = f"model {request.model!r} gave no answer before the deadline"
        return RequestError(text, code=Code.DEADLINE_EXCEEDED)

    # --- receiving -----------------------------------------------------------------------------------------------

    def _lost_hope(self) -> None:
        self._errands.lose_orders(lambda order: True)
        for request in self._pending:
            self._give_up(request, self._failed(request.model))

    def _failed(self, model: str) -> ModelFailed:
        """What the model server, which has ended for it, would say of this model."""
        states = {state.name: state for state in self.models()}
        return ModelFailed(model, states[model].reason if model in states else "the model server does not serve it")

    def _reopened(self, aftermath: Aftermath) -> None:
        self._met_server.set()
        epoch = self._opened().link.epoch
        self._errands.lose_orders(lambda order: order.epoch != epoch)
        if aftermath is not Aftermath.KEPT:
            for request in self._pending.unsend(started_too=aftermath is Aftermath.LOST):
                request.waiter.fail(
                    RequestError(
                        "the model server was restarted in the middle of this answer", code=Code.SERVER_UNAVAILABLE
                    )
                )
        self._flush_soon()

    def _deliver(self, message: Message, frames: list[Buffer]) -> None:
        match message:
            case Reply():
                for header, value in split_frames(message.replies, frames):
                    self._on_reply(header, value)
            case Chunk():
                for chunk, value in split_frames(message.chunks, frames):
                    self._on_chunk(chunk, value)
            case Snapshot():
                self._errands.told(message)
            case Managed():
                self._errands.done(message)
            case _:
                raise ProtocolError(f"the model server sent {type(message).__name__}, which is not for fronts")

    def _on_reply(self, header: ReplyHeader, frames: list[Buffer]) -> None:
        request = self._pending.remove(header.id)
        if request is None:
            # Its caller has left, or this is the second answer to a request that was sent twice.
            return
        if header.code is Code.CANCELLED:
            # Nobody here has cancelled it: the model server did, for this front's silence.
            request.waiter.fail(unavailable())
            return
        if header.code is not Code.OK:
            retry_after_s = header.retry_after_ms / 1000 or None
            request.waiter.fail(
                RequestError(header.message, code=header.code, detail=header.detail, retry_after_s=retry_after_s)
            )
            return
        try:
            value = unpack(frames) if frames else None
        except ProtocolError as error:
            request.waiter.fail(RequestError(f"the answer cannot be read: {error}", code=Code.INTERNAL))
            raise
        request.waiter.resolve(Answer(value, header.timings, header.slot, header.attempt))

    def _on_chunk(self, header: ChunkHeader, frames: list[Buffer]) -> None:
        request = self._pending.get(header.id)
        if request is None:
            return
        if header.index != request.next_chunk:
            text = f"piece {request.next_chunk} of the answer was lost: piece {header.index} came instead"
            self._give_up(request, RequestError(text, code=Code.INTERNAL))
            return
        request.next_chunk += 1
        try:
            taken = request.waiter.push(unpack(frames), frames_bytes(frames))
        except ProtocolError as error:
            self._give_up(request, RequestError(f"a piece of the answer cannot be read: {error}", code=Code.INTERNAL))
            raise
        if not taken:
            text = "the answer is read more slowly than it is made: too many pieces wait"
            self._give_up(request, RequestError(text, code=Code.CANCELLED))

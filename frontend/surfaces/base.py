"""What every HTTP dialect has in common: one request, from its first header to its last byte.

Owns the order of the guards, the watch for clients that leave, metrics, and the promise that every request ends in
one response. Refuses body shapes: a `Surface` brings those.

The hot routes are plain ASGI applications inside the FastAPI application: parsing and validating by pydantic, and
the machinery of a FastAPI route, would cost several times what the rest of a request does here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, cast

from fastapi import APIRouter
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from frontend import guards
from frontend.calls import Call, Calls, StreamCall, StreamCalls
from frontend.direct import send_whole, watched_connection
from frontend.guards import ClientGone, Headers, KeyRing
from frontend.pending import Answer
from frontend.responses import (
    CLIENT_CLOSED_REQUEST,
    EVENT_STREAM_HEADERS,
    KEEP_ALIVE,
    HeaderList,
    error_headers,
    send_response,
    server_timing,
    status_of,
)
from frontend.services import Services
from frontend.visits import Visit
from shared.errors import Code, RequestError, UnknownModel
from shared.logs import log_event
from shared.messages import Managed

if TYPE_CHECKING:
    from frontend.outgoing import RequestOptions

logger = logging.getLogger("frontend")

# Where a connection cannot be watched, a task listens to it. Most answers come sooner than this, and need none; a
# client that leaves is noticed after this long at the latest.
WATCH_AFTER_S = 0.05
# A client that is still sending a body that was refused reads the response only afterwards. So the rest is read and
# thrown away, up to these bounds; beyond, the connection is simply closed.
LINGER_S = 5.0
LINGER_BYTES_MAX = 256 * 2**20
# A stream that is silent for longer shows that it is alive: proxies and clients give up a connection after 30 to 60 s
# of silence. A stream that does not begin within this time gets its status, 200, before it is known how it ends.
KEEP_ALIVE_S = 15.0


class Abandonable(Protocol):
    def abandon(self) -> None: ...


Piece = TypeVar("Piece")
End = TypeVar("End")
PieceIn = TypeVar("PieceIn", contravariant=True)
EndIn = TypeVar("EndIn", contravariant=True)
PieceOut = TypeVar("PieceOut", covariant=True)
EndOut = TypeVar("EndOut", covariant=True)


class Streamed(Protocol[PieceOut, EndOut]):
    """What is read in pieces: a `StreamCall`, which says what each part does, or several as one."""

    @property
    def is_over(self) -> bool: ...
    async def arrived(self, timeout_s: float | None = None) -> bool: ...
    def take(self) -> Sequence[PieceOut]: ...
    def raise_if_broken(self) -> None: ...
    def final_answer(self) -> EndOut: ...
    def abandon(self) -> None: ...


class EventFormat(Protocol[PieceIn, EndIn]):
    """How a dialect writes a streamed answer; made anew for each one. Each method returns whole events, or nothing."""

    def begin(self) -> bytes: ...

    def piece(self, value: PieceIn) -> bytes: ...

    def end(self, answer: EndIn) -> bytes: ...

    def error(self, error: RequestError) -> bytes: ...


class Exchange:
    """One HTTP request on a hot route, and the means to answer it."""

    def __init__(
        self,
        services: Services,
        scope: Scope,
        receive: Receive,
        send: Send,
        status_of: Callable[[RequestError], int] = status_of,
        keys: KeyRing | None = None,
    ) -> None:
        """`keys` open this route, if those that open the others do not."""
        self.services = services
        self._keys = keys
        self.scope = scope
        self.status_of = status_of
        self.headers: Headers = dict(scope["headers"])
        self.request_id = guards.request_id(self.headers)
        # uvloop's clock, which deadlines use, stands still within one turn of the loop and counts whole milliseconds.
        self.began_s = time.perf_counter()
        self.started_s = asyncio.get_running_loop().time()
        self.deadline_s = self.started_s
        self.priority = 0
        # For metrics and logs; set once it is known to name a model, so that labels stay bounded.
        self.model = ""
        self.body_bytes = 0
        self.body_complete = False
        self.response_started = False
        # What is to be told of it; None where nothing is.
        self.visit: Visit | None = None
        self._receive = receive
        self._send = send

    async def read(self) -> bytes:
        """Passes the guards, fills in `deadline_s` and `priority`, and returns the body.

        Raises:
            RequestError: what is wrong with the request.
            ClientGone: it never became whole.
        """
        services, http = self.services, self.services.config.http
        (self._keys or services.keys).check(self.headers)
        timeout_s = guards.request_timeout_s(self.headers, http.request_timeout_s, http.request_timeout_max_s)
        self.deadline_s = self.started_s + timeout_s
        self.priority = guards.request_priority(self.headers)
        body = await services.bodies.read(self.headers, self._receive, self.deadline_s)
        self.body_bytes = len(body)
        self.body_complete = True
        return body

    def choose_model(self, name: str) -> None:
        """Raises:
        RequestError: `unknown_model`, naming those there are.
        """
        known = self.services.client.model_names()
        if name not in known:
            raise UnknownModel(name, known)
        self.model = name

    async def predict(self, inputs: object, parameters: Mapping[str, object] | None) -> Answer:
        """Asks the chosen model.

        Raises:
            RequestError: as `ModelClient.predict`.
            ClientGone: nobody waits for the answer; the model server knows.
        """
        asked_ns = self._asked_ns()
        call = self.services.client.submit(self.model, inputs, parameters, **self._options())
        with self._watch(call) as watch:
            try:
                return self._answered(await call, asked_ns)
            except RequestError:
                watch.raise_if_gone()
                raise
            finally:
                call.abandon()

    async def predict_all(self, questions: Sequence[Question]) -> list[Answer]:
        """Asks the chosen model several things at once; the first one that fails, fails all.

        Raises:
            RequestError: as `predict`; `question` in its detail is the number of the one that failed, from 0.
            ClientGone: as `predict`.
        """
        calls: list[Call] = []
        whole = Calls(calls)
        asked_ns = self._asked_ns()
        with self._watch(whole) as watch:
            try:
                for inputs, parameters in questions:
                    calls.append(self.services.client.submit(self.model, inputs, parameters, **self._options()))
                return self._answered(await whole, asked_ns)
            except RequestError as error:
                watch.raise_if_gone()
                if (number := whole.number_of(error)) is not None:
                    error.detail["question"] = number
                raise
            finally:
                whole.abandon()

    async def stream(
        self, inputs: object, parameters: Mapping[str, object] | None, events: EventFormat[object, Answer]
    ) -> int:
        """Asks the chosen model for a streamed answer and sends it as events; the last one says how it ended.

        Raises:
            RequestError: the answer ended before its first piece, and soon enough to be refused with a status.
            ClientGone: nobody reads it any more; the model server knows.
        """
        call = self.services.client.submit_stream(self.model, inputs, parameters, **self._options())
        return await self._send_events(call, events)

    async def stream_all(
        self, questions: Sequence[Question], events: EventFormat[tuple[int, object], list[Answer]]
    ) -> int:
        """As `stream`, for several answers that are made at once and sent mixed, each piece with its number; the first
        one that fails, fails all."""
        calls: list[StreamCall] = []
        try:
            for inputs, parameters in questions:
                calls.append(self.services.client.submit_stream(self.model, inputs, parameters, **self._options()))
        except RequestError:
            for call in calls:
                call.abandon()
            raise
        return await self._send_events(StreamCalls(calls, asyncio.get_running_loop()), events)

    async def _send_events(self, call: Streamed[Piece, End], events: EventFormat[Piece, End]) -> int:
        status, has_begun = 200, False
        asked_ns = self._asked_ns()
        with self._watch(call) as watch:
            try:
                await call.arrived(KEEP_ALIVE_S)
                call.raise_if_broken()
                await self._start_events()
                if head := events.begin():
                    await self._send_part(head)
                while not call.is_over:
                    if await call.arrived(KEEP_ALIVE_S):
                        call.raise_if_broken()
                        # Those that a slow reader finds waiting go in one write.
                        if pieces := call.take():
                            if not has_begun:
                                has_begun = True
                                self.services.metrics.stream_began(self.model, time.perf_counter() - self.began_s)
                            await self._send_part(b"".join(map(events.piece, pieces)))
                    else:
                        await self._send_part(KEEP_ALIVE)
                await self._send_part(events.end(self._answered(call.final_answer(), asked_ns)))
            except RequestError as error:
                watch.raise_if_gone()
                if not self.response_started:
                    raise
                status = self.status_of(error)
                if self.visit is not None:
                    self.visit.error = error.code
                await self._send_part(events.error(error))
            except asyncio.CancelledError:
                if not self.response_started:
                    raise
                status = 503
                await self._send_part(events.error(_stopping()))
            finally:
                call.abandon()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return status

    async def manage(self, action: str, replicas: int = 0) -> Managed | None:
        """Gives the model server an order about the chosen model, or about itself where none was chosen; None if that
        goes on beyond the deadline, or beyond the life of this worker.

        Raises:
            RequestError: `server_unavailable`.
            ClientGone: nobody waits for its end; it goes on.
        """
        client = self.services.client
        order = client.manage(action, self.model, replicas)
        with DisconnectWatch(self._receive, order, order.abandon) as watch:
            try:
                async with asyncio.timeout_at(self.deadline_s):
                    managed = await order
            except TimeoutError:
                managed = None
                if not client.server_heard():
                    text = "the model server is not heard any more: what has become of this, it says when it is back"
                    raise RequestError(text, code=Code.SERVER_UNAVAILABLE) from None
            finally:
                order.abandon()
        watch.raise_if_gone()
        outcome, text = ("goes on", "") if managed is None else (managed.outcome, managed.text)
        fields = {"action": action, "model": self.model, "replicas": replicas, "outcome": outcome, "text": text}
        log_event(logger, "info", "managed", request_id=self.request_id, **fields)
        return managed

    def _asked_ns(self) -> int:
        return 0 if self.visit is None else time.time_ns()

    def _answered(self, answer: End, asked_ns: int) -> End:
        """Counts what the answers tell of themselves, and notes when they came; returns them."""
        answers: list[Answer] = answer if isinstance(answer, list) else [cast(Answer, answer)]
        for each in answers:
            value = each.value
            if type(value) is dict and "prompt_tokens" in value:
                self._count_tokens(value)
        if self.visit is not None:
            self.visit.answered(answers, asked_ns)
        return answer

    def _count_tokens(self, value: dict[str, object]) -> None:
        prompt, generated = value["prompt_tokens"], value.get("generated_tokens", 0)
        # A class of the user's own may mean something else by these names.
        if type(prompt) is int and type(generated) is int and prompt >= 0 and generated >= 0:
            self.services.metrics.tokens_told(self.model, prompt, generated)

    def _watch(self, call: Abandonable) -> DisconnectWatch:
        return DisconnectWatch(self._receive, call, self.services.client.stop_holding)

    async def respond(self, status: int, headers: HeaderList, body: bytes) -> int:
        """Sends the whole response; returns its status."""
        self.response_started = True
        headers.append((b"x-request-id", self.request_id.encode()))
        if self.body_complete or status == CLIENT_CLOSED_REQUEST:
            headers.append((b"content-length", b"%d" % len(body)))
            if not send_whole(self._send, status, headers, body):
                await send_response(self._send, status, headers, body)
        else:
            await self._respond_and_linger(status, headers, body)
        return status

    async def _respond_and_linger(self, status: int, headers: HeaderList, body: bytes) -> None:
        # The rest of the body may still be on its way, for good; the connection is of no more use.
        headers += [(b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        await send_response(self._send, status, headers, body, more_body=True)
        if b"expect" not in self.headers:
            # (A client that asked first, by `Expect: 100-continue`, has not begun to send.)
            await self._discard_body()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard_body(self) -> None:
        left_bytes = LINGER_BYTES_MAX
        try:
            async with asyncio.timeout(LINGER_S):
                more = True
                while more and left_bytes > 0:
                    message = await self._receive()
                    left_bytes -= len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            log_event(logger, "debug", "refused_body_cut_off", request_id=self.request_id)

    async def _send_part(self, part: bytes) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def _start_events(self) -> None:
        self.response_started = True
        headers = [*EVENT_STREAM_HEADERS, (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _options(self) -> RequestOptions:
        return {
            "timeout_s": max(0.0, self.deadline_s - asyncio.get_running_loop().time()),
            "priority": self.priority,
            "request_id": self.request_id,
            "traceparent": guards.traceparent(self.headers) if self.visit is None else self.visit.traceparent,
        }


Question = tuple[object, Mapping[str, object] | None]
"""What a model is asked: inputs and parameters."""

Handler = Callable[[Exchange, bytes], Awaitable[int]]
"""Gets a request that has passed the guards, and its body; sends the response, and returns its status."""


class DisconnectWatch:
    """While entered: abandons the call as soon as the client closes its connection, and calls `on_stop` when the HTTP
    server begins to stop, if its connection can be watched."""

    def __init__(self, receive: Receive, call: Abandonable, on_stop: Callable[[], None]) -> None:
        self._receive = receive
        self._call = call
        self._on_stop = on_stop
        self._connection = watched_connection(receive)
        self._start_handle: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.gone = False

    def __enter__(self) -> Self:
        if self._connection is not None:
            self._connection.watch(self._client_gone, self._on_stop)
        else:
            self._start_handle = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.unwatch()
        if self._start_handle is not None:
            self._start_handle.cancel()
        if self._task is not None:
            self._task.cancel()

    def raise_if_gone(self) -> None:
        if self.gone:
            raise ClientGone

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        # The whole body was read, so the next thing a server has to say is that the client is gone.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_gone()

    def _client_gone(self) -> None:
        self.gone = True
        self._call.abandon()


class Surface(ABC):
    """One HTTP dialect. A new one is a subclass in a file of its own, and a line in `registry.py`."""

    name: ClassVar[str]
    prefix: ClassVar[str] = ""
    """Paths that begin so are its own, also those that do not exist: what is refused there is refused in its words."""

    def __init__(self, services: Services) -> None:
        self.services = services

    @abstractmethod
    def routes(self) -> Iterable[Route]:
        """The hot routes, most specific first."""

    def router(self) -> APIRouter:
        """The other routes, which FastAPI itself calls and describes."""
        return APIRouter()

    @abstractmethod
    def openapi_paths(self) -> dict[str, Any]:
        """The same for `/openapi.json`: OpenAPI 3.1 path items by path."""

    @abstractmethod
    def error_body(self, error: RequestError) -> bytes:
        """The body of a response, in this dialect, that says what went wrong."""

    @abstractmethod
    def framework_error_body(self, status: int, text: str, error_type: str) -> bytes:
        """The same for what no model was asked: unknown paths, wrong methods."""

    def status_of(self, error: RequestError) -> int:
        return status_of(error)

    def hot_route(self, path: str, handle: Handler, keys: KeyRing | None = None) -> Route:
        """One POST route; `keys` are those that open it, if not all do."""
        label = re.sub(r":\w+}", "}", path)
        return Route(path, HotRoute(self, label, handle, keys), methods=["POST"], name=f"{self.name} {label}")


class HotRoute:
    """The ASGI application of one POST route."""

    def __init__(self, surface: Surface, label: str, handle: Handler, keys: KeyRing | None) -> None:
        self._keys = keys
        self._surface = surface
        self._services = surface.services
        self._label = label
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._services, scope, receive, send, self._surface.status_of, self._keys)
        metrics = self._services.metrics
        metrics.request_began()
        visits = self._services.visits
        if visits is not None:
            exchange.visit = visits.begin(scope, self._label, exchange.request_id, exchange.headers)
        status = CLIENT_CLOSED_REQUEST
        try:
            status = await self._answer(exchange)
        finally:
            duration_s = time.perf_counter() - exchange.began_s
            metrics.request_ended(exchange.model, self._label, status, duration_s, exchange.body_bytes)
            if visits is not None and exchange.visit is not None:
                visits.end(exchange.visit, exchange.model, status, duration_s, exchange.body_bytes)

    async def _answer(self, exchange: Exchange) -> int:
        try:
            return await self._handle(exchange, await exchange.read())
        except ClientGone:
            log_event(logger, "info", "client_gone", request_id=exchange.request_id, model=exchange.model, status=499)
            return CLIENT_CLOSED_REQUEST
        except RequestError as error:
            return await self._refuse(exchange, error)
        except asyncio.CancelledError:
            # This process stops, and its time for open requests is over. The task ends here either way; raising
            # again would only make the server log a fault.
            return await self._refuse(exchange, _stopping())
        except Exception as fault:
            # The boundary of one request: whatever went wrong, its client gets an answer, and the others theirs.
            log_event(logger, "error", "request_failed", request_id=exchange.request_id, exception=fault)
            text = f"headwaiter failed on this request; its log says why, under request_id {exchange.request_id}"
            return await self._refuse(exchange, RequestError(text, code=Code.INTERNAL))

    async def _refuse(self, exchange: Exchange, error: RequestError) -> int:
        status = self._surface.status_of(error)
        if exchange.visit is not None:
            exchange.visit.error = error.code
        if exchange.response_started:
            # Too late for another status; the server closes the connection on a response without an end.
            return status
        headers = [(b"content-type", b"application/json"), *error_headers(error)]
        return await exchange.respond(status, headers, self._surface.error_body(error))


def _stopping() -> RequestError:
    return RequestError("this front worker stops; send the request again", code=Code.DRAINING)


def timing_headers(answer: Answer) -> HeaderList:
    """For a successful response."""
    return [(b"content-type", b"application/json"), (b"server-timing", server_timing(answer.timings))]

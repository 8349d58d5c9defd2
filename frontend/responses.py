"""From outcomes to HTTP: statuses, headers, and the bytes of bodies and events.

Owns the only translation of error codes into HTTP numbers. Refuses body shapes: those belong to the surfaces.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from shared.errors import Code, RequestError
from shared.json_text import dump_json
from shared.messages import Timings

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
# Never sent: the client has left. In logs and metrics, as nginx has it.
CLIENT_CLOSED_REQUEST = 499

STATUS: dict[Code, int] = {
    Code.OK: 200,
    Code.BAD_REQUEST: 400,
    Code.UNAUTHORIZED: 401,
    Code.UNKNOWN_MODEL: 404,
    Code.TOO_LARGE: 413,
    Code.INVALID_INPUT: 422,
    Code.OVERLOADED: 429,
    Code.CANCELLED: CLIENT_CLOSED_REQUEST,
    Code.MODEL_ERROR: 500,
    Code.OUT_OF_MEMORY: 500,
    Code.POISON_INPUT: 500,
    Code.INTERNAL: 500,
    Code.REPLICA_FAULT: 500,
    Code.MODEL_CRASHED: 502,
    Code.MODEL_LOADING: 503,
    Code.MODEL_FAILED: 503,
    Code.DRAINING: 503,
    Code.SERVER_UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}

# How an operator's order has ended, by the outcome that the model server tells.
MANAGED_STATUS: dict[str, int] = {"done": 200, "refused": 409, "failed": 502}

# Client libraries repeat any 5xx of their own accord. For these the same request would end the same way, or has
# already used up the time that its sender had.
_NOT_TO_BE_RETRIED = frozenset({Code.DEADLINE_EXCEEDED, Code.POISON_INPUT, Code.MODEL_ERROR, Code.OUT_OF_MEMORY})

# Seconds until a retry makes sense, where nobody knows better. A model that has failed works again at a time that the
# model server names, or never.
_RETRY_AFTER_S: dict[Code, float] = {
    Code.OVERLOADED: 1.0,
    Code.MODEL_LOADING: 5.0,
    Code.DRAINING: 5.0,
    Code.SERVER_UNAVAILABLE: 2.0,
}


def status_of(error: RequestError) -> int:
    return STATUS[error.code]


def error_headers(error: RequestError) -> HeaderList:
    """The headers that say what a client may do next."""
    headers: HeaderList = []
    if error.code is Code.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    is_for_good = error.code in _NOT_TO_BE_RETRIED
    if status_of(error) in (429, 503):
        seconds = error.retry_after_s or _RETRY_AFTER_S.get(error.code)
        if seconds is None:
            is_for_good = True
        else:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(seconds))))
    if is_for_good:
        headers.append((b"x-should-retry", b"false"))
    return headers


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """For routes that FastAPI calls."""
    return Response(dump_json(value), status, headers, media_type="application/json")


def server_timing(timings: Timings) -> bytes:
    """https://www.w3.org/TR/server-timing/: where the time went, for the client and its developer tools."""
    return (
        f"queue;dur={timings.queue_ms:.1f}, prepare;dur={timings.prepare_ms:.1f}, "
        f"forward;dur={timings.forward_ms:.1f}, finish;dur={timings.finish_ms:.1f}"
    ).encode()


async def send_response(send: Send, status: int, headers: HeaderList, body: bytes, *, more_body: bool = False) -> None:
    """One whole response, whose headers have its length; with `more_body` the connection stays open behind it."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


EVENT_STREAM_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # Proxies otherwise collect a response until it is worth sending.
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


KEEP_ALIVE = b": still here\n\n"
"""An event stream's comment, which every reader passes over."""


def server_sent_event(data: bytes, event: str = "") -> bytes:
    """https://html.spec.whatwg.org/multipage/server-sent-events.html; `data` is JSON, so it has no line breaks."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + data + b"\n\n"

"""What a caller asks for, as a request that can be sent: packed, checked, and with a deadline.

Owns what may be said about a request, the defaults of it, and the key by which requests share a batch. Pure: it knows
no socket and no table; times are arguments, in seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import TypedDict

from frontend import circumstances
from frontend.calls import Call, StreamCall
from frontend.pending import PendingRequest
from shared.errors import Code, ProtocolError, RequestError, Unserialisable
from shared.frames import frames_bytes
from shared.values import pack
from shared.wire import check

# A day. The wire carries whole milliseconds in 32 bits, and a configuration allows no longer deadline.
TIMEOUT_S_MAX = 86_400.0
OPERATION = "predict"


class RequestOptions(TypedDict, total=False):
    """What may be said about a request beside its inputs and parameters. In an own route of a front worker, the
    defaults are what its caller has said in headers."""

    timeout_s: float | None
    """The whole time to wait, in seconds, at most a day. Default: `request_timeout_s` of the configuration."""
    priority: int
    """A lower one is more urgent. Default 0."""
    request_id: str
    """Goes into the logs of every process that sees the request. Default: the call's `id` in hexadecimal."""
    traceparent: str
    """W3C trace context, passed on."""


def new_request(
    call: Call | StreamCall,
    model: str,
    inputs: object,
    parameters: Mapping[str, object] | None,
    options: RequestOptions,
    *,
    timeout_s: float,
    now_s: float,
) -> PendingRequest:
    """The request of a call; `timeout_s` is how long it waits where nobody says.

    Raises:
        RequestError: `invalid_input`: the inputs, or what is said about them, cannot be sent.
    """
    # In one order, so that equal parameters make equal batch keys.
    sorted_parameters = dict(sorted(parameters.items(), key=_key_text)) if parameters else {}
    try:
        payload = pack([inputs, sorted_parameters], where="request")
        batch_key = _batch_key(sorted_parameters)
    except Unserialisable as error:
        raise RequestError(_in_callers_words(error.message), code=Code.INVALID_INPUT) from None
    around = circumstances.present()
    asked_s = options.get("timeout_s")
    if asked_s is None:
        asked_s = timeout_s if around is None else max(0.0, around.deadline_s - now_s)
    elif math.isnan(asked_s):
        raise RequestError("timeout_s is not a number: give seconds, or None", code=Code.INVALID_INPUT)
    request = PendingRequest(
        id=call.id,
        model=model,
        operation=OPERATION,
        batch_key=batch_key,
        priority=options.get("priority", 0 if around is None else around.priority),
        stream=isinstance(call, StreamCall),
        retryable=True,
        request_id=options.get("request_id") or (call.id.hex() if around is None else around.request_id),
        traceparent=options.get("traceparent", "" if around is None else around.traceparent),
        payload=tuple(payload),
        body_bytes=frames_bytes(payload),
        deadline_s=now_s + min(asked_s, TIMEOUT_S_MAX),
        waiter=call,
    )
    try:
        check(request.header(now_s))
    except ProtocolError as error:
        raise RequestError(f"the request cannot be sent: {error}", code=Code.INVALID_INPUT) from None
    return request


def _key_text(entry: tuple[object, object]) -> str:
    return str(entry[0])


def _in_callers_words(text: str) -> str:
    """A payload is the list of inputs and parameters; its sender knows them by name."""
    return re.sub(r"\brequest\[([01])\]", lambda match: ("inputs", "parameters")[int(match[1])], text, count=1)


def _batch_key(parameters: dict[str, object]) -> bytes:
    """Requests may share a batch if these 8 bytes are equal; empty without parameters."""
    if not parameters:
        return b""
    digest = hashlib.blake2b(digest_size=8)
    for frame in pack(parameters):
        digest.update(frame)
    return digest.digest()

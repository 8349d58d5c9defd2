"""What has to be in order before a request may go to a model: its key, its size, its deadline, its ids.

Owns the reading of headers and bodies. Refuses everything about a dialect: bodies come out as bytes, and what is wrong
comes out as a `RequestError` for the surface to render.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import random
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from frontend.direct import has_message, take_whole_body
from frontend.encodings import ENCODINGS, IDENTITY, expanded
from shared.errors import Code, RequestError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Headers = dict[bytes, bytes]
"""Lower-case names to raw values, as ASGI servers give them; of a repeated header, the last."""

REQUEST_ID_LENGTH_MAX = 128
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
# Wide enough for any ranking, narrow enough that ageing (seconds for each step) still lets everything through.
PRIORITY_MAX = 100


class ClientGone(Exception):
    """The client closed its connection before it had sent the whole request."""


class KeyRing:
    """The API keys that open the service. Keeps digests only, so that no dump or trace of it shows a key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def check(self, headers: Headers) -> None:
        """Lets a request pass whose `Authorization: Bearer` key is known; any request, where there are no keys.

        Raises:
            RequestError: `unauthorized`.
        """
        if self._digests and not self.knows(headers):
            raise RequestError(
                "this service needs an API key: send it as `Authorization: Bearer KEY`", code=Code.UNAUTHORIZED
            )

    def knows(self, headers: Headers) -> bool:
        """Whether a request brings one of these keys."""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, each in constant time: neither the place nor the likeness of a key shows in the time taken.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


class AdministrationClosed(RequestError):
    """No administration key is configured, so that none opens."""

    default_code = Code.UNAUTHORIZED


class AdminKeyRing(KeyRing):
    """The keys that open the administration of the service, which stays shut where there are none."""

    def check(self, headers: Headers) -> None:
        """Lets a request pass whose `Authorization: Bearer` key is known.

        Raises:
            AdministrationClosed: there is no such key.
            RequestError: `unauthorized`.
        """
        if not self._digests:
            text = (
                "this service is not administered over HTTP: set http.admin_keys, or use the command headwaiter there"
            )
            raise AdministrationClosed(text)
        if not self.knows(headers):
            raise RequestError(
                "this takes an administration key: send one of http.admin_keys as `Authorization: Bearer KEY`",
                code=Code.UNAUTHORIZED,
            )


class BodyReader:
    """Reads request bodies, each within a limit, and all that are being read within another.

    What is being read belongs to no model's queue yet, so many slow uploads need a bound of their own.
    """

    def __init__(self, *, body_bytes_max: int, total_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._total_bytes_max = total_bytes_max
        self._total_bytes = 0

    async def read(self, headers: Headers, receive: Receive, deadline_s: float) -> bytes:
        """The whole body, without the encoding it came in. `deadline_s` is on the event loop's clock.

        Raises:
            ClientGone: it will never be whole.
            RequestError: `too_large`, `bad_request` (its length or encoding), `overloaded`, or `deadline_exceeded`.
        """
        encoding = _encoding(headers)
        body = await self._read_encoded(headers, receive, deadline_s)
        if encoding == IDENTITY:
            return body
        content = expanded(body, encoding, self._body_bytes_max)
        if content is None:
            raise self._too_large()
        return content

    async def _read_encoded(self, headers: Headers, receive: Receive, deadline_s: float) -> bytes:
        self._check_length(headers)
        whole = take_whole_body(receive)
        if whole is not None:
            if len(whole) > self._body_bytes_max:
                raise self._too_large()
            return whole
        message = await _receive_until(receive, deadline_s)
        body: bytes = message.get("body", b"")
        if len(body) > self._body_bytes_max:
            raise self._too_large()
        if not message.get("more_body", False):
            return body
        return await self._read_on(body, receive, deadline_s)

    def _check_length(self, headers: Headers) -> None:
        length = headers.get(b"content-length")
        if length is None:
            return
        if not length.isdigit():
            raise RequestError(f"Content-Length {_shown(length)} is not a number of bytes", code=Code.BAD_REQUEST)
        if int(length) > self._body_bytes_max:
            raise self._too_large(int(length))

    async def _read_on(self, first: bytes, receive: Receive, deadline_s: float) -> bytes:
        parts = [first]
        size_bytes = len(first)
        self._total_bytes += size_bytes
        try:
            more = True
            while more:
                if self._total_bytes > self._total_bytes_max:
                    text = f"request bodies of {self._total_bytes_max} bytes in all are being read already"
                    raise RequestError(text, code=Code.OVERLOADED, retry_after_s=1.0)
                message = await _receive_until(receive, deadline_s)
                part = message.get("body", b"")
                size_bytes += len(part)
                self._total_bytes += len(part)
                if size_bytes > self._body_bytes_max:
                    # The length was missing, or a lie.
                    raise self._too_large()
                parts.append(part)
                more = message.get("more_body", False)
            return b"".join(parts)
        finally:
            self._total_bytes -= size_bytes

    def _too_large(self, size_bytes: int | None = None) -> RequestError:
        size = "the request body" if size_bytes is None else f"a request body of {size_bytes} bytes"
        text = f"{size} is larger than the {self._body_bytes_max} bytes that this service takes (http.body_bytes_max)"
        return RequestError(text, code=Code.TOO_LARGE, detail={"body_bytes_max": self._body_bytes_max})


def _encoding(headers: Headers) -> bytes:
    given = headers.get(b"content-encoding", IDENTITY)
    encoding = given.strip().lower()
    if encoding not in ENCODINGS:
        known = ", ".join(name.decode() for name in ENCODINGS if name != IDENTITY)
        text = f"Content-Encoding {_shown(given)} is not read here: send the body as it is, or in one of {known}"
        raise RequestError(text, code=Code.BAD_REQUEST)
    return encoding


async def _receive_until(receive: Receive, deadline_s: float) -> MutableMapping[str, Any]:
    try:
        if has_message(receive):
            message = await receive()
        else:
            async with asyncio.timeout_at(deadline_s):
                message = await receive()
    except TimeoutError:
        raise RequestError("the request body did not arrive before the deadline", code=Code.DEADLINE_EXCEEDED) from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def request_timeout_s(headers: Headers, default_s: float, max_s: float) -> float:
    """How long the client wants to wait: `X-Request-Timeout` in seconds; without one `default_s`, or `max_s` if less.

    Raises:
        RequestError: `bad_request`, if the header is not a positive number; `invalid_input`, if it is more than
            `max_s`: a shorter deadline is one that the client has not set, and would not know of.
    """
    text = headers.get(b"x-request-timeout")
    if text is None:
        return min(default_s, max_s)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise RequestError(
            f"X-Request-Timeout {_shown(text)} is not a positive number of seconds, such as 2.5", code=Code.BAD_REQUEST
        )
    check_timeout(f"X-Request-Timeout {_shown(text)}", seconds, max_s, remedy=f"send at most {max_s:g}")
    return seconds


def check_timeout(said: str, seconds: float, max_s: float, *, remedy: str) -> None:
    """`said` is what the client wrote.

    Raises:
        RequestError: `invalid_input`, if that is more than `max_s`.
    """
    if seconds > max_s:
        raise RequestError(
            f"{said} is more than the {max_s:g} seconds that this service allows (http.request_timeout_max_s): "
            f"{remedy}",
            code=Code.INVALID_INPUT,
            detail={"request_timeout_max_s": max_s},
        )


def request_priority(headers: Headers) -> int:
    """`X-Request-Priority`, 0 without one; a lower number is more urgent.

    Raises:
        RequestError: `bad_request`, if the header is not a whole number within bounds.
    """
    text = headers.get(b"x-request-priority")
    if text is None:
        return 0
    try:
        priority = int(text)
    except ValueError:
        priority = PRIORITY_MAX + 1
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise RequestError(
            f"X-Request-Priority {_shown(text)} is not a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}",
            code=Code.BAD_REQUEST,
        )
    return priority


def request_id(headers: Headers) -> str:
    """The client's own id for the request, made safe for logs and headers; a new one if it has none."""
    for name in (b"x-request-id", b"x-amzn-trace-id"):
        text = headers.get(name)
        if text is not None:
            cleaned = _NOT_PRINTABLE.sub("", text.decode("latin-1")).strip()[:REQUEST_ID_LENGTH_MAX]
            if cleaned:
                return cleaned
    return f"{random.getrandbits(96):024x}"


def traceparent(headers: Headers) -> str:
    """The W3C trace context to pass on; empty if there is none, or none that the standard allows."""
    text = headers.get(b"traceparent", b"").decode("latin-1")
    match = _TRACEPARENT.fullmatch(text)
    if match is None or text.startswith("ff") or not match[1].strip("0") or not match[2].strip("0"):
        return ""
    return text


def _shown(text: bytes) -> str:
    """A header's value, for a message: bounded, and nothing that a terminal obeys."""
    return repr(text[:40].decode("latin-1"))

"""Short ways from an application to uvicorn's end of its connection, where nobody stands between the two.

ASGI gives an application two functions, `receive` and `send`. Where these are uvicorn's own methods, the object that
they belong to is at hand, and much of what they do for each request can be left out. Everybody else's, such as those
of a middleware or of another server, must be called: each function here says so, and its caller takes ASGI's way.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from frontend.responses import HeaderList

# What one connection may have sent ahead, behind the request that is being answered, and still be read from.
REQUESTS_BEHIND_MAX = 8
BODIES_BEHIND_BYTES_MAX = 64 * 1024


class WatchedConnection(HttpToolsProtocol):
    """A connection that tells the request on it when its client goes, and when the server is about to."""

    # Of the one request that is being answered.
    _on_gone: Callable[[], None] | None = None
    _on_stop: Callable[[], None] | None = None
    _is_lost = False
    _is_stopping = False

    def shutdown(self) -> None:
        """Called when the server begins to stop."""
        self.note_stop()
        super().shutdown()

    def note_stop(self) -> None:
        self._is_stopping = True
        if self._on_stop is not None:
            self._on_stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_lost = True
        if self._on_gone is not None:
            self._on_gone()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._go_on_hearing()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._go_on_hearing()

    def _go_on_hearing(self) -> None:
        """uvicorn stops reading as soon as another request comes in behind the one that is being answered. Then nobody
        would hear that the client goes; so a little more is read, but never more than may wait here."""
        if self._on_gone is not None and self.flow.read_paused and len(self.pipeline) <= REQUESTS_BEHIND_MAX:
            behind_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
            if behind_bytes <= BODIES_BEHIND_BYTES_MAX:
                self.flow.resume_reading()

    def watch(self, on_gone: Callable[[], None], on_stop: Callable[[], None]) -> None:
        """Until `unwatch`. `on_gone` is called when the client goes, `on_stop` when the server begins to stop; at once,
        if that has happened already."""
        if self._is_lost:
            on_gone()
            return
        if self._is_stopping:
            on_stop()
        self._on_gone, self._on_stop = on_gone, on_stop

    def unwatch(self) -> None:
        self._on_gone = self._on_stop = None


def watched_connection(receive: Receive) -> WatchedConnection | None:
    """The connection behind `receive`, if it is one that can be watched."""
    cycle = _cycle_of(receive)
    connection = None if cycle is None else getattr(cycle.on_response, "__self__", None)
    return connection if isinstance(connection, WatchedConnection) else None


def has_message(receive: Receive) -> bool:
    """Whether `receive` is known to return without waiting."""
    cycle = _cycle_of(receive)
    return cycle is not None and cycle.message_event.is_set()


def take_whole_body(receive: Receive) -> bytes | None:
    """The body of a request that has come in whole already, as `receive` would return it; None if it has not, or is not
    known to."""
    cycle = _cycle_of(receive)
    if (
        cycle is None
        or cycle.more_body
        or cycle.disconnected
        or cycle.response_complete
        or not cycle.message_event.is_set()
    ):
        return None
    cycle.flow.resume_reading()
    cycle.message_event.clear()
    cycle.waiting_for_100_continue = False
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


def send_whole(send: Send, status: int, headers: HeaderList, body: bytes) -> bool:
    """Sends a whole response to a POST in one piece, if there is a short way.

    The headers are not checked: they must be lower-case, with values that hold nothing but printable characters, and
    without `connection`.
    """
    cycle = _cycle_of(send)
    if cycle is None or cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.access_log:
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    cycle.transport.writelines((b"".join((STATUS_LINE[status], *lines, b"\r\n")), body))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


def _cycle_of(function: object) -> RequestResponseCycle | None:
    cycle = getattr(function, "__self__", None)
    return cycle if type(cycle) is RequestResponseCycle else None

"""The server's end of one HTTP/1.1 connection: uvicorn's own, with bounds where it has none.

Owns how many connections there may be, how large a request's head may be and how long it may take, that an offer to
change protocols is passed over with the request left as it is, and that a stop cuts off no request on its way in.
Refuses everything behind the head: bodies, deadlines and answers are the application's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from frontend.direct import WatchedConnection
from frontend.limits import REFUSED_KEPT, connections_max
from frontend.surfaces.native import error_body
from shared.errors import Code

# The request line and all headers, as nginx and Apache have it, more or less. Counted from the end of the first read.
HEAD_BYTES_MAX = 64 * 1024
# From a connection's first moment, or a head's first byte, to the head's end. The same bounds hold for headers behind
# a body, and for whatever else may stand between the pieces of one.
HEAD_TIMEOUT_S = 20.0
# How long the head of a request that is on its way, or the first one of a new connection, may still take to come when
# the server stops. A client that sends at once has met a server that took its connection, and will be answered.
LAST_HEAD_TIMEOUT_S = 1.0
# How long a refused connection may stay, so that its client can read why.
REFUSED_TIMEOUT_S = 1.0


class Protocol(WatchedConnection):
    """See the module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        open_count = len(self.connections)
        if open_count <= connections_max():
            self._await_head()
        else:
            self._refuse_connection(open_count)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ended()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called when the server begins to stop."""
        self.note_stop()
        if self._head_timer is None or self._refused:
            super().shutdown()
        else:
            self.loop.call_later(LAST_HEAD_TIMEOUT_S, self._give_up_head)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._is_stopping:
            self.cycle.keep_alive = False

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        scope, cycle = self.scope, self.cycle
        held_bytes = 0 if cycle is None else len(cycle.body)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(400, "this is not an HTTP/1.1 request")
            return
        if self._has_progressed(cycle, held_bytes):
            if self._head_timer is not None:
                self._head_ended()
            return
        if self.scope is not scope or self._is_discarding():
            # Where in this read a head began is not known, and need not be: a read has its own limit.
            self._head_bytes = 0
        else:
            self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(431, f"the headers of a request may have {HEAD_BYTES_MAX} bytes in all")
        elif self._head_timer is None:
            self._await_head()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._pass_over_upgrade() + data[upgrade.args[0] :]
            else:
                return

    def _refuse(self, status: int, text: str) -> None:
        """Answers what cannot be parsed any further, and closes the connection."""
        if self._answer_is_due():
            # It comes first, and is the last.
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # The rest of its body cannot be read, so for the application its client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        self._write_refusal(status, text, Code.BAD_REQUEST)
        if self._head_timer is None:
            self._await_head()

    def _refuse_connection(self, open_count: int) -> None:
        """Answers a client that came when there was no room, before it has said what it wants."""
        text = f"this front worker has {connections_max()} connections open already, all that its open files allow"
        self._write_refusal(429, text, Code.OVERLOADED, b"retry-after: 1\r\n")
        if open_count <= connections_max() + REFUSED_KEPT:
            self._head_timer = self.loop.call_later(REFUSED_TIMEOUT_S, self._head_timed_out)
        else:
            self.transport.close()

    def _write_refusal(self, status: int, text: str, code: Code, header: bytes = b"") -> None:
        body = error_body(text, code)
        headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + header + headers + body)
        # A client that is still sending reads this only afterwards, so what it sends is thrown away for a while.
        self.transport.write_eof()
        self._refused = True

    def _answer_is_due(self) -> bool:
        """Whether a request has come in whole and waits for its answer."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    # --- the head ------------------------------------------------------------------------------------------------

    def _has_progressed(self, cycle: RequestResponseCycle | None, held_bytes: int) -> bool:
        """Whether what was just read has ended a head, or is part of a body: anything else is in or like a head.

        The arguments are what there was before: the last request, and how much of its body.
        """
        if self.scope is None:
            return True
        # Each head makes a scope, and its end a cycle with that scope.
        if self.cycle is None or self.cycle.scope is not self.scope:
            return False
        return self.cycle is not cycle or not cycle.more_body or len(cycle.body) != held_bytes

    def _is_discarding(self) -> bool:
        """Whether what comes is a body that was answered before it was read, and nobody reads any more."""
        return self.cycle is not None and self.cycle.scope is self.scope and self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_timed_out)

    def _head_ended(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        if self._answer_is_due():
            # It comes first, and nothing may be read until then.
            self._await_head()
        elif not self.transport.is_closing():
            self.transport.close()

    def _give_up_head(self) -> None:
        if self._head_timer is not None:
            super().shutdown()

    # --- offers to change protocols ------------------------------------------------------------------------------

    def _pass_over_upgrade(self) -> bytes:
        """Makes a parser for what follows a head that offers another protocol; returns what it has to read first.

        Java's HTTP client and others offer HTTP/2 with each request. The parser takes the offer for accepted, and
        the body for the other protocol; a new one, told only how the body is framed, reads it as what it is.
        """
        self.parser = httptools.HttpRequestParser(_BehindHead(self))
        # As uvicorn does for the first one: bytes behind a last request are passed over.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.cycle.more_body = True
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        return b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(b"%s: %s\r\n" % header for header in framing)


class _BehindHead:
    """What a parser calls, which passes over the first head and hands everything behind it to the connection."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._head_ended = False
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self._head_ended:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._head_ended:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_ended:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._head_ended:
            self._protocol.on_headers_complete()
        self._head_ended = True

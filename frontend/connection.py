"""The socket to the model server, on an event loop.

Owns one DEALER, the reader that nothing can end, and the HELLOs and PULSEs that keep the link up. Refuses to know
what a request is: it hands every valid message to its owner, and says when the link has (re)opened.

The file descriptor of a ZeroMQ socket is edge-triggered: it becomes readable when something may have changed, and
stays silent until then. So the reader takes everything there is, and looks again after each send, which may have
swallowed an edge.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable, Sequence

import zmq

from frontend.link import Aftermath, Say, ServerLink
from shared.errors import ProtocolError
from shared.logs import Level, RateLimiter, log_event
from shared.messages import FrontHello, FrontPulse, Message, ServerPulse, Welcome
from shared.sockets import Buffer, connect_dealer, drain, has_message, readiness, send
from shared.version import VERSION
from shared.wire import decode, encode

logger = logging.getLogger("frontend")

# Messages handled before the event loop gets its turn; the rest follow at once.
MESSAGES_PER_TURN_MAX = 256
# Also how late a silence is noticed.
TICK_S = 0.25
# What was written goes out at closing, or never: a connected local socket takes it at once.
CLOSE_LINGER_MS = 50


class Connection:
    """One front's connection. Every method runs on the event loop that made it, and returns at once."""

    def __init__(
        self,
        endpoint: str,
        *,
        deliver: Callable[[Message, list[Buffer]], None],
        reopened: Callable[[Aftermath], None],
        lost_hope: Callable[[], None],
        pending_count: Callable[[], int],
        is_worker: bool,
    ) -> None:
        """`is_worker`: this is a worker of the HTTP front, and not a client in some other program."""
        self._deliver = deliver
        self._reopened = reopened
        self._lost_hope = lost_hope
        self._pending_count = pending_count
        self._is_worker = is_worker
        self.malformed_count = 0
        self._malformed_log = RateLimiter(logger, "warning", "message_malformed")
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        # Requests are kept in the front's own table, so the socket keeps nothing for a server that is not there.
        self._socket = connect_dealer(self._context, endpoint, hold_unsent=False)
        # A connection that nobody closed: its memory may be collected in any order, and a context waits without end for
        # a socket that is still open.
        self._finalizer = weakref.finalize(self, _end, self._socket, self._context, linger_ms=0)
        self._finalizer.atexit = False
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self.link = ServerLink(self._loop.time())
        self._receive_handle: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._receive)
        self._tick_handle = self._loop.call_soon(self._tick)

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Hands one message to the socket; False if there is no connection to put it on.

        The frames must not change afterwards: large ones are not copied.
        """
        sent = send(self._socket, encode(message, frames))
        if not sent:
            if self.link.is_up:
                log_event(logger, self._loss_level(), "server_disconnected", epoch=self.link.epoch)
            self.link.not_connected()
        if not self.link.is_up or has_message(self._socket):
            self._look_again()
        return sent

    def _loss_level(self) -> Level:
        """A server that goes after it has said that it is about to stop is no news."""
        return "info" if self.link.draining else "warning"

    def close(self) -> None:
        """Says goodbye, and ends the connection. Also after the end of its event loop."""
        if self.link.is_up:
            self.send(FrontPulse(pending=0, leaving=True))
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._tick_handle.cancel()
        if self._receive_handle is not None:
            self._receive_handle.cancel()
        self._finalizer.detach()
        _end(self._socket, self._context, linger_ms=CLOSE_LINGER_MS)

    # --- receiving -----------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        if self._receive_handle is None and not self._loop.is_closed():
            self._receive_handle = self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        if self._receive_handle is not None:
            self._receive_handle.cancel()
            self._receive_handle = None
        self._take_messages()
        if not self.link.is_up:
            is_readable, is_connected = readiness(self._socket)
            if is_connected:
                self._say(self.link.connectable(self._loop.time()))
            if is_readable:
                self._look_again()

    def _take_messages(self) -> None:
        count = 0
        for parts in drain(self._socket, MESSAGES_PER_TURN_MAX):
            count += 1
            try:
                message, frames = decode(parts)
                self._take(message, frames)
            except ProtocolError as error:
                self.malformed_count += 1
                self._malformed_log.log(reason=str(error))
            except Exception:
                # The boundary of one message: whatever is wrong with our handling of it, the next one is read.
                logger.exception("message_handling_failed")
        if count == MESSAGES_PER_TURN_MAX:
            self._look_again()

    def _take(self, message: Message, frames: list[Buffer]) -> None:
        now_s = self._loop.time()
        if isinstance(message, Welcome):
            is_new, was_up = message.epoch != self.link.epoch, self.link.is_up
            aftermath = self.link.heard_welcome(message, now_s)
            if is_new:
                log_event(logger, "info", "server_joined", epoch=message.epoch, server_version=message.version)
            if is_new and was_up:
                # It was restarted between two pulses, and has welcomed whoever sent the second: it has no HELLO yet.
                self._say(Say.HELLO)
            self._reopened(aftermath)
        elif isinstance(message, ServerPulse):
            self._say(self.link.heard_pulse(message, now_s))
            if message.hopeless:
                self._lost_hope()
        else:
            self._deliver(message, frames)
            self.link.heard(now_s)

    # --- keeping the link up -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        # First what has arrived while this process did something else: it may say that nothing is wrong.
        self._receive()
        was_up = self.link.is_up
        say = self.link.tick(self._loop.time())
        if was_up and not self.link.is_up:
            log_event(logger, self._loss_level(), "server_silent", epoch=self.link.epoch, pending=self._pending_count())
        self._say(say)
        self._tick_handle = self._loop.call_later(TICK_S, self._tick)

    def _say(self, say: Say) -> None:
        if Say.HELLO in say:
            pid = os.getpid()
            name = f"{'front' if self._is_worker else 'client'}-{pid}"
            self.send(FrontHello(front=name, pid=pid, version=VERSION, is_worker=self._is_worker))
        if Say.PULSE in say:
            self.send(FrontPulse(pending=self._pending_count()))


def _end(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], *, linger_ms: int) -> None:
    socket.close(linger=linger_ms)
    context.term()

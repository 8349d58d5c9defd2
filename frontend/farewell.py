"""A last word for the clients whose connections nobody will accept any more, because the front stops.

The kernel takes connections for as long as anybody listens, and resets those that wait when the last listener closes:
their clients could not tell a stop from a fault. The master, which never accepts otherwise, answers them instead.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time

# Workers stop accepting within a moment; those that were only being started never have. What comes later is refused.
FAREWELL_S = 0.5
# How long a client may take to read its answer and leave. A connection that is closed on what its client sends
# meanwhile makes the kernel take the answer back.
LINGER_S = 2.0
_BODY = b'{"error":"this front stops; send the request again","error_type":"draining"}'
RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_BODY), _BODY)
)
_READ_BYTES = 65536


def refuse_waiting(listener: socket.socket, seconds: float = FAREWELL_S, linger_s: float = LINGER_S) -> int:
    """Answers with 503 what waits at the listener, and what comes meanwhile; then closes it, and returns how many it
    has answered once all of them have left, or `linger_s` later."""
    count = 0
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if key.fileobj is listener:
                    count += _answer_one(listener, selector)
                else:
                    _hear_out(key.data, selector)
        # Between the last that is accepted here and the close, hardly anybody can come.
        while answered := _answer_one(listener, selector):
            count += answered
        selector.unregister(listener)
        listener.close()
        until_s = time.monotonic() + linger_s
        while selector.get_map() and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                _hear_out(key.data, selector)
        for key in list(selector.get_map().values()):
            _close(key.data, selector)
    return count


def _answer_one(listener: socket.socket, selector: selectors.BaseSelector) -> int:
    """How many were answered: none, if a worker was quicker, or the client has left, or no more files can be opened."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return 0
    connection.setblocking(False)
    selector.register(connection, selectors.EVENT_READ, connection)
    with contextlib.suppress(OSError):
        connection.sendall(RESPONSE)
        connection.shutdown(socket.SHUT_WR)
    return 1


def _hear_out(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    """Throws away what the client says, until it leaves."""
    try:
        ended = not connection.recv(_READ_BYTES)
    except BlockingIOError:
        return
    except OSError:
        ended = True
    if ended:
        _close(connection, selector)


def _close(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(connection)
    connection.close()

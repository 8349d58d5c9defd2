"""A last word for the clients whose connections nobody will accept any more, because the front stops.

The kernel takes connections for as long as anybody listens, and resets those that wait when the last listener closes:
their clients could not tell a stop from a fault. The master, which never accepts otherwise, answers them instead.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

# Workers stop accepting within a moment; those that were only being started never have. What comes later is refused.
FAREWELL_S = 0.5
_BODY = b'{"error":"this front stops; send the request again","error_type":"draining"}'
RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_BODY), _BODY)
)
_READ_BYTES = 65536


def refuse_waiting(listener: socket.socket, seconds: float = FAREWELL_S) -> int:
    """Answers with 503 what waits at the listener, and what comes meanwhile; then closes it. Returns how many."""
    until_s = time.monotonic() + seconds
    answered: list[socket.socket] = []
    listener.setblocking(False)
    while (left_s := until_s - time.monotonic()) > 0:
        select.select([listener], [], [], left_s)
        # A worker may have been quicker, or the client may have left again, or there are no more files to open.
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            answered.append(connection)
            connection.sendall(RESPONSE)
            connection.shutdown(socket.SHUT_WR)
    listener.close()
    for connection in answered:
        # What is unread at the end would make the kernel take the answer back.
        with contextlib.suppress(OSError):
            while connection.recv(_READ_BYTES):
                pass
        connection.close()
    return len(answered)

"""Connections that wait at a listener which nobody serves any more."""

from __future__ import annotations

import socket

import pytest

from frontend.farewell import refuse_waiting
from tests.chaos.connection import request_bytes


def test_each_connection_that_waits_is_told_and_the_next_one_refused() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    request = request_bytes("/models/m", {"inputs": "x" * 100_000}, timeout_s=1, keep=True)
    clients = [socket.create_connection(address) for _ in range(5)]
    for client in clients[:3]:
        client.sendall(request)
    # One has left again.
    clients.pop().close()
    assert refuse_waiting(listener, 0.2) >= len(clients)
    for client in clients:
        with client:
            answer = b"".join(iter(lambda client=client: client.recv(65536), b""))  # type: ignore[misc]
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5\r\n" in answer
        assert answer.endswith(b'"error_type":"draining"}')
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)

"""Connections that wait at a listener which nobody serves any more."""

from __future__ import annotations

import socket
import threading

import pytest

from frontend.farewell import refuse_waiting
from tests.chaos.connection import request_bytes
from tests.topology import wait_for


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


def test_client_that_sends_its_request_after_the_answer_can_still_read_it() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as client:
        farewell = threading.Thread(target=refuse_waiting, args=[listener, 0.1, 60.0])
        farewell.start()
        wait_for(lambda: listener.fileno() == -1, "nobody listens any more")
        client.sendall(request_bytes("/models/m", {"inputs": "x"}, timeout_s=1, keep=True))
        answer = b"".join(iter(lambda: client.recv(65536), b""))
        # Had its connection been closed, the kernel would refuse this, and would have taken the answer back.
        client.sendall(b"more")
    farewell.join(30)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert not farewell.is_alive()

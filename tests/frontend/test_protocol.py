"""The server's end of a connection over real sockets: heads that are too large or never end, and offers to upgrade."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from frontend import protocol
from frontend.protocol import HEAD_BYTES_MAX, Protocol
from tests.fronts import raw_request

UPGRADE = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"
CHUNKED = b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the method and the body, once that is whole; on `/early`, before it is read."""
    if scope["path"] == "/early":
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        return
    body = scope["method"].encode() + b":"
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


class Peer:
    """A client's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: ServerState) -> None:
        self.reader = reader
        self.writer = writer
        self._server = server

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def stop_server(self) -> None:
        """What uvicorn does with its connections when it stops, once what was sent has been read."""
        await asyncio.sleep(0.1)
        for connection in list(self._server.connections):
            connection.shutdown()

    async def all(self) -> list[tuple[int, str]]:
        """Status and body of each answer until the server closes the connection."""
        text = (await self.reader.read()).decode()
        found = []
        while text:
            head, _, text = text.partition("\r\n\r\n")
            length = int(re.findall(r"content-length: (\d+)", head)[0])
            found.append((int(head.split(" ")[1]), text[:length]))
            text = text[length:]
        return found


def run(work: Callable[[Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        config = uvicorn.Config(echo, ws="none", log_config=None)
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with asyncio.timeout(30), server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                await work(Peer(reader, writer, state))
            finally:
                writer.transport.abort()
                # Both ends hear of it.
                await asyncio.sleep(0.05)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# --- offers to change protocols --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 7, 10_000], ids=["in single bytes", "in pieces", "at once"])
@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (raw_request("/", b'{"inputs": 1}', *UPGRADE), 'POST:{"inputs": 1}'),
        (raw_request("/", CHUNKED, *UPGRADE, "Transfer-Encoding: chunked"), "POST:abcdefg"),
        (raw_request("/", b"", *UPGRADE).replace(b"POST", b"GET").replace(b"Content-Length: 0\r\n", b""), "GET:"),
        (raw_request("/", b"x", "Connection: upgrade", "Upgrade: websocket"), "POST:x"),
    ],
    ids=["length", "chunked", "no body", "websocket"],
)
def test_offer_of_another_protocol_is_passed_over_and_the_request_is_whole(
    request_bytes: bytes, answer: str, step: int
) -> None:
    async def work(peer: Peer) -> None:
        data = request_bytes * 2 + raw_request("/", b"last", "Connection: close")
        for start in range(0, len(data), step):
            peer.send(data[start : start + step])
            await asyncio.sleep(0)
        assert await peer.all() == [(200, answer), (200, answer), (200, "POST:last")]

    run(work)


def test_broken_body_behind_an_offer_is_refused() -> None:
    async def work(peer: Peer) -> None:
        peer.send(raw_request("/", b"zz\r\n", *UPGRADE, "Transfer-Encoding: chunked"))
        [(status, body)] = await peer.all()
        assert (status, "not an HTTP/1.1 request" in body) == (400, True)

    run(work)


def test_thousands_of_offers_in_one_read_are_all_passed_over() -> None:
    async def work(peer: Peer) -> None:
        peer.send(raw_request("/", b"", "Connection: upgrade", "Upgrade: x") * 2000)
        peer.send(raw_request("/", b"", "Connection: close"))
        assert await peer.all() == [(200, "POST:")] * 2001

    run(work)


# --- heads -----------------------------------------------------------------------------------------------------------

HUGE = b"x" * (2 * HEAD_BYTES_MAX)


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET / HTTP/1.1\r\nX: ", HUGE],
        [b"GET /", HUGE],
        [b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\nX: ", HUGE],
        [b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;", HUGE],
    ],
    ids=["header", "URL", "trailer", "chunk extension"],
)
def test_what_is_no_body_is_bounded_wherever_it_stands(parts: list[bytes]) -> None:
    async def work(peer: Peer) -> None:
        for part in parts:
            peer.send(part)
            await peer.writer.drain()
            await asyncio.sleep(0.01)
        data = await peer.reader.readuntil(b"\r\n\r\n")
        assert data.startswith(b"HTTP/1.1 431 ")
        assert b"connection: close" in data

    run(work)


def test_large_body_is_no_head_however_it_is_cut() -> None:
    async def work(peer: Peer) -> None:
        size = 4 * HEAD_BYTES_MAX
        data = raw_request("/", b"x" * size, "Connection: close")
        for start in range(0, len(data), 1000):
            peer.send(data[start : start + 1000])
            await peer.writer.drain()
        [(status, body)] = await peer.all()
        assert (status, len(body)) == (200, len("POST:") + size)

    run(work)


def test_body_that_nobody_reads_is_thrown_away_and_the_next_request_answered() -> None:
    async def work(peer: Peer) -> None:
        peer.send(raw_request("/early", b"", length=len(HUGE)))
        await peer.reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(HUGE), 10_000):
            peer.send(HUGE[start : start + 10_000])
            await peer.writer.drain()
        peer.send(raw_request("/", b"next", "Connection: close"))
        assert await peer.all() == [(200, "POST:next")]

    run(work)


def test_many_requests_in_one_read_are_no_large_head() -> None:
    async def work(peer: Peer) -> None:
        peer.send(raw_request("/", b"") * 4000)
        peer.send(raw_request("/", b"", "Connection: close"))
        assert await peer.all() == [(200, "POST:")] * 4001

    run(work)


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"GET / HTTP/1.1\r\nX: ",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX",
        raw_request("/early", b"", length=10**9),
    ],
    ids=["nothing", "header", "trailer", "body that nobody reads"],
)
def test_head_that_does_not_end_is_cut_off_even_if_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)

    async def work(peer: Peer) -> None:
        received = bytearray()

        async def read_to_the_end() -> None:
            # Who still sends when the connection is closed may be told so by a reset.
            with contextlib.suppress(ConnectionResetError):
                while data := await peer.reader.read(4096):
                    received.extend(data)

        ended = asyncio.ensure_future(read_to_the_end())
        peer.send(beginning)
        while not ended.done():
            await asyncio.sleep(0.02)
            if beginning and not peer.writer.transport.is_closing():
                peer.send(b"x")
        await ended
        assert received.count(b"HTTP/1.1") == beginning.count(b"early")

    run(work)


# --- a stop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [b"", raw_request("/", b"earlier")], ids=["first", "later"])
@pytest.mark.parametrize("cut", [0, 20, 10_000], ids=["not begun", "in its head", "whole"])
def test_request_on_its_way_when_the_server_stops_is_answered_and_the_connection_closed(
    earlier: bytes, cut: int
) -> None:
    data = raw_request("/", b"last")

    async def work(peer: Peer) -> None:
        peer.send(earlier + data[:cut])
        await peer.stop_server()
        answers = [(200, "POST:earlier")] if earlier else []
        # One that has not begun on a connection that has served its first is no request on its way.
        if cut or not earlier:
            peer.send(data[cut:])
            answers.append((200, "POST:last"))
        assert await peer.all() == answers

    run(work)


@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\nX: "], ids=["nothing", "half a head"])
def test_connection_that_brings_no_request_does_not_hold_up_a_stop(
    monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(protocol, "LAST_HEAD_TIMEOUT_S", 0.1)

    async def work(peer: Peer) -> None:
        peer.send(beginning)
        await peer.stop_server()
        assert await peer.all() == []

    run(work)


# --- garbage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"nonsense\r\n\r\n"])
def test_what_is_not_http_is_refused_in_our_words(garbage: bytes) -> None:
    async def work(peer: Peer) -> None:
        peer.send(garbage)
        [(status, body)] = await peer.all()
        assert (status, body) == (400, '{"error":"this is not an HTTP/1.1 request","error_type":"bad_request"}')

    run(work)


def test_garbage_behind_whole_requests_costs_no_answer() -> None:
    async def work(peer: Peer) -> None:
        peer.send(raw_request("/", b"a") + raw_request("/", b"b") + b"}\r\n\x00\r\n\r\n")
        assert await peer.all() == [(200, "POST:a"), (200, "POST:b")]

    run(work)

"""One HTTP/1.1 connection of a client that counts every byte: nothing is repaired, retried or passed over."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Broken(Exception):
    """The connection ended, or said something that is no HTTP, before the answer was whole."""


class Connection(asyncio.Protocol):
    """Made by `connect`. One request at a time."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ended = False
        self._news = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, port: int) -> Connection:
        """Raises:
        OSError: nobody listens, or the connection was refused otherwise.
        """
        _, made = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return made

    # --- what asyncio calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._news.set()

    def eof_received(self) -> None:
        self.ended = True
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self._news.set()

    # --- what a client calls -------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Raises:
        Broken: nobody is there any more.
        """
        assert self._transport is not None
        if self.ended:
            raise Broken("the connection ended before the request was sent")
        self._transport.write(data)

    def pause(self) -> None:
        """Reads no more, as a client that is busy with something else."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response; waits for the end of a connection that is to be closed.

        Raises:
            Broken: it never became whole.
        """
        head = await self._until(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields if field)
        }
        if headers.get("transfer-encoding") == "chunked":
            body = await self._chunks()
        else:
            body = await self._take(int(headers["content-length"]))
        if headers.get("connection") == "close":
            while not self.ended:
                await self._more()
        return int(line.split()[1]), headers, body

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self._until(b"\r\n"), 16):
            parts.append(await self._take(size))
            await self._take(2)
        await self._take(2)
        return b"".join(parts)

    async def _until(self, mark: bytes) -> bytes:
        while (at := self.received.find(mark)) < 0:
            await self._more()
        found = bytes(self.received[:at])
        del self.received[: at + len(mark)]
        return found

    async def _take(self, size: int) -> bytes:
        while len(self.received) < size:
            await self._more()
        found = bytes(self.received[:size])
        del self.received[:size]
        return found

    async def _more(self) -> None:
        if self.ended:
            raise Broken(f"the connection ended after {bytes(self.received[-80:])!r}")
        self._news.clear()
        await self._news.wait()


def request_bytes(path: str, body: Any, *, timeout_s: float, keep: bool) -> bytes:
    """A whole POST."""
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"X-Request-Timeout: {timeout_s:g}",
        f"Content-Length: {len(content)}",
        *([] if keep else ["Connection: close"]),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content

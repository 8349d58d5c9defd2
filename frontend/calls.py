"""The caller's end of a request: something to await, or to iterate over.

Owns how answers, failures and streamed pieces reach the waiting task. Refuses everything about the wire; all of it
runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator

from frontend.pending import Answer
from shared.errors import Code, RequestError
from shared.messages import RequestId

# Pieces a reader may be behind before its stream is given up: the protocol has no way to slow a model down, and a
# client that stopped reading must not fill this process.
CHUNKS_BEHIND_MAX = 4096
BYTES_BEHIND_MAX = 16 * 2**20


class Call:
    """One request under way. `await call` gives its `Answer`, or raises the `RequestError` it ended with."""

    __slots__ = ("_abandon", "_future", "id")

    def __init__(
        self, request_id: RequestId, loop: asyncio.AbstractEventLoop, abandon: Callable[[RequestId], None]
    ) -> None:
        self.id = request_id
        self._future: asyncio.Future[Answer] = loop.create_future()
        self._abandon = abandon

    def __await__(self) -> Generator[object, None, Answer]:
        return self._future.__await__()

    def abandon(self) -> None:
        """Nobody waits for the answer any more: the model server is told, and whoever awaits gets `cancelled`.

        Does nothing to a request that has ended.
        """
        self._abandon(self.id)

    def resolve(self, answer: Answer) -> None:
        if not self._future.done():
            self._future.set_result(answer)

    def fail(self, error: RequestError) -> None:
        if self._future.done():
            return
        self._future.set_exception(error)
        # A call may be given up before it is awaited; its error is then nobody's business, and no warning's either.
        self._future.exception()

    def push(self, value: object, size_bytes: int) -> bool:
        self.fail(RequestError("the model server streamed an answer that was not to be streamed", code=Code.INTERNAL))
        return False


class StreamCall:
    """One streamed request under way. `values()` iterates over its pieces; or wait for `arrived`, and `take` them."""

    __slots__ = ("_abandon", "_answer", "_arrived", "_bytes_behind", "_error", "_loop", "_values", "id")

    def __init__(
        self, request_id: RequestId, loop: asyncio.AbstractEventLoop, abandon: Callable[[RequestId], None]
    ) -> None:
        self.id = request_id
        self._loop = loop
        self._abandon = abandon
        self._values: deque[tuple[object, int]] = deque()
        self._bytes_behind = 0
        self._answer: Answer | None = None
        self._error: RequestError | None = None
        self._arrived: asyncio.Future[None] | None = None

    def final_answer(self) -> Answer:
        """What came behind the pieces; there once the iteration over them has ended well."""
        assert self._answer is not None
        return self._answer

    def abandon(self) -> None:
        """As `Call.abandon`."""
        self._abandon(self.id)

    async def values(self) -> AsyncGenerator[object, None]:
        """The pieces as they arrive. Leaving the iteration, however that happens, gives the request up.

        Raises:
            RequestError: the stream broke off; the pieces so far are not a whole answer.
        """
        try:
            while not self.is_over:
                await self.arrived()
                while self._values:
                    yield self._take_one()
                self.raise_if_broken()
        finally:
            self.abandon()

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended well, and all of its pieces were taken."""
        return self._answer is not None and not self._values

    async def arrived(self, timeout_s: float | None = None) -> bool:
        """Returns True when a piece, or the end, is there; False when `timeout_s` seconds have passed without."""
        if not self._has_news:
            self._arrived = self._loop.create_future()
            timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._wake)
            try:
                await self._arrived
            finally:
                if timer is not None:
                    timer.cancel()
        return self._has_news

    def take(self) -> list[object]:
        """All pieces that are there."""
        return [self._take_one() for _ in range(len(self._values))]

    def raise_if_broken(self) -> None:
        """
        Raises:
            RequestError: the stream broke off, and every piece before that was taken.
        """
        if self._error is not None and not self._values:
            raise self._error

    @property
    def _has_news(self) -> bool:
        return bool(self._values) or self._answer is not None or self._error is not None

    def _take_one(self) -> object:
        value, size_bytes = self._values.popleft()
        self._bytes_behind -= size_bytes
        return value

    def resolve(self, answer: Answer) -> None:
        self._answer = answer
        self._wake()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._wake()

    def push(self, value: object, size_bytes: int) -> bool:
        if len(self._values) >= CHUNKS_BEHIND_MAX or self._bytes_behind >= BYTES_BEHIND_MAX:
            return False
        self._values.append((value, size_bytes))
        self._bytes_behind += size_bytes
        self._wake()
        return True

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

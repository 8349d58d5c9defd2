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

    def push(self, value: object) -> bool:
        self.fail(RequestError("the model server streamed an answer that was not to be streamed", code=Code.INTERNAL))
        return False


class StreamCall:
    """One streamed request under way. `values()` iterates over its pieces."""

    __slots__ = ("_abandon", "_answer", "_arrived", "_error", "_loop", "_values", "id")

    def __init__(
        self, request_id: RequestId, loop: asyncio.AbstractEventLoop, abandon: Callable[[RequestId], None]
    ) -> None:
        self.id = request_id
        self._loop = loop
        self._abandon = abandon
        self._values: deque[object] = deque()
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
            while True:
                while self._values:
                    yield self._values.popleft()
                if self._error is not None:
                    raise self._error
                if self._answer is not None:
                    return
                self._arrived = self._loop.create_future()
                await self._arrived
        finally:
            self.abandon()

    async def started(self) -> None:
        """Returns when the first piece, or the end, is there.

        Raises:
            RequestError: the request ended without a single piece.
        """
        while not self._values and self._answer is None:
            if self._error is not None:
                raise self._error
            self._arrived = self._loop.create_future()
            await self._arrived

    def resolve(self, answer: Answer) -> None:
        self._answer = answer
        self._wake()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._wake()

    def push(self, value: object) -> bool:
        if len(self._values) >= CHUNKS_BEHIND_MAX:
            return False
        self._values.append(value)
        self._wake()
        return True

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

"""The caller's end of a request: something to await, or to iterate over.

Owns how answers, failures and streamed pieces reach the waiting task. Refuses everything about the wire; all of it
runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

from frontend.pending import Answer
from shared.errors import Code, RequestError
from shared.messages import Managed, RequestId

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

    def ended_with(self, error: RequestError) -> bool:
        future = self._future
        return future.done() and not future.cancelled() and future.exception() is error

    def push(self, value: object, size_bytes: int) -> bool:
        self.fail(RequestError("the model server streamed an answer that was not to be streamed", code=Code.INTERNAL))
        return False


class Calls:
    """Several requests under way that are one to their caller. `await calls` gives their answers in order, or raises
    the first `RequestError` that any of them ended with."""

    __slots__ = ("_calls",)

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def __await__(self) -> Generator[object, None, list[Answer]]:
        return asyncio.gather(*(call._future for call in self._calls)).__await__()

    def number_of(self, error: RequestError) -> int | None:
        """Which request ended with this error, counted from 0; None if none did."""
        return next((number for number, call in enumerate(self._calls) if call.ended_with(error)), None)

    def abandon(self) -> None:
        """As `Call.abandon`, for all of them."""
        for call in self._calls:
            call.abandon()


class Order:
    """An operator's order under way. `await order` tells how it ended; None says that it was given up here, and goes on
    without anybody who hears of its end."""

    __slots__ = ("_forget", "_future", "epoch", "token")

    def __init__(self, token: int, epoch: str, loop: asyncio.AbstractEventLoop, forget: Callable[[int], None]) -> None:
        self.token = token
        self.epoch = epoch
        """Of the model server that was given it: another one knows nothing of it."""
        self._future: asyncio.Future[Managed | None] = loop.create_future()
        self._forget = forget

    def __await__(self) -> Generator[object, None, Managed | None]:
        return self._future.__await__()

    def abandon(self) -> None:
        """Nobody waits for its end any more. Does nothing to one that has ended."""
        self._forget(self.token)
        self.resolve(None)

    def resolve(self, managed: Managed | None) -> None:
        if not self._future.done():
            self._future.set_result(managed)

    def fail(self, error: RequestError) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            # As in `Call.fail`.
            self._future.exception()


class Bell:
    """Wakes the one task that waits for news."""

    __slots__ = ("_loop", "_rung")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung: asyncio.Future[None] | None = None

    def ring(self) -> None:
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)

    async def wait(self, timeout_s: float | None) -> None:
        """Returns when it rings, or after `timeout_s` seconds."""
        self._rung = self._loop.create_future()
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self.ring)
        try:
            await self._rung
        finally:
            if timer is not None:
                timer.cancel()


class StreamCall:
    """One streamed request under way. `values()` iterates over its pieces; or wait for `arrived`, and `take` them."""

    __slots__ = ("_abandon", "_answer", "_bytes_behind", "_error", "_values", "bell", "id")

    def __init__(
        self, request_id: RequestId, loop: asyncio.AbstractEventLoop, abandon: Callable[[RequestId], None]
    ) -> None:
        self.id = request_id
        self.bell = Bell(loop)
        """Rings with each piece, and with the end. Whoever reads several streams at once gives them one bell."""
        self._abandon = abandon
        self._values: deque[tuple[object, int]] = deque()
        self._bytes_behind = 0
        self._answer: Answer | None = None
        self._error: RequestError | None = None

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
        if not self.has_news:
            await self.bell.wait(timeout_s)
        return self.has_news

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
    def has_news(self) -> bool:
        """Whether a piece, or the end, is there."""
        return bool(self._values) or self._answer is not None or self._error is not None

    def _take_one(self) -> object:
        value, size_bytes = self._values.popleft()
        self._bytes_behind -= size_bytes
        return value

    def resolve(self, answer: Answer) -> None:
        self._answer = answer
        self.bell.ring()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self.bell.ring()

    def push(self, value: object, size_bytes: int) -> bool:
        if len(self._values) >= CHUNKS_BEHIND_MAX or self._bytes_behind >= BYTES_BEHIND_MAX:
            return False
        self._values.append((value, size_bytes))
        self._bytes_behind += size_bytes
        self.bell.ring()
        return True


class StreamCalls:
    """Several streamed requests under way that are one to their caller, who reads each piece with the number of its
    request. Read like a `StreamCall`; the last thing of each request is its `Answer`."""

    __slots__ = ("_bell", "_calls", "_open")

    def __init__(self, calls: Sequence[StreamCall], loop: asyncio.AbstractEventLoop) -> None:
        self._calls = calls
        self._open = dict(enumerate(calls))
        self._bell = Bell(loop)
        for call in calls:
            call.bell = self._bell

    def final_answer(self) -> list[Answer]:
        """What came behind the pieces of each; there once all have ended well."""
        return [call.final_answer() for call in self._calls]

    def abandon(self) -> None:
        """As `Call.abandon`, for all of them."""
        for call in self._calls:
            call.abandon()

    @property
    def is_over(self) -> bool:
        """Whether all have ended well, and all there is was taken."""
        return not self._open

    async def arrived(self, timeout_s: float | None = None) -> bool:
        """As `StreamCall.arrived`, for any of them."""
        if not self._has_news:
            await self._bell.wait(timeout_s)
        return self._has_news

    def take(self) -> list[tuple[int, object]]:
        """All that is there: numbers of requests, with a piece or an `Answer` each."""
        taken: list[tuple[int, object]] = []
        for index, call in list(self._open.items()):
            taken += [(index, piece) for piece in call.take()]
            if call.is_over:
                taken.append((index, call.final_answer()))
                del self._open[index]
        return taken

    def raise_if_broken(self) -> None:
        """As `StreamCall.raise_if_broken`, for any of them."""
        for call in self._open.values():
            call.raise_if_broken()

    @property
    def _has_news(self) -> bool:
        return any(call.has_news for call in self._open.values())

"""Clients that know the right answer to each of their requests, in an event loop on a thread of their own."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.chaos import questions
from tests.chaos.connection import Broken, Connection, request_bytes
from tests.chaos.ledger import Ended, Ledger, Outcome
from tests.chaos.questions import Question

# Beyond the deadline, for a machine that is busy with everything else that is tested.
SLACK_S = 5.0
# Between two requests of a client, on the average.
PAUSE_S = 0.02
SHUT_PAUSE_S = 0.1
T = TypeVar("T")
Manner = Callable[[Connection, bytes], Awaitable[None]]
"""How a client sends its request."""


async def at_once(connection: Connection, request: bytes) -> None:
    connection.send(request)


class Clients:
    """A continuous load on one port, until the `with` block ends; then every open request is waited for."""

    def __init__(self, port: int, ledger: Ledger, *, count: int, seed: int) -> None:
        self.port = port
        self.ledger = ledger
        self._count = count
        self._seed = seed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="clients")
        self._stopping = False
        self._all: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._all = [self.start(self._client(random.Random(self._seed * 1000 + n))) for n in range(self._count)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        try:
            for client in self._all:
                client.result(questions.DEADLINE_S + 2 * SLACK_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, question: Question) -> Future[Outcome]:
        """One more request, on a connection of its own."""
        return self.start(self._ask_alone(question))

    async def _ask_alone(self, question: Question) -> Outcome:
        return (await self.ask_on(None, question, keep=False))[0]

    async def _client(self, chance: random.Random) -> None:
        kept: Connection | None = None
        while not self._stopping:
            keep = chance.random() < 0.7
            outcome, kept = await self.ask_on(kept, questions.any_innocent(chance), keep=keep)
            await asyncio.sleep(SHUT_PAUSE_S if outcome is Outcome.SHUT else chance.expovariate(1 / PAUSE_S))
        if kept is not None:
            kept.close()

    async def ask_on(
        self, connection: Connection | None, question: Question, *, keep: bool, manner: Manner = at_once
    ) -> tuple[Outcome, Connection | None]:
        """Asks, puts the end down in the ledger, and returns the connection if it can be used again."""
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(question.deadline_s + SLACK_S):
                if connection is not None and connection.ended:
                    connection.close()
                    connection = None
                ended, connection = await self._exchange(connection, question, keep, manner, sent_s)
        except TimeoutError:
            ended = Ended(Outcome.LOST, text=f"{question.inputs}: nothing within {question.deadline_s:g} s and slack")
            if connection is not None:
                connection.close()
            connection = None
        self.ledger.put_down(sent_s, ended)
        return ended.outcome, connection

    async def _exchange(
        self, connection: Connection | None, question: Question, keep: bool, manner: Manner, sent_s: float
    ) -> tuple[Ended, Connection | None]:
        while True:
            reused = connection is not None
            try:
                connection = connection or await Connection.connect(self.port)
                if connection.received:
                    connection.close()
                    return Ended(Outcome.TWICE, text=f"before {question.inputs}: {bytes(connection.received)!r}"), None
                body = {"inputs": question.inputs, "stream": question.stream}
                left_s = sent_s + question.deadline_s - time.monotonic()
                path = f"/models/{question.model}"
                await manner(connection, request_bytes(path, body, timeout_s=max(left_s, 0.001), keep=keep))
                status, headers, raw = await connection.response()
            except OSError as error:
                return self._not_connected(question, sent_s, error), None
            except Broken as broken:
                assert connection is not None
                untouched = reused and not connection.received
                connection.close()
                if any(window.may_cut for window in self.ledger.met(sent_s)):
                    return Ended(Outcome.CUT), None
                if not untouched:
                    return Ended(Outcome.LOST, text=f"{question.inputs}: {broken}"), None
                # Closed by a server that had no more use for it, while the request was on its way: all clients send
                # it again.
                self.ledger.put_down(sent_s, Ended(Outcome.RESENT))
                connection = None
                continue
            break
        if connection.received:
            connection.close()
            return Ended(Outcome.TWICE, text=f"{question.inputs}: behind it {bytes(connection.received[:200])!r}"), None
        ended = question.judge(status, headers, raw, self.ledger.met(sent_s))
        if not keep or connection.ended:
            connection.close()
            return ended, None
        return ended, connection

    def _not_connected(self, question: Question, sent_s: float, error: OSError) -> Ended:
        if any(window.may_shut for window in self.ledger.met(sent_s)):
            return Ended(Outcome.SHUT)
        return Ended(Outcome.LOST, text=f"{question.inputs}: cannot connect: {error}")

    async def look_in(self, request: bytes, seconds: float) -> None:
        """Connects, sends what may be a part of a request or nothing, and goes away without an answer."""
        sent_s = time.monotonic()
        try:
            connection = await Connection.connect(self.port)
        except OSError as error:
            self.ledger.put_down(sent_s, self._not_connected(questions.unknown(), sent_s, error))
            return
        if request and not connection.ended:
            connection.send(request)
        await asyncio.sleep(seconds)
        connection.close()
        self.ledger.put_down(sent_s, Ended(Outcome.LEFT))

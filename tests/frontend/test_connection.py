"""A front's connection misses nothing that happens between two of its looks at the socket.

The file descriptor of a ZeroMQ socket tells of a change once, and any look at the socket may take it in. Each test has
something happen just before a look, and has ticks, which would find it a quarter of a second later, never come.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from frontend import connection
from frontend.connection import Connection
from frontend.link import Aftermath
from shared.messages import FrontPulse, Inspect, Message, Snapshot
from shared.sockets import Buffer, RunDirectory
from tests.stub_broker import StubBroker

SETTLED_S = 0.3
WITHIN_S = 10.0


class Front:
    """A connection, and what it has told its owner."""

    def __init__(self, run_dir: Path) -> None:
        self.openings: asyncio.Queue[Aftermath] = asyncio.Queue()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.connection = Connection(
            RunDirectory(run_dir).front_endpoint,
            deliver=self._deliver,
            reopened=self.openings.put_nowait,
            lost_hope=lambda: None,
            pending_count=lambda: 0,
            is_worker=False,
        )

    def _deliver(self, message: Message, frames: list[Buffer]) -> None:
        self.messages.put_nowait(message)

    async def opened(self) -> Aftermath:
        return await asyncio.wait_for(self.openings.get(), WITHIN_S)

    async def told(self) -> Message:
        return await asyncio.wait_for(self.messages.get(), WITHIN_S)


@pytest.mark.parametrize("look", ["has_message", "readiness"])
def test_a_server_that_comes_back_just_before_a_look_is_greeted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    async def scenario() -> None:
        with StubBroker(run_dir):
            front = Front(run_dir)
            await front.opened()
        await asyncio.sleep(SETTLED_S)
        monkeypatch.setattr(connection, "TICK_S", 60.0)
        front.connection._tick_handle.cancel()
        real: Any = getattr(connection, look)
        comes_back = StubBroker(run_dir)
        entered: list[StubBroker] = []

        def looks_late(socket: Any) -> Any:
            if not entered:
                entered.append(comes_back.__enter__())
                time.sleep(SETTLED_S)
            return real(socket)

        monkeypatch.setattr(connection, look, looks_late)
        try:
            front.connection.link.is_up = True
            assert not front.connection.send(FrontPulse(pending=0))
            if look == "has_message" and not entered:
                # It is not asked any more where the link is known to be down.
                entered.append(comes_back.__enter__())
            await front.opened()
        finally:
            front.connection.close()
            if entered:
                comes_back.__exit__(None, None, None)

    asyncio.run(scenario())


def test_an_answer_that_comes_just_before_the_look_after_a_send_is_read(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with StubBroker(run_dir) as broker:
            # The only messages are those that are asked for.
            broker.pulses = False
            front = Front(run_dir)
            await front.opened()
            front.connection._tick_handle.cancel()
            real: Any = connection.__dict__["has_message"]

            def looks_late(socket: Any) -> bool:
                time.sleep(SETTLED_S)
                return bool(real(socket))

            monkeypatch.setattr(connection, "has_message", looks_late)
            for token in range(3):
                assert front.connection.send(Inspect(token))
                snapshot = await front.told()
                assert isinstance(snapshot, Snapshot)
                assert snapshot.token == token
            front.connection.close()

    asyncio.run(scenario())

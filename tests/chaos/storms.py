"""Clients that misbehave in crowds: they leave, read slowly, send slowly, or come in waves.

Their own requests are put down in the ledger as well: `left` where they went away, and otherwise as anybody else's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.chaos import questions
from tests.chaos.connection import Connection, request_bytes

if TYPE_CHECKING:
    from tests.chaos.clients import Clients
    from tests.chaos.faults import Scene

LEAVING = 200
SLOW = 40
# As many at a time as the files that a process may usually have open allow.
WAVE = 250
WAVES = 4
SLOW_PIECES = 8
GIVE_UP_S = 90.0


def leave(scene: Scene) -> None:
    """Each goes away at some point between its first byte and its answer."""
    scene.clients.start(_crowd(scene, LEAVING, _leave_one)).result(GIVE_UP_S)


def read_slowly(scene: Scene) -> None:
    """Each asks for much and then looks away for a while."""
    scene.clients.start(_crowd(scene, SLOW, _read_slowly_one)).result(GIVE_UP_S)


def send_slowly(scene: Scene) -> None:
    """Each sends its body in little pieces."""
    scene.clients.start(_crowd(scene, SLOW, _send_slowly_one)).result(GIVE_UP_S)


def waves(scene: Scene) -> None:
    """More than are served at once, several times; half of them only look in."""
    for _ in range(WAVES):
        scene.clients.start(_crowd(scene, WAVE, _come)).result(GIVE_UP_S)


async def _crowd(scene: Scene, count: int, one: Callable[[Clients, random.Random], Awaitable[object]]) -> None:
    await asyncio.gather(*(one(scene.clients, random.Random(scene.chance.random())) for _ in range(count)))


async def _leave_one(clients: Clients, chance: random.Random) -> None:
    question = questions.any_innocent(chance)
    body = {"inputs": question.inputs, "stream": question.stream}
    whole = request_bytes(f"/models/{question.model}", body, timeout_s=question.deadline_s, keep=True)
    part = whole[: chance.randint(1, len(whole))] if chance.random() < 0.5 else whole
    await clients.look_in(part, chance.random() * 0.1)


async def _read_slowly_one(clients: Clients, chance: random.Random) -> None:
    question = questions.counting(25) if chance.random() < 0.5 else questions.echo("m", 60_000)

    async def look_away(connection: Connection, request: bytes) -> None:
        connection.pause()
        connection.send(request)
        await asyncio.sleep(1.0)
        connection.resume()

    await clients.ask_on(None, question, keep=False, manner=look_away)


async def _send_slowly_one(clients: Clients, chance: random.Random) -> None:
    async def in_pieces(connection: Connection, request: bytes) -> None:
        size = len(request) // SLOW_PIECES + 1
        for start in range(0, len(request), size):
            connection.send(request[start : start + size])
            await asyncio.sleep(0.2)

    await clients.ask_on(None, questions.square("m"), keep=False, manner=in_pieces)


async def _come(clients: Clients, chance: random.Random) -> None:
    if chance.random() < 0.5:
        await clients.ask_on(None, questions.any_innocent(chance), keep=False)
    else:
        await clients.look_in(b"", chance.random() * 0.2)

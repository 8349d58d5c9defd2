"""Clients of text generation: answers whole, whose tokens are counted, and answers in pieces, each with its moment.

Owns the reading of event streams as OpenAI's clients read them. A connection for each request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.load_generator import ANSWER_TIMEOUT_S, LoadFailed, ask, chunks, open_answer


@dataclass(slots=True)
class Stream:
    """One streamed answer, read to its end or to the piece at which its reader left."""

    sent_s: float
    pieces_s: list[float] = field(default_factory=list)
    """When each piece with text arrived."""

    @property
    def first_ms(self) -> float:
        return (self.pieces_s[0] - self.sent_s) * 1000

    @property
    def between_ms(self) -> list[float]:
        return [(after - before) * 1000 for before, after in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


def whole_answers(port: int, path: str, bodies: Sequence[bytes], connections: int) -> tuple[int, float]:
    """The tokens of all answers, and the seconds from the first request to the last answer.

    Raises:
        LoadFailed: some answer was not 200, or a connection broke off.
    """

    async def lane(left: Iterator[bytes]) -> int:
        return sum([_tokens_of(await ask(port, path, body)) for body in left])

    async def run() -> tuple[int, float]:
        left = iter(bodies)
        start_s = time.perf_counter()
        tokens = await asyncio.gather(*(lane(left) for _ in range(connections)))
        return sum(tokens), time.perf_counter() - start_s

    return asyncio.run(run())


def streams(port: int, path: str, bodies: Sequence[bytes], connections: int, pieces_max: int = 0) -> list[Stream]:
    """All answers in pieces; with `pieces_max` their readers leave when they have so many.

    Raises:
        LoadFailed: some answer was not 200, broke off, or had no text.
    """
    done: list[Stream] = []

    async def lane(left: Iterator[bytes]) -> None:
        for body in left:
            stream = await _read(port, path, body, pieces_max)
            done.append(stream)

    async def run() -> None:
        left = iter(bodies)
        await asyncio.gather(*(lane(left) for _ in range(connections)))

    asyncio.run(run())
    return done


async def _read(port: int, path: str, body: bytes, pieces_max: int) -> Stream:
    stream = Stream(time.perf_counter())
    async with asyncio.timeout(ANSWER_TIMEOUT_S), open_answer(port, path, body) as reader:
        rest = b""
        async for part in chunks(reader):
            now_s = time.perf_counter()
            *events, rest = (rest + part).split(b"\n\n")
            stream.pieces_s += [now_s for event in events if has_text(event)]
            if pieces_max and len(stream.pieces_s) >= pieces_max:
                return stream
    if not stream.pieces_s:
        raise LoadFailed("a stream had no text")
    return stream


def has_text(event: bytes) -> bool:
    """Whether one event of a stream shows something.

    Raises:
        LoadFailed: it is an error.
    """
    data = event.removeprefix(b"data: ")
    if data == event or data == b"[DONE]":
        return False
    value = json.loads(data)
    if "error" in value:
        raise LoadFailed(f"a stream broke off: {value['error']}")
    return any(choice.get("text") for choice in value["choices"])


def _tokens_of(answer: bytes) -> int:
    tokens: int = json.loads(answer)["usage"]["completion_tokens"]
    return tokens

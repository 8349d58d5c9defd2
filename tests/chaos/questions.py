"""What the clients ask, each with the one right answer, and what counts as an honest refusal."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.chaos.ledger import Ended, Outcome, Window

# The service could not do it now. Every other code says that something is wrong with the request, or with us.
HONEST = {
    "overloaded": 429,
    "model_loading": 503,
    "model_failed": 503,
    "draining": 503,
    "server_unavailable": 503,
    "deadline_exceeded": 504,
    "model_crashed": 502,
}
DEADLINE_S = 10.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Question:
    model: str
    inputs: Any
    is_right: Callable[[int, Any], bool]
    """Gets the status and the decoded body: JSON, or for a stream its events as (name, data)."""
    stream: bool = False
    deadline_s: float = DEADLINE_S

    def judge(self, status: int, headers: dict[str, str], raw: bytes, met: list[Window]) -> Ended:
        """How the request ended that got this response."""
        try:
            decoded = events(raw) if "event-stream" in headers.get("content-type", "") else json.loads(raw)
        except ValueError:
            return Ended(Outcome.WRONG, text=f"{self.inputs}: {status} {raw[:200]!r}")
        if self.is_right(status, decoded):
            return Ended(Outcome.RIGHT)
        failure = decoded
        if isinstance(decoded, list) and decoded and decoded[-1][0] == "error":
            pieces = [data for name, data in decoded[:-1]]
            # A stream that had begun says how it broke off, and what it gave before is right as far as it goes.
            if pieces == list(range(1, len(pieces) + 1)):
                failure, status = decoded[-1][1], 0
        code = failure.get("error_type", "") if isinstance(failure, dict) else ""
        if self._is_honest(status, code, headers, met):
            return Ended(Outcome.REFUSED, code=code)
        return Ended(Outcome.WRONG, text=f"{self.inputs}: {status} {raw[:300]!r}")

    def _is_honest(self, status: int, code: str, headers: dict[str, str], met: list[Window]) -> bool:
        if code == "poison_input":
            # Twice in a process that was killed from outside: nobody can tell that from the input's own doing.
            return sum(window.kills for window in met) >= 2
        if code not in HONEST or status not in (0, HONEST[code]):
            return False
        return status not in (429, 503) or int(headers.get("retry-after", "0")) >= 1


def events(raw: bytes) -> list[tuple[str, Any]]:
    """The server-sent events of a whole stream."""
    found = []
    for block in raw.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


def square(model: str, seconds: float = 0.0) -> Question:
    number = next(_numbers)
    return Question(
        model,
        {"do": "square", "number": number, "seconds": seconds},
        lambda status, body: (status, body) == (200, number * number),
    )


def echo(model: str, size: int = 0) -> Question:
    value = {"number": next(_numbers), "text": "\u00e9" * size}
    return Question(model, {"do": "echo", "value": value}, lambda status, body: (status, body) == (200, value))


def counting(to: int) -> Question:
    whole = [*(("", number) for number in range(1, to + 1)), ("done", {"numbers": list(range(1, to + 1))})]
    return Question(
        "count",
        {"name": str(next(_numbers)), "to": to},
        lambda status, told: (status, told) == (200, whole),
        stream=True,
    )


def refused(model: str) -> Question:
    return Question(model, {"do": "nothing we know"}, lambda status, body: status == 422)


def unknown() -> Question:
    return Question("nobody", 1, lambda status, body: status == 404)


def any_innocent(chance: random.Random) -> Question:
    """What most clients ask most of the time."""
    match chance.choices(("m", "one", "big", "stream", "bad", "unknown"), (40, 20, 8, 20, 6, 2))[0]:
        case "m":
            return square("m", chance.choice((0.0, 0.002, 0.02)))
        case "one":
            return square("one", chance.choice((0.0, 0.005)))
        case "big":
            # Large enough for frames of their own.
            return echo(chance.choice(("m", "one")), chance.choice((1_000, 60_000)))
        case "stream":
            return counting(chance.choice((2, 10, 25)))
        case "bad":
            return refused(chance.choice(("m", "one")))
        case _:
            return unknown()


CULPRITS: dict[str, tuple[int, str]] = {
    "exit": (500, "poison_input"),
    "kill": (500, "poison_input"),
    "segfault": (500, "poison_input"),
    "sleep": (504, "deadline_exceeded"),
    "hold_gil": (504, "deadline_exceeded"),
    "spin": (504, "deadline_exceeded"),
    "memory": (500, "out_of_memory"),
    "device_memory": (500, "out_of_memory"),
    "device_assert": (500, "model_error"),
}


def culprit(deed: str) -> Question:
    """A request that does harm, and the answer that it has earned. Never the same payload twice."""
    return Question(
        "m",
        {"do": deed, "seconds": 600, "label": str(next(_numbers))},
        lambda status, body: isinstance(body, dict) and (status, body.get("error_type")) == CULPRITS[deed],
        deadline_s=30.0,
    )

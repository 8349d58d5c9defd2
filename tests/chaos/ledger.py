"""The ledger: what became of every request, by the fault that it met.

Owns the counting and the verdict. A request is put down once, when its client knows how it ended, to the fault that was
injected last among those that its life overlapped, or to `calm`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

CALM = "calm"


class Outcome(StrEnum):
    RIGHT = "right"
    """The answer that its sender knew beforehand, which may be a refusal of a bad request."""
    REFUSED = "refused"
    """An honest refusal: a code that means that the service could not do it now, and where due, when to come back."""
    LEFT = "left"
    """Its client left on purpose before the answer."""
    RESENT = "resent"
    """Its idle connection had been closed before a byte of the answer came; sent again on a new one, and counted."""
    CUT = "cut"
    """The connection ended without an answer, and the front worker that held it had been killed."""
    SHUT = "shut"
    """Nobody listened, and the whole front had been ended."""
    WRONG = "wrong"
    """Another answer, or a refusal that is none of its own fault."""
    LOST = "lost"
    """Neither an answer nor a refusal by its deadline and some slack."""
    TWICE = "twice"
    """More bytes than one answer."""


BROKEN_PROMISES = (Outcome.WRONG, Outcome.LOST, Outcome.TWICE)


@dataclass(frozen=True, slots=True)
class Ended:
    """How one request ended."""

    outcome: Outcome
    code: str = ""
    """Of a refusal: the word for it that the service used."""
    text: str = ""
    """For a broken promise: what was asked and what came."""


@dataclass(slots=True)
class Window:
    """The time in which a fault may be felt: from just before its injection until the service is whole again."""

    fault: str
    may_cut: bool = False
    may_shut: bool = False
    kills: int = 0
    """How often it ends a model process from outside, so that an innocent input may look like the culprit."""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = float("inf")


class Ledger:
    """All requests of one run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Counter[str]] = {}
        self._refusals: dict[str, Counter[str]] = {}
        self._windows: list[Window] = []
        self.broken: list[str] = []

    @contextmanager
    def window(self, fault: str, *, may_cut: bool = False, may_shut: bool = False, kills: int = 0) -> Iterator[None]:
        """While entered, requests may meet this fault."""
        window = Window(fault, may_cut, may_shut, kills)
        with self._lock:
            self._windows.append(window)
            self._rows.setdefault(fault, Counter())["injected"] += 1
        try:
            yield
        finally:
            window.ended_s = time.monotonic()

    def met(self, sent_s: float) -> list[Window]:
        """The faults that a request met which was sent at `sent_s` and ends now, in order of their injection."""
        with self._lock:
            return [window for window in self._windows if window.ended_s >= sent_s]

    def put_down(self, sent_s: float, ended: Ended) -> None:
        met = self.met(sent_s)
        row = met[-1].fault if met else CALM
        with self._lock:
            counts = self._rows.setdefault(row, Counter())
            counts[ended.outcome] += 1
            counts["sent"] += ended.outcome is not Outcome.RESENT
            if ended.outcome is Outcome.REFUSED:
                self._refusals.setdefault(row, Counter())[ended.code] += 1
            if ended.outcome in BROKEN_PROMISES:
                self.broken.append(f"{row}: {ended.outcome}: {ended.text}")

    def count(self, outcome: Outcome, fault: str | None = None) -> int:
        with self._lock:
            rows = self._rows.values() if fault is None else [self._rows.get(fault, Counter())]
            return sum(row[outcome] for row in rows)

    def sent(self, fault: str | None = None) -> int:
        with self._lock:
            rows = self._rows.values() if fault is None else [self._rows.get(fault, Counter())]
            return sum(row["sent"] for row in rows)

    def refusals(self, fault: str) -> dict[str, int]:
        with self._lock:
            return dict(self._refusals.get(fault, Counter()))

    def text(self) -> str:
        """The table, one line a fault, and one for all of them."""
        columns = ["injected", "sent", *Outcome]
        with self._lock:
            rows = {name: Counter(row) for name, row in sorted(self._rows.items())}
            refusals = {name: Counter(codes) for name, codes in self._refusals.items()}
        rows["all"] = sum(rows.values(), Counter())
        refusals["all"] = sum(refusals.values(), Counter())
        width = max(len(name) for name in rows)
        lines = [f"{'fault':<{width}}" + "".join(f"{column:>9}" for column in columns) + "  refused with"]
        for name, row in rows.items():
            codes = ", ".join(f"{code} {number}" for code, number in sorted(refusals.get(name, Counter()).items()))
            lines.append(f"{name:<{width}}" + "".join(f"{row[column]:>9}" for column in columns) + f"  {codes}")
        return "\n".join(line.rstrip() for line in lines)

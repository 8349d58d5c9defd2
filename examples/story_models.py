"""The models of the two stories: one that takes its time to load, and one that starts a process in every call.

Imported by model processes alone. Each load is a line in a journal, so that the stories can count what really happened.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwaiter import Model


def note(journal: str, what: str) -> None:
    with Path(journal).open("a") as stream:
        stream.write(f"{what} {os.getpid()}\n")


def noted(journal: Path, what: str) -> list[int]:
    """The pids that noted it, in order."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [int(pid) for word, pid in (line.split() for line in lines) if word == what]


def hold_the_gil(seconds: float) -> None:
    """One call into C during which no other thread of this process runs Python: what reading and unpacking weights
    can look like from outside. No health check inside this process could be answered."""
    libc = ctypes.PyDLL(None)
    libc.usleep.argtypes = [ctypes.c_uint]
    libc.usleep(int(seconds * 1_000_000))


class PoolInEachCall(Model):
    """Opens and closes a pool of one process in every `forward`, as feature code of older libraries did."""

    def __init__(self, journal: str, method: str) -> None:
        self._journal = journal
        self._method = method

    def load(self, device: str) -> None:
        note(self._journal, "loaded")

    def forward(self, items: Sequence[Any]) -> list[int]:
        note(self._journal, "pool")
        with multiprocessing.get_context(self._method).Pool(1) as pool:
            return list(pool.map(abs, items))

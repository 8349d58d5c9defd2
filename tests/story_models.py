"""Models as people write them in a hurry: work at import, a query for CUDA, child processes in every call.

Each import and load is one line `what pid` in the file named by the environment variable `STORY_JOURNAL`, which every
process of a test inherits, so that a test counts who really imported this.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

JOURNAL_VARIABLE = "STORY_JOURNAL"


def note(what: str) -> None:
    with Path(os.environ[JOURNAL_VARIABLE]).open("a") as stream:
        stream.write(f"{what} {os.getpid()}\n")


def noted(journal: Path, what: str) -> list[int]:
    """Pids of the processes that noted it, in order."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [int(pid) for word, pid in (line.split() for line in lines) if word == what]


if JOURNAL_VARIABLE in os.environ:
    note("imported")


def use_pool(method: str) -> int:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return int(pool.apply(abs, (-3,)))


def use_executor() -> int:
    with ProcessPoolExecutor(1) as executor:
        return executor.submit(abs, -3).result()


def run_command() -> int:
    return subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"]).returncode


def end_a_child() -> int:
    """A forked child has inherited whatever its parent does about signals, and is sent one."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return 3 if os.WIFSIGNALED(status) else 0


WAYS: dict[str, Callable[[], int]] = {
    "fork": lambda: use_pool("fork"),
    "spawn": lambda: use_pool("spawn"),
    "forkserver": lambda: use_pool("forkserver"),
    "executor": use_executor,
    "command": run_command,
    "signal": end_a_child,
}


class Restless:
    """Starts processes in the middle of its work, in the way that the input names, and answers 3."""

    def load(self, device: str) -> None:
        note("loaded")

    def forward(self, items: Sequence[Any]) -> list[int]:
        return [WAYS[item]() for item in items]


class Eager:
    """Asks for CUDA as soon as it is built, before anything was loaded; answers with its pid."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda.is_available()
        note("asked_for_cuda")

    def load(self, device: str) -> None:
        note("loaded")

    def forward(self, items: Sequence[Any]) -> list[int]:
        return [os.getpid() for _ in items]


class Parallel:
    """Computes with all its threads while it loads, and again in each call."""

    def load(self, device: str) -> None:
        import torch

        self.weights = torch.ones(2000, 2000)
        self.weights.exp().sum()

    def forward(self, items: Sequence[Any]) -> list[int]:
        return [round(float((self.weights * item).sum())) for item in items]


class Streaming:
    """Answers with as many pieces as the input says."""

    def load(self, device: str) -> None:
        note("loaded")

    def forward(self, items: Sequence[Any]) -> list[Iterator[int]]:
        return [(number for number in range(item)) for item in items]


class ShutOut:
    """Finds its device taken, where it is the one named by `taken`: what a GPU in exclusive mode says."""

    def __init__(self, taken: str) -> None:
        self.taken = taken

    def load(self, device: str) -> None:
        if os.environ["CUDA_VISIBLE_DEVICES"] == self.taken:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    def forward(self, items: Sequence[Any]) -> list[str]:
        return [os.environ["CUDA_VISIBLE_DEVICES"] for _ in items]

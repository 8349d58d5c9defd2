"""A model that does what its input says: the one custom model that the fault tests serve.

An input is `{"do": what, …}`. Every import, load and forwarded item is one line in the file named by the option
`journal`, so that a test can count what really happened, in whichever process it happened.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headwaiter import InvalidInput, Model


def hold_the_gil(seconds: float) -> None:
    """Sleeps in C without letting go of the GIL, as a long native call does."""
    libc = ctypes.PyDLL(None)
    libc.usleep.argtypes = [ctypes.c_uint]
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        libc.usleep(100_000)


def hold_the_gil_for_good(seconds: float) -> None:
    """One single C call, so that the interpreter never gets a chance to switch threads."""
    libc = ctypes.PyDLL(None)
    left_s = int(seconds)
    while left_s:
        # A signal, such as the one that asks for the stacks, ends it early.
        left_s = libc.sleep(left_s)


def square(number: int) -> int:
    return number * number


def report(item: dict[str, Any]) -> dict[str, Any]:
    """What the process sees of itself."""
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "group": os.getpgid(0),
        "daemon": multiprocessing.current_process().daemon,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": [thread.name for thread in threading.enumerate()],
        "main_thread": threading.current_thread() is threading.main_thread(),
        "environment": {name: os.environ.get(name) for name in item.get("names", [])},
        "torch_threads": _torch_threads(),
    }


def _torch_threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def use_pool(item: dict[str, Any]) -> int:
    with multiprocessing.get_context(item["method"]).Pool(1) as pool:
        return int(pool.apply(square, (item["number"],)))


def start_helpers(item: dict[str, Any]) -> list[int]:
    """Leaves processes behind: one in our group, one in a session of its own."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    return [
        subprocess.Popen(sleeper).pid,
        subprocess.Popen(sleeper, start_new_session=True).pid,
    ]


def segfault(item: dict[str, Any]) -> None:
    ctypes.string_at(0)


def device_assert(item: dict[str, Any]) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


def fail(item: dict[str, Any]) -> None:
    raise ValueError(item.get("text", "told to fail"))


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own; headwaiter goes by the name, so that it needs no torch."""


def run_out_of_memory(item: dict[str, Any]) -> None:
    raise MemoryError


def run_out_of_device_memory(item: dict[str, Any]) -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def compute_square(item: dict[str, Any]) -> int:
    """Work that takes the time it is told to, and whose right answer its sender knows."""
    time.sleep(item.get("seconds", 0.0))
    return square(item["number"])


def spin(item: dict[str, Any]) -> None:
    """An endless loop in Python, as a generation that never meets its end."""
    while True:
        pass


def use_semaphore(item: dict[str, Any]) -> str:
    """What tqdm and many others do; nobody cleans it up when the process leaves at once."""
    KEPT.append(multiprocessing.get_context("spawn").Lock())
    return str(KEPT[-1])


KEPT: list[Any] = []


DEEDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "echo": lambda item: item.get("value"),
    "sleep": lambda item: time.sleep(item["seconds"]),
    "hold_gil": lambda item: hold_the_gil_for_good(item["seconds"]),
    "exit": lambda item: os._exit(item.get("code", 1)),
    "kill": lambda item: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": segfault,
    "stop": lambda item: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": fail,
    "device_assert": device_assert,
    "report": report,
    "pool": use_pool,
    "helpers": start_helpers,
    "semaphore": use_semaphore,
    "square": compute_square,
    "spin": spin,
    "memory": run_out_of_memory,
    "device_memory": run_out_of_device_memory,
    "nan": lambda item: {"score": float("nan"), "scores": [float("inf"), 1.0]},
    "object": lambda item: {"fine": 1, "items": [{"thing": object()}]},
}


class Obedient(Model):
    """See the module's text."""

    def __init__(
        self,
        journal: str = "",
        load_seconds: float = 0.0,
        load_holds_gil: bool = False,
        load_error: str = "",
        load_error_file: str = "",
    ) -> None:
        """While there is a `load_error_file`, loads fail with its text."""
        self.journal = Path(journal) if journal else None
        self.load_seconds = load_seconds
        self.load_holds_gil = load_holds_gil
        self.load_error = load_error
        self.load_error_file = Path(load_error_file) if load_error_file else None
        self.entered = threading.Lock()
        self.note("made")

    def note(self, what: str, value: object = "") -> None:
        if self.journal is not None:
            with self.journal.open("a") as stream:
                stream.write(f"{what} {os.getpid()} {time.monotonic():.6f} {value}\n")

    def load(self, device: str) -> None:
        self.note("load_started")
        if self.load_seconds:
            (hold_the_gil if self.load_holds_gil else time.sleep)(self.load_seconds)
        if self.load_error:
            raise RuntimeError(self.load_error)
        if self.load_error_file is not None and self.load_error_file.exists():
            raise RuntimeError(self.load_error_file.read_text())
        self.note("load_ended")

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
        if not isinstance(inputs, dict) or inputs.get("do") not in {"steps", *DEEDS}:
            raise InvalidInput(f"inputs.do must be one of {', '.join(DEEDS)}")
        if parameters:
            raise InvalidInput(f"unknown parameter {next(iter(parameters))!r}: this model takes none")
        self.note("prepared", inputs.get("label", ""))
        return inputs

    def take_steps(self, item: dict[str, Any]) -> int:
        """One long forward that shows how it goes on."""
        count = int(item["count"])
        for number in range(count):
            if not self.is_wanted(item):
                self.note("left_off", item.get("label", ""))
                return number
            time.sleep(item["seconds"])
            self.report_step()
        return count

    def forward(self, items: Sequence[Any]) -> Sequence[Any]:
        assert self.entered.acquire(blocking=False), "forward was entered twice at once"
        try:
            outputs = []
            for item in items:
                self.note("forwarded", item.get("label", ""))
                outputs.append(self.take_steps(item) if item["do"] == "steps" else DEEDS[item["do"]](item))
            return outputs
        finally:
            self.entered.release()

"""`headwaiter serve` on a configuration of its own, started, watched and stopped by a script: what the stories share.

Owns one temporary run directory, one free port and one child process. Looks from outside only, as an operator would:
HTTP, `headwaiter plan` and `/proc`. Refuses to know anything about models.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from shared.processes import set_parent_death_signal

ROOT = Path(__file__).resolve().parent.parent
LOOK_S = 0.05
STOP_S_MAX = 120
# As a shell reports a program that SIGINT has ended.
INTERRUPTED = 128 + signal.SIGINT
T = TypeVar("T")


class Differs(AssertionError):
    """What was seen is not what the story tells."""


def wait_for(look: Callable[[], T | None], what: str, within_s: float) -> T:
    """The first true value of `look`.

    Raises:
        Differs: there was none in time.
    """
    until_s = time.monotonic() + within_s
    while True:
        if value := look():
            return value
        if time.monotonic() > until_s:
            raise Differs(f"not within {within_s:g} s: {what}")
        time.sleep(LOOK_S)


class Stage:
    """One `headwaiter serve`, from the start of the `with` block to its end.

    `models` are `[[models]]` entries; `packages` is where headwaiter itself is imported from, for a story that edits
    a copy of it.
    """

    def __init__(
        self,
        models: list[dict[str, Any]],
        *,
        workers: int = 1,
        packages: Path = ROOT,
        variables: Mapping[str, str] | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        # A socket's path has room for 107 bytes only, so the directory has a short name.
        self._directory = tempfile.TemporaryDirectory(prefix="hw-")
        self.directory = Path(self._directory.name)
        self.port = _free_port()
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=120, limits=httpx.Limits(max_keepalive_connections=0)
        )
        document: dict[str, Any] = {
            "run_dir": self.directory / "run",
            "python_path": [ROOT],
            "http": {"port": self.port, "workers": workers, **sections.pop("http", {})},
            **sections,
        }
        self._config = self.directory / "headwaiter.toml"
        self._config.write_text(_toml(document, models))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAITER_")}
        self._variables = {**inherited, "PYTHONPATH": str(packages), "COLUMNS": "200", **(variables or {})}
        self._log = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.http.close()
        try:
            self.stop()
        finally:
            # Whoever ends a script with Ctrl-C does not ask what went wrong.
            if isinstance(error, Exception):
                print(f"--- the end of the log\n{self.log()[-4000:]}", file=sys.stderr)
            self._directory.cleanup()

    def start(self) -> None:
        with self._log.open("ab") as stream:
            self._process = subprocess.Popen(
                self._command("serve"),
                env=self._variables,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                # Also when this script is killed: nobody else knows what it has started. Main thread only, since the
                # kernel watches the thread and not the process.
                preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
            )

    def stop(self) -> int:
        """SIGTERM to `serve`, and its exit code; SIGKILL after two minutes."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "headwaiter", arguments[0], "--config", str(self._config), *arguments[1:]]

    # --- looking -------------------------------------------------------------------------------------------------

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self, within_s: float) -> None:
        """Until every slot is ready, not only one of each model."""
        wait_for(self.all_ready, "every slot is ready", within_s)

    def all_ready(self) -> bool:
        """Whether every slot is.

        Raises:
            Differs: `serve` has ended.
        """
        assert self._process is not None
        if self._process.poll() is not None:
            raise Differs(f"headwaiter serve ended with {self._process.returncode}")
        slots = self.slots()
        return bool(slots) and all(slot["state"] == "ready" for slot in slots.values())

    def slots(self) -> dict[str, dict[str, Any]]:
        """The rows of `/status` by slot; empty while nobody answers."""
        try:
            response = self.http.get("/status")
        except httpx.TransportError:
            return {}
        return {slot["slot"]: slot for slot in response.json()["slots"]} if response.is_success else {}

    def plan(self) -> dict[str, dict[str, Any]]:
        """The rows of `headwaiter plan` by slot."""
        completed = subprocess.run(
            self._command("plan", "--json"), env=self._variables, capture_output=True, text=True, check=True
        )
        return {slot["name"]: slot for slot in json.loads(completed.stdout)["slots"]}

    def family(self) -> list[psutil.Process]:
        """Every process below `serve`."""
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def model_processes(self) -> set[int]:
        """The processes that were started to hold a model; each has the mark of its slot in its environment."""
        return {process.pid for process in self.family() if _is_model_process(process)}

    def front_workers(self) -> list[int]:
        """The processes that speak HTTP: what uvicorn's master has spawned."""
        masters = [process for process in self.family() if "frontend" in _words(process)]
        return [
            child.pid
            for master in masters
            for child in _children(master)
            if any("spawn_main" in word for word in _words(child))
        ]

    # --- asking --------------------------------------------------------------------------------------------------

    def post(self, model: str, body: Mapping[str, object]) -> Any:
        """One answer, over a connection of its own.

        Raises:
            Differs: it was not 200.
        """
        response = self.http.post(f"/models/{model}", json=body)
        if response.status_code != 200:
            raise Differs(f"{model} answered {response.status_code}: {response.text[:200]}")
        return response.json()

    def post_many(self, model: str, bodies: Sequence[Mapping[str, object]], at_once: int) -> list[Any]:
        """As `post`, with `at_once` requests under way at a time; the answers in the order of the bodies."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda body: self.post(model, body), bodies))


def tell_and_exit(name: str, story: Callable[[], int]) -> NoReturn:
    """Ends this program with the story's exit code; a difference and Ctrl-C are told in one line."""
    try:
        sys.exit(story())
    except (Differs, RuntimeError) as fault:
        sys.exit(f"{name}: {fault}")
    except KeyboardInterrupt:
        print(f"{name}: interrupted; all that it started has ended", file=sys.stderr)
        sys.exit(INTERRUPTED)


class Report:
    """One line for each claim, as it is checked; at the end, whether all of them held."""

    def __init__(self, title: str) -> None:
        self.out = Console(highlight=False, soft_wrap=True)
        self._start_s = time.monotonic()
        self._held = 0
        self._failed = 0
        # Inside a group that is told in one line, what holds is only counted.
        self._brief = False
        self.out.rule(f"[bold]{title}")

    @contextmanager
    def group(self, title: str, *, in_full: bool) -> Iterator[None]:
        """Claims that belong together; if not `in_full`, those that hold share one line."""
        if in_full:
            self.out.print(title, style="bold", markup=False)
        before = (self._held, self._failed)
        self._brief = not in_full
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._brief = False
        if not in_full:
            held, failed = self._held - before[0], self._failed - before[1]
            self._line(
                failed == 0, f"{title}: {held} of {held + failed} claims hold ({time.monotonic() - start_s:.0f} s)"
            )

    def say(self, text: str) -> None:
        if not self._brief:
            self.out.print(f"  {text}", style="dim", markup=False)

    def claim(self, text: str, holds: bool, seen: object = "") -> None:
        if holds:
            self._held += 1
        else:
            self._failed += 1
        if not (holds and self._brief):
            self._line(holds, text if holds or seen == "" else f"{text}: saw {seen}")

    def _line(self, holds: bool, text: str) -> None:
        self.out.print("[green]✓[/]" if holds else "[bold red]✗[/]", end=" ")
        self.out.print(text, markup=False)

    def table(self, table: Table) -> None:
        self.out.print(table)

    def end(self) -> int:
        """The exit code: 0 if everything held."""
        took = f"{time.monotonic() - self._start_s:.0f} s"
        if self._failed:
            self.out.print(f"[bold red]{self._failed} of {self._held + self._failed} claims did not hold[/] ({took})")
        else:
            self.out.print(f"[bold green]Everything is as it should be[/]: {self._held} claims hold ({took})")
        return 1 if self._failed else 0


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_model_process(process: psutil.Process) -> bool:
    try:
        # What a model process has started carries the mark too, and has a marked parent.
        parent = process.parent()
        return _marked(process) and parent is not None and not _marked(parent)
    except psutil.Error:
        return False


def _marked(process: psutil.Process) -> bool:
    return "HEADWAITER_REPLICA" in process.environ()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _toml(document: Mapping[str, Any], models: list[dict[str, Any]]) -> str:
    sections = {key: value for key, value in document.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {_value(value)}" for key, value in document.items() if key not in sections]
    for heading, entries in [*((f"[{key}]", sections[key]) for key in sections), *(("[[models]]", m) for m in models)]:
        lines += [heading, *(f"{key} = {_value(value)}" for key, value in entries.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)

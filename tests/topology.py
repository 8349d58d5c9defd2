"""The real topology for tests: `python -m model_worker` and `python -m frontend` as two programs, over real sockets.

Owns starting, waiting by condition (never by a nap), looking inside through `/status` and `/proc`, and ending only what
it started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


def wait_for(condition: Callable[[], T | None], what: str, within_s: float = 30.0) -> T:
    """The condition's first true value.

    Raises:
        AssertionError: it never became true.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    return json.dumps(value if not isinstance(value, Path) else str(value))


class Service:
    """A model server and a front, both ours, until the `with` block ends."""

    def __init__(self, models: list[dict[str, Any]], *, workers: int = 1, **sections: dict[str, Any]) -> None:
        # Not pytest's tmp_path: a socket's path has room for 107 bytes only.
        self.directory = Path(tempfile.mkdtemp(prefix="hw-"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        sections.setdefault("http", {}).update({"port": self.port, "workers": workers})
        self.config_file = self.directory / "headwaiter.toml"
        lines = [f"run_dir = {toml_value(self.directory / 'run')}", f"python_path = [{toml_value(ROOT)}]"]
        for section, values in sections.items():
            lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
        for model in models:
            lines += ["[[models]]", *(f"{key} = {toml_value(value)}" for key, value in model.items())]
        self.config_file.write_text("\n".join(lines) + "\n")
        self.http = httpx.Client(base_url=self.url, timeout=60, limits=httpx.Limits(max_connections=None))
        self.pool = ThreadPoolExecutor(64)
        self.server: subprocess.Popen[bytes] | None = None
        self.front: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start_server()
            self.start_front()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.http.close()
        programs = [program for program in (self.front, self.server) if program is not None]
        # Both at once: neither waits for the other.
        for program in programs:
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
        for program in programs:
            stop(program)
        if error is not None:
            for name in ("server.log", "front.log"):
                print(f"--- {name}\n{self.log(name)}")
        shutil.rmtree(self.directory)

    # --- the two programs ---------------------------------------------------------------------------------------

    def start_server(self) -> None:
        self.server = self._start("model_worker", "server.log")

    def start_front(self) -> None:
        self.front = self._start("frontend", "front.log")
        self._wait_for_200("/livez", 30.0, self.front)

    def _start(self, module: str, log: str) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAITER_")}
        environment["HEADWAITER_CONFIG"] = str(self.config_file)
        with (self.directory / log).open("ab") as stream:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        file = self.directory / name
        return file.read_text(errors="replace") if file.exists() else ""

    # --- looking inside -----------------------------------------------------------------------------------------

    def probe(self, path: str) -> int:
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self, within_s: float = 60.0) -> Self:
        """
        Raises:
            AssertionError: not within that time, or a program has ended; `__exit__` prints what both had to say.
        """
        self._wait_for_200("/readyz", within_s, self.server, self.front)
        return self

    def _wait_for_200(self, path: str, within_s: float, *needed: subprocess.Popen[bytes] | None) -> None:
        def answers() -> bool:
            for program in needed:
                assert program is None or program.poll() is None, f"ended with {program.returncode}: {program.args!r}"
            return self.probe(path) == 200

        wait_for(answers, f"{path} says 200", within_s)

    def status(self) -> dict[str, Any]:
        """The model server's snapshot; waits for a server that is just starting."""
        return wait_for(self._snapshot, "/status answers")

    def _snapshot(self) -> dict[str, Any] | None:
        response = self.http.get("/status")
        return response.json() if response.is_success else None

    def slots(self) -> dict[str, dict[str, Any]]:
        return {slot["slot"]: slot for slot in self.status()["slots"]}

    def model_pids(self) -> dict[str, int]:
        return {name: slot["pid"] for name, slot in self.slots().items()}

    def front_workers(self) -> list[int]:
        assert self.front is not None
        # uvicorn's parent also has multiprocessing's resource tracker as a child.
        return [pid for pid in children(self.front.pid) if b"spawn_main" in _command_line(pid)]

    # --- asking -------------------------------------------------------------------------------------------------

    def ask(self, model: str, inputs: object, *, timeout_s: float | None = None, **body: object) -> httpx.Response:
        headers = {"Connection": "close"}
        if timeout_s is not None:
            headers["X-Request-Timeout"] = str(timeout_s)
        return self.http.post(f"/models/{model}", json={"inputs": inputs, **body}, headers=headers)

    def ask_later(self, model: str, inputs: object, **options: Any) -> Future[httpx.Response]:
        return self.pool.submit(self.ask, model, inputs, **options)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def stop(program: subprocess.Popen[bytes], within_s: float = 40.0) -> int:
    """SIGTERM, then SIGKILL if that is not enough; returns the exit code."""
    if program.poll() is None:
        program.send_signal(signal.SIGTERM)
        try:
            program.wait(within_s)
        except subprocess.TimeoutExpired:
            program.kill()
    return program.wait()


def journal_lines(file: Path, what: str) -> Iterator[list[str]]:
    """Lines of an `Obedient` journal: [what, pid, seconds, value]."""
    if file.exists():
        for line in file.read_text().splitlines():
            fields = line.split(" ", 3)
            if fields[0] == what:
                yield fields

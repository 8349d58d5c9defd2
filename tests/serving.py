"""`headwaiter serve` as a process, watched from outside: its words, its descendants, its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from model_worker.commands.supervision import PASSWORD, USER
from tests.command_line import COMMAND, ECHO, environment, write_config
from tests.topology import alive, children, free_port, wait_for

SUPERVISORCTL = Path(sys.executable).with_name("supervisorctl")
SOCKET_NAMES = ("front.sock", "model.sock", "supervisor.sock", "supervisord.pid")


class Serving:
    """One `headwaiter serve`. Call `close` at the end, whatever happened."""

    def __init__(self, *arguments: str, cwd: Path, variables: Mapping[str, str] | None = None) -> None:
        self.cwd = cwd
        self.run_directory = cwd / "run"
        self._out_file = cwd / "out.log"
        self._error_file = cwd / "error.log"
        with self._out_file.open("wb") as out, self._error_file.open("wb") as error:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", *arguments],
                cwd=cwd,
                env=environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out_file.read_text(errors="replace")

    @property
    def error(self) -> str:
        return self._error_file.read_text(errors="replace")

    def wait_for_words(self, words: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None or words in self.out, f"ended: {self.out}\n{self.error}"
            return words in self.out

        wait_for(said, f"serve says {words!r}", 60)

    def wait_ready(self) -> str:
        """Returns the address it names."""
        self.wait_for_words("Control:")
        [address] = re.findall(r"^(?:Ready|Serving) on (\S+)", self.out, re.MULTILINE)
        return str(address)

    def ask(self, inputs: object, model: str = "echo", timeout_s: float = 30.0) -> httpx.Response:
        [address] = re.findall(r"^(?:Ready|Serving) on (\S+)", self.out, re.MULTILINE)
        return httpx.post(f"{address}/models/{model}", json={"inputs": inputs}, timeout=timeout_s)

    def wait_end(self) -> int:
        return self.process.wait(60)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def supervisorctl(self, *arguments: str) -> str:
        server = f"unix://{self.run_directory / 'supervisor.sock'}"
        completed = subprocess.run(
            [sys.executable, SUPERVISORCTL, "-s", server, "-u", USER, "-p", PASSWORD, *arguments],
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return completed.stdout

    # --- its descendants ----------------------------------------------------------------------------------------

    @property
    def supervisord(self) -> int:
        [pid] = children(self.process.pid)
        return pid

    def program(self, name: str) -> int:
        """The pid of `model_worker` or `frontend`."""
        return int(self.supervisorctl("pid", name))

    def model_pids(self) -> list[int]:
        """The model processes; not the helpers that multiprocessing and the model server start beside them."""
        return [pid for pid in descendants(self.program("model_worker")) if b"HEADWAITER_REPLICA=" in _environ(pid)]

    def everything(self) -> list[int]:
        return [self.process.pid, *descendants(self.process.pid)]

    def wait_gone(self, pids: list[int]) -> None:
        wait_for(lambda: not any(alive(pid) for pid in pids), f"{pids} are gone")

    def left_files(self) -> list[str]:
        return [name for name in SOCKET_NAMES if (self.run_directory / name).exists()]

    def close(self) -> None:
        """Ends it, and all that it started, if it has not ended by itself."""
        pids = self.everything() if self.process.poll() is None else []
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(*models: Mapping[str, Any], **sections: Mapping[str, Any]) -> Iterator[Serving]:
    """`headwaiter serve` with a configuration file in a directory of its own, from its start to its end."""
    with short_directory() as directory:
        http = {"port": free_port(), "workers": 1, **sections.pop("http", {})}
        write_config(directory, *(models or (ECHO,)), http=http, **sections)
        with closing(Serving(cwd=directory)) as started:
            yield started


@contextlib.contextmanager
def closing(started: Serving) -> Iterator[Serving]:
    try:
        yield started
    except BaseException:
        print(f"--- standard output\n{started.out}\n--- standard error\n{started.error}")
        raise
    finally:
        started.close()


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory for a service. Not pytest's tmp_path: a socket's path has room for 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="hw-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def in_terminal(arguments: list[str], cwd: Path, variables: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a command as a terminal would, and returns it with the terminal's other end."""
    outer, inner = os.openpty()
    # The new session takes the pseudo-terminal as its own, so that Ctrl-C typed into it becomes a SIGINT.
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", take, *arguments],
        cwd=cwd,
        env=environment({"TERM": "xterm", **variables}),
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    os.close(inner)
    fcntl.fcntl(outer, fcntl.F_SETFL, os.O_NONBLOCK)
    return process, outer


def read_available(terminal: int) -> bytes:
    """What has been written to the terminal and not been read yet."""
    parts = []
    # EIO: every process that had it open has ended.
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 65536):
            parts.append(part)
    return b"".join(parts)

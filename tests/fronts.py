"""Real front workers for tests: `python -m frontend` (or bare uvicorn) on a free port, beside a `StubBroker`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.topology import ROOT, alive, children, free_port, toml_value, wait_for

LISTENING = re.compile(r"listening url=(http://\S+)")


class Front:
    """One front, from `start` (or entering) to the end of the `with` block."""

    def __init__(self, *, models: tuple[str, ...] = ("echo",), workers: int = 1, **http: Any) -> None:
        # Not pytest's tmp_path: a socket's path has room for 107 bytes only.
        self.directory = Path(tempfile.mkdtemp(prefix="hw-"))
        self.run_dir = self.directory / "run"
        self.config_file = self.directory / "headwaiter.toml"
        values: dict[str, Any] = {"port": 0, "workers": workers, "grace_s": 10} | http
        lines = [f"run_dir = {toml_value(self.run_dir)}", "[http]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
        for model in models:
            lines += ["[[models]]", f'name = "{model}"', 'model = "tests.stub_models:Stub"']
        self.config_file.write_text("\n".join(lines) + "\n")
        self.log_file = self.directory / "front.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.client = httpx.Client(timeout=30)
        self._worker_count = workers

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if self.process is not None and self.process.poll() is None:
            family = self.workers()
            self.process.kill()
            self.process.wait()
            wait_for(lambda: not any(alive(pid) for pid in family), "the workers follow their master", 15)
        if error is not None:
            print(f"--- {self.log_file}\n{self.log()}")
        else:
            shutil.rmtree(self.directory, ignore_errors=True)

    def start(self, *flags: str) -> Self:
        self.spawn([sys.executable, "-P", "-m", "frontend", *flags])
        self.url = wait_for(lambda: (LISTENING.findall(self.log()) or [""])[-1], "the front listens")
        return self.wait_live()

    def start_bare_uvicorn(self, *flags: str, app: str = "frontend.app:app") -> Self:
        """`uvicorn frontend.app:app`, as people know it."""
        port = free_port()
        self.spawn([sys.executable, "-m", "uvicorn", app, "--port", str(port), *flags])
        self.url = f"http://127.0.0.1:{port}"
        return self.wait_live()

    def spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAITER_")}
        environment["HEADWAITER_CONFIG"] = str(self.config_file)
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        return self.process

    def wait_live(self) -> Self:
        wait_for(lambda: self.probe("/livez") == 200, "/livez says 200")
        return self

    def wait_ready(self) -> Self:
        wait_for(lambda: self.probe("/readyz") == 200, "/readyz says 200")
        return self

    def wait_joined(self) -> Self:
        """Waits until every worker has met the model server; `wait_ready` asks whichever one takes its connection."""
        wait_for(lambda: self.log().count("server_joined") >= self._worker_count, "every worker has joined the server")
        return self

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.client.post(self.url + path, **options)

    def ask(self, inputs: object = "x", model: str = "echo", **options: Any) -> httpx.Response:
        return self.post(f"/models/{model}", json={"inputs": inputs}, **options)

    def probe(self, path: str) -> int:
        """The status of a GET on a connection of its own, so that any worker may answer; 0 if there is no answer."""
        try:
            return self.get_once(path)[0]
        except (OSError, AssertionError):
            return 0

    def get_once(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """A GET on a connection of its own."""
        with self.connect() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            return read_response(connection)

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=20)

    def workers(self) -> list[int]:
        """The pids of the worker processes."""
        assert self.process is not None
        return [pid for pid in children(self.process.pid) if b"spawn_main" in _command_line(pid)]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, within_s: float = 30) -> int:
        assert self.process is not None
        return self.process.wait(within_s)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def raw_request(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """The bytes of one POST; `length` is what Content-Length claims, if it is not the truth."""
    head = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    if not any(header.lower().startswith("transfer-encoding") for header in headers):
        head.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one response with a Content-Length, or of one that ends with the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        assert part, f"the connection ended after {data!r}"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    length = int(headers["content-length"]) if "content-length" in headers else None
    while length is None or len(body) < length:
        part = connection.recv(65536)
        if not part:
            break
        body += part
    return int(lines[0].split(" ")[1]), headers, body

"""The service under destruction: a real `headwaiter serve`, started again whenever it ends, as systemd would do.

Owns its processes by role, found in /proc at the moment they are asked for, and the question whether it is whole.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.command_line import COMMAND, environment, write_config
from tests.serving import descendants
from tests.topology import alive, children, free_port, wait_for

WORKERS = 2
# Far longer than a square takes, even a batch of them on a machine that does much else.
BATCH_TIMEOUT_S = 3.0
STEP_S = 0.004
# Longer than any request of the clients takes, and no longer than a test can wait.
GRACE_S = 3
REPLICAS = {"m": 2, "one": 1, "count": 1}
DISK_BYTES = 8 << 20


class Subject:
    """One service; `with` starts it and, at the end, stops it and makes sure that nothing is left."""

    def __init__(self, *, open_files: int | None = None, load_s: float = 0.0, small_disk: bool = False) -> None:
        """`open_files`: the hard limit of every process. `small_disk`: its output and its run directory are on a disk
        of `DISK_BYTES`."""
        # Not pytest's tmp_path: a socket's path has room for 107 bytes only.
        self.directory = Path(tempfile.mkdtemp(prefix="hw-"))
        self.port = free_port()
        self.disk = self.directory / "disk"
        self.disk.mkdir()
        self.has_small_disk = small_disk and mount_small_disk(self.disk)
        self.run_directory = self.disk / "run"
        self.starts = 0
        self._open_files = open_files
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper")
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=5)
        plain = {"device": "cpu", "max_batch_size": 8, "batch_timeout_s": BATCH_TIMEOUT_S}
        obedient: dict[str, Any] = {"model": "tests.obedient_model:Obedient", "options": {"load_seconds": load_s}}
        counting: dict[str, Any] = {"model": "tests.stub_models:Counting", "options": {"step_s": STEP_S}}
        write_config(
            self.directory,
            {"name": "m", "replicas": REPLICAS["m"], **plain, **obedient},
            {"name": "one", **plain, **obedient},
            {"name": "count", **plain, **counting},
            http={"port": self.port, "workers": WORKERS, "grace_s": GRACE_S},
            top={"run_dir": self.run_directory},
            # Whoever kills a process again and again while it loads means no broken model.
            server={"grace_s": GRACE_S, "load_attempts_max": 1000, "parallel_loads": 2},
        )

    def __enter__(self) -> Self:
        try:
            self._start()
            self._keeper.start()
            self.wait_whole()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._keeper.is_alive():
            self._keeper.join()
        assert self._process is not None
        pids = self.everything()
        self._process.terminate()
        try:
            self._process.wait(30)
            # Nothing to kill: that is the last thing that every run proves.
            wait_for(lambda: not any(alive(pid) for pid in pids), f"all of {pids} are gone", 5)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._http.close()
            if self.has_small_disk:
                subprocess.run(["umount", "--lazy", self.disk], check=True)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self) -> None:
        self.starts += 1
        limit = self._open_files

        def limited() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

        with (self.disk / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*COMMAND, "serve"],
                cwd=self.directory,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=limited,
            )

    def _keep(self) -> None:
        while not self._stopping.wait(0.05):
            assert self._process is not None
            if self._process.poll() is not None:
                self._start()

    def log(self) -> str:
        return (self.disk / "log").read_text(errors="replace")

    # --- its processes -------------------------------------------------------------------------------------------

    @property
    def serve(self) -> int:
        assert self._process is not None
        return self._process.pid

    def everything(self) -> list[int]:
        return [self.serve, *descendants(self.serve)]

    def supervisord(self) -> int:
        return _only(pid for pid in children(self.serve))

    def server(self) -> int:
        return self._program("model_worker")

    def master(self) -> int:
        return self._program("frontend")

    def workers(self) -> list[int]:
        """The front workers."""
        return [pid for pid in children(self.master()) if b"spawn_main" in _read(pid, "cmdline")]

    def replicas(self, model: str = "") -> list[int]:
        """The model processes, of one model or all, in the order of their slots."""
        found = {}
        for pid in children(self.server()):
            variables = dict(pair.partition(b"=")[::2] for pair in _read(pid, "environ").split(b"\0"))
            mark = variables.get(b"HEADWAITER_REPLICA", b"").decode()
            slot = mark.partition("/")[2].partition("#")[0]
            if slot and slot.startswith(f"{model}/" if model else ""):
                found[slot] = pid
        return [found[slot] for slot in sorted(found)]

    def guardian(self) -> int:
        return _only(pid for pid in children(self.server()) if b"guardian.py" in _read(pid, "cmdline"))

    def _program(self, module: str) -> int:
        mark = f"\0-m\0{module}\0".encode()
        return _only(pid for pid in children(self.supervisord()) if mark in _read(pid, "cmdline"))

    # --- how it is -----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any] | None:
        try:
            answer = self._http.get("/status")
            ready = self._http.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return None
        return answer.json() if answer.status_code == 200 and ready else None

    def is_whole(self) -> bool:
        """Whether every process is there and every model is ready."""
        try:
            if len(self.workers()) != WORKERS or len(self.replicas()) != sum(REPLICAS.values()):
                return False
        except LookupError:
            return False
        status = self.status()
        return (
            status is not None
            and status["fronts"] == WORKERS
            and all(slot["state"] == "ready" for slot in status["slots"])
        )

    def wait_whole(self, within_s: float = 120.0) -> None:
        wait_for(self.is_whole, "the service is whole", within_s)


def _only(pids: Any) -> int:
    """Raises:
    LookupError: the process is not there at the moment.
    """
    for pid in pids:
        return int(pid)
    raise LookupError("no such process at the moment")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def mount_small_disk(directory: Path) -> bool:
    """Puts a file system of `DISK_BYTES` there, where this user may."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "none", str(directory)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def signalled(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there to be sent the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def paused(pids: list[int], seconds: float) -> None:
    """Stops the processes for a while, as a debugger, a frozen container or a suspended machine does."""
    for pid in pids:
        signalled(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        signalled(pid, signal.SIGCONT)

"""supervisord as a child process: started with the shipped `supervisord.conf`, asked, stopped, and never left behind.

Owns the child's command line, environment and control socket. Refuses to interpret what the programs do: it reports
their states, and `serve.py` decides. Run as `python -m model_worker.commands.supervision PARENT_PID …`, this module is
the child itself: supervisord, tied to the life of its parent.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import xmlrpc.client
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import psutil

from shared.config import ENV_PREFIX, working_directory
from shared.errors import ConfigurationError
from shared.processes import stop_with_parent

# As in supervisord.conf. The directory's mode is the protection; these only keep supervisord from warning.
USER = PASSWORD = "headwaiter"
CONTROL_SOCKET = "supervisor.sock"
SUPERVISOR_FILES = (CONTROL_SOCKET, "supervisord.pid")
# What another start cannot mend, as `exitcodes` in supervisord.conf.
PERMANENT_EXIT_CODES = (70, 78)
_EARLY_EXIT = re.compile(rb"\S+ \S+ WARN exited: (\w+) \(exit status (\d+); not expected\)")
# supervisord answers from its one loop, within milliseconds unless it is being started or stopped.
CONTROL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Program:
    """One program as supervisord sees it."""

    name: str
    state: str
    pid: int
    exit_status: int

    @property
    def given_up(self) -> bool:
        """Whether it has ended and will not be started again: by its own exit code, or after too many tries.

        After any other end it is `EXITED` as well, for the moment until supervisord starts it again.
        """
        return self.state == "FATAL" or (self.state == "EXITED" and self.exit_status in PERMANENT_EXIT_CODES)


def early_refusal(line: bytes) -> Program | None:
    """The program of which this line of supervisord's says that it refused to run before `startsecs` had passed.

    supervisord takes every end within that time for one that another start may mend, and its answers about programs
    do not tell their exit codes then; its log does.
    """
    told = _EARLY_EXIT.match(line)
    if told is None or int(told[2]) not in PERMANENT_EXIT_CODES:
        return None
    return Program(told[1].decode(), "EXITED", 0, int(told[2]))


def configuration_file() -> Path:
    """The shipped `supervisord.conf`: beside `headwaiter.py` in a checkout, else among the environment's data.

    Raises:
        ConfigurationError: it is in neither place.
    """
    root = Path(__file__).resolve().parents[2]
    places = (
        root / "supervisord.conf",
        Path(sysconfig.get_path("data")) / "share" / "headwaiter" / "supervisord.conf",
    )
    for place in places:
        if place.is_file():
            return place
    raise ConfigurationError(f"supervisord.conf is missing at {places[0]}: install headwaiter again")


class Supervisor:
    """A supervisord in the foreground of this process. Use it on the main thread, which has to outlive it; `stop` may
    be called on any."""

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> IO[bytes]:
        """Starts it and returns what it and the programs write, lines of both mixed.

        Raises:
            ConfigurationError: see `configuration_file` and `working_directory`.
        """
        command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), "-n", "-e", "warn"]
        command += ["-c", str(configuration_file())]
        if os.getuid() == 0:
            # Without a user, supervisord complains about running as root at every start.
            command += ["-u", "0"]
        environment = os.environ | {
            ENV_PREFIX + "PYTHON": sys.executable,
            ENV_PREFIX + "DIRECTORY": str(working_directory()),
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            command,
            # Relative paths in supervisord.conf, such as the control socket's, are meant relative to here.
            cwd=self._run_directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal is for `serve` alone, which passes it on as an orderly stop.
            process_group=0,
        )
        return cast("IO[bytes]", self._process.stdout)

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start() comes first"
        return self._process

    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._running.poll()

    def bury_others(self) -> None:
        """Collects ended children that this process has not started itself: as the first process of a container it
        inherits what models have started and left behind."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (ended := os.waitid(os.P_ALL, 0, flags)) is not None and ended.si_pid != self.pid:
            os.waitpid(ended.si_pid, os.WNOHANG)

    def close(self) -> None:
        """Stops it, if it still runs, and waits for its end."""
        self.stop()
        self._running.wait()

    def programs(self) -> tuple[Program, ...]:
        """The programs' states; empty while supervisord cannot answer, at its very start and end."""
        transport = _ControlTransport(self._run_directory / CONTROL_SOCKET)
        proxy = xmlrpc.client.ServerProxy("http://supervisor", transport=transport)
        try:
            with proxy:
                rows = cast("list[dict[str, object]]", proxy.supervisor.getAllProcessInfo())
        except (OSError, http.client.HTTPException, xmlrpc.client.Error):
            return ()
        return tuple(
            Program(str(row["name"]), str(row["statename"]), int(str(row["pid"])), int(str(row["exitstatus"])))
            for row in rows
        )

    def stop(self) -> None:
        """An orderly stop: supervisord ends the web workers, then the model server, and then itself."""
        if self.exit_code() is None:
            self._running.terminate()
            # supervisord looks for signals once a second, or when something else wakes its loop; within that second it
            # would start a program once more that has just refused to run.
            self.programs()

    def stop_at_once(self) -> None:
        """Kills the programs, which lets supervisord end in order; where there are none left, supervisord itself."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children()
            programs = [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE]
            for pid in programs:
                # Each program leads a process group of its own. It cannot be another process by now: its pid is
                # taken until supervisord, its parent, has seen the end of it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            if not programs:
                self._running.kill()


class _ControlTransport(xmlrpc.client.Transport):
    """XML-RPC over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            headers=[("Authorization", "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())]
        )
        self._path = path

    def make_connection(self, host: tuple[str, dict[str, str]] | str) -> http.client.HTTPConnection:
        connection = _ControlConnection(self._path)
        # Where the base class looks for what it has to close.
        self._connection = (host, connection)
        return connection


class _ControlConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=CONTROL_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONTROL_TIMEOUT_S)
        self.sock.connect(str(self._path))


def main() -> None:
    """The child: supervisord, which gets SIGTERM when its parent ends, however that happens."""
    stop_with_parent(int(sys.argv[1]))
    from supervisor import supervisord

    supervisord.main(sys.argv[2:])


if __name__ == "__main__":
    main()

"""What can stand in the way of a start besides the plan itself, each thing checked once and in one place.

Owns the checks that `serve` makes before it starts anything and `check` reports. Changes nothing but the run directory,
which it creates. Each function returns what it found, in words, or raises with value and remedy.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.util
import json
import math
import os
import resource
import socket
import subprocess
import sys

import psutil

from model_worker.commands.addresses import connectable_host
from shared.config import Config, ModelConfig
from shared.errors import ConfigurationError
from shared.processes import described
from shared.sockets import SOCKET_PATH_BYTES_MAX, RunDirectory

# supervisord's listening socket gets this suffix and a pid while it is being bound.
CONTROL_SOCKET_ROOM_BYTES = len(os.fsencode("/supervisor.sock.4194304"))
# What the largest of the processes needs before the first connection, and a few connections. As in supervisord.conf.
OPEN_FILES_MIN = 128
# One descriptor per open connection, and a few dozen besides; below this a busy front worker runs out.
OPEN_FILES_FEW = 4096

# Of a web worker that has to ask the model server first.
HTTP_TIMEOUT_S = 3.0
STATUS_BYTES_MAX = 64 * 2**20


def check_port(config: Config) -> str:
    """Whether the front workers will be able to listen.

    Raises:
        ConfigurationError: see `probe_port`.
    """
    host, port = config.http.host, config.http.port
    probe_port(config)
    return f"{host}:{port} is free" if port else f"{host}, any free port"


def probe_port(config: Config) -> int:
    """Listens for a moment where the front workers will; returns the port, which for 0 is one that is free now.

    Raises:
        ConfigurationError: the address is taken, not of this machine, or not allowed.
    """
    host, port = config.http.host, config.http.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"http.host = {host!r}: {_reason(error)}: set http.host to an address of this machine", keys=("host",)
        ) from None
    with socket.socket(family, kind, protocol) as probe:
        # As the front workers do: an address in TIME_WAIT is free for a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
            return int(probe.getsockname()[1])
        except OSError as error:
            key, setting, remedy = "port", f"http.port = {port}", "set http.port to another one"
            if error.errno == errno.EADDRNOTAVAIL:
                key, setting, remedy = "host", f"http.host = {host!r}", "set http.host to an address of this machine"
            raise ConfigurationError(
                f"{setting}: cannot listen on {host}:{port}: {_reason(error)}{holder_words(port)}: {remedy}",
                keys=(key,),
            ) from None


def epoch_behind_port(config: Config) -> str | None:
    """The epoch of the model server that whoever listens there works with; None if nobody answers like a front."""
    key = next(iter(config.http.api_keys), None)
    headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
    connection = http.client.HTTPConnection(connectable_host(config), config.http.port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("GET", "/status", headers=headers)
        told = json.loads(connection.getresponse().read(STATUS_BYTES_MAX))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return str(told["epoch"]) if isinstance(told, dict) and "epoch" in told else None


def _reason(error: OSError | UnicodeError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def holder_words(port: int) -> str:
    """Who listens there, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f" ({psutil.Process(connection.pid).name()}, {described(connection.pid)})"
    return ""


def check_run_directory(config: Config) -> str:
    """Whether the run directory can be used, and nobody uses it.

    Raises:
        ConfigurationError: it cannot be created, is open to others, too long for a socket, or in use.
    """
    path = config.run_directory
    length_bytes = len(os.fsencode(path)) + CONTROL_SOCKET_ROOM_BYTES
    if length_bytes > SOCKET_PATH_BYTES_MAX:
        raise ConfigurationError(
            f"run_dir = {str(path)!r}: {length_bytes - SOCKET_PATH_BYTES_MAX} bytes too long for the sockets in it "
            f"(at most {SOCKET_PATH_BYTES_MAX} bytes each): set run_dir or HEADWAITER_RUN_DIR to a shorter path"
        )
    directory = RunDirectory(path)
    directory.prepare()
    directory.lock()
    directory.release()
    return f"{path} is private and free"


def check_open_files() -> str:
    """Whether the processes can open what they need: both programs raise their limit to the hard one.

    Raises:
        ConfigurationError: hardly a connection could be accepted.
    """
    allowed = open_files_allowed()
    if allowed < OPEN_FILES_MIN:
        raise ConfigurationError(
            f"{allowed:.0f} open files are allowed, too few to start: raise the hard limit to {OPEN_FILES_FEW} or "
            "more, with ulimit -Hn or LimitNOFILE="
        )
    return "no limit" if math.isinf(allowed) else f"up to {allowed:.0f}"


def open_files_allowed() -> float:
    """How many files a process of ours will be able to open; infinite where there is no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if hard == resource.RLIM_INFINITY else hard


def check_packages(config: Config) -> str:
    """Whether this Python has what the configured models are run with.

    Raises:
        ConfigurationError: a package is missing.
    """
    needed = sorted({package for model in config.models for package in _packages(model)})
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigurationError(
            f"this Python has no {' and no '.join(missing)}: install them with pip install 'headwaiter[worker]'"
        )
    return ", ".join(needed) or "no model needs torch or transformers"


def check_routers(config: Config) -> str:
    """Whether the front workers will be able to serve the user's own routers. These are imported in a process of their
    own, which is a front's and not this one.

    Raises:
        ConfigurationError: they will not; in the front's own words.
    """
    if not config.http.routers:
        return "none"
    command = [sys.executable, "-P", "-m", "frontend.check"]
    checked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if checked.returncode != 0:
        said = checked.stderr.strip().splitlines() or [f"python -m frontend.check ended with {checked.returncode}"]
        raise ConfigurationError(said[-1].removeprefix("headwaiter: "))
    return ", ".join(config.http.routers)


def _packages(model: ModelConfig) -> tuple[str, ...]:
    if model.is_custom:
        return ()
    return ("torch", "transformers", "gguf") if model.model.endswith(".gguf") else ("torch", "transformers")

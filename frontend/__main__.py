"""`python -m frontend`: the front workers, as supervisord starts them.

Owns the flags, the listening socket and uvicorn's settings. The workers load the configuration themselves: flags
reach them as environment variables. Kept small: each spawned worker imports this module again, as `__mp_main__`.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import socket
import subprocess
import sys
from enum import IntEnum
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

    from shared.config import Config


class ExitCode(IntEnum):
    """What an exit says. Follows sysexits.h where that has a word for it."""

    OK = 0
    WORKERS_FAILED = 70
    """A worker could not start, and would not the next time either; the log says why."""
    CONFIGURATION = 78
    """The configuration, or the machine it is used on, does not allow a start: also a port that is in use."""


# How long a worker may leave its master's health check unanswered. uvicorn's own 5 s kill a worker that is merely
# slow; the check is answered by a thread, so only a process that is stopped or broken fails it.
WORKER_HEALTH_CHECK_S = 30
# Longer than the usual 60 s of proxies and load balancers: the side that sends requests has to be the one that closes,
# or some of its requests meet a connection that has just gone.
KEEP_ALIVE_S = 75
# A client that takes nothing of its answer for this long is gone, or wants to fill this process.
UNREAD_TIMEOUT_S = 60
# Flags that are keys of the section `http`, under the same names.
HTTP_FLAGS = ("host", "port", "workers", "reload")


def main(arguments: list[str] | None = None) -> int:
    from shared import logs
    from shared.config import CONFIG_FILE_VARIABLE, ENV_PREFIX, Config, working_directory
    from shared.errors import ConfigurationError
    from shared.processes import open_standard_streams, raise_open_files_limit, stop_with_parent
    from shared.sockets import RunDirectory
    from shared.tracing import check_tracing

    open_standard_streams()
    flags = _parser().parse_args(arguments)
    if flags.exit_with_parent is not None:
        stop_with_parent(flags.exit_with_parent)
    given = {flag: value for flag in HTTP_FLAGS if (value := getattr(flags, flag)) is not None}
    os.environ.update({f"{ENV_PREFIX}HTTP__{flag.upper()}": str(value) for flag, value in given.items()})
    try:
        if flags.config is not None:
            os.environ[CONFIG_FILE_VARIABLE] = str(working_directory() / flags.config)
        config = Config.load(flags={("http", flag): f"--{flag}" for flag in given})
        RunDirectory(config.run_directory).prepare()
        check_tracing(config.tracing.enabled)
        check_own_routes(config)
    except ConfigurationError as error:
        print(f"headwaiter: {error}", file=sys.stderr)
        return ExitCode.CONFIGURATION
    logs.configure(config.logging.level, config.logging.format, program="frontend")
    before, now = raise_open_files_limit()
    logs.log_event(logging.getLogger("frontend"), "debug", "open_files_limit_raised", before=before, now=now)
    try:
        listener = listen(config.http.host, config.http.port)
    except OSError as error:
        address = f"{config.http.host}:{config.http.port}"
        print(
            f"headwaiter: cannot listen on {address}: {error.strerror}; set http.port or http.host to another one, or "
            "stop what uses it",
            file=sys.stderr,
        )
        return ExitCode.CONFIGURATION
    return run(config, listener)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m frontend",
        description="Runs the front workers: HTTP in front of the models that `python -m model_worker` holds.",
        epilog="Signals: TERM and INT stop, HUP replaces the workers one by one, TTIN and TTOU add and remove one.",
    )
    parser.add_argument("--config", type=Path, help="configuration file (default: $HEADWAITER_CONFIG, headwaiter.toml)")
    parser.add_argument("--host", help="address to listen on (http.host)")
    parser.add_argument("--port", type=int, help="TCP port (http.port); 0 takes a free one")
    parser.add_argument("--workers", type=int, help="worker processes (http.workers)")
    parser.add_argument("--reload", action="store_true", default=None, help="restart a worker when its source changes")
    parser.add_argument(
        "--exit-with-parent", type=int, metavar="PID", help="stop when PID, which started this process, ends"
    )
    return parser


def check_own_routes(config: Config) -> None:
    """Finds out in another process whether the workers will be able to serve the user's own routers: what those import
    is not for the master, which would keep it for ever.

    Raises:
        ConfigurationError: they will not.
    """
    from shared.errors import ConfigurationError

    if not config.http.routers:
        return
    safe_path = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe_path, "-m", "frontend.check"]
    checked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if checked.returncode != ExitCode.OK:
        said = checked.stderr.strip().splitlines() or [f"the check ended with {checked.returncode}"]
        raise ConfigurationError(said[-1].removeprefix("headwaiter: "))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, for all workers. Made here because uvicorn's own leaves out the protocol number, without
    which asyncio would not turn Nagle's algorithm off: 44 ms for each answer on a connection that is kept.

    Raises:
        OSError: the host has no address here, or the port is taken.
    """
    from frontend.limits import backlog

    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # The port of a process that has just ended may be used at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it. What is written to one that is not read would stay in memory for good.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_S * 1000)
        listener.bind(address)
        # Now, not when the first worker is ready: a port that another process listens on is refused only here.
        listener.listen(backlog())
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(True)
    return listener


def run(config: Config, listener: socket.socket) -> int:
    """Runs uvicorn until it is told to stop; returns an `ExitCode`."""
    from shared.logs import log_event

    settings = uvicorn_settings(config)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    workers = 1 if config.http.reload else config.http.workers
    log_event(logging.getLogger("frontend"), "info", "listening", url=url, workers=workers, pid=os.getpid())
    if config.http.reload:
        return _run_reloading(settings, listener)
    return _run_workers(settings, listener)


def uvicorn_settings(config: Config) -> uvicorn.Config:
    import uvicorn

    from frontend.limits import backlog
    from shared import logs

    return uvicorn.Config(
        "frontend.app:app",
        loop="uvloop",
        http="frontend.protocol:Protocol",
        ws="none",
        lifespan="on",
        workers=config.http.workers,
        backlog=backlog(),
        reload=config.http.reload,
        # Never the model workers' source: models stay loaded.
        reload_dirs=_source_directories(config) if config.http.reload else None,
        log_config=logs.log_config(config.logging.level, config.logging.format, program="frontend"),
        access_log=config.logging.level == "debug",
        # Nothing but the access log asks where a request comes from.
        proxy_headers=config.logging.level == "debug",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.http.grace_s),
        timeout_worker_healthcheck=WORKER_HEALTH_CHECK_S,
    )


def _source_directories(config: Config) -> list[str]:
    packages = Path(__file__).resolve().parents[1]
    found = [str(packages / "frontend"), str(packages / "shared")]
    for router in config.http.routers:
        top = router.partition(":")[0].partition(".")[0]
        spec = PathFinder.find_spec(top, [*sys.path, *map(str, config.python_path)])
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).parent))
    return found


def _run_workers(settings: uvicorn.Config, listener: socket.socket) -> int:
    from uvicorn.config import STARTUP_FAILURE
    from uvicorn.supervisors import Multiprocess

    from frontend.farewell import refuse_waiting
    from shared.logs import log_event

    logger = logging.getLogger("frontend")

    class Master(Multiprocess):
        """uvicorn's own, which notices at once when a worker dies during a health check, and says so; and which takes
        no connections while it stops."""

        def keep_subprocess_alive(self) -> None:
            for process in self.processes:
                # The worker's end of the pipe. As long as this process has it open too, the death of the worker does
                # not end the wait for its answer, and signals wait as well. Closing it twice does nothing.
                process.child_conn.close()
            before = list(self.processes)
            super().keep_subprocess_alive()
            for old, new in zip(before, self.processes, strict=True):
                if old is not new:
                    fields = {"pid": old.pid, "exit_code": old.exitcode, "replaced_by": new.pid}
                    log_event(logger, "warning", "front_worker_died", **fields)

        def terminate_all(self) -> None:
            super().terminate_all()
            # As long as this process has it open, the kernel takes connections that no worker will accept any more:
            # clients would wait until the last open request is done, only to be cut off.
            refused = refuse_waiting(listener)
            log_event(logger, "debug", "connections_refused", count=refused)

    # Also for one worker: without a master nothing would replace it, and HUP would end it.
    master = Master(settings, sockets=[listener])
    master.run()
    log_event(logger, "info", "front_stopped", pid=os.getpid())
    failed = any(process.exitcode == STARTUP_FAILURE for process in master.processes)
    return ExitCode.WORKERS_FAILED if failed else ExitCode.OK


def _run_reloading(settings: uvicorn.Config, listener: socket.socket) -> int:
    import uvicorn
    from uvicorn.supervisors import ChangeReload

    ChangeReload(settings, target=uvicorn.Server(settings).run, sockets=[listener]).run()
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())

"""Puts the model server together from a configuration and runs it.

Owns the order of a start: everything that can refuse comes before anything that another process could see.
"""

from __future__ import annotations

import logging
import os
import sys
from enum import IntEnum
from pathlib import Path

from model_worker.guardian import Guardian
from model_worker.launchers import SpawnLauncher
from model_worker.planner import GrowingPlan
from model_worker.preflight import preflight
from model_worker.replica.process import run as run_model_process
from model_worker.server import ModelServer, fresh_epoch
from shared import logs
from shared.config import Config
from shared.processes import raise_open_files_limit, stop_with_parent
from shared.sockets import RunDirectory

logger = logging.getLogger("model_worker")


class ExitCode(IntEnum):
    """What the model server's exit says. `supervisord.conf` starts it again after any other than the last two."""

    OK = 0
    NO_MODEL_LOADED = 70
    """No model can ever be loaded; a new start would only try the same again."""
    CONFIGURATION = 78
    """The configuration, or the machine it is used on, does not allow a start."""


def run_model_server(config_file: Path | None, *, parent_pid: int | None = None) -> int:
    """Runs until stopped, or until `parent_pid`, if given, ends; returns the exit code.

    Raises:
        ConfigurationError: nothing was started.
    """
    if parent_pid is not None:
        stop_with_parent(parent_pid)
    config = Config.load(config_file)
    logs.configure(config.logging.level, config.logging.format, program="model_worker")
    before, now = raise_open_files_limit()
    logs.log_event(logger, "debug", "open_files_limit_raised", before=before, now=now)
    ready = preflight(config)
    for remark in ready.remarks():
        level: logs.Level = "warning" if remark.is_doubtful else "info"
        logs.log_event(logger, level, "plan_remark", about=remark.about, remark=remark.text)
    run_directory = RunDirectory(config.run_directory)
    run_directory.prepare()
    run_directory.lock()
    try:
        run_directory.clean()
        epoch = fresh_epoch()
        guardian = Guardian(epoch)
        guardian.start()
        planner = GrowingPlan(ready, os.environ)
        server = ModelServer(
            ready.broker_settings(),
            planner,
            lambda slot, incarnation: planner.replica_spec(slot, incarnation, run_directory.model_endpoint),
            SpawnLauncher(run_model_process, epoch, guardian),
            guardian,
            run_directory,
            epoch=epoch,
            grace_s=config.server.grace_s,
            devices=planner.devices,
        )
        logs.log_event(logger, "info", "server_started", epoch=epoch, pid=os.getpid(), slots=len(ready.slots))
        stopped = server.run()
        # The core says 1 when no model can be loaded; as a process's exit code that would be any crash of Python's.
        exit_code = ExitCode.NO_MODEL_LOADED if stopped.hopeless else stopped.exit_code
        fields: dict[str, object] = {"exit_code": int(exit_code)}
        if exit_code == ExitCode.NO_MODEL_LOADED:
            # Told in a line of its own, as a refusal before the start is, for people and for `headwaiter serve`.
            print(f"headwaiter: {stopped.reason}", file=sys.stderr)
        else:
            fields["reason"] = stopped.reason
        logs.log_event(logger, "error" if exit_code else "info", "server_stopped", **fields)
        return exit_code
    finally:
        run_directory.release()

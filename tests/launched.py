"""What a launcher test starts: a target for model processes, by recipe, and a way to build its `ReplicaSpec`.

The recipe travels in `RuntimeSpec.options`; what the process has to say it leaves in a JSON file, whole or not at all.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from model_worker.launchers import guard_child
from model_worker.specs import ReplicaSpec, RuntimeSpec
from shared.messages import SlotName
from tests.topology import wait_for

FOREVER_S = 600
REPORT_VARIABLE = "LAUNCHED_REPORT"


def replica_spec(
    report: Path, *, slot: str = "qa/0", incarnation: int = 1, cores: tuple[int, ...] = (), **options: object
) -> ReplicaSpec:
    return ReplicaSpec(
        slot=SlotName(slot),
        incarnation=incarnation,
        endpoint="",
        torch_device="cpu",
        environment={"CUDA_VISIBLE_DEVICES": "GPU-of-this-test", REPORT_VARIABLE: str(report)},
        cores=cores,
        threads=1,
        runtime=RuntimeSpec("qa", "", "", options={"report": str(report), **options}),
        max_batch_size=1,
        max_batch_cost=0,
    )


def read_report(report: Path) -> dict[str, Any]:
    """Waits for what the process has to say."""
    wait_for(report.exists, f"{report.name} is written")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def write_report(report: Path, **facts: object) -> None:
    unfinished = report.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(facts))
    unfinished.rename(report)


def run(spec: ReplicaSpec) -> None:
    """The target: guards itself, starts a family if told to, reports, and then does as `then` says."""
    guard_child(spec)
    options = spec.runtime.options
    family = _start_family() if options.get("family") else {}
    if options.get("without_kernel_guard"):
        # <linux/prctl.h>: PR_SET_PDEATHSIG, off.
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    if options.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_report(
        Path(str(options["report"])),
        pid=os.getpid(),
        group=os.getpgid(0),
        daemon=multiprocessing.current_process().daemon,
        affinity={task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")},
        stdin=os.readlink("/proc/self/fd/0"),
        sigint_ignored=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        threads=[thread.name for thread in threading.enumerate()],
        family=family,
    )
    _then(str(options.get("then", "wait")), options)


def run_and_raise(spec: ReplicaSpec) -> None:
    guard_child(spec)
    raise RuntimeError("the target of this test raises")


def _then(what: str, options: dict[str, object]) -> None:
    if what == "wait":
        time.sleep(FOREVER_S)
    elif what == "hold_gil":
        # Releases no lock: neither a thread nor a handler written in Python runs until it returns.
        ctypes.PyDLL(None).sleep(FOREVER_S)
    elif what == "exit":
        sys.exit(int(str(options["code"])))
    elif what == "signal":
        os.kill(os.getpid(), int(str(options["number"])))
    else:
        raise ValueError(what)


# The pools must live as long as the process.
_POOLS: list[Any] = []


def _start_family() -> dict[str, int]:
    """Processes as a model's own code might start them: pools of both kinds, and one in a session of its own."""
    _POOLS.extend([multiprocessing.get_context("fork").Pool(1), multiprocessing.get_context("spawn").Pool(1)])
    session = subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
    # Nothing ties it to this process but that it is its child.
    bare = subprocess.Popen(["/bin/sleep", str(FOREVER_S)], start_new_session=True, env={})
    fork, spawn = (pool.apply(os.getpid) for pool in _POOLS)
    return {"fork_pool": fork, "spawn_pool": spawn, "session": session.pid, "bare": bare.pid}

"""A launcher target whose module takes its time to import in the model process, as big libraries do.

It says that it is being imported, then waits for a file named `release` beside its report. While it waits it holds the
GIL most of the time, so that no thread can come to the rescue.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from model_worker.specs import ReplicaSpec
from tests import launched

# Set for the replica alone, before its interpreter starts.
if launched.REPORT_VARIABLE in os.environ:
    _report = Path(os.environ[launched.REPORT_VARIABLE])
    launched.write_report(_report.with_suffix(".importing"), pid=os.getpid())
    while not _report.with_name("release").exists():
        ctypes.PyDLL(None).usleep(20_000)


def run(spec: ReplicaSpec) -> None:
    launched.run(spec)

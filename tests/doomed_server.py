"""Stands in for a model server that is about to be killed: starts a guardian and one replica, says so, and waits.

`python -m tests.doomed_server REPORT OPTIONS`, with the options of `launched.replica_spec` as JSON. SIGINT and SIGTERM
are ignored, so that only SIGKILL ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from model_worker.guardian import Guardian
from model_worker.launchers import SpawnLauncher
from tests import launched


def main() -> None:
    report = Path(sys.argv[1])
    options = json.loads(sys.argv[2])
    # Handlers, not SIG_IGN: that one the replica would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    epoch = f"doomed-{os.getpid()}"
    guardian = Guardian(epoch) if options.pop("guardian") else None
    if guardian is not None:
        guardian.start()
    target = launched.run
    if options.pop("slow_import", False):
        # Not at the top: the replica imports this module too, on its way to its target.
        from tests import launched_slowly

        target = launched_slowly.run
    child = SpawnLauncher(target, epoch, guardian).start(launched.replica_spec(report, **options))
    facts = {"server": os.getpid(), "child": child.pid, "guardian": guardian.pid if guardian else 0}
    launched.write_report(report.with_suffix(".server"), **facts)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()

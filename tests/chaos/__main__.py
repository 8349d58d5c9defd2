"""Destroys a service for as long as you like: `python -m tests.chaos --minutes 20 --seed 7`.

Faults are drawn from a seed, with a load of checking clients all the time; sometimes the next comes before the service
has recovered from the last. At the end the ledger; the exit code is 1 if a promise was broken. `--recovery` measures
how long it takes from a kill to the next answer instead.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import recovery
from tests.chaos.clients import Clients
from tests.chaos.faults import BY_NAME, FAULTS, Fault, Scene, inject
from tests.chaos.ledger import Ledger
from tests.chaos.subject import Subject

# The mean pause between two faults, and how often the next comes without waiting for the end of the last.
PAUSE_S = 2.0
OVERLAP = 0.3


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and of what the clients ask (default: 0)")
    parser.add_argument("--clients", type=int, default=12, help="that ask all the time (default: 12)")
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), help="these faults alone")
    parser.add_argument("--recovery", action="store_true", help="measure times of recovery instead")
    arguments = parser.parse_args(command_line)
    # So that the service is stopped as well when this is told to stop.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.recovery:
        print(recovery.report())
        return 0
    faults = [BY_NAME[name] for name in arguments.only] if arguments.only else list(FAULTS)
    ledger = Ledger()
    with Subject(small_disk=True) as subject:
        with Clients(subject.port, ledger, count=arguments.clients, seed=arguments.seed) as clients:
            scene = Scene(subject, clients, ledger, random.Random(arguments.seed))
            stuck = destroy(scene, faults, arguments.minutes * 60)
        starts = subject.starts
        if ledger.broken or stuck:
            log = Path(tempfile.gettempdir(), f"chaos-{arguments.seed}.log")
            log.write_text(subject.log())
            print(f"the service's log is in {log}", file=sys.stderr)
    print(ledger.text())
    print(
        f"seed {arguments.seed}: `headwaiter serve` was started {starts} times; broken promises: {len(ledger.broken)}"
    )
    for line in [*ledger.broken[:50], *stuck]:
        print(line, file=sys.stderr)
    return 1 if ledger.broken or stuck else 0


def destroy(scene: Scene, faults: Sequence[Fault], seconds: float) -> list[str]:
    """Injects faults until the time is over; returns what did not recover."""
    stuck: list[str] = []
    under_way: list[threading.Thread] = []
    end_s = time.monotonic() + seconds
    next_report_s = 0.0
    # Each kind once before any comes again.
    drawn: list[Fault] = []

    def run(fault: Fault) -> None:
        try:
            inject(fault, scene)
        except Exception as error:
            # A thread's own boundary: told at the end, with everything else that was broken.
            stuck.append(f"{fault.name}: {type(error).__name__}: {error}")

    while time.monotonic() < end_s and not stuck:
        drawn = drawn or scene.chance.sample(faults, len(faults))
        thread = threading.Thread(target=run, args=[drawn.pop()], name="fault")
        thread.start()
        under_way.append(thread)
        if scene.chance.random() >= OVERLAP or sum(other.is_alive() for other in under_way) > 1:
            for other in under_way:
                other.join()
            under_way.clear()
        time.sleep(scene.chance.expovariate(1 / PAUSE_S))
        if time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + 30
            left_s = max(0.0, end_s - time.monotonic())
            told = f"{scene.ledger.sent()} requests, {len(scene.ledger.broken)} broken promises, {left_s:.0f} s left"
            print(told, flush=True)
    for thread in under_way:
        thread.join()
    return stuck


if __name__ == "__main__":
    sys.exit(main())

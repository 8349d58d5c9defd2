"""From the start of the first process to the first answer, with nothing but files in the page cache."""

from __future__ import annotations

from benchmarks.run import Run
from benchmarks.systems import HEADWAITER, echo_systems, embedding_systems

LOAD = "start"


def measure(run: Run) -> None:
    wanted = {"echo": echo_systems(), "minilm": embedding_systems()}
    for number in range(1, min(run.rounds, 2) + 1):
        for case, systems in wanted.items():
            for system in run.taking_part(systems):
                if "batches" in system.name or (system.fronts == 1 and not system.environment):
                    continue  # it starts as it does without batches, or with more fronts
                with run.all_running(LOAD, [system]) as endpoints:
                    for endpoint in endpoints.values():
                        name = system.name if system.environment else HEADWAITER
                        run.record(LOAD, case, name, number, {"start_s": endpoint.start_s})

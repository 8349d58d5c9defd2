"""One run of the benchmarks: what it was asked for, and where its samples go.

Owns the recording, which is on disk after every sample, and what happens to a peer that does not work: it is left out
and named. headwaiter failing ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import systems
from benchmarks.load_generator import LoadFailed
from benchmarks.summary import Results, Sample
from benchmarks.systems import Endpoint, System


@dataclass(slots=True)
class Run:
    results: Results
    file: Path
    rounds: int
    quick: bool
    peers: frozenset[str]
    """The environments of the peers that take part."""
    start_s: float = field(default_factory=time.monotonic)

    def seconds(self, usual: float, quick: float = 1.0) -> float:
        """How long one window lasts."""
        return quick if self.quick else usual

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.start_s), 60)
        print(f"[{minutes:2}:{seconds:02}] {text}", flush=True)

    def record(self, load: str, case: str, system: str, number: int, values: dict[str, float]) -> None:
        self.results.samples.append(Sample(load, case, system, number, values))
        self.results.save(self.file)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.say(f"{load} {case} round {number}  {system}: {shown}")

    def leave_out(self, load: str, text: str) -> None:
        """Something that belongs to the load was not measured, and the reader is told."""
        self.results.notes.append(f"{load}: {text}")
        self.results.save(self.file)
        self.say(f"{load}: left out: {text}")

    @contextmanager
    def all_running(self, load: str, wanted: Sequence[System]) -> Iterator[dict[System, Endpoint]]:
        """Those of the systems that take part and start, side by side; they cost next to nothing while nobody asks."""
        endpoints: dict[System, Endpoint] = {}
        with ExitStack() as stack:
            for system in self.taking_part(wanted):
                try:
                    if system.environment:
                        self.install(system.environment)
                        self.say(f"{load}: starts {system.name}")
                    endpoints[system] = stack.enter_context(system.running())
                except LoadFailed as error:
                    if not system.environment:
                        raise
                    self.leave_out(load, f"{system.name} ({str(error).splitlines()[0]})")
            yield endpoints

    def install(self, environment: str) -> None:
        """
        Raises:
            LoadFailed: pip could not install it.
        """
        if not systems.environment_python(environment).exists():
            self.say(f"installs the environment of {environment}")
        systems.install(environment)

    def taking_part(self, wanted: Sequence[System]) -> list[System]:
        return [system for system in wanted if not system.environment or system.environment in self.peers]

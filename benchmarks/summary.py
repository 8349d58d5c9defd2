"""Samples and what is made of them: medians, spreads, ratios.

Owns the file of results. Pure but for `Results.load` and `Results.save`.

A ratio of two systems is computed round by round, because what disturbs the machine disturbs neighbours in time alike,
and then summarised like any other figure.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Sample:
    """What one system did in one round of one case. The names of values end with their units."""

    load: str
    case: str
    system: str
    round: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of several rounds, and the lowest and highest of them."""

    median: float
    low: float
    high: float


def figure(values: Iterable[float]) -> Figure | None:
    """None where there are no values."""
    ordered = sorted(values)
    return Figure(statistics.median(ordered), ordered[0], ordered[-1]) if ordered else None


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0.0 to 1.0) of the values lie, at least.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values, so no percentile")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def slope_per_1000(points: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through (count, value) points by least squares, for each 1,000 of the count."""
    slope, _ = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return slope * 1000


@dataclass(slots=True)
class Results:
    """Everything that one run has measured so far."""

    about: dict[str, Any] = field(default_factory=dict)
    """The machine, the versions, the settings."""
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""
    done: list[str] = field(default_factory=list)
    """Loads that were measured to their end."""

    @classmethod
    def load(cls, file: Path) -> Self:
        held = json.loads(file.read_text())
        samples = [Sample(**sample) for sample in held["samples"]]
        return cls(held["about"], samples, held["notes"], held["done"])

    def save(self, file: Path) -> None:
        """Replaces the file in one step, so that a reader, or a run that is ended, never leaves half of one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        rounded = [
            asdict(sample) | {"values": {name: float(f"{value:.5g}") for name, value in sample.values.items()}}
            for sample in self.samples
        ]
        lines = ",\n  ".join(json.dumps(sample) for sample in rounded)
        head = json.dumps({"about": self.about, "notes": self.notes, "done": self.done}, indent=1)
        fresh = file.with_suffix(".new")
        fresh.write_text(f'{head[:-2]},\n "samples": [\n  {lines}\n ]\n}}\n')
        os.replace(fresh, file)

    def forget(self, load: str) -> None:
        """Drops what an earlier run has measured of this load."""
        self.samples = [sample for sample in self.samples if sample.load != load]
        self.done = [name for name in self.done if name != load]
        self.notes = [note for note in self.notes if not note.startswith(f"{load}: ")]

    # --- asking --------------------------------------------------------------------------------------------------

    def by_round(self, load: str, case: str, system: str, value: str) -> dict[int, float]:
        return {
            sample.round: sample.values[value]
            for sample in self.samples
            if (sample.load, sample.case, sample.system) == (load, case, system) and value in sample.values
        }

    def figure(self, load: str, case: str, system: str, value: str) -> Figure | None:
        return figure(self.by_round(load, case, system, value).values())

    def ratio(
        self, load: str, case: str, value: str, system: str, other: str, *, other_case: str | None = None
    ) -> Figure | None:
        """`system` over `other`, round by round; None where one of them was not measured."""
        ours = self.by_round(load, case, system, value)
        theirs = self.by_round(load, case if other_case is None else other_case, other, value)
        return figure(ours[number] / theirs[number] for number in ours if theirs.get(number))

    def systems(self, load: str) -> list[str]:
        """In the order they were first measured."""
        return list(dict.fromkeys(sample.system for sample in self.samples if sample.load == load))

    def cases(self, load: str) -> list[str]:
        return list(dict.fromkeys(sample.case for sample in self.samples if sample.load == load))

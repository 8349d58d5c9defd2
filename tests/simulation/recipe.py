"""What a world is made from: its seed, and what is left out of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """The same recipe gives the same world. Leaving something out changes nothing else that was drawn from the seed."""

    seed: int
    skipped: frozenset[int] = frozenset()
    """Numbers of requests that are never sent."""
    spared: frozenset[str] = frozenset()
    """Names of faults that do not happen."""
    fronts_max: int = 3
    models_max: int = 2
    replicas_max: int = 3
    validate_each_turn: bool = False

    def __str__(self) -> str:
        return (
            f"seed {self.seed}, at most {self.fronts_max} fronts, {self.models_max} models of {self.replicas_max} "
            f"replicas, without {len(self.skipped)} requests and {len(self.spared)} faults"
        )

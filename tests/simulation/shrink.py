"""Makes a failing world smaller: fewer fronts, replicas, requests and faults, while it still breaks the same promise.

Whatever is left out changes nothing else that was drawn from the seed, but it changes what happens; so each smaller
world is run, and taken only if it fails as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tests.simulation.promises import Violation
from tests.simulation.recipe import Recipe
from tests.simulation.world import World

RUNS_MAX = 1000

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """How a world has failed."""

    error: Exception
    at_s: float
    requests: tuple[int, ...]
    """Numbers of those that were sent before."""
    faults: tuple[str, ...]
    """Names of those that happened before."""

    @property
    def kind(self) -> object:
        """The same for failures that differ in names and numbers alone."""
        if isinstance(self.error, Violation):
            return self.error.promise
        return type(self.error), re.sub(r"[0-9a-f]{32}|[0-9.]+", "#", str(self.error))


def fail(recipe: Recipe) -> Failure | None:
    """Runs the world; None if it keeps all its promises."""
    world = World(recipe)
    try:
        world.run()
    except Exception as error:  # a crash of the core is a failure like any other
        sent = range(1, world.requests_taken + 1)
        requests = tuple(number for number in sent if number not in recipe.skipped)
        return Failure(error, world.clock.now_s, requests, tuple(world.faults.struck))
    return None


def shrink(recipe: Recipe, runs_max: int = RUNS_MAX) -> tuple[Recipe, Failure]:
    """The smallest world found that still fails in the same way, and its failure.

    Raises:
        ValueError: the world does not fail.
    """
    # Invariants are looked at in each turn, so that failures show where they begin.
    search = _Search(replace(recipe, validate_each_turn=True), runs_max)
    while search.go_on():
        pass
    return search.recipe, search.failure


class _Search:
    def __init__(self, recipe: Recipe, runs_max: int) -> None:
        failure = fail(recipe)
        if failure is None:
            raise ValueError(f"{recipe} keeps all its promises")
        self.recipe, self.failure = recipe, failure
        self._runs_left = runs_max

    def go_on(self) -> bool:
        """Leaves out what it can; False if that was nothing, or enough was tried."""
        before = self.recipe
        for part in ("models_max", "fronts_max", "replicas_max"):
            while getattr(self.recipe, part) > 1 and self._take(
                replace(self.recipe, **{part: getattr(self.recipe, part) - 1})
            ):
                pass
        skipped, spared = self.recipe.skipped, self.recipe.spared
        self._minimise(self.failure.requests, lambda gone: replace(self.recipe, skipped=skipped | gone))
        self._minimise(self.failure.faults, lambda gone: replace(self.recipe, spared=spared | gone))
        return self.recipe != before and self._runs_left > 0

    def _minimise(self, items: Sequence[T], without: Callable[[frozenset[T]], Recipe]) -> None:
        """Leaves out halves, then quarters, and so on, as far as the world still fails."""
        gone: frozenset[T] = frozenset()
        size = len(items)
        while size >= 1:
            for start in range(0, len(items), size):
                more = gone | frozenset(items[start : start + size])
                if more != gone and self._take(without(more)):
                    gone = more
            size //= 2

    def _take(self, smaller: Recipe) -> bool:
        if self._runs_left <= 0:
            return False
        self._runs_left -= 1
        failure = fail(smaller)
        if failure is None or failure.kind != self.failure.kind:
            return False
        self.recipe, self.failure = smaller, failure
        return True

"""How many cells of a dense cache a set of sequences will need at most, before they have run. Pure arithmetic.

A dense cache is as wide as its longest row, so what a sequence costs depends on its neighbours: a short answer beside a
long one takes as many columns as the long one does. Refuses to estimate: what is admitted always fits, to the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """One row from now on: it holds `tokens` and one more after each of at most `steps` steps, then it is gone."""

    tokens: int
    steps: int


def peak_cells(demands: Iterable[Demand]) -> int:
    """The largest rows x columns at any time, if every row goes on to its end.

    Rows that end early, or join later than they said, only make it less. The batch is largest just before some row's
    last step, so these are the only times to look at: O(rows).
    """
    # From the row that stays longest to the one that leaves first: whoever is before also stays at least as long.
    peak = longest_tokens = 0
    longest_first = sorted(demands, key=lambda demand: demand.steps, reverse=True)
    for rows, demand in enumerate(longest_first, start=1):
        longest_tokens = max(longest_tokens, demand.tokens)
        peak = max(peak, rows * (longest_tokens + demand.steps))
    return peak

"""Beginnings that prompts have in common, such as a system prompt: read once, then copied.

Owns which beginnings are kept, in one piece of memory that is taken once: what two of the last prompts began with. A
new one takes the place of the oldest. Of a prompt that begins like one of them, only the rest is read: in a causal
model a token's keys and values depend on what stands before it and on nothing else.

Refuses to know models and rows: keys and values come from a grid, and go to one. Main thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model_worker.runtimes.continuous.grid import LayerShape

# Less is read as soon as it is looked for.
_TOKENS_MIN = 32
# Prompts that a new one is compared with.
_RECENT = 32


@dataclass(frozen=True, slots=True)
class _Kept:
    ids: list[int]
    start: int
    """Its place in the memory; it has as many as it has tokens."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is known of one prompt: valid until the next `note`."""

    tokens: int
    cells: list[torch.Tensor]
    """Keys and values, layer by layer, of its first `tokens`, each [heads, tokens, size]."""


UNKNOWN = Beginning(0, [])


class Prefixes:
    """Room for `tokens` tokens; with 0, nothing is kept."""

    def __init__(self, layer_shapes: Sequence[LayerShape], tokens: int, device: torch.device) -> None:
        self._tokens = tokens
        self._memory = [
            torch.empty((heads, tokens, size), dtype=shape.dtype, device=device)
            for shape in layer_shapes
            for heads, size in (shape.keys, shape.values)
        ]
        self._kept: list[_Kept] = []
        self._next = 0
        self._recent: deque[list[int]] = deque(maxlen=_RECENT)

    def find(self, prompt_ids: list[int]) -> Beginning:
        """As much as is known of a prompt, its last token excepted: what comes after that is always computed."""
        best, tokens = self._best(prompt_ids)
        tokens = min(tokens, len(prompt_ids) - 1)
        if best is None or tokens < _TOKENS_MIN:
            return UNKNOWN
        return Beginning(tokens, [own[:, best.start : best.start + tokens] for own in self._memory])

    def note(self, prompt_ids: list[int], cells: Sequence[torch.Tensor]) -> None:
        """Takes note of a prompt that has been read, and of what it has in common with an earlier one.

        `cells` are as in `Beginning`, for all of its tokens.
        """
        if not self._tokens:
            return
        shared = max((_common(prompt_ids, other) for other in self._recent), default=0)
        self._recent.append(prompt_ids)
        shared = min(shared, self._tokens)
        if shared >= _TOKENS_MIN and shared > self._best(prompt_ids)[1]:
            self._keep(prompt_ids[:shared], cells)

    def _best(self, prompt_ids: list[int]) -> tuple[_Kept | None, int]:
        """The one that has most in common with a prompt, and how many tokens that is."""
        return max(((kept, _common(prompt_ids, kept.ids)) for kept in self._kept), key=_tokens_of, default=(None, 0))

    def _keep(self, ids: list[int], cells: Sequence[torch.Tensor]) -> None:
        start = self._next if self._next + len(ids) <= self._tokens else 0
        end = start + len(ids)
        # Before anything is overwritten, so that a failure in between leaves nothing wrong.
        self._kept = [kept for kept in self._kept if kept.end <= start or kept.start >= end]
        for own, new in zip(self._memory, cells, strict=True):
            own[:, start:end] = new[:, : len(ids)]
        self._kept.append(_Kept(ids, start))
        self._next = end


def _tokens_of(pair: tuple[_Kept | None, int]) -> int:
    return pair[1]


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with; compares slices, which costs nothing beside a loop over tokens."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Padding token ids on the main thread, where no tokenizer may be touched, and how much one forward should hold.

Refuses to decide which sequences share a batch; that is `batching.split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

# Padded tokens of one forward where the configuration names no number: enough to keep the device busy, little enough
# that the activations of a base-sized encoder stay below 2 GiB on a CPU.
CPU_BATCH_COST = 8_192
ACCELERATOR_BATCH_COST = 65_536
# Length of the warm-up's longest request. On an accelerator it should meet the largest buffers; a CPU keeps none.
_CPU_WARM_UP_TOKENS = 64
_ACCELERATOR_WARM_UP_TOKENS = 512


def default_batch_cost(device: str) -> int:
    """Padded tokens one forward may take on `device`."""
    return CPU_BATCH_COST if torch.device(device).type == "cpu" else ACCELERATOR_BATCH_COST


def warm_up_tokens(device: str, limit_tokens: int | None) -> int:
    """Tokens of the longest request to warm up with."""
    wanted = _CPU_WARM_UP_TOKENS if torch.device(device).type == "cpu" else _ACCELERATOR_WARM_UP_TOKENS
    return min(wanted, limit_tokens or wanted)


def pad(rows: Sequence[Sequence[int]], value: int, side: Literal["left", "right"]) -> torch.Tensor:
    """int64 [rows, longest], filled up with `value` on `side`."""
    longest = max(len(row) for row in rows)
    padded = torch.full((len(rows), longest), value, dtype=torch.long)
    for index, row in enumerate(rows):
        columns = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        padded[index, columns] = torch.tensor(row, dtype=torch.long)
    return padded


def attention_mask(lengths: Sequence[int], side: Literal["left", "right"]) -> torch.Tensor:
    """int64 [rows, longest]: 1 where a row of `pad` holds its own tokens."""
    return pad([[1] * length for length in lengths], 0, side)

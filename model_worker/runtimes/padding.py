"""Padding token ids on the main thread, where no tokenizer may be touched, and how much one forward should hold.

Refuses to decide which sequences share a batch; that is `batching.split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

# Padded tokens of one forward where the configuration names no number. On a CPU more than this makes an encoder no
# faster: its activations leave the caches, and short texts wait padded beside long ones.
_CPU_BATCH_COST = 1_024
# A step of decoding reads all weights whatever the batch, so there more rows are nearly free.
_CPU_GENERATION_BATCH_COST = 8_192
_ACCELERATOR_BATCH_COST = 65_536
# Tokens of one request with many texts: more would keep everybody else waiting for too long.
_CPU_REQUEST_COST_MAX = 524_288
_ACCELERATOR_REQUEST_COST_MAX = 4_194_304
# Length of the warm-up's longest request. On an accelerator it should meet the largest buffers; a CPU keeps none.
_CPU_WARM_UP_TOKENS = 64
_ACCELERATOR_WARM_UP_TOKENS = 512
# Lengths to measure with how much one forward should hold: what is asked most, and what is long.
_CPU_SAMPLE_TOKENS = (64, 256)
_ACCELERATOR_SAMPLE_TOKENS = (128, 512)


def default_batch_cost(device: str, *, generates: bool = False) -> int:
    """Padded tokens one forward may take on `device`."""
    if torch.device(device).type != "cpu":
        return _ACCELERATOR_BATCH_COST
    return _CPU_GENERATION_BATCH_COST if generates else _CPU_BATCH_COST


def request_cost_max(device: str) -> int:
    """Tokens that the texts of one request may have together."""
    return _CPU_REQUEST_COST_MAX if torch.device(device).type == "cpu" else _ACCELERATOR_REQUEST_COST_MAX


def warm_up_tokens(device: str, limit_tokens: int | None) -> int:
    """Tokens of the longest request to warm up with."""
    wanted = _CPU_WARM_UP_TOKENS if torch.device(device).type == "cpu" else _ACCELERATOR_WARM_UP_TOKENS
    return min(wanted, limit_tokens or wanted)


def sample_tokens(device: str, limit_tokens: int | None) -> tuple[int, ...]:
    """Tokens of the requests to measure with, without those that the model does not read."""
    lengths = _CPU_SAMPLE_TOKENS if torch.device(device).type == "cpu" else _ACCELERATOR_SAMPLE_TOKENS
    return tuple(dict.fromkeys(min(length, limit_tokens or length) for length in lengths))


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

"""Sequences laid end to end in one row, so that a forward computes no padding.

Owns the row, the positions of its tokens, and an attention, registered with transformers, in which each sequence sees
itself alone; every other layer treats tokens one by one and need not know where a sequence ends. Sequences of one
length go through the attention together. Refuses, by `CannotPack`, models whose attention it does not understand, and
to judge whether what comes out is right: that is for `encoder.py`, which compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

NAME = "headwaiter_packed"
"""Of the attention, among those of transformers."""


class CannotPack(Exception):
    """Why sequences in one row would not be computed as they are alone."""


@dataclass(frozen=True, slots=True)
class Block:
    """What was computed for sequences that stand in one tensor."""

    positions: list[int]
    """Of these sequences among those that were given."""
    output: torch.Tensor
    """[sequences, tokens, …]"""
    mask: torch.Tensor
    """int64 [sequences, tokens]: 1 for what belongs to a sequence, which begins in the first column."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours of one length in a row."""

    count: int
    length: int


@dataclass(slots=True)
class _Row:
    """The runs of one row, from its first token to its last; every attention of the forward is given it."""

    runs: list[_Run]
    tokens: list[int]
    """Of each run."""
    was_attended: bool = False
    """An attention of the model has asked where the sequences are."""


class PackedForward:
    """Calls a model on rows of sequences, between `begin` and `undo`. Main thread only.

    Raises:
        CannotPack: the model cannot be told where the tokens of a row stand in their sequences.
    """

    def __init__(self, model: Any, read: Callable[[Any], torch.Tensor], *, takes_token_types: bool) -> None:
        """`read` takes [rows, tokens, …] out of what the model returns."""
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise CannotPack("it takes no position_ids")
        self.row_tokens_max: int | None = None
        """A row with more tokens is computed in parts."""
        self._model = model
        self._read = read
        self._takes_token_types = takes_token_types
        self._uncounted_id = uncounted_id(model)
        self._former_attention: str = model.config._attn_implementation

    def begin(self) -> None:
        """Gives the model the attention for rows; from now on all its forwards go through this."""
        self._model.set_attn_implementation(NAME)

    def undo(self) -> None:
        """Gives the model its own attention back."""
        self._model.set_attn_implementation(self._former_attention)

    def __call__(self, sequences: Sequence[list[int]], type_ids: Sequence[list[int]] | None) -> list[Block]:
        """
        Raises:
            CannotPack: the model's attention does something that this one does not know.
        """
        order = sorted(range(len(sequences)), key=lambda position: len(sequences[position]))
        return [
            block for part in self._parts(order, sequences) for block in self._compute_row(part, sequences, type_ids)
        ]

    def _parts(self, order: list[int], sequences: Sequence[list[int]]) -> Iterator[list[int]]:
        part: list[int] = []
        tokens = 0
        for position in order:
            length = len(sequences[position])
            if part and self.row_tokens_max is not None and tokens + length > self.row_tokens_max:
                yield part
                part, tokens = [], 0
            part.append(position)
            tokens += length
        yield part

    def _compute_row(
        self, order: list[int], sequences: Sequence[list[int]], type_ids: Sequence[list[int]] | None
    ) -> list[Block]:
        row = _row([len(sequences[position]) for position in order])
        ids = _end_to_end(sequences, order)
        inputs = {
            "input_ids": ids,
            # Without one some models make up their own, and guess from the positions where sequences end.
            "attention_mask": torch.ones_like(ids),
            "position_ids": self._positions(ids, row),
        }
        if self._takes_token_types:
            inputs["token_type_ids"] = torch.zeros_like(ids) if type_ids is None else _end_to_end(type_ids, order)
        output = self._read(self._model(**inputs, packed_row=row))
        if not row.was_attended:
            raise CannotPack("its attention is not one of those that transformers lets others replace")
        if output.shape[1] != ids.shape[1]:
            raise ValueError(f"it made outputs for {output.shape[1]} tokens out of {ids.shape[1]}")
        blocks = []
        places = iter(order)
        for run, own in zip(row.runs, _by_run(output, row, 1), strict=True):
            shape = (run.count, run.length)
            block = own.view(*shape, *output.shape[2:])
            blocks.append(Block([next(places) for _ in range(run.count)], block, torch.ones(shape, dtype=torch.long)))
        return blocks

    def _positions(self, ids: torch.Tensor, row: _Row) -> torch.Tensor:
        if self._uncounted_id is None:
            return torch.cat([torch.arange(run.length).repeat(run.count) for run in row.runs]).unsqueeze(0)
        counted = ids.ne(self._uncounted_id).long()
        numbers = [
            own.view(run.count, run.length).cumsum(1).view(1, -1)
            for run, own in zip(row.runs, _by_run(counted, row, 1), strict=True)
        ]
        return torch.cat(numbers, dim=1) * counted + self._uncounted_id


def uncounted_id(model: Any) -> int | None:
    """The padding id of models that count the positions behind it, leaving it out (RoBERTa and its kin); else None."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return module.padding_idx
    return None


def _row(lengths: Sequence[int]) -> _Row:
    runs = [_Run(len(list(neighbours)), length) for length, neighbours in groupby(lengths)]
    return _Row(runs, [run.count * run.length for run in runs])


def _end_to_end(rows: Sequence[list[int]], order: list[int]) -> torch.Tensor:
    return torch.tensor([list(chain.from_iterable(rows[position] for position in order))])


@dataclass(slots=True)
class _SequenceMask:
    """Who sees whom, as the model wants it, within a sequence of any length; stands where a tensor usually does."""

    sees: Callable[..., Any]
    """The model's rule, for places counted from the beginning of a sequence: (batch, head, who, whom) to bool."""
    by_length: dict[int, tuple[torch.Tensor | None, bool]] = field(default_factory=dict)

    def of(self, length: int) -> tuple[torch.Tensor | None, bool]:
        """bool [1, 1, length, length] or None for no mask, and whether each sees what is before it alone."""
        if self.sees is bidirectional_mask_function:
            return None, False
        if self.sees is causal_mask_function:
            return None, True
        if length not in self.by_length:
            places = torch.arange(length)
            first = torch.zeros(1, 1, 1, 1, dtype=torch.long)
            mask = self.sees(first, first, places[None, None, :, None], places[None, None, None, :])
            self.by_length[length] = (None if mask.all() else mask.expand(1, 1, length, length), False)
        return self.by_length[length]


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    use_vmap: bool = False,
    **_: Any,
) -> _SequenceMask:
    """What transformers asks for a mask; the names are its own."""
    if batch_size != 1 or q_length != kv_length or use_vmap:
        raise CannotPack("its attention has a mask of its own kind")
    return _SequenceMask(mask_function)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _SequenceMask | torch.Tensor | None,
    *,
    packed_row: _Row | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in place of its own attention: [1, heads, tokens, dim] to [1, tokens, heads, dim]."""
    if packed_row is None:
        raise CannotPack("it does not hand to its attention what its forward is given")
    if position_bias is not None or isinstance(attention_mask, torch.Tensor):
        raise CannotPack("its attention adds something of its own to each pair of tokens")
    packed_row.was_attended = True
    parts = []
    mask = None
    for run, own_query, own_key, own_value in zip(
        packed_row.runs,
        _by_run(query, packed_row, 2),
        _by_run(key, packed_row, 2),
        _by_run(value, packed_row, 2),
        strict=True,
    ):
        if attention_mask is not None:
            mask, is_causal = attention_mask.of(run.length)
        part, _ = sdpa_attention_forward(
            module,
            _apart(own_query, run),
            _apart(own_key, run),
            _apart(own_value, run),
            mask,
            is_causal=is_causal,
            **keywords,
        )
        parts.append(part if run.count == 1 else part.reshape(1, -1, *part.shape[2:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None


def _by_run(tensor: torch.Tensor, row: _Row, dim: int) -> Sequence[torch.Tensor]:
    """Views of the tokens of each run, which stand along `dim`."""
    return (tensor,) if len(row.runs) == 1 else torch.split_with_sizes(tensor, row.tokens, dim)


def _apart(tensor: torch.Tensor, run: _Run) -> torch.Tensor:
    """[1, heads, tokens, dim] to [sequences, heads, length, dim] without a copy."""
    if run.count == 1:
        return tensor
    _, heads, _, size = tensor.shape
    return tensor.view(heads, run.count, run.length, size).transpose(0, 1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)

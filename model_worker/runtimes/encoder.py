"""One forward of a model over sequences of any lengths, without padding where that is proven right.

Owns the choice between two ways: sequences padded to the longest, or laid end to end (`packing.py`). The second is
taken on a CPU alone, after its outputs agreed with those of the first, token for token; otherwise `padding` says why
not. On an accelerator one forward over padded sequences is faster than one attention for each. Refuses to know what is
made of the outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from model_worker.runtimes import loading, padding
from model_worker.runtimes.packing import Block, CannotPack, PackedForward, uncounted_id
from model_worker.runtimes.transfer import to_device
from shared.logs import log_event

logger = logging.getLogger(__name__)

# Lengths to try it with: a single token, equal ones, and one that is longer than the windows of local attention.
_TRIED_SHORT_TOKENS = (1, 19, 2, 7, 7)
_TRIED_LONG_TOKENS = 131
# A row may be longer than any sequence that the model reads, and some models take offence: it is tried with more
# tokens than they have positions, up to this number, for the time it takes. With more positions, no row gets longer.
_TRIED_POSITIONS_MAX = 1_024
# How far outputs may be apart, as a share of their usual size. Rounding alone makes up a tenth of it.
_TOLERANCES = {torch.float32: 3e-5, torch.float16: 0.02, torch.bfloat16: 0.08}


class Encoder:
    """Main thread only."""

    def __init__(
        self,
        model: Any,
        read: Callable[[Any], torch.Tensor],
        *,
        pad_token_id: int,
        takes_token_types: bool,
    ) -> None:
        """`read` takes [sequences, tokens, …] out of what the model returns."""
        self.padding = "to the longest of a batch"
        """How sequences of different lengths share a forward, for `headwaiter status`."""
        self._model = model
        self._read = read
        self._pad_token_id = pad_token_id
        self._takes_token_types = takes_token_types
        self._packed: PackedForward | None = None

    @property
    def pads(self) -> bool:
        return self._packed is None

    def compute(self, sequences: Sequence[list[int]], type_ids: Sequence[list[int]] | None = None) -> list[Block]:
        """The outputs of every token. Without `type_ids` all are of kind 0, for models that know kinds."""
        compute = self._compute_padded if self._packed is None else self._packed
        return compute(sequences, type_ids)

    def stop_padding(self, name: str, tokenizer: Any) -> None:
        """Goes over to rows without padding if they are proven right; else says in the log why model `name` pads."""
        reason = self._why_padded(tokenizer)
        if reason:
            self.padding = f"to the longest of a batch: {reason}"
            log_event(logger, "info", "sequences_padded", model=name, reason=reason)
        else:
            self.padding = "none"

    def _why_padded(self, tokenizer: Any) -> str:
        """Empty if nothing speaks against packing any more, which is then in use."""
        if self._model.device.type != "cpu":
            return "without padding on a CPU only"
        if self._model._compiled_call_impl is not None:
            return "a compiled model would be compiled anew for each mix of lengths"
        tolerance = _TOLERANCES.get(self._model.dtype)
        if tolerance is None:
            return f"not tried with {str(self._model.dtype).removeprefix('torch.')}"
        limit = loading.position_limit(self._model, None)
        short, long, copies = self._tried(tokenizer, limit)
        sequences = [*short, *([long] * copies)]
        try:
            packed = PackedForward(self._model, self._read, takes_token_types=self._takes_token_types)
        except CannotPack as error:
            return str(error)
        try:
            with torch.inference_mode(), loading.quiet_libraries():
                expected = _each(self._compute_padded(short, None))
                expected += _each(self._compute_padded([long], None)) * copies
                packed.begin()
                got = _each(packed(sequences, None))
                reason = "" if _agree(got, expected, tolerance) else "without it the results would differ"
        except CannotPack as error:
            reason = str(error)
        except Exception as error:
            # Whatever the model's code thinks of such a row; it does well with padding.
            reason = f"without it, {type(error).__name__}: {loading.one_line(error)}"
        if reason:
            packed.undo()
        else:
            packed.row_tokens_max = None if limit is None or limit < sum(map(len, sequences)) else limit
            self._packed = packed
        return reason

    def _tried(self, tokenizer: Any, limit: int | None) -> tuple[list[list[int]], list[int], int]:
        """Short sequences, a long one, and how many copies of it belong into a row; ids are all over the vocabulary."""
        longest = min(_TRIED_LONG_TOKENS, limit or _TRIED_LONG_TOKENS)
        short_lengths = [min(length, longest) for length in _TRIED_SHORT_TOKENS]
        more_than = limit if limit is not None and limit <= _TRIED_POSITIONS_MAX else 0
        copies = 1 + max(0, more_than - sum(short_lengths)) // longest
        known = loading.known_token_ids(self._model, tokenizer)
        # Where they mean something to a model, such as that a position is not counted, that has to hold in a row.
        marks = [*tokenizer.all_special_ids, uncounted_id(self._model)]
        marks = [mark for mark in marks if mark is not None and mark < known]

        def sequence(number: int, length: int) -> list[int]:
            ids = [(place * place * 31 + place * 17 + number * 101 + 7) % known for place in range(length)]
            if length > 2 * len(marks) + 1:
                ids[1 : 1 + 2 * len(marks) : 2] = marks
            return ids

        short = [sequence(number, length) for number, length in enumerate(short_lengths)]
        return short, sequence(len(short), longest), copies

    def _compute_padded(self, sequences: Sequence[list[int]], type_ids: Sequence[list[int]] | None) -> list[Block]:
        device = self._model.device
        lengths = [len(sequence) for sequence in sequences]
        # On the right whatever the tokenizer would do: there no position moves, and no token looks ahead at it.
        mask = to_device(padding.attention_mask(lengths, "right"), device)
        inputs = {
            "input_ids": to_device(padding.pad(sequences, self._pad_token_id, "right"), device),
            "attention_mask": mask,
        }
        if self._takes_token_types:
            inputs["token_type_ids"] = (
                torch.zeros_like(inputs["input_ids"])
                if type_ids is None
                else to_device(padding.pad(type_ids, 0, "right"), device)
            )
        output = self._read(self._model(**inputs))
        if output.shape[1] != max(lengths):
            raise ValueError(f"it made outputs for {output.shape[1]} tokens out of {max(lengths)}")
        return [Block(list(range(len(sequences))), output, mask)]


def _each(blocks: Sequence[Block]) -> list[torch.Tensor]:
    """float32 [tokens, …] for each sequence, in the order in which they were given."""
    found: dict[int, torch.Tensor] = {}
    for block in blocks:
        lengths = block.mask.sum(1).tolist()
        for position, output, length in zip(block.positions, block.output, lengths, strict=True):
            found[position] = output[:length].float()
    return [found[position] for position in range(len(found))]


def _agree(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> bool:
    usual = torch.cat([output.flatten() for output in expected]).square().mean().sqrt()
    return all(
        # A number that is none agrees with nothing.
        bool(((one - other).abs() <= tolerance * (usual + other.abs())).all())
        for one, other in zip(got, expected, strict=True)
    )

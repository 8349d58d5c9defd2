"""Text generation step by step: a model's sequences in an engine for continuous batching.

Owns the answers that grow, and the choice of an engine's size. Refuses prompts and parameters: those are checked.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch

from model_worker.runtimes import samples
from model_worker.runtimes.base import Progress
from model_worker.runtimes.continuous import engines
from model_worker.runtimes.continuous.dense import Limits
from model_worker.runtimes.continuous.engines import Choice, Engine
from model_worker.runtimes.continuous.sequences import Progress as Event
from model_worker.runtimes.continuous.sequences import Sequence, TokenScore
from model_worker.runtimes.generation_answers import Item, Output, Piece
from shared.errors import InvalidInput, LoadError

# Where the configuration names no number. On a CPU a longer prefill keeps the others waiting for longer than it saves.
_CPU_CACHE_TOKENS = 8_192
_CPU_PREFILL_TOKENS = 256
_ACCELERATOR_CACHE_TOKENS = 65_536
_ACCELERATOR_PREFILL_TOKENS = 2_048
# Of the cache, as much again for beginnings that prompts have in common.
_PREFIX_PART = 8
# A smaller cache than this is no help: the model itself leaves no room.
_CACHE_TOKENS_MIN = 1_024
_ROWS_MAX = 32
# Two prompts of different length to try an engine with.
_TRIAL_TOKENS = (12, 5)


@dataclass(slots=True)
class _Growing:
    """An answer that is being made."""

    item: Item
    sequence: Sequence
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)


class Steps:
    """What `Model`'s part for continuous batching does, for `Item`s. Main thread only, `refusal` excepted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._answers: dict[Sequence, _Growing] = {}
        self._sequences: dict[Item, Sequence] = {}

    def refusal(self, prompt_tokens: int, max_new_tokens: int) -> InvalidInput | None:
        """As the engine's. Any thread."""
        return self.engine.refusal(prompt_tokens, max_new_tokens)

    def can_join(self, item: Item) -> bool:
        return self.engine.can_join(_sequence(item))

    def join(self, item: Item) -> None:
        sequence = _sequence(item)
        self.engine.join(sequence)
        self._sequences[item] = sequence
        self._answers[sequence] = _Growing(item, sequence)

    def leave(self, item: Item) -> None:
        sequence = self._sequences.pop(item)
        del self._answers[sequence]
        self.engine.leave(sequence)

    def step(self) -> list[Progress]:
        return [self._progress(event) for event in self.engine.step()]

    def _progress(self, event: Event) -> Progress:
        growing = self._answers[event.sequence]
        growing.texts.append(event.text)
        growing.token_ids += event.token_ids
        growing.scores += event.scores
        piece = Piece(event.text, event.scores) if event.text or event.scores else None
        if event.ending is None:
            return Progress(growing.item, piece)
        del self._answers[event.sequence], self._sequences[growing.item]
        if isinstance(event.ending, Exception):
            return Progress(growing.item, piece, ended=True, output=event.ending)
        text = "".join(growing.texts)
        output = Output(growing.item, growing.token_ids, event.ending, text, tuple(growing.scores))
        return Progress(growing.item, piece, ended=True, output=output)


def _sequence(item: Item) -> Sequence:
    settings = item.parameters
    return Sequence(
        item.ids,
        item.max_new_tokens,
        settings.sampling,
        stop=settings.stop,
        skip_special_tokens=settings.skip_special_tokens,
        grammar=item.grammar,
        owner=item,
    )


def choose(
    model: Any,
    tokenizer: Any,
    *,
    cache_tokens: int | None,
    prefill_tokens: int | None,
    prefix_tokens: int | None,
    rows_max: int,
    limit_tokens: int,
    end_ids: frozenset[int],
    pad_token_id: int,
) -> Choice:
    """Builds an engine and tries it, or says why there is none. Without a number for it, the cache is as large as fits.

    Raises:
        LoadError: the cache that was asked for does not fit into the device's memory.
    """
    on_cpu = torch.device(model.device).type == "cpu"
    size = cache_tokens or (_CPU_CACHE_TOKENS if on_cpu else _ACCELERATOR_CACHE_TOKENS)
    prefill = prefill_tokens or (_CPU_PREFILL_TOKENS if on_cpu else _ACCELERATOR_PREFILL_TOKENS)
    prompts = _trial_prompts(tokenizer, limit_tokens)
    while True:
        prefix = size // _PREFIX_PART if prefix_tokens is None else prefix_tokens
        limits = Limits(size, rows_max or _ROWS_MAX, prefill, prefix)
        try:
            return engines.build(model, tokenizer, limits, end_ids=end_ids, pad_token_id=pad_token_id, prompts=prompts)
        except torch.OutOfMemoryError as error:
            if cache_tokens is not None or size // 2 < _CACHE_TOKENS_MIN:
                raise LoadError(
                    f"a cache of {size} tokens does not fit into the memory of {model.device} beside the weights: "
                    "lower options.cache_tokens",
                    permanent=True,
                ) from error
        # Only here: until the error is gone, its stack keeps what was made of the cache alive.
        torch.cuda.empty_cache()
        size //= 2


def _trial_prompts(tokenizer: Any, limit_tokens: int) -> Many[list[int]]:
    # Half of the positions at most, so that there are some to spare.
    texts = [samples.text_of(tokenizer, max(1, min(tokens, limit_tokens // 2))) for tokens in _TRIAL_TOKENS]
    return [tokenizer(text)["input_ids"] for text in texts]

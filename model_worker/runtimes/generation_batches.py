"""Text generation in whole batches, for models that no engine can drive step by step.

Owns the end of each row (end token, stop string, number of tokens) and its independence of those beside it: greedy ones
share a batch, sampled and penalised ones are computed alone. Refuses numbers that are not numbers any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from model_worker.runtimes import padding
from model_worker.runtimes.base import Model
from model_worker.runtimes.continuous.sequences import FinishReason, not_finite, not_wanted
from model_worker.runtimes.generation_answers import Item, Output, decoded
from model_worker.runtimes.transfer import on_device, to_device
from shared.errors import RequestError


def generate(
    runtime: Model,
    model: Any,
    decoder: Any,
    items: Sequence[Item],
    *,
    end_ids: frozenset[int],
    pad_token_id: int,
) -> list[Output | RequestError]:
    """One batch through transformers' `generate`. Reports each step to `runtime`. Main thread only."""
    lengths = [len(item.ids) for item in items]
    rows = _Rows(runtime, items, decoder, end_ids)
    with torch.inference_mode(), _seeded(items, model.device):
        model.generate(
            input_ids=to_device(padding.pad([item.ids for item in items], pad_token_id, "left"), model.device),
            attention_mask=to_device(padding.attention_mask(lengths, "left"), model.device),
            generation_config=_settings(items, pad_token_id),
            logits_processor=LogitsProcessorList([rows.guard]),
            stopping_criteria=StoppingCriteriaList([rows]),
        )
    return rows.outputs()


def _settings(items: Sequence[Item], pad_token_id: int) -> GenerationConfig:
    """One configuration for the batch; what differs between its rows is left to `_Rows`."""
    keywords: dict[str, object] = {
        "max_new_tokens": max(item.max_new_tokens for item in items),
        "pad_token_id": pad_token_id,
        "do_sample": False,
    }
    sampling = items[0].parameters.sampling
    if sampling.repetition_penalty != 1.0:
        keywords["repetition_penalty"] = sampling.repetition_penalty
    if sampling.is_drawn:
        keywords.update(
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
    return GenerationConfig(**keywords)


class _Rows(StoppingCriteria):
    """Ends each row of a batch by itself: at its end token, its stop strings, its number of tokens, or its NaNs, and as
    soon as nobody waits for it any more."""

    def __init__(self, model: Model, items: Sequence[Item], decoder: Any, end_ids: frozenset[int]) -> None:
        self._model = model
        self._items = items
        self._decoder = decoder
        self._end_ids = end_ids
        self._generated: list[list[int]] = [[] for _ in items]
        self._endings: list[FinishReason | RequestError | None] = [None] * len(items)
        self.guard = _NanGuard(self)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        """Called after each step; bool [rows], True for rows that are done."""
        self._model.report_step()
        for index, token in enumerate(input_ids[:, -1].tolist()):
            if self._endings[index] is None and not self._model.is_wanted(self._items[index]):
                self._endings[index] = not_wanted()
            if self._endings[index] is None:
                self._generated[index].append(token)
                self._endings[index] = self._ending(index, token)
        return on_device([ending is not None for ending in self._endings], input_ids.device)

    def fail(self, index: int) -> None:
        """Ends a row without an answer."""
        if self._endings[index] is None:
            self._endings[index] = not_finite()

    def outputs(self) -> list[Output | RequestError]:
        """What became of each row."""
        return [
            ending if isinstance(ending, RequestError) else Output(item, generated, ending or "length")
            for item, generated, ending in zip(self._items, self._generated, self._endings, strict=True)
        ]

    def _ending(self, index: int, token: int) -> FinishReason | None:
        item, generated = self._items[index], self._generated[index]
        if token in self._end_ids or self._holds_stop(item, generated):
            return "stop"
        return "length" if len(generated) >= item.max_new_tokens else None

    def _holds_stop(self, item: Item, generated: list[int]) -> bool:
        stops = item.parameters.stop
        if not stops:
            return False
        # A token stands for at least one byte, so a stop string that ends here began within this many tokens.
        reach = max(len(stop.encode()) for stop in stops)
        before, last = generated[:-reach], generated[-reach:]
        text = decoded(self._decoder, [*item.ids, *before], last, item.parameters.skip_special_tokens)
        return any(stop in text for stop in stops)


class _NanGuard(LogitsProcessor):
    """Ends rows whose scores are not numbers, before something is drawn from them."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Minus infinity is how a token is ruled out; NaN and plus infinity come from a model gone wrong.
        broken = (torch.isnan(scores) | torch.isposinf(scores)).any(dim=-1)
        if bool(broken.any()):
            for index in broken.nonzero().flatten().tolist():
                self._rows.fail(index)
            # Sampling from NaN raises, and on an accelerator ends the process for everybody.
            scores = torch.where(broken.unsqueeze(-1), torch.zeros_like(scores), scores)
        return scores


@contextlib.contextmanager
def _seeded(items: Sequence[Item], device: torch.device) -> Iterator[None]:
    """Gives a sampled item random numbers of its own, the same for the same seed whatever ran before."""
    sampling = items[0].parameters.sampling
    if not sampling.is_drawn:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(sampling.seed)
        yield

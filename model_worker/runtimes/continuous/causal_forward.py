"""One forward of a causal language model over a grid, whatever the names its class gives to its arguments.

Owns what is asked of a model: a cache of keys and values per layer, a mask over columns, explicit positions where the
model has any. Refuses models that keep something else (state-space models keep one state per sequence).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from model_worker.runtimes.continuous.grid import Grid, LayerShape

# transformers has renamed it: `past_key_values` for years, `cache` since 5.2x.
_CACHE_NAMES = ("cache", "past_key_values")


class Unsupported(Exception):
    """A model cannot be driven step by step; the text says why."""


class CausalForward:
    """
    Raises:
        Unsupported: the model keeps no keys and values that could be cut and joined by rows.
    """

    def __init__(self, model: Any) -> None:
        accepted = inspect.signature(model.forward).parameters
        names = [name for name in _CACHE_NAMES if name in accepted]
        if not names or "attention_mask" not in accepted:
            raise Unsupported(f"{type(model).__name__} takes no cache of keys and values")
        self._model = model
        self._cache_name = names[0]
        # ALiBi models (BLOOM, MPT) take none: they count columns of the mask.
        self._takes_positions = "position_ids" in accepted
        # Without it the scores of a whole prompt are computed, each as long as the vocabulary.
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self.device: torch.device = model.device
        self.layer_shapes = self._measure()

    def __call__(self, ids: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Writes int64 `ids` [rows, columns] behind the grid's window; returns the scores [rows, vocabulary] of what
        may come after the last column."""
        columns = ids.shape[1]
        keywords: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": grid.attention_mask(columns),
            self._cache_name: grid.cache,
            "use_cache": True,
        }
        if self._takes_positions:
            keywords["position_ids"] = grid.positions(columns)
        if self._takes_logits_to_keep:
            keywords["logits_to_keep"] = 1
        logits: torch.Tensor = self._model(**keywords).logits[:, -1]
        grid.advance(columns)
        return logits

    def _measure(self) -> Sequence[LayerShape]:
        # Never made for the model's own configuration: layers with a sliding window would drop columns of their own.
        cache: Any = DynamicCache()
        token = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        keywords = {"attention_mask": torch.ones_like(token), self._cache_name: cache, "use_cache": True}
        try:
            self._model(input_ids=token, **keywords)
            shapes = [
                LayerShape(_form(layer.keys, 1), _form(layer.values, 1), layer.keys.dtype) for layer in cache.layers
            ]
        except Exception as error:
            # Whatever a class does that keeps something else than keys and values, it does it in its own way.
            raise Unsupported(
                f"{type(self._model).__name__} keeps no keys and values in a plain cache "
                f"({type(error).__name__}: {error})"
            ) from error
        if not shapes:
            raise Unsupported(f"{type(self._model).__name__} puts no keys and values into a cache")
        return shapes


def _form(states: Any, tokens: int) -> tuple[int, int]:
    if not isinstance(states, torch.Tensor) or states.ndim != 4 or states.shape[0] != 1 or states.shape[2] != tokens:
        raise Unsupported(f"keys and values are not [rows, heads, tokens, size] but {getattr(states, 'shape', states)}")
    return int(states.shape[1]), int(states.shape[3])

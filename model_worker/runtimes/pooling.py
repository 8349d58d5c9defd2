"""From one vector per token to one per text: the pooling and dense modules of sentence-transformers.

Owns the arithmetic and the two generations of their configuration files. Refuses modes it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared.errors import LoadError

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda vectors: vectors,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": torch.nn.functional.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": torch.nn.functional.silu,
}
# The order in which several poolings of one model are put side by side; the files hold it nowhere.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """One or more ways to pool, their results side by side."""

    modes: tuple[str, ...]
    include_prompt: bool = True
    """Whether the tokens of a prompt take part."""

    @classmethod
    def from_config(cls, config: dict[str, Any] | None) -> Pooling:
        """Reads a pooling module's `config.json`: one flag per mode, or, in newer files, their names."""
        config = config or {}
        named = config.get("pooling_mode")
        if named:
            modes = tuple(named) if isinstance(named, list) else (str(named),)
        else:
            modes = tuple(mode for flag, mode in _FLAGS.items() if config.get(flag))
        return cls(modes or ("mean",), bool(config.get("include_prompt", True)))

    def check(self) -> None:
        """
        Raises:
            LoadError: a mode that is not known.
        """
        for mode in self.modes:
            if mode not in _POOLERS:
                raise LoadError(f"pooling {mode!r} is not known; known: {', '.join(_POOLERS)}", permanent=True)

    def apply(self, hidden: torch.Tensor, mask: torch.Tensor, prompt_tokens: Sequence[int]) -> torch.Tensor:
        """float32 [batch, tokens, dim] and int64 [batch, tokens] to float32 [batch, modes * dim].

        `prompt_tokens` are those of each row; they are left out if this pooling leaves prompts out.
        """
        own = mask
        if not self.include_prompt and any(prompt_tokens):
            skipped = torch.tensor(prompt_tokens, device=mask.device).unsqueeze(1)
            own = mask * (mask.cumsum(dim=1) > skipped)
        return torch.cat([_POOLERS[mode](hidden, mask, own) for mode in self.modes], dim=1)


class Dense:
    """A linear layer and its activation, in float32."""

    def __init__(self, config: dict[str, Any] | None, weights: dict[str, torch.Tensor]) -> None:
        activation = str((config or {}).get("activation_function", "Tanh")).rpartition(".")[2]
        if activation not in _ACTIVATIONS:
            raise LoadError(
                f"the activation {activation!r} of a Dense module is not known; known: {', '.join(_ACTIVATIONS)}",
                permanent=True,
            )
        if "linear.weight" not in weights:
            raise LoadError("a Dense module holds no linear.weight", permanent=True)
        self._activation = _ACTIVATIONS[activation]
        self._weight = weights["linear.weight"].float()
        bias = weights.get("linear.bias")
        self._bias = None if bias is None else bias.float()

    def to(self, device: str) -> None:
        self._weight = self._weight.to(device)
        self._bias = None if self._bias is None else self._bias.to(device)

    def apply(self, vectors: torch.Tensor) -> torch.Tensor:
        return self._activation(torch.nn.functional.linear(vectors, self._weight, self._bias))


# Each takes the vectors, the mask of all tokens, and the mask of those that take part: [batch, tokens].
_Pooler = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _cls(hidden: torch.Tensor, mask: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    # The first token of all, prompt or not.
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), mask.argmax(dim=1)]


def _max(hidden: torch.Tensor, mask: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(own.unsqueeze(-1) == 0, -1e9).amax(dim=1)


def _sum(hidden: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return (hidden * own.unsqueeze(-1)).sum(dim=1)


def _mean(hidden: torch.Tensor, mask: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return _sum(hidden, own) / own.sum(dim=1, keepdim=True).clamp(min=1)


def _mean_sqrt_length(hidden: torch.Tensor, mask: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return _sum(hidden, own) / own.sum(dim=1, keepdim=True).clamp(min=1).sqrt()


def _weighted_mean(hidden: torch.Tensor, mask: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    # Later tokens of a decoder have seen more, so the n-th token of a text counts n times.
    weights = mask.cumsum(dim=1) * own
    return _sum(hidden, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1)


def _last(hidden: torch.Tensor, mask: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    columns = torch.arange(own.shape[1], device=own.device)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), (own * columns).argmax(dim=1)]


_POOLERS: dict[str, _Pooler] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_length,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}

"""A model of your own: how good a sentence sounds, by the words in it.

headwaiter serve --config examples/sentiment.toml
curl localhost:8080/models/sentiment -d '{"inputs": "A great day"}'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwaiter import InvalidInput, Model


class Sentiment(Model):
    def __init__(self, words: str = "good great fine") -> None:
        self.words = frozenset(words.split())

    def load(self, device: str) -> None:
        """Once, on the main thread of the model process. Import torch here if you need it, not at the top."""
        self.weight = 1.0

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> list[str]:
        """One request to one item."""
        if parameters:
            raise InvalidInput(f"unknown parameter {next(iter(parameters))!r}: this model takes none")
        if not isinstance(inputs, str):
            raise InvalidInput(f"inputs must be a string, not {type(inputs).__name__}")
        return inputs.lower().split()

    def cost(self, item: list[str]) -> int:
        """Padded units; a batch costs `max(cost) * len(items)`."""
        return len(item)

    def forward(self, items: Sequence[list[str]]) -> list[float]:
        """A list of items to a list of outputs."""
        return [self.weight * sum(word in self.words for word in item) for item in items]

    def finish(self, output: float) -> dict[str, float]:
        """To plain values, numpy arrays or tensors."""
        return {"score": output}

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        """What to warm up with, the largest first."""
        return [("a fine sentence of some length", {})]

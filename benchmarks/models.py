"""Models that compute nothing, for what a request costs beside its model: `benchmarks.models:Echo` and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from model_worker.runtimes.base import Model


class Echo(Model):
    """Gives back what it gets."""

    def load(self, device: str) -> None:
        pass

    def forward(self, items: Sequence[Any]) -> Sequence[Any]:
        return items


class Enlarge(Model):
    """Takes bytes, such as an image, and gives back float32 numbers, such as a mask: `floats` of them."""

    def __init__(self, floats: int) -> None:
        self._answer = np.zeros(floats, np.float32)

    def load(self, device: str) -> None:
        pass

    def forward(self, items: Sequence[Any]) -> Sequence[Any]:
        return [self._answer for _ in items]

"""A model that tells what bytes it got, for tests of how pictures and recordings arrive."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from model_worker.runtimes.base import Model


class Witness(Model):
    """Its label is the input, its score the number of the request's parameters."""

    def load(self, device: str) -> None:
        pass

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> tuple[bytes, int]:
        return base64.b64decode(inputs) if isinstance(inputs, str) else inputs, len(parameters)

    def forward(self, items: Sequence[tuple[bytes, int]]) -> list[list[dict[str, object]]]:
        return [[{"label": data.hex(), "score": count}] for data, count in items]

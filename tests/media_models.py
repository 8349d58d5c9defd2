"""Classes of one's own in place of models: what they got, and whatever Hugging Face's clients can be answered."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from model_worker.runtimes.base import Model

# A black picture of 16 by 8 pixels.
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAICAAAAADVHSBLAAAADElEQVR42mNgGBwAAACIAAF0uDlnAAAAAElFTkSuQmCC"
)


class Witness(Model):
    """Its label is the input, its score the number of the request's parameters."""

    def load(self, device: str) -> None:
        pass

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> tuple[bytes, int]:
        return base64.b64decode(inputs) if isinstance(inputs, str) else inputs, len(parameters)

    def forward(self, items: Sequence[tuple[bytes, int]]) -> list[list[dict[str, object]]]:
        return [[{"label": data.hex(), "score": count}] for data, count in items]


class Studio(Model):
    """Makes what no pipeline of transformers makes, out of whatever a client sends for it."""

    def load(self, device: str) -> None:
        pass

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
        if isinstance(inputs, dict):  # a table to classify
            return ["1"] * len(next(iter(inputs["table"].values())))
        if "question" in parameters:
            return [{"answer": parameters["question"], "score": 1.0}]
        if isinstance(inputs, bytes) and inputs[8:12] == b"WAVE":
            return [{"label": "sound", "content-type": "audio/wav", "blob": inputs}]
        if isinstance(inputs, bytes):
            return [{"generated_text": f"{len(inputs)} bytes"}]
        return PICTURE

    def forward(self, items: Sequence[Any]) -> list[Any]:
        return list(items)

"""A model that brings torch along, to see what the process makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.stub_models import Echo


class TorchEcho(Echo):
    """Notes torch's threads at its load, in place of the device; has torch's memory for one item at once."""

    def load(self, device: str) -> None:
        super().load(f"{torch.get_num_threads()} threads")

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        if len(items) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return [torch.full((2,), len(item)) for item in items]

"""Models that bring torch along, to see what the process makes of that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from model_worker.runtimes.base import Model
from tests.stub_models import Echo


class TorchEcho(Echo):
    """Notes torch's threads at its load, in place of the device; has torch's memory for one item at once."""

    def load(self, device: str) -> None:
        super().load(f"{torch.get_num_threads()} threads")

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        if len(items) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return [torch.full((2,), len(item)) for item in items]


class Parallel(Model):
    """Answers with the numbers of the threads that the process had before an operation that uses all of torch's, and
    those that it has afterwards."""

    def load(self, device: str) -> None:
        pass

    def forward(self, items: Sequence[Any]) -> Sequence[Any]:
        before = sorted(os.listdir("/proc/self/task"))
        matrix = torch.ones(512, 512)
        for _ in range(3):
            matrix = (matrix @ matrix).clamp(0, 1)
        answer = {"before": before, "after": sorted(os.listdir("/proc/self/task")), "threads": torch.get_num_threads()}
        return [answer for _ in items]

"""Tensors on their way to the device.

Owns how they are copied. Results come back in one copy for each forward, which is the only moment at which the host
waits for the device; that is up to each runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`; to a GPU without waiting for the copy, or for anything before it.

    The copy is made from pinned memory, which torch keeps until it is through and then uses again.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(values: Sequence[object], device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers, or lists of them, as a tensor on `device`, copied as by `to_device`."""
    return to_device(torch.tensor(values, dtype=dtype), device)

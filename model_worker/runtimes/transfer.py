"""Tensors on their way to the device.

Owns how they are copied. Results come back in one copy for each forward, which is the only moment at which the host
waits for the device; that is up to each runtime.
"""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`; to a GPU without waiting for the copy, or for anything before it.

    The copy is made from pinned memory, which torch keeps until it is through and then uses again.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

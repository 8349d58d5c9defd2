"""What a model process asks of torch, if the model brought torch along.

Owns every use of torch outside `runtimes/`. It never imports torch: a model that does without it must not pay for
it. Call everything here on the main thread, the one that computes.
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType


def set_threads(count: int) -> None:
    """Bounds the threads inside one operation, on the CPU; without torch there is nothing to bound."""
    torch = sys.modules.get("torch")
    if torch is not None and count > 0 and torch.get_num_threads() != count:
        torch.set_num_threads(count)


def synchronize() -> None:
    """Waits for what was started on the device, so that its time and its errors belong to who started it.

    Raises:
        RuntimeError: something that ran on the device failed.
    """
    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()


def release_memory() -> None:
    """Gives back what is free, so that a smaller try finds it in one piece."""
    gc.collect()
    cuda = _cuda()
    if cuda is not None:
        cuda.empty_cache()
    torch = sys.modules.get("torch")
    if torch is not None and torch.backends.mps.is_available():
        torch.mps.empty_cache()


def reserved_bytes() -> int:
    """Device memory that this process holds; 0 where it uses none."""
    cuda = _cuda()
    return int(cuda.memory_reserved()) if cuda is not None else 0


def _cuda() -> ModuleType | None:
    torch = sys.modules.get("torch")
    # A question about a device must never be what initialises it: that alone takes hundreds of megabytes.
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sys.modules["torch.cuda"]

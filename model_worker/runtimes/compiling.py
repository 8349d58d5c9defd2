"""`torch.compile` for the models of this package.

Owns whether a model can be compiled here, and how: once for all lengths and batch sizes, since texts come in all of
them. Refuses to fall back to the model as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from shared.errors import LoadError

BACKEND = "inductor"
"""torch's own compiler. A test takes one that is through at once."""


def compile_in_place(model: Any, source: str, device: str) -> None:
    """Has the model compiled by its first forwards, and called in its compiled form from then on.

    Raises:
        LoadError: permanent: this machine lacks what that takes.
    """
    lacks = _lacks(torch.device(device).type)
    if lacks:
        raise LoadError(
            f"{source}: compile = true is not possible here: {lacks}, or set compile = false", permanent=True
        )
    import torch._inductor.config as inductor

    # Otherwise a pool of processes is started for it, which would stay as long as this one.
    inductor.compile_threads = 1
    model.compile(dynamic=True, backend=BACKEND)


def refuse(source: str, why: str) -> LoadError:
    """For a model of which every step would be compiled anew."""
    return LoadError(f"{source}: compile = true is not possible here: {why}: set compile = false", permanent=True)


def _lacks(device_type: str) -> str:
    """What is missing and what to do about it; empty if nothing is."""
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler: install one (g++), or name it in the variable CXX"
        return ""
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "the package triton is missing, or this GPU is too old for it: install triton"
    return f"torch cannot compile for {device_type}: use another device"

"""Linear layers whose weights lie in memory as oneDNN reads them, for models that compute on a CPU.

`torch.nn.functional.linear` has the library below it bring the whole weight into the order that it multiplies in, in
each call. For a few tokens, such as one short text or one step of some answers, that takes longer than the product.
Here it is done once, after loading. `torch.compile` does the same with frozen weights and by the same two operators,
which have no public name; so they are tried first, and a model stays as it was loaded where they fail.

Owns the layers and their weights. A layer whose `weight` something else asks for becomes an ordinary one again.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

# What each may differ by from torch's own product, as a share: rounding.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
# On other processors torch has other libraries below it, which were not tried.
_TRIED_PROCESSORS = ("AVX2", "AVX512")
# Up to so many rows, in steps of so many. Fewer than a fifth of the rows are computed in vain.
_ROW_STEPS = ((32, 1), (64, 8), (256, 16), (math.inf, 32))
_TRIAL_ROWS, _TRIAL_INPUTS, _TRIAL_OUTPUTS = 3, 40, 24


class _Prepacked(nn.Module):
    """What both kinds of layers share. The weight, [out, in], is in `_packed`, which only oneDNN can read."""

    ordinary: ClassVar[type[nn.Module]]
    stores_transposed: ClassVar[bool] = False
    """Whether the ordinary layer holds its weight as [in, out]."""
    _packed: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[…, in] to […, out]."""
        *shape, inputs_per_row = inputs.shape
        rows = math.prod(shape)
        spare = rows_with_kernels(rows) - rows
        if not spare:
            return _product(inputs, self._packed, self.bias)
        padded = nn.functional.pad(inputs.reshape(rows, inputs_per_row), (0, 0, 0, spare))
        return _product(padded, self._packed, self.bias)[:rows].view(*shape, -1)

    def __getattr__(self, name: str) -> Any:
        # Not among the parameters any more, so whoever asks for it comes here.
        return self._ordinary_weight() if name == "weight" else super().__getattr__(name)

    def _ordinary_weight(self) -> Any:
        weight = _turned(self._packed.to_dense(), type(self))
        del self._packed
        self.__class__ = self.ordinary  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        return self.get_parameter("weight")


class PrepackedLinear(_Prepacked, nn.Linear):
    """In place of `torch.nn.Linear`."""

    ordinary = nn.Linear


class PrepackedConv1D(_Prepacked, Conv1D):
    """In place of the linear layer of GPT-2 and its kin."""

    ordinary = Conv1D
    stores_transposed = True


_KINDS: dict[type[nn.Module], type[_Prepacked]] = {kind.ordinary: kind for kind in (PrepackedLinear, PrepackedConv1D)}


def rows_with_kernels(rows: int) -> int:
    """The next number of rows, from `rows` on, that products are computed with.

    oneDNN compiles kernels for each number that it meets, some tenths of a megabyte for layers of one size, and keeps
    them to the end of the process. So few rows are computed as they are, where a step of some answers has no time to
    lose, and more of them as the next of a few numbers.
    """
    step = next(step for bound, step in _ROW_STEPS if rows <= bound)
    return -(-rows // step) * step


def prepack(model: nn.Module) -> None:
    """Does so with all layers of a model that can be: those on a CPU, of a type that `refusal` has nothing against.

    A layer that has its weight in common with an embedding leaves it to that, and has its own besides; one that has it
    in common with another layer stays as it is.
    """
    layers = [module for module in model.modules() if _can_be_prepacked(module)]
    if not layers:
        return
    uses = Counter(id(layer.weight) for layer in layers)
    for layer in layers:
        if uses[id(layer.weight)] == 1:
            _prepack_layer(layer)
    # As long as one tensor lies in the file that all were loaded from, the process holds that whole file in memory.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.detach().clone()


def described(model: nn.Module) -> str:
    """How many of a model's layers are, and what speaks against others, for `headwaiter status`."""
    prepacked = sum(isinstance(module, _Prepacked) for module in model.modules())
    ordinary: list[Any] = [module for module in model.modules() if type(module) in _KINDS]
    reasons = {refusal(layer.weight.dtype) for layer in ordinary if layer.weight.dtype in _TOLERANCES} - {""}
    return ": ".join([f"{prepacked} of {prepacked + len(ordinary)}", *sorted(reasons)])


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Those that are not among the model's parameters any more."""
    return [module._packed for module in model.modules() if isinstance(module, _Prepacked)]


@cache
def refusal(dtype: torch.dtype) -> str:
    """Why no layer of this type can be prepacked in this process; empty if nothing speaks against it."""
    processor = torch.backends.cpu.get_cpu_capability()
    if processor not in _TRIED_PROCESSORS:
        return f"not tried on a processor with {processor}"
    inputs = torch.linspace(-1, 1, _TRIAL_ROWS * _TRIAL_INPUTS, dtype=dtype).view(_TRIAL_ROWS, _TRIAL_INPUTS)
    weight = torch.linspace(-1, 1, _TRIAL_OUTPUTS * _TRIAL_INPUTS, dtype=dtype).view(_TRIAL_OUTPUTS, _TRIAL_INPUTS)
    bias = torch.linspace(-1, 1, _TRIAL_OUTPUTS, dtype=dtype)
    try:
        product = _product(inputs, _pack(weight), bias)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    tolerance = _TOLERANCES[dtype]
    is_right = torch.allclose(product, nn.functional.linear(inputs, weight, bias), rtol=tolerance, atol=tolerance)
    return "" if is_right else "oneDNN computes something else than torch"


def _can_be_prepacked(module: nn.Module) -> bool:
    # Of this class itself: another one computes something else. Where `forward` was replaced, so was what it is for.
    if type(module) not in _KINDS or "forward" in vars(module):
        return False
    weight = module.weight
    # One of a class of its own may be quantised, or made anew for each forward; one without elements has no product.
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or not weight.numel():
        return False
    return weight.dtype in _TOLERANCES and not refusal(weight.dtype)


def _prepack_layer(layer: Any) -> None:
    kind = _KINDS[type(layer)]
    packed = _pack(_turned(layer.weight.detach(), kind))
    del layer.weight
    layer.__class__ = kind
    layer._packed = packed


def _turned(weight: torch.Tensor, kind: type[_Prepacked]) -> torch.Tensor:
    """From the way in which the ordinary layer holds it to [out, in], or back."""
    return weight.t().contiguous() if kind.stores_transposed else weight


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] in the order that oneDNN chooses. It may depend on the number of rows, of which any may come."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _product(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return product

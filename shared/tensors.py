"""Arrays and tensors as (dtype name, shape, bytes), and back to numpy arrays.

Owns which element types can be sent: fixed-size numbers and booleans, little-endian, in row-major order. Recognises
numpy arrays and torch tensors without importing either before a value of theirs appears, so that a front worker that
only sees text stays small. Refuses objects, strings, complex numbers, masks and sparse or quantised tensors.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import Buffer

from shared.errors import ProtocolError

if TYPE_CHECKING:
    import numpy

# Name on the wire to bytes per element. `bfloat16` is unknown to numpy: its bits travel as they are.
ITEM_BYTES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
# numpy itself stops at 64; nobody's model is near.
DIMENSIONS_MAX = 32


class Tensor(NamedTuple):
    """What travels: `data` is a view of the array's own memory wherever that is possible."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array or a torch tensor, of whatever element type."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    torch = sys.modules.get("torch")
    # Without `Tensor` torch is still being imported by another thread, and nobody has a tensor yet.
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def is_scalar(value: object) -> bool:
    """Whether `value` is a numpy scalar such as `numpy.float32(0.5)`."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def dump(value: Any) -> Tensor:
    """The content of an array or tensor (see `is_array`); one on a device is copied to host memory first.

    Host memory is viewed, not copied, unless it is strided or big-endian: do not write to it afterwards.

    Raises:
        TypeError: it cannot be sent; the text says what about it, and what to return instead.
    """
    import numpy

    if isinstance(value, numpy.ndarray):
        array, name = value, value.dtype.name
        if isinstance(value, numpy.ma.MaskedArray):
            raise TypeError("its mask would be lost: return its filled(...)")
    else:
        array, name = _host_array(value)
    if name not in ITEM_BYTES:
        raise TypeError(f"its elements are {name}: convert to one of {', '.join(ITEM_BYTES)}, or to a list")
    if name != "bfloat16":
        array = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    array = numpy.asarray(array, order="C")
    return Tensor(name, array.shape, array.reshape(-1).view(numpy.uint8).data)


def load(dtype: str, shape: tuple[int, ...], data: Buffer) -> numpy.ndarray[Any, Any]:
    """An array over `data`, which is neither copied nor made writable. `bfloat16` becomes float32, which is exact.

    Raises:
        ProtocolError: the three do not belong together.
    """
    import numpy

    view = memoryview(data)
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise ProtocolError(f"unknown element type {dtype!r}: known are {', '.join(ITEM_BYTES)}")
    if len(shape) > DIMENSIONS_MAX or any(type(size) is not int or size < 0 for size in shape):
        raise ProtocolError(f"an array's shape is at most {DIMENSIONS_MAX} sizes of 0 or more: got {shape[:40]}")
    if math.prod(shape) * item_bytes != view.nbytes:
        raise ProtocolError(f"an array of {dtype} {list(shape)} does not have {view.nbytes} bytes")
    array: numpy.ndarray[Any, Any]
    if dtype == "bfloat16":
        # The upper half of a float32.
        array = (numpy.frombuffer(view, "<u2").astype(numpy.uint32) << 16).view(numpy.float32)
    else:
        array = numpy.frombuffer(view, numpy.dtype(dtype).newbyteorder("<"))
    try:
        return array.reshape(shape)
    except ValueError as error:
        # A size of zero lets the others be anything, and numpy has limits of its own.
        raise ProtocolError(f"an array cannot have the shape {list(shape)}: {error}") from None


def _host_array(tensor: Any) -> tuple[Any, str]:
    """A torch tensor's memory as a numpy array, and the name of its element type."""
    torch = sys.modules["torch"]
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided:
        raise TypeError(f"its layout is {tensor.layout}: return its to_dense()")
    if name not in ITEM_BYTES:
        return None, name
    tensor = tensor.detach().cpu()
    if name == "bfloat16":
        # numpy has no such type, so the bits are viewed as integers of the same size.
        tensor = tensor.contiguous().view(torch.int16)
    return tensor.resolve_neg().numpy(), name

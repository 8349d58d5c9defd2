"""Values as JSON text, for HTTP bodies.

Owns how a value that JSON has no word for is written: bytes as base64 text, NaN and infinities as null, arrays as
nested lists. Floats of arrays are written as short as their own precision allows (0.1, not 0.10000000149011612).
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import orjson

from shared import tensors
from shared.errors import Unserialisable

# JSON itself has no limit, but orjson stops at what fits 64 bits.
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1


def dump_json(value: object) -> bytes:
    """JSON text in UTF-8, without spaces, keys in the order they have.

    `value` is what `values.unpack` returns, or anything made of the same parts. Whole numbers beyond 64 bits keep all
    their digits; half a surrogate pair in text becomes a question mark.

    Raises:
        Unserialisable: a part has no JSON form.
    """
    # Given this option, orjson imports numpy; without numpy there are no arrays, and a front worker stays small.
    option = orjson.OPT_SERIALIZE_NUMPY if "numpy" in sys.modules else 0
    try:
        return orjson.dumps(value, _default, option)
    except orjson.JSONEncodeError:
        # One of the rare things that orjson neither writes nor asks about.
        pass
    try:
        return orjson.dumps(_rewritten(value), _default, option)
    except (orjson.JSONEncodeError, RecursionError, ValueError) as error:
        raise Unserialisable(f"a value cannot be written as JSON: {error}") from None


def _default(value: Any) -> object:
    """Called by orjson for the types that it does not write by itself."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if tensors.is_scalar(value) and value.dtype.kind == "f":
        return float(value)
    if tensors.is_array(value):
        return _array(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _array(value: Any) -> object:
    """An array that orjson does not write as it is: without dimensions, strided, or a tensor."""
    import numpy

    try:
        dtype, shape, data = tensors.dump(value)
    except TypeError as error:
        raise TypeError(f"{type(value).__name__} has no JSON form: {error}") from None
    array = tensors.load(dtype, shape, data)
    # `[()]` takes the scalar out of an array without dimensions; a scalar keeps its precision.
    return array[()] if array.ndim == 0 else numpy.ascontiguousarray(array)


def _rewritten(value: Any) -> Any:
    """A copy in which what orjson refuses is replaced by what it takes."""
    if isinstance(value, dict):
        return {_rewritten_text(str(key)): _rewritten(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rewritten(item) for item in value]
    if isinstance(value, str):
        return _rewritten_text(value)
    if isinstance(value, int) and not _INT64_MIN <= value <= _UINT64_MAX:
        return orjson.Fragment(str(int(value)))
    if tensors.is_array(value):
        return _array(value)
    return value


def _rewritten_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()

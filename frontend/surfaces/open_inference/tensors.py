"""Tensors as the protocol has them: a datatype, a shape, and elements in JSON or as bytes.

Owns the datatypes and both ways to write elements. What a client sends is checked here, element by element where that
takes it, because nobody behind would find out. Numbers stay bytes: neither numpy nor a copy is needed for them.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared import tensors
from shared.errors import Code, InvalidInput, RequestError
from shared.messages import FRAME_BYTES_MAX

BYTES = "BYTES"
BFLOAT16 = "BF16"
# Names as the protocol has them, and as `shared.tensors` does.
NUMBERS = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    BFLOAT16: "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}
DATATYPES = {dtype: datatype for datatype, dtype in NUMBERS.items()}
_STRUCT_CODES = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
# Each element of BYTES is an object of its own, where a number is a few bytes of an array.
BYTES_ELEMENTS_MAX = 65_536
_LENGTH = struct.Struct("<I")
# Names of tensors that a message shows.
_NAME_SHOWN_MAX = 60


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of a request."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: tensors.Tensor | Sequence[str | bytes]
    """Numbers, or the elements of BYTES in row-major order: text where they came in JSON, which has no bytes."""

    def refuse(self, reason: str) -> InvalidInput:
        return refuse_input(self.name, reason)


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an answer."""

    name: str
    content: Any
    """A numpy array, or the elements of BYTES in row-major order."""
    shape: tuple[int, ...]
    datatype: str

    def as_json(self) -> object:
        """The elements, for `dump_json`.

        Raises:
            InvalidInput: they are bytes that JSON cannot carry.
        """
        if self.datatype != BYTES:
            return self.content.reshape(-1)
        try:
            return [element.decode() for element in self.content]
        except UnicodeDecodeError:
            text = f"output {self.name!r} holds bytes that are no text, which JSON cannot carry: ask for binary_data"
            raise InvalidInput(text) from None

    def as_bytes(self) -> bytes | memoryview:
        if self.datatype != BYTES:
            return tensors.dump(self.content).data
        parts = ((_LENGTH.pack(len(element)), element) for element in self.content)
        return b"".join(itertools.chain.from_iterable(parts))


def output_of_array(name: str, array: Any) -> Output:
    """
    Raises:
        RequestError: `model_error`, where the protocol has no datatype for its elements.
    """
    datatype = DATATYPES.get(array.dtype.name)
    if datatype is None:
        text = f"output {name!r} has elements of {array.dtype}, for which the protocol has no datatype"
        raise RequestError(text, code=Code.MODEL_ERROR)
    return Output(name, array, array.shape, datatype)


def output_of_elements(name: str, elements: Sequence[bytes]) -> Output:
    return Output(name, elements, (len(elements),), BYTES)


def refuse_input(name: str, reason: str) -> InvalidInput:
    return InvalidInput(f"input {name[:_NAME_SHOWN_MAX]!r} {reason}")


def check_shape(name: str, datatype: object, shape: object) -> tuple[str, tuple[int, ...]]:
    """
    Raises:
        InvalidInput: it is not a known datatype, or not a shape of it that can be sent.
    """
    if not isinstance(datatype, str) or (datatype != BYTES and datatype not in NUMBERS):
        known = ", ".join([*NUMBERS, BYTES])
        raise refuse_input(name, f"has the datatype {_shown(datatype)}; known: {known}")
    sizes_max = tensors.DIMENSIONS_MAX
    if (
        not isinstance(shape, list)
        or len(shape) > sizes_max
        or any(type(size) is not int or size < 0 for size in shape)
    ):
        raise refuse_input(name, f"needs a shape: a list of at most {sizes_max} whole numbers, 0 or more each")
    # A size of zero would let the others be anything.
    elements = math.prod(size or 1 for size in shape)
    if datatype == BYTES and elements > BYTES_ELEMENTS_MAX:
        raise refuse_input(name, f"has the shape {_shown(shape)}: BYTES have at most {BYTES_ELEMENTS_MAX} elements")
    if datatype != BYTES and elements * tensors.ITEM_BYTES[NUMBERS[datatype]] > FRAME_BYTES_MAX:
        raise refuse_input(name, f"has the shape {_shown(shape)}, which is more than {FRAME_BYTES_MAX} bytes")
    return datatype, tuple(shape)


# --- elements as bytes -----------------------------------------------------------------------------------------------


def read_bytes(name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> Input:
    """A tensor over `data`, which is not copied where it holds numbers.

    Raises:
        InvalidInput: that is not the content of such a tensor.
    """
    if datatype == BYTES:
        elements = _split_elements(name, math.prod(shape), data)
        return Input(name, datatype, shape, elements)
    dtype = NUMBERS[datatype]
    wanted = math.prod(shape) * tensors.ITEM_BYTES[dtype]
    if wanted != data.nbytes:
        raise refuse_input(name, f"has {data.nbytes} bytes; {datatype} of the shape {list(shape)} has {wanted}")
    if datatype == "BOOL" and bytes(data).translate(None, b"\x00\x01"):
        raise refuse_input(name, "has a byte that is neither 0 nor 1: BOOL takes one byte for each element")
    return Input(name, datatype, shape, tensors.Tensor(dtype, shape, data))


def _split_elements(name: str, count: int, data: memoryview) -> list[bytes]:
    elements = []
    position = 0
    for number in range(count):
        start = position + _LENGTH.size
        if start > data.nbytes:
            raise refuse_input(name, f"ends before element {number}, of {count} by its shape")
        [length] = _LENGTH.unpack_from(data, position)
        position = start + length
        if position > data.nbytes:
            reason = f"ends in element {number}, whose length is {length} bytes: {data.nbytes - start} are there"
            raise refuse_input(name, reason)
        elements.append(bytes(data[start:position]))
    if position != data.nbytes:
        raise refuse_input(name, f"has {data.nbytes - position} bytes behind its last element, of {count} by its shape")
    return elements


# --- elements in JSON ------------------------------------------------------------------------------------------------


def read_json(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Input:
    """
    Raises:
        InvalidInput: that is not the content of such a tensor.
    """
    if datatype == BFLOAT16:
        raise refuse_input(name, "is BF16, which travels as binary data only")
    elements = _flat(name, shape, data)
    allowed = _json_types(datatype)
    if not allowed.issuperset(map(type, elements)):
        position, odd = next((at, each) for at, each in enumerate(elements) if type(each) not in allowed)
        raise refuse_input(name, f"has {_shown(odd)} as element {position}, which is no {datatype}")
    if datatype == BYTES:
        return Input(name, datatype, shape, elements)
    try:
        data_bytes = struct.pack(f"<{len(elements)}{_STRUCT_CODES[datatype]}", *elements)
    except (struct.error, OverflowError):
        raise refuse_input(name, f"has a number that does not fit {datatype}") from None
    return Input(name, datatype, shape, tensors.Tensor(NUMBERS[datatype], shape, memoryview(data_bytes)))


def _json_types(datatype: str) -> frozenset[type]:
    if datatype == BYTES:
        return frozenset({str})
    if datatype == "BOOL":
        return frozenset({bool})
    return frozenset({int, float} if datatype.startswith("FP") else {int})


def _flat(name: str, shape: tuple[int, ...], data: object) -> list[Any]:
    """The elements in row-major order; they may come flat, or nested as the shape is."""
    count = math.prod(shape)
    if not isinstance(data, list):
        raise refuse_input(name, f"needs its data as a list of {count} elements")
    elements: list[Any] = data
    depth = 0
    while elements and type(elements[0]) is list:
        depth += 1
        if depth >= len(shape) or any(type(row) is not list or len(row) != shape[depth] for row in elements):
            raise refuse_input(name, f"has data that is nested otherwise than its shape {list(shape)}")
        elements = list(itertools.chain.from_iterable(elements))
    if len(elements) != count:
        raise refuse_input(name, f"has {len(elements)} elements; the shape {list(shape)} has {count}")
    return elements


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _NAME_SHOWN_MAX else text[: _NAME_SHOWN_MAX - 1] + "…"

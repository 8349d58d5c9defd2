"""Values of requests and results as frames, and back: plain data, bytes, arrays and tensors.

Owns what a value may be. `None`, booleans, whole numbers of any usual size, floats (NaN and infinities too), text,
bytes, lists, dicts with text keys, numpy arrays, torch tensors, and `tensors.Tensor` in place of either. Close
relatives are made plain on the way: tuples become lists, numpy scalars become numbers, whole-number keys become text
as they would in JSON, so that a value is the same whether it came over HTTP or from Python. Everything else is
refused, with its place in the value and what to return instead: sets have no order, and dates, enums and records have
no single representation.

Bytes and arrays of 64 KiB and more travel as frames of their own, uncopied: whoever packs a value must not write to
them afterwards.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
from typing_extensions import Buffer

from shared import tensors
from shared.errors import ProtocolError, Unserialisable
from shared.frames import frames_bytes
from shared.messages import FRAME_BYTES_MAX

# From here on a copy costs more than a frame does. FRAMES_MAX of the wire follows from it.
OWN_FRAME_BYTES_MIN = 64 * 1024
# Levels of lists and dicts. Real inputs have less than ten; recursion over a value has to stay far from Python's limit.
DEPTH_MAX = 64
# 1024 bits: more than any id or hash, and few enough digits to print.
BIG_INT_BYTES_MAX = 128
# Steps of a path that an error text shows; a longer one is of a value that contains itself.
STEPS_SHOWN_MAX = 12

# The codes of msgpack's extension types.
ARRAY = 1
ARRAY_FRAME = 2
BYTES_FRAME = 3
BIG_INT = 4

_PLAIN = frozenset({type(None), bool, int, float, str})
_LEAVES = _PLAIN | {bytes}
_TEXT = frozenset({str})


def pack(value: object, *, where: str = "result") -> list[Buffer]:
    """The frames of `value`: the first holds its structure, each other one the content of a large array or of bytes.

    Raises:
        Unserialisable: something in it cannot be sent; `where` is what the text calls the value.
    """
    own_frames: list[Buffer] = []
    try:
        plain = _outgoing(value, own_frames, 1)
    except _Refused as refused:
        raise Unserialisable(refused.text(where)) from None
    try:
        head = msgpack.packb(plain, default=_pack_big_int)
    except UnicodeEncodeError:
        place = _place_of(_is_bad_text, value, where)
        raise Unserialisable(f"{place} is text with half a surrogate pair, which UTF-8 cannot express") from None
    except OverflowError:
        place = _place_of(_is_too_large, value, where)
        raise Unserialisable(f"{place} is a whole number of more than {BIG_INT_BYTES_MAX} bytes: return text") from None
    except ValueError as error:
        raise Unserialisable(f"{where} is too large to be sent: {error}") from None
    size_bytes = len(head) + frames_bytes(own_frames)
    if size_bytes > FRAME_BYTES_MAX:
        raise Unserialisable(f"{where} has {size_bytes} bytes, more than {FRAME_BYTES_MAX}: return less at once")
    return [head, *own_frames]


def unpack(frames: Sequence[Buffer]) -> Any:
    """The value that `pack` made `frames` from. Arrays are numpy arrays, read-only, over the frames' own memory.

    bfloat16 arrays come out as float32, which holds each of their values exactly. Bytes are always `bytes`.

    Raises:
        ProtocolError: the frames are not a value.
    """
    if not frames:
        raise ProtocolError("a value has at least one frame, got none")
    size_bytes = frames_bytes(frames)
    if size_bytes > FRAME_BYTES_MAX:
        raise ProtocolError(f"a value has {size_bytes} bytes, more than {FRAME_BYTES_MAX}")
    own_frames = _OwnFrames(frames)
    try:
        value = msgpack.unpackb(frames[0], ext_hook=own_frames.extension)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a value cannot be unpacked: {error}") from None
    own_frames.check_all_used()
    _verify(value, 1)
    return value


class _Refused(Exception):
    """A part of a value cannot be sent. Each container on the way out adds the step that leads to it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.steps: list[str] = []

    def text(self, where: str) -> str:
        steps = self.steps[::-1]
        if len(steps) > STEPS_SHOWN_MAX:
            steps[STEPS_SHOWN_MAX:] = ["…"]
        return f"{where}{''.join(steps)} {self.reason}"


class _OwnFrames:
    """Hands out the frames behind the first in order, each exactly once."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = frames
        self._next = 1

    def extension(self, code: int, data: bytes) -> Any:
        if code == BIG_INT:
            if len(data) > BIG_INT_BYTES_MAX:
                raise ProtocolError(f"a whole number has at most {BIG_INT_BYTES_MAX} bytes, got {len(data)}")
            return int.from_bytes(data, "little", signed=True)
        content = msgpack.unpackb(data)
        if code == BYTES_FRAME:
            frame = self._take(content)
            return frame if isinstance(frame, bytes) else bytes(frame)
        match content:
            case [str(dtype), list(shape), bytes(elements)] if code == ARRAY:
                return tensors.load(dtype, tuple(shape), elements)
            case [str(dtype), list(shape), index] if code == ARRAY_FRAME:
                return tensors.load(dtype, tuple(shape), self._take(index))
        raise ProtocolError(f"unknown extension type {code} with {len(data)} bytes")

    def check_all_used(self) -> None:
        if self._next != len(self._frames):
            raise ProtocolError(f"a value refers to {self._next - 1} frames of its own and has {len(self._frames) - 1}")

    def _take(self, index: object) -> Buffer:
        if index != self._next or self._next >= len(self._frames):
            raise ProtocolError(
                f"a value refers to frame {index!r:.20} of {len(self._frames) - 1} where {self._next} would be next"
            )
        self._next += 1
        return self._frames[self._next - 1]


def _outgoing(value: Any, own_frames: list[Buffer], depth: int) -> Any:
    """`value` in types that msgpack packs; large content is moved to `own_frames`.

    Raises:
        _Refused: with the reason, and the steps from `value` on.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, dict):
        return _outgoing_dict(value, own_frames, depth)
    if kind is tensors.Tensor:
        return _outgoing_tensor(value, own_frames)
    if isinstance(value, (list, tuple)):
        return _outgoing_list(value, own_frames, depth)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _outgoing_bytes(value, own_frames)
    if isinstance(value, (str, int, float)):
        # Subclasses, such as `enum.IntEnum` or `numpy.float64`: msgpack packs what they are underneath.
        return value
    if tensors.is_array(value):
        return _outgoing_array(value, own_frames)
    if tensors.is_scalar(value):
        number = value.item()
        # An extended-precision scalar only has itself to offer.
        return _outgoing(float(number) if tensors.is_scalar(number) else number, own_frames, depth)
    raise _Refused(f"is {_article(kind)}, which cannot be sent: {_remedy(value)}")


def _outgoing_list(value: Sequence[Any], own_frames: list[Buffer], depth: int) -> Sequence[Any]:
    _check_depth(depth)
    if _PLAIN.issuperset(map(type, value)):
        return value
    items = []
    for index, item in enumerate(value):
        try:
            items.append(_outgoing(item, own_frames, depth + 1))
        except _Refused as refused:
            refused.steps.append(f"[{index}]")
            raise
    return items


def _outgoing_dict(value: dict[Any, Any], own_frames: list[Buffer], depth: int) -> dict[str, Any]:
    _check_depth(depth)
    if _TEXT.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values())):
        return value
    entries: dict[str, Any] = {}
    for key, item in value.items():
        text = _key_text(key)
        if text in entries:
            raise _Refused(f"has two keys that are both {text!r} as text: rename one")
        try:
            entries[text] = _outgoing(item, own_frames, depth + 1)
        except _Refused as refused:
            refused.steps.append(_step(text))
            raise
    return entries


def _outgoing_bytes(value: bytes | bytearray | memoryview, own_frames: list[Buffer]) -> Any:
    if not isinstance(value, bytes):
        view = memoryview(value)
        value = view.cast("B") if view.c_contiguous and view.nbytes >= OWN_FRAME_BYTES_MIN else bytes(view)
    if len(value) < OWN_FRAME_BYTES_MIN:
        return value
    own_frames.append(value)
    return msgpack.ExtType(BYTES_FRAME, msgpack.packb(len(own_frames)))


def _outgoing_array(value: Any, own_frames: list[Buffer]) -> Any:
    try:
        tensor = tensors.dump(value)
    except TypeError as error:
        raise _Refused(f"is {_article(type(value))} that cannot be sent, because {error}") from None
    return _outgoing_tensor(tensor, own_frames)


def _outgoing_tensor(tensor: tensors.Tensor, own_frames: list[Buffer]) -> Any:
    dtype, shape, data = tensor
    if len(shape) > tensors.DIMENSIONS_MAX:
        raise _Refused(f"is an array of {len(shape)} dimensions, more than {tensors.DIMENSIONS_MAX}: reshape it")
    if data.nbytes < OWN_FRAME_BYTES_MIN:
        return msgpack.ExtType(ARRAY, msgpack.packb([dtype, shape, bytes(data)]))
    own_frames.append(data)
    return msgpack.ExtType(ARRAY_FRAME, msgpack.packb([dtype, shape, len(own_frames)]))


def _pack_big_int(value: object) -> Any:
    """msgpack asks for help with what it does not know; after `_outgoing` that is whole numbers beyond 64 bits."""
    assert isinstance(value, int)
    if _is_too_large(value):
        raise OverflowError
    return msgpack.ExtType(BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return key
    if tensors.is_scalar(key):
        key = key.item()
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    raise _Refused(f"has the key {key!r:.80}, {_article(type(key))}: keys are str or int")


def _step(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{key[:80]!r}]"


def _check_depth(depth: int) -> None:
    if depth > DEPTH_MAX:
        raise _Refused(f"is nested deeper than {DEPTH_MAX} levels, or contains itself")


def _article(kind: type) -> str:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


_REMEDIES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda value: isinstance(value, (set, frozenset)), "return a list, such as sorted(...)"),
    (lambda value: isinstance(value, (datetime.date, datetime.time)), "return its isoformat()"),
    (lambda value: isinstance(value, datetime.timedelta), "return its total_seconds()"),
    (lambda value: isinstance(value, enum.Enum), "return its value"),
    (lambda value: hasattr(value, "model_dump"), "return its model_dump()"),
    (lambda value: dataclasses.is_dataclass(value), "return dataclasses.asdict(...) of it"),
    (lambda value: isinstance(value, Iterator), "return list(...) of it"),
    (lambda value: isinstance(value, complex), "return its real and imaginary parts"),
)


def _remedy(value: object) -> str:
    for applies, remedy in _REMEDIES:
        if applies(value):
            return remedy
    return "return text, numbers, lists, dicts, bytes or arrays"


def _place_of(is_bad: Callable[[object], bool], value: Any, where: str) -> str:
    """The path of the first part that `is_bad`. Slow, and only called when there is one."""
    if isinstance(value, dict):
        for key, item in value.items():
            if is_bad(key):
                return f"a key of {where}"
            if place := _place_of(is_bad, item, where + _step(str(key))):
                return place
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if place := _place_of(is_bad, item, f"{where}[{index}]"):
                return place
    return where if is_bad(value) else ""


def _is_bad_text(value: object) -> bool:
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def _is_too_large(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() // 8 + 1 > BIG_INT_BYTES_MAX


def _verify(value: Any, depth: int) -> None:
    """A peer may pack what `pack` would refuse; what comes out here is only what the top of this file lists."""
    kind = type(value)
    if kind is list:
        items = value
    elif kind is dict:
        if not _TEXT.issuperset(map(type, value)):
            raise ProtocolError("the keys of a dict are text")
        items = value.values()
    elif kind in _LEAVES or tensors.is_array(value):
        return
    else:
        raise ProtocolError(f"{_article(kind)} is no part of a value")
    if depth > DEPTH_MAX:
        raise ProtocolError(f"a value is nested deeper than {DEPTH_MAX} levels")
    if not _LEAVES.issuperset(map(type, items)):
        for item in items:
            _verify(item, depth + 1)

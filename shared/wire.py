"""The only encoder and decoder of wire messages: records to frames and back, as `PROTOCOL.md` specifies.

Pure: it knows no socket, no clock and no payload. `decode` takes bytes from anybody and raises nothing but
`ProtocolError`; `encode` refuses whatever `decode` on the other side would refuse, because it asks the same decoder.

What a field allows stands in its annotation in `messages.py`, and msgspec's decoder keeps to it. Only what goes wrong
is looked at in Python: to mend a report that cannot be sent as it is, or to say which field of which record is bad.
"""

from __future__ import annotations

import numbers
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from msgspec import DecodeError, MsgspecError, ValidationError, inspect, msgpack, structs
from typing_extensions import Buffer

from shared.errors import ProtocolError
from shared.messages import (
    INT_MAX,
    KINDS,
    MAP_DEPTH_MAX,
    MAP_ENTRIES_MAX,
    TEXT_CHARS_MAX,
    WIRE_VERSION,
    Map,
    Message,
    Record,
    Text,
)

# Bounds what one header can make a process allocate, with room for RECORDS_MAX records of usual size.
HEADER_BYTES_MAX: Final = 16 * 2**20


class Framed(Protocol):
    """A record that is followed by frames of its own."""

    @property
    def frame_count(self) -> int: ...


FramedRecord = TypeVar("FramedRecord", bound=Framed)


def encode(message: Message, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """The message's frames, without a routing id: prefix, header, then `frames` as they are.

    Raises:
        ProtocolError: the other side would refuse this message; the text names the field.
    """
    header = _pack(message)
    _check_frames(message, len(frames))
    return [_PREFIXES[type(message)], header, *frames]


def decode(parts: Sequence[Buffer]) -> tuple[Message, list[Buffer]]:
    """The message in `parts` (without routing id) and the frames of its records, uncopied.

    Raises:
        ProtocolError: anything that the protocol does not allow.
    """
    if len(parts) < 2:
        raise ProtocolError(f"a message has a prefix and a header, got {len(parts)} frames")
    message: Message = _unpack(_kind_of(bytes(memoryview(parts[0])[:3])), parts[1])
    frames = list(parts[2:])
    _check_frames(message, len(frames))
    return message, frames


def check(record: Record) -> None:
    """Refuses a record that could not be sent, before it is put into a message together with innocent others.

    Raises:
        ProtocolError: the text names the field and its value.
    """
    _pack(record)


def split_frames(
    records: Iterable[FramedRecord], frames: Sequence[Buffer]
) -> Iterator[tuple[FramedRecord, list[Buffer]]]:
    """Each record with its own frames; `decode` has made sure that they add up."""
    start = 0
    for record in records:
        end = start + record.frame_count
        yield record, list(frames[start:end])
        start = end


def _pack(record: Record) -> bytes:
    kind = type(record)
    try:
        header = _encoder.encode(record)
        _unpack(kind, header)
    except (ProtocolError, MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        mended = _mended(record, None)
    else:
        return header
    try:
        header = _encoder.encode(mended)
    except (MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{kind.__name__} cannot be packed: {error}") from None
    _unpack(kind, header)
    return header


def _unpack(kind: type[Any], header: Buffer) -> Any:
    size_bytes = memoryview(header).nbytes
    if size_bytes > HEADER_BYTES_MAX:
        text = f"header of {kind.__name__} has {size_bytes} bytes, more than {HEADER_BYTES_MAX}: send less at once"
        raise ProtocolError(text)
    try:
        return _decoder(kind).decode(header)
    except ValidationError as error:
        raise ProtocolError(_explained(kind, header, str(error))) from None
    except (DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"header of {kind.__name__} cannot be unpacked: {error}") from None


def _check_frames(message: Message, frame_count: int) -> None:
    framed = _FRAMED.get(type(message))
    announced = 0 if framed is None else sum([record.frame_count for record in getattr(message, framed)])
    if announced != frame_count:
        raise ProtocolError(f"{type(message).__name__} announces {announced} frames and has {frame_count}")


def _kind_of(prefix: bytes) -> type[Message]:
    if prefix[:1] != _VERSION_BYTE:
        theirs = f"version {prefix[0]}" if prefix else "no version"
        raise ProtocolError(
            f"the peer speaks {theirs} of the wire protocol, this process version {WIRE_VERSION}: "
            "run the same headwaiter on both sides"
        )
    kind = _KINDS.get(prefix)
    if kind is None:
        raise ProtocolError(f"unknown kind of message: prefix {prefix.hex()}")
    return kind


def _explained(kind: type[Any], header: Buffer, problem: str) -> str:
    """Which field of which record is bad. The decoder gives the place in numbers, such as `$[0][3][4]`."""
    rule, _, path = problem.partition(" - at `")
    try:
        value = msgpack.decode(header)
    except Exception:
        # It is also broken further on, where nobody would have come.
        return f"{kind.__name__}: {problem}"
    place, at = kind.__name__, inspect.type_info(kind)
    for step in map(int, re.findall(r"\[(\d+)\]", path)):
        if isinstance(at, inspect.StructType):
            field = at.fields[step]
            place, at = f"{at.cls.__name__}.{field.name}", field.type
        elif isinstance(at, inspect.VarTupleType):
            at = at.item_type
        else:
            break
        value = value[step]
    if isinstance(at, inspect.StructType):
        place = at.cls.__name__
    return f"{place} is refused: {rule}, got {reprlib.repr(value)}"


# --- reports of failures do not fail -----------------------------------------------------------------------------


def _mended(value: Any, hint: object) -> Any:
    """The same with texts cut and free-form maps made plain: they explain failures, and must not cause one."""
    if isinstance(value, Record):
        return type(value)(*(_mended(getattr(value, f.name), f.type) for f in structs.fields(value)))
    if isinstance(value, tuple):
        return tuple(_mended(item, None) for item in value)
    if hint is Text and isinstance(value, str):
        return _cut(value)
    if hint is Map and isinstance(value, dict):
        return _plain(value, 1)
    return value


def _cut(text: str) -> str:
    if len(text) > TEXT_CHARS_MAX:
        text = text[: TEXT_CHARS_MAX - 1] + "…"
    # Half a surrogate pair is legal in a Python string and cannot be sent.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _plain(value: Any, depth: int) -> Any:
    """What a free-form map can carry, made from whatever a model's code put into it.

    Anything else goes as its text, because these maps explain failures and must not cause one.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _cut(str(value))
    if isinstance(value, numbers.Integral) and -INT_MAX - 1 <= int(value) <= 2 * INT_MAX + 1:
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    if depth <= MAP_DEPTH_MAX and isinstance(value, dict):
        entries = list(value.items())[:MAP_ENTRIES_MAX]
        return {_plain_key(key): _plain(item, depth + 1) for key, item in entries}
    if depth <= MAP_DEPTH_MAX and isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value[:MAP_ENTRIES_MAX]]
    return _text_of(value)


def _plain_key(key: Any) -> str:
    return _cut(str(key)) if isinstance(key, str) else _text_of(key)


def _text_of(value: Any) -> str:
    try:
        return _cut(reprlib.repr(value))
    except Exception:
        # The `__repr__` of a model's own class may raise anything, and so may that of a huge whole number.
        return f"<{type(value).__name__}>"


def _plain_number(value: object) -> int | float:
    """Asked by the encoder for what it does not know, such as numbers of numpy."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not sent")


def _decoder(kind: type[Any]) -> msgpack.Decoder[Any]:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgpack.Decoder(kind)
    return decoder


def _framed_field(kind: type[Any]) -> str | None:
    """The field with the records that are followed by frames."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        item = field.type.item_type if isinstance(field.type, inspect.VarTupleType) else None
        if isinstance(item, inspect.StructType) and any(part.name == "frame_count" for part in item.fields):
            return field.name
    return None


_decoders: dict[type, msgpack.Decoder[Any]] = {}
_encoder = msgpack.Encoder(enc_hook=_plain_number)
_VERSION_BYTE = bytes([WIRE_VERSION])
_PREFIXES: dict[type, bytes] = {kind: bytes([WIRE_VERSION, number]) for kind, number in KINDS.items()}
_KINDS: dict[bytes, type[Any]] = {prefix: kind for kind, prefix in _PREFIXES.items()}
_FRAMED: dict[type, str] = {kind: name for kind in KINDS if (name := _framed_field(kind)) is not None}

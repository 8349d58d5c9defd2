"""The only encoder and decoder of wire messages: records to frames and back, as `PROTOCOL.md` specifies.

Owns the limits of every field. Pure: it knows no socket, no clock and no payload. `decode` takes bytes from anybody
and raises nothing but `ProtocolError`; `encode` refuses whatever `decode` on the other side would refuse.

How it works: each record class of `messages.py` gets one `_Codec`, made from its annotations at import. A codec checks
a whole row of fields with few, C-level comparisons, because both ends of every request pass here twice.
"""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, Protocol, TypeVar, get_args, get_origin, get_type_hints

import msgpack
from typing_extensions import Buffer

from shared.errors import ProtocolError
from shared.messages import KINDS, WIRE_VERSION, Message, RequestId

# Bounds what one header can make a process allocate, with room for RECORDS_MAX records of usual size.
HEADER_BYTES_MAX: Final = 16 * 2**20
# A front may wait for 16,384 answers; all of them may be refused in one turn of the broker's loop.
RECORDS_MAX: Final = 2**16
# A value has one frame, and one more for each 64 KiB at least; see `values.py` and FRAME_BYTES_MAX.
FRAMES_MAX: Final = 2**14 + 1
# Names, versions, ids of other systems: nothing that a person reads in one line is longer.
NAME_CHARS_MAX: Final = 256
# Causes and error texts. The encoder cuts longer ones: a report of a failure must not fail on its length.
TEXT_CHARS_MAX: Final = 4096
# `batch_key` is a digest or a few canonical parameters.
BYTES_MAX: Final = 256
ID_BYTES: Final = 16
# Entries of one map, and levels of maps and arrays in a free-form one.
MAP_ENTRIES_MAX: Final = 4096
MAP_DEPTH_MAX: Final = 8
INT_MAX: Final = 2**63 - 1
INT32_MAX: Final = 2**31 - 1

_TEXT_FIELDS = frozenset({"message", "reason", "detail"})
# Where the range is not "0 to INT_MAX". Milliseconds end at what a C poll timeout can hold.
_INT_RANGES: dict[str, tuple[int, int]] = {
    "frame_count": (0, FRAMES_MAX),
    "remaining_ms": (-INT32_MAX, INT32_MAX),
    "retry_after_ms": (0, INT32_MAX),
    "grace_ms": (0, INT32_MAX),
    "heard_ms_ago": (-1, INT_MAX),
    "priority": (-INT32_MAX, INT32_MAX),
    "pid": (0, INT32_MAX),
}
# NaN and infinity compare false with these, so they are refused: one of them would stay in every sum for ever.
_FLOAT_RANGE = (-1.7976931348623157e308, 1.7976931348623157e308)


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
    codec = _MESSAGE_CODECS[type(message)]
    row = codec.to_row(message)
    codec.check_frames(message, len(frames))
    header = _pack(codec, row)
    if len(header) > HEADER_BYTES_MAX:
        raise ProtocolError(
            f"header of {codec.name} has {len(header)} bytes, more than {HEADER_BYTES_MAX}: send less at once"
        )
    return [codec.prefix, header, *frames]


def decode(parts: Sequence[Buffer]) -> tuple[Message, list[Buffer]]:
    """The message in `parts` (without routing id) and the frames of its records, uncopied.

    Raises:
        ProtocolError: anything that the protocol does not allow.
    """
    if len(parts) < 2:
        raise ProtocolError(f"a message has a prefix and a header, got {len(parts)} frames")
    codec = _codec_for(bytes(memoryview(parts[0])[:3]))
    header = memoryview(parts[1])
    if header.nbytes > HEADER_BYTES_MAX:
        raise ProtocolError(f"header of {codec.name} has {header.nbytes} bytes, more than {HEADER_BYTES_MAX}")
    try:
        row = msgpack.unpackb(
            header, ext_hook=_refuse_extension, max_array_len=RECORDS_MAX, max_map_len=MAP_ENTRIES_MAX
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"header of {codec.name} cannot be unpacked: {error}") from None
    message: Message = codec.from_row(row)
    frames = list(parts[2:])
    codec.check_frames(message, len(frames))
    return message, frames


def check(record: object) -> None:
    """Refuses a record that could not be sent, before it is put into a message together with innocent others.

    Raises:
        ProtocolError: the text names the field and its value.
    """
    codec = _codec_of(type(record))
    _pack(codec, codec.to_row(record))


def split_frames(
    records: Iterable[FramedRecord], frames: Sequence[Buffer]
) -> Iterator[tuple[FramedRecord, list[Buffer]]]:
    """Each record with its own frames; `decode` has made sure that they add up."""
    start = 0
    for record in records:
        end = start + record.frame_count
        yield record, list(frames[start:end])
        start = end


@dataclass(frozen=True, slots=True)
class Rule:
    """What one field allows, in the words of `PROTOCOL.md`, and how it is turned into what msgpack carries."""

    name: str
    kind: str
    """`int`, `text`, `array of RequestHeader` …"""
    held: type
    """Its type in the record."""
    sent: type
    """Its type after unpacking."""
    range: tuple[float, float] | None = None
    """Of a number."""
    lengths: tuple[int, int] | None = None
    """In characters, bytes or entries."""
    to_sent: Callable[[Any], Any] | None = None
    to_held: Callable[[Any], Any] | None = None
    framed: bool = False
    """Whether it is an array of records that are followed by frames."""


def rules(record: type) -> tuple[Rule, ...]:
    """The fields of a record class in wire order."""
    return _codec_of(record).rules


class _Codec:
    """One record class: a row is the list of its fields in order, as msgpack packs and unpacks it."""

    def __init__(self, record: type) -> None:
        self.name = record.__name__
        self.prefix = bytes([WIRE_VERSION, KINDS[record]]) if record in KINDS else b""
        self.rules = tuple(_rules(record))
        self._record = record
        self._read = _row_reader([rule.name for rule in self.rules])
        self._held = tuple(rule.held for rule in self.rules)
        self._sent = tuple(rule.sent for rule in self.rules)
        self._ranges = [(i, *rule.range) for i, rule in enumerate(self.rules) if rule.range]
        self._lengths = [(i, *rule.lengths) for i, rule in enumerate(self.rules) if rule.lengths]
        self._to_sent = [(i, rule.to_sent) for i, rule in enumerate(self.rules) if rule.to_sent]
        self._to_held = [(i, rule.to_held) for i, rule in enumerate(self.rules) if rule.to_held]
        self._defaults = [_default_maker(field, rule) for field, rule in zip(fields(record), self.rules, strict=True)]
        self._required = self._defaults.count(None)
        self._framed = next((rule.name for rule in self.rules if rule.framed), None)

    def to_row(self, record: Any) -> list[Any]:
        row = self._read(record)
        if tuple(map(type, row)) != self._held:
            self._convert(row, self._held)
        for position, convert in self._to_sent:
            row[position] = convert(row[position])
        self._check(row)
        return row

    def from_row(self, row: Any) -> Any:
        if type(row) is not list:
            raise ProtocolError(f"{self.name} is an array of its fields, not {reprlib.repr(row)}")
        if len(row) != len(self.rules):
            self._fit(row)
        if tuple(map(type, row)) != self._sent:
            self._convert(row, self._sent)
        self._check(row)
        for position, convert in self._to_held:
            row[position] = convert(row[position])
        return self._record(*row)

    def check_frames(self, message: Any, frame_count: int) -> None:
        announced = 0 if self._framed is None else sum(record.frame_count for record in getattr(message, self._framed))
        if announced != frame_count:
            raise ProtocolError(f"{self.name} announces {announced} frames and has {frame_count}")

    def _check(self, row: list[Any]) -> None:
        for position, low, high in self._ranges:
            if not low <= row[position] <= high:
                self._refuse(position, row, "is finite" if type(low) is float else f"is {low} to {high}")
        for position, low, high in self._lengths:
            if not low <= len(row[position]) <= high:
                self._refuse(position, row, f"has {low} to {high} characters, bytes or entries")

    def _fit(self, row: list[Any]) -> None:
        """A newer peer sends more fields than are known here, an older one fewer."""
        if len(row) < self._required:
            raise ProtocolError(f"{self.name} has at least {self._required} fields, got {len(row)}")
        row.extend(make() for make in self._defaults[len(row) :] if make is not None)
        del row[len(self.rules) :]

    def _convert(self, row: list[Any], expected: tuple[type, ...]) -> None:
        """Some type is not exactly the usual one: subclasses and whole numbers for floats are fine, the rest is not."""
        for position, (value, wanted) in enumerate(zip(row, expected, strict=True)):
            if type(value) is wanted:
                continue
            allowed = (int, float) if wanted is float else wanted
            if wanted not in (int, float, str, bytes) or isinstance(value, bool) or not isinstance(value, allowed):
                self._refuse(position, row, f"is {wanted.__name__}, not {type(value).__name__}")
            row[position] = wanted(value)

    def _refuse(self, position: int, row: list[Any], rule: str) -> None:
        raise ProtocolError(f"{self.name}.{self.rules[position].name} {rule}: got {reprlib.repr(row[position])}")


def _codec_for(prefix: bytes) -> _Codec:
    if prefix[:1] != _VERSION_BYTE:
        theirs = f"version {prefix[0]}" if prefix else "no version"
        raise ProtocolError(
            f"the peer speaks {theirs} of the wire protocol, this process version {WIRE_VERSION}: "
            "run the same headwaiter on both sides"
        )
    codec = _KIND_CODECS.get(prefix)
    if codec is None:
        raise ProtocolError(f"unknown kind of message: prefix {prefix.hex()}")
    return codec


def _codec_of(record: type) -> _Codec:
    codec = _CODECS.get(record)
    if codec is None:
        codec = _CODECS[record] = _Codec(record)
    return codec


def _pack(codec: _Codec, row: list[Any]) -> bytes:
    try:
        header: bytes = msgpack.packb(row)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{codec.name} cannot be packed: {error}") from None
    return header


def _rules(record: type) -> Iterator[Rule]:
    hints = get_type_hints(record)
    for field in fields(record):
        yield _rule(field.name, hints[field.name])


def _rule(name: str, hint: Any) -> Rule:
    if hint is RequestId:
        return Rule(name, "id", bytes, bytes, lengths=(ID_BYTES, ID_BYTES))
    if hint is bytes:
        return Rule(name, "bytes", bytes, bytes, lengths=(0, BYTES_MAX))
    if hint is bool:
        return Rule(name, "bool", bool, bool)
    if hint is int:
        return Rule(name, "int", int, int, range=_INT_RANGES.get(name, (0, INT_MAX)))
    if hint is float:
        return Rule(name, "float", float, float, range=_FLOAT_RANGE)
    if hint is str and name in _TEXT_FIELDS:
        return Rule(name, "text", str, str, lengths=(0, TEXT_CHARS_MAX), to_sent=_cut)
    if hint is str:
        return Rule(name, "str", str, str, lengths=(0, NAME_CHARS_MAX))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Rule(name, hint.__name__, hint, str, to_held=_member_finder(name, hint))
    if hint == dict[str, int]:
        return Rule(name, "map of int", dict, dict, lengths=(0, MAP_ENTRIES_MAX), to_held=_check_counts)
    if hint == dict[str, object]:
        return Rule(name, "map", dict, dict, lengths=(0, MAP_ENTRIES_MAX), to_sent=_plain_map, to_held=_check_plain_map)
    if isinstance(hint, type) and is_dataclass(hint):
        codec = _codec_of(hint)
        return Rule(name, codec.name, hint, list, to_sent=codec.to_row, to_held=codec.from_row)
    return _array_rule(name, hint)


def _array_rule(name: str, hint: Any) -> Rule:
    item, _ = get_args(hint) if get_origin(hint) is tuple else (None, None)
    lengths = (0, RECORDS_MAX)
    if item is RequestId:
        return Rule(name, "array of id", tuple, list, lengths=lengths, to_sent=_check_ids, to_held=_check_ids)
    if not is_dataclass(item) or not isinstance(item, type):
        raise TypeError(f"no rule for field {name}: {hint}")
    codec = _codec_of(item)
    to_row, from_row = codec.to_row, codec.from_row
    return Rule(
        name,
        f"array of {codec.name}",
        tuple,
        list,
        lengths=lengths,
        to_sent=lambda records: [to_row(record) for record in records],
        to_held=lambda rows: tuple([from_row(row) for row in rows]),
        framed=any(rule.name == "frame_count" for rule in codec.rules),
    )


def _row_reader(names: list[str]) -> Callable[[Any], list[Any]]:
    # `attrgetter` reads all fields in one call, but returns a bare value for one name and takes no empty list.
    if not names:
        return lambda record: []
    read = attrgetter(*names)
    if len(names) == 1:
        return lambda record: [read(record)]
    return lambda record: list(read(record))


def _default_maker(field: Any, rule: Rule) -> Callable[[], Any] | None:
    """Makes what a sender that left the field out would have sent; None if it may not be left out."""
    if field.default is MISSING and field.default_factory is MISSING:
        return None
    held: Callable[[], Any] = field.default_factory if field.default is MISSING else lambda: field.default
    to_sent = rule.to_sent
    return held if to_sent is None else lambda: to_sent(held())


def _member_finder(name: str, members: type[StrEnum]) -> Callable[[str], StrEnum]:
    by_value = {member.value: member for member in members}

    def find(value: str) -> StrEnum:
        member = by_value.get(value)
        if member is None:
            raise ProtocolError(f"{name} {reprlib.repr(value)} is not one of {', '.join(by_value)}")
        return member

    return find


def _check_ids(ids: Sequence[Any]) -> tuple[Any, ...]:
    for request_id in ids:
        if type(request_id) is not bytes or len(request_id) != ID_BYTES:
            raise ProtocolError(f"a request id has {ID_BYTES} bytes: got {reprlib.repr(request_id)}")
    return tuple(ids)


def _check_counts(counts: dict[Any, Any]) -> dict[str, int]:
    for key, count in counts.items():
        if type(key) is not str or len(key) > NAME_CHARS_MAX or type(count) is not int or not 0 <= count <= INT_MAX:
            raise ProtocolError(
                f"a map of int holds names and whole numbers: got {reprlib.repr(key)}: {reprlib.repr(count)}"
            )
    return counts


def _cut(text: str) -> str:
    if len(text) > TEXT_CHARS_MAX:
        text = text[: TEXT_CHARS_MAX - 1] + "…"
    # Half a surrogate pair is legal in a Python string and cannot be sent.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _plain_map(entries: dict[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(entries, 1) if entries else entries
    return plain


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
    if depth < MAP_DEPTH_MAX and isinstance(value, dict):
        entries = list(value.items())[:MAP_ENTRIES_MAX]
        return {_plain_key(key): _plain(item, depth + 1) for key, item in entries}
    if depth < MAP_DEPTH_MAX and isinstance(value, (list, tuple)):
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


def _check_plain_map(entries: dict[Any, Any]) -> dict[str, Any]:
    if entries:
        _check_plain(entries, 1)
    return entries


def _check_plain(value: Any, depth: int) -> None:
    if depth > MAP_DEPTH_MAX:
        raise ProtocolError(f"a map is nested deeper than {MAP_DEPTH_MAX} levels")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ProtocolError(f"a key of a map is str: got {reprlib.repr(key)}")
            _check_plain(item, depth + 1)
    elif type(value) is list:
        for item in value:
            _check_plain(item, depth + 1)
    elif type(value) not in _PLAIN_TYPES:
        raise ProtocolError(f"a map holds plain values: got {reprlib.repr(value)}")


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ProtocolError(f"a header holds no extension types: got type {code}")


_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})
_VERSION_BYTE = bytes([WIRE_VERSION])
_CODECS: dict[type, _Codec] = {}
_MESSAGE_CODECS = {record: _codec_of(record) for record in KINDS}
_KIND_CODECS = {codec.prefix: codec for codec in _MESSAGE_CODECS.values()}

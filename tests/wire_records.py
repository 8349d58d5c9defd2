"""Hypothesis strategies for every record of the wire protocol, made from its annotations."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from shared.messages import KINDS

PLAIN_MAPS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FRAMES = st.lists(st.binary(max_size=8), max_size=3)


def records(record: type) -> st.SearchStrategy[Any]:
    """Records that the protocol allows; the sequences of `frame_count` are small."""
    return st.builds(record, **{field.name: _field(field.name, field.type) for field in record_fields(record)})


def record_fields(record: type) -> tuple[inspect.Field, ...]:
    """The fields of a record class in wire order, each with what its annotation allows."""
    info = inspect.type_info(record)
    assert isinstance(info, inspect.StructType)
    return info.fields


def messages() -> st.SearchStrategy[Any]:
    """A message of any kind, and frames that fit it."""
    return st.one_of([records(record) for record in KINDS]).flatmap(_with_frames)


def _with_frames(message: Any) -> st.SearchStrategy[Any]:
    count = frame_count(message)
    return st.tuples(st.just(message), st.lists(st.binary(max_size=8), min_size=count, max_size=count))


def frame_count(message: Any) -> int:
    """How many frames the records of `message` announce."""
    total = 0
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, tuple):
            total += sum(getattr(record, "frame_count", 0) for record in value)
    return total


def _field(name: str, allowed: inspect.Type) -> st.SearchStrategy[Any]:
    text = st.text(st.characters(codec="utf-8"), max_size=12)
    if name == "frame_count":
        return st.integers(0, 3)
    match allowed:
        case inspect.BytesType(min_length=None):
            return st.binary(max_size=12)
        case inspect.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=high)
        case inspect.StrType():
            return text
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, high)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.DictType(value_type=inspect.UnionType()):
            return st.dictionaries(text, PLAIN_MAPS, max_size=3)
        case inspect.DictType(value_type=value):
            return st.dictionaries(text, _field("", value), max_size=3)
        case inspect.EnumType(cls=members):
            return st.sampled_from(members)
        case inspect.VarTupleType(item_type=item):
            return st.lists(_field("", item), max_size=2).map(tuple)
        case inspect.StructType(cls=record):
            return records(record)
    raise AssertionError(f"no strategy for {name}: {allowed}")

"""Hypothesis strategies for every record of the wire protocol, made from its annotations and the codec's own rules."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from shared import wire
from shared.messages import KINDS

PLAIN_MAPS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FRAMES = st.lists(st.binary(max_size=8), max_size=3)


def records(record: type) -> st.SearchStrategy[Any]:
    """Records that the protocol allows; the sequences of `frame_count` are small."""
    hints = get_type_hints(record)
    return st.builds(record, **{rule.name: _field(rule, hints[rule.name]) for rule in wire.rules(record)})


def messages() -> st.SearchStrategy[Any]:
    """A message of any kind, and frames that fit it."""
    return st.one_of([records(record) for record in KINDS]).flatmap(_with_frames)


def _with_frames(message: Any) -> st.SearchStrategy[Any]:
    count = frame_count(message)
    return st.tuples(st.just(message), st.lists(st.binary(max_size=8), min_size=count, max_size=count))


def frame_count(message: Any) -> int:
    """How many frames the records of `message` announce."""
    total = 0
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, tuple):
            total += sum(getattr(record, "frame_count", 0) for record in value)
    return total


def _field(rule: wire.Rule, hint: Any) -> st.SearchStrategy[Any]:
    low, high = rule.lengths or (0, 0)
    text = st.text(st.characters(codec="utf-8"), max_size=12)
    if rule.name == "frame_count":
        return st.integers(0, 3)
    match rule.kind:
        case "id":
            return st.binary(min_size=low, max_size=high)
        case "bytes":
            return st.binary(max_size=12)
        case "str" | "text":
            return text
        case "bool":
            return st.booleans()
        case "int":
            assert rule.range
            return st.integers(int(rule.range[0]), int(rule.range[1]))
        case "float":
            return st.floats(allow_nan=False, allow_infinity=False)
        case "map":
            return st.dictionaries(text, PLAIN_MAPS, max_size=3)
        case "map of int":
            return st.dictionaries(text, st.integers(0, 2**63 - 1), max_size=3)
        case "Code" | "Phase":
            return st.sampled_from(hint)
        case "array of id":
            return st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple)
    if get_origin(hint) is tuple:
        return st.lists(records(get_args(hint)[0]), max_size=2).map(tuple)
    return records(hint)

"""Values become JSON that a strict parser reads, whatever is in them."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Unserialisable
from shared.json_text import dump_json
from shared.values import pack, unpack


def refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def parsed(value: object) -> Any:
    return json.loads(dump_json(value), parse_constant=refuse_constant)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**1000), 2**1000) | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
        ),
    )
)
def test_plain_values_keep_every_digit(value: object) -> None:
    assert parsed(value) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [None, "float16", "float32", "float64"])
def test_numbers_that_json_lacks_become_null(value: float, dtype: str | None) -> None:
    held = [value] if dtype is None else numpy.array([value], dtype)
    assert dump_json({"score": held}) == b'{"score":[null]}'


def test_bytes_become_base64() -> None:
    assert parsed({"image": b"\x00\xff", "views": [bytearray(b"a"), memoryview(b"b")]}) == {
        "image": "AP8=",
        "views": ["YQ==", "Yg=="],
    }
    assert base64.b64decode(parsed(bytes(range(256)))) == bytes(range(256))


@pytest.mark.parametrize(
    "array",
    [
        numpy.array(0.1, "float32"),
        numpy.zeros((2, 0, 3)),
        numpy.arange(6, dtype="float16").reshape(2, 3).T,
        numpy.arange(3, dtype=">i4"),
        numpy.array([True, False]),
        numpy.array([2**64 - 1], "uint64"),
        numpy.float32(0.1),
        numpy.longdouble(0.5),
        torch.arange(4).reshape(2, 2).T,
        torch.tensor(1.5, dtype=torch.bfloat16),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype} {tuple(array.shape)}",
)
def test_arrays_become_nested_lists(array: Any) -> None:
    plain = array.tolist()
    assert parsed(array) == pytest.approx(plain, rel=1e-6) if isinstance(plain, float) else parsed(array) == plain
    assert parsed([10**30, array])[1] == parsed(array), "also beside what needs the long way"


def test_floats_of_arrays_are_as_short_as_they_are_precise() -> None:
    assert dump_json(numpy.array([0.1], "float32")) == b"[0.1]"
    assert dump_json(numpy.array(0.1, "float32")) == b"0.1"
    assert dump_json(numpy.array([[0.1, 0.2]], "float32").T) == b"[[0.1],[0.2]]"


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    assert parsed({"\ud800k": ["a\udfff"]}) == {"?k": ["a?"]}


def test_received_values_become_json() -> None:
    value = {"vector": numpy.ones((2, 40_000), "float32"), "blob": bytes(100_000), "id": 2**64}
    text = parsed(unpack(pack(value)))
    assert text["vector"] == [[1.0] * 40_000] * 2
    assert text["id"] == 2**64


@pytest.mark.parametrize(
    "value",
    [{1}, object(), [1j], numpy.array(["a"]), {"big": 10**5000}],
    ids=["set", "object", "complex", "text array", "huge"],
)
def test_what_has_no_json_form_is_refused(value: object) -> None:
    with pytest.raises(Unserialisable, match="cannot be written as JSON"):
        dump_json(value)

"""What a request of the Open Inference Protocol may look like, and what is said of one that may not."""

from __future__ import annotations

import gzip
import json
import re
import struct
import zlib
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.encodings import expanded
from frontend.surfaces.open_inference.bodies import Inference, read_inference
from frontend.surfaces.open_inference.signatures import signature_of
from frontend.surfaces.open_inference.tensors import BYTES, NUMBERS
from shared import tensors
from shared.errors import Code, RequestError

NONE: dict[bytes, bytes] = {}
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}


def read(*inputs: Any, behind: bytes = b"", **fields: Any) -> Inference:
    head = json.dumps({"inputs": list(inputs), **fields}).encode()
    return read_inference(head + behind, {b"inference-header-content-length": b"%d" % len(head)} if behind else NONE)


def binary(name: str, shape: list[int], datatype: str, size_bytes: int) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size_bytes}}


def elements(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def refused(*inputs: Any, **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read(*inputs, **fields)
    assert caught.value.code in (Code.INVALID_INPUT, Code.BAD_REQUEST)
    assert len(caught.value.message) < 400
    return caught.value.message


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_numbers_stay_where_they_are_in_the_body() -> None:
    data = struct.pack("<3f", 1, 2, 3) + elements(b"a", b"") + b"\x01\x00"
    inputs = (
        binary("x", [3, 1], "FP32", 12),
        binary("y", [2], "BYTES", 9),
        binary("z", [2], "BOOL", 2),
        {"name": "j", "shape": [1], "datatype": "INT8", "data": [-1]},
    )
    x, y, z, j = read(*inputs, behind=data).inputs
    assert isinstance(x.content, tensors.Tensor)
    assert (x.content.dtype, x.content.shape) == ("float32", (3, 1))
    assert x.content.data.readonly
    assert x.content.data.tobytes() == data[:12]
    assert isinstance(x.content.data.obj, bytes)
    assert len(x.content.data.obj) > len(data)
    assert y.content == [b"a", b""]
    assert isinstance(z.content, tensors.Tensor)
    assert isinstance(j.content, tensors.Tensor)
    assert j.content.data.tobytes() == b"\xff"


def test_data_in_json_may_be_flat_or_nested() -> None:
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]]):
        [tensor] = read({"name": "x", "shape": [2, 2, 1], "datatype": "INT64", "data": data}).inputs
        assert isinstance(tensor.content, tensors.Tensor)
        assert tensor.content.data.tobytes() == struct.pack("<4q", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("shape", "datatype", "data", "words"),
    [
        ([3], "INT32", [1, 2], r"has 2 elements; the shape \[3\] has 3"),
        ([2, 2], "INT32", [[1, 2], [3]], "nested otherwise"),
        ([2], "INT32", [[1, 2]], "nested otherwise"),
        ([1], "INT32", 5, "needs its data as a list"),
        ([1], "INT8", [128], "does not fit INT8"),
        ([1], "UINT8", [-1], "does not fit UINT8"),
        ([1], "FP16", [70000.0], "does not fit FP16"),
        ([1], "FP32", [1e39], "does not fit FP32"),
        ([1], "INT32", [1.5], "has 1.5 as element 0, which is no INT32"),
        ([2], "INT32", [1, True], "has True as element 1"),
        ([1], "BOOL", [1], "has 1 as element 0"),
        ([1], "FP32", ["1"], "as element 0"),
        ([1], "FP32", [None], "has None as element 0"),
        ([1], "BYTES", [1], "has 1 as element 0"),
        ([1], "BF16", [1.0], "binary data only"),
        ([1], "FP8", [1.0], "known: BOOL"),
        ([1], None, [1.0], "known: BOOL"),
        ([-1], "FP32", [1.0], "whole numbers, 0 or more"),
        ([True], "FP32", [1.0], "whole numbers, 0 or more"),
        ("1", "FP32", [1.0], "whole numbers, 0 or more"),
        ([1] * 33, "FP32", [1.0], "at most 32 whole numbers"),
        ([0, 2**62], "FP32", [], "is more than"),
        ([0, 2**20], "BYTES", [], "at most 65536 elements"),
    ],
)
def test_json_tensors_that_are_none_are_refused_by_name(shape: Any, datatype: Any, data: Any, words: str) -> None:
    message = refused({"name": "x", "shape": shape, "datatype": datatype, "data": data})
    assert message.startswith("input 'x' ")
    assert re.search(words, message), message


@pytest.mark.parametrize(
    ("shape", "datatype", "size_bytes", "data", "words"),
    [
        ([2], "FP32", 4, b"1234", "has 4 bytes; FP32 of the shape [2] has 8"),
        ([1], "FP32", 8, b"12345678", "has 8 bytes; FP32 of the shape [1] has 4"),
        ([2], "FP32", 8, b"1234", "has a binary_data_size of 8, and 4 bytes are left for it"),
        ([1], "FP32", 4, b"12345678", "4 bytes of the body belong to no input"),
        ([1], "FP32", -4, b"1234", "not a number of bytes"),
        ([1], "FP32", True, b"1", "not a number of bytes"),
        ([1], "BOOL", 1, b"\x02", "neither 0 nor 1"),
        ([2], "BYTES", 5, elements(b"a"), "ends before element 1, of 2 by its shape"),
        ([1], "BYTES", 5, elements(b"a")[:4], "are left for it"),
        ([1], "BYTES", 6, b"\x05\0\0\0ab", "ends in element 0, whose length is 5 bytes: 2 are there"),
        ([1], "BYTES", 10, elements(b"a", b"b"), "has 5 bytes behind its last element"),
    ],
)
def test_binary_tensors_whose_sizes_disagree_are_refused(
    shape: list[int], datatype: str, size_bytes: int, data: bytes, words: str
) -> None:
    assert words in refused(binary("x", shape, datatype, size_bytes), behind=data)


def test_a_tensor_has_its_data_in_one_place_and_its_name_alone() -> None:
    both = {**binary("x", [1], "INT8", 1), "data": [1]}
    assert "both data and binary_data_size" in refused(both, behind=b"1")
    assert "has no data" in refused({"name": "x", "shape": [1], "datatype": "INT8"})
    assert "is there twice" in refused(TEXT, TEXT)
    assert "object with a name" in refused({"shape": [1]})
    assert "list of 1 to 256 tensors" in refused()
    shared_memory = {**TEXT, "parameters": {"shared_memory_region": "r"}}
    assert "shared memory, which is not supported" in refused(shared_memory)


@pytest.mark.parametrize("length", [b"-1", b"x", b"", b"1.5", b"9" * 5000, b"9999", "²".encode("latin-1")])
def test_a_length_of_the_json_that_cannot_be_is_refused(length: bytes) -> None:
    with pytest.raises(RequestError, match="Inference-Header-Content-Length") as caught:
        read_inference(json.dumps({"inputs": [TEXT]}).encode(), {b"inference-header-content-length": length})
    assert caught.value.code is Code.BAD_REQUEST
    assert len(caught.value.message) < 200


# --- beside the tensors ----------------------------------------------------------------------------------------------


def test_parameters_of_the_protocol_are_taken_out_and_the_others_left() -> None:
    given = {"timeout": 2_500_000, "priority": 1, "binary_data_output": True, "top_k": 2}
    request = read(TEXT, id="7", parameters=given, outputs=[{"name": "a"}, {"name": "b"}])
    assert (request.timeout_s, request.priority, request.id) == (2.5, -100, "7")
    assert request.parameters == {"top_k": 2}
    assert [output.is_binary for output in request.outputs] == [True, True]
    named = [{"name": "a", "parameters": {"binary_data": False}}]
    assert not read(TEXT, parameters=given, outputs=named).outputs[0].is_binary


@pytest.mark.parametrize(("given", "priority"), [(0, None), (1, -100), (100, -1), (101, 0), (201, 100)])
def test_priorities_count_from_the_most_urgent(given: int, priority: int | None) -> None:
    assert read(TEXT, parameters={"priority": given}).priority == priority


def test_no_timeout_and_a_timeout_of_zero_are_the_same() -> None:
    assert read(TEXT).timeout_s is None
    assert read(TEXT, parameters={"timeout": 0}).timeout_s is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parameters": {"timeout": -1}}, "timeout is not a whole number of microseconds"),
        ({"parameters": {"timeout": "1"}}, "timeout is not a whole number of microseconds"),
        ({"parameters": {"timeout": True}}, "timeout is not a whole number of microseconds"),
        ({"parameters": {"priority": 202}}, "from 1, the most urgent, to 201"),
        ({"parameters": {"priority": -1}}, "from 1, the most urgent, to 201"),
        ({"parameters": {"sequence_id": 1}}, "sequence_id is not supported"),
        ({"parameters": {"headers": {}}}, "send HTTP headers instead"),
        ({"parameters": {"triton_x": 1}}, "reserved"),
        ({"parameters": {"binary_data_output": 1}}, "not true or false"),
        ({"parameters": []}, "parameters is an array, not an object"),
        ({"id": 5}, "id is a number, not a string"),
        ({"outputs": {}}, "outputs must be a list"),
        ({"outputs": [{}]}, "object with a name"),
        ({"outputs": [{"name": "a"}, {"name": "a"}]}, "asks for 'a' again"),
        ({"outputs": [{"name": "a", "parameters": {"classification": 2}}]}, "classification"),
        ({"outputs": [{"name": "a", "parameters": {"shared_memory_region": "r"}}]}, "shared memory"),
        ({"outputs": [{"name": "a", "parameters": {"binary_data": 1}}]}, "not true or false"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], words: str) -> None:
    assert words in refused(TEXT, **fields)


# --- anything at all -------------------------------------------------------------------------------------------------

SIZES = st.integers(-1, 4) | st.integers(0, 2**64)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TENSOR_PARAMETERS = st.fixed_dictionaries({}, optional={"binary_data_size": SIZES | JSON_VALUES})
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "text", "question"]) | JSON_VALUES,
        "shape": st.lists(SIZES, max_size=3) | JSON_VALUES,
        "datatype": st.sampled_from([*NUMBERS, BYTES]) | JSON_VALUES,
        "data": JSON_VALUES,
        "parameters": TENSOR_PARAMETERS | JSON_VALUES,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, min_size=1, max_size=3)},
    optional={"id": JSON_VALUES, "parameters": JSON_VALUES, "outputs": st.lists(TENSORS, max_size=2) | JSON_VALUES},
)
TASKS = ["embedding", "question-answering", "text-generation", "decision", "automatic-speech-recognition", "a:B"]


def read_or_refuse(body: bytes, headers: dict[bytes, bytes], task: str) -> bool:
    """Whether it was read; the only way not to be is an error of the caller's."""
    code = None
    try:
        request = read_inference(body, headers)
        assert list(signature_of(task).questions(request.inputs, is_raw=request.is_raw))
    except RequestError as error:
        code = error.code
    assert code in (None, Code.INVALID_INPUT, Code.BAD_REQUEST)
    return code is None


@settings(max_examples=300, deadline=None)
@given(request=REQUESTS, behind=st.binary(max_size=24), off=st.integers(-2, 2), task=st.sampled_from(TASKS))
def test_no_request_is_anything_but_read_or_refused(
    request: dict[str, Any], behind: bytes, off: int, task: str
) -> None:
    try:
        head = orjson.dumps(request)
    except (orjson.JSONEncodeError, TypeError):
        head = json.dumps(request).encode()
    read_or_refuse(head + behind, {b"inference-header-content-length": b"%d" % (len(head) + off)}, task)
    read_or_refuse(head, NONE, task)


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=64), length=st.binary(max_size=4) | st.integers(0, 70).map(lambda n: b"%d" % n))
def test_no_bytes_are_anything_but_read_or_refused(body: bytes, length: bytes) -> None:
    read_or_refuse(body, {b"inference-header-content-length": length}, "embedding")


@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.binary(max_size=8), min_size=1, max_size=5), cut=st.integers(0, 40), extra=st.binary())
def test_bytes_are_split_as_they_were_joined_and_never_otherwise(values: list[bytes], cut: int, extra: bytes) -> None:
    data = elements(*values)
    [tensor] = read(binary("x", [len(values)], "BYTES", len(data)), behind=data).inputs
    assert tensor.content == values
    spoilt = data[: max(0, len(data) - cut)] + extra
    if spoilt != data and spoilt:
        head = json.dumps({"inputs": [binary("x", [len(values)], "BYTES", len(spoilt))]}).encode()
        headers = {b"inference-header-content-length": b"%d" % len(head)}
        if read_or_refuse(head + spoilt, headers, "a:B"):
            [again] = read_inference(head + spoilt, headers).inputs
            assert elements(*again.content) == spoilt


# --- compressed bodies -----------------------------------------------------------------------------------------------


def test_a_compressed_body_is_read_up_to_a_bound() -> None:
    content = b"x" * 1000
    for encoding, body in ((b"gzip", gzip.compress(content)), (b"deflate", zlib.compress(content))):
        assert expanded(body, encoding, 1000) == content
        assert expanded(body, encoding, 999) is None


def test_a_small_body_that_stands_for_gigabytes_takes_no_more_than_the_bound() -> None:
    bomb = gzip.compress(bytes(64 * 2**20))
    assert len(bomb) < 100_000
    assert expanded(bomb, b"gzip", 1024) is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends too early"),
        (b"plain", "incorrect header"),
        (gzip.compress(b"x" * 100, mtime=0)[:-1], "ends too early"),
        (gzip.compress(b"a", mtime=0) + gzip.compress(b"b", mtime=0), "bytes follow its end"),
        (gzip.compress(b"a", mtime=0)[:-5] + b"12345", "check"),
    ],
)
def test_a_body_that_is_not_compressed_as_it_says_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        expanded(body, b"gzip", 1000)
    assert caught.value.code is Code.BAD_REQUEST

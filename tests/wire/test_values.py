"""Values arrive as they were packed, large ones uncopied; what cannot be sent is named by its place."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import random
import subprocess
import sys
from collections import OrderedDict, namedtuple
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgpack
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import tensors, values
from shared.errors import Code, ProtocolError, Unserialisable
from shared.values import OWN_FRAME_BYTES_MIN, pack, unpack

ROOT = Path(__file__).resolve().parents[2]
LARGE = OWN_FRAME_BYTES_MIN
INTS = st.integers(-(2**1000), 2**1000)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTS | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=5)
    ),
)


def sent(value: object) -> Any:
    return unpack([bytes(frame) for frame in pack(value)])


@pytest.mark.parametrize("count", [3, LARGE])
def test_tensor_described_by_its_bytes_arrives_as_the_array(count: int) -> None:
    array = numpy.arange(count, dtype=numpy.float32).reshape(1, count)
    body = b"head" + array.tobytes()
    frames = pack({"x": tensors.Tensor("float32", (1, count), memoryview(body)[4:])})
    numpy.testing.assert_array_equal(unpack(frames)["x"], array)
    if len(frames) > 1:
        # A view of the body that it came in.
        assert memoryview(frames[1]).obj is body


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


@dataclasses.dataclass
class Answer:
    text: str


Pair = namedtuple("Pair", "left right")


@given(PLAIN)
def test_plain_values_arrive_unchanged(value: object) -> None:
    assert sent(value) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324])
def test_every_float_arrives_unchanged(value: float) -> None:
    assert str(sent([value])[0]) == str(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2,)), [1, [2]]),
        (Pair(1, "r"), [1, "r"]),
        (OrderedDict(a=1), {"a": 1}),
        ({0: "no", numpy.int64(1): "yes"}, {"0": "no", "1": "yes"}),
        (Level.LOW, 1),
        ([Word.YES], ["yes"]),
        (numpy.float32(0.5), 0.5),
        (numpy.float64(0.1), 0.1),
        (numpy.longdouble(0.5), 0.5),
        (numpy.int8(-3), -3),
        (numpy.uint64(2**64 - 1), 2**64 - 1),
        (numpy.bool_(True), True),
        (numpy.str_("text"), "text"),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abcdef")[::2], b"ace"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_relatives_of_plain_types_become_plain(value: object, plain: object) -> None:
    received = sent(value)
    assert received == plain
    assert type(received) is type(plain)


# --- arrays ------------------------------------------------------------------------------------------------------

DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (3, 0, 2), (200, 400)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_arrive_with_dtype_shape_and_elements(dtype: str, shape: tuple[int, ...]) -> None:
    array = (numpy.arange(math.prod(shape)) % 100).astype(dtype).reshape(shape)
    received = sent({"array": array})["array"]
    assert received.dtype == array.dtype
    assert received.shape == shape
    assert numpy.array_equal(received, array)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (200, 400)], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_tensors_arrive_as_arrays(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)) % 100).to(getattr(torch, dtype)).reshape(shape)
    received = sent([tensor])[0]
    assert received.dtype.name == ("float32" if dtype == "bfloat16" else dtype)
    assert received.shape == shape
    assert numpy.array_equal(received, tensor.float().numpy().astype(received.dtype))


def test_bfloat16_is_exact() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    tensor = bits.view(torch.bfloat16)
    assert numpy.array_equal(sent(tensor), tensor.float().numpy(), equal_nan=True)


def test_tensors_of_a_graph_are_detached() -> None:
    weights = torch.ones(3, requires_grad=True)
    assert sent(weights * 2).tolist() == [2.0, 2.0, 2.0]
    assert sent(torch.nn.Parameter(torch.ones(1))).tolist() == [1.0]


def test_strided_and_big_endian_arrays_arrive_in_order() -> None:
    array = numpy.arange(6, dtype="float32").reshape(2, 3)
    assert numpy.array_equal(sent(array.T), array.T)
    assert numpy.array_equal(sent(array[:, ::-1]), array[:, ::-1])
    assert numpy.array_equal(sent(array.astype(">f4")), array)
    assert numpy.array_equal(sent(torch.arange(6).reshape(2, 3).T), numpy.arange(6).reshape(2, 3).T)


def test_large_parts_are_frames_of_their_own_and_never_copied() -> None:
    array = numpy.zeros((128, 128), numpy.float32)
    tensor = torch.zeros(LARGE, dtype=torch.bfloat16)
    blob = bytes(LARGE)
    writable = bytearray(LARGE)
    frames = pack({"array": array, "small": numpy.zeros(4), "rest": [tensor, blob, writable]})
    assert len(frames) == 5
    assert numpy.shares_memory(numpy.frombuffer(memoryview(frames[1]), numpy.uint8), array)
    assert numpy.shares_memory(numpy.frombuffer(memoryview(frames[2]), numpy.uint8), tensor.view(torch.int16).numpy())
    assert frames[3] is blob
    assert memoryview(frames[4]).obj is writable
    received = unpack(frames)
    assert numpy.shares_memory(received["array"], array)
    assert received["rest"][1] is blob
    assert received["rest"][2] == bytes(LARGE)


def test_what_is_just_too_small_for_a_frame_stays_inside() -> None:
    assert len(pack([bytes(LARGE - 1), numpy.zeros(LARGE - 1, numpy.uint8)])) == 1
    assert len(pack([bytes(LARGE), numpy.zeros(LARGE, numpy.uint8)])) == 3


def test_received_arrays_cannot_be_written_to() -> None:
    for frames in (pack(numpy.zeros(3)), [bytes(frame) for frame in pack(numpy.zeros(LARGE))]):
        assert not unpack(frames).flags.writeable


# --- refusals ----------------------------------------------------------------------------------------------------


def endless() -> list[object]:
    inner: list[object] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([{"score": {1}}], r"result\[0\]\.score is a set, .*: return a list"),
        ({"a b": (1, object())}, r"result\['a b'\]\[1\] is an object"),
        (datetime.datetime(2026, 1, 31), r"result is a datetime\.datetime, .* isoformat"),
        (datetime.timedelta(1), "total_seconds"),
        (numpy.datetime64("2026-01-31"), r"datetime\.date, .* isoformat"),
        ([Colour.RED], r"result\[0\] is a .*\.Colour, .* its value"),
        (Answer("yes"), r"dataclasses\.asdict"),
        (Decimal(1), r"decimal\.Decimal"),
        (iter([1]), "list"),
        (1j, "real and imaginary"),
        (print, "builtin_function"),
        ({"a": {1.5: 0}}, r"result\.a has the key 1\.5, a float"),
        ({True: 0}, "has the key True, a bool"),
        ({1: 0, "1": 0}, "two keys that are both '1'"),
        ({"a": 2**1024}, r"result\.a is a whole number of more than 128 bytes"),
        (["ok", {"k": "\ud800"}], r"result\[1\]\.k is text with half a surrogate pair"),
        ({"\udfff": 1}, "a key of result is text"),
        (endless(), "deeper than 64 levels, or contains itself"),
        (numpy.array(["a"]), "its elements are str32: convert"),
        (numpy.array([object()]), "its elements are object: convert"),
        (numpy.zeros(1, complex), "its elements are complex128"),
        (numpy.ma.array([1], mask=True), "its mask would be lost"),
        (numpy.zeros((1,) * 33), "33 dimensions, more than 32"),
        (torch.zeros(2, 2).to_sparse(), "its layout is torch.sparse_coo: return its to_dense"),
        ([torch.zeros(1, dtype=torch.complex64)], r"result\[0\] is a torch\.Tensor .* complex64"),
    ],
    ids=lambda value: str(type(value)) if not isinstance(value, str) else "",
)
def test_what_cannot_be_sent_is_named_with_its_place_and_a_remedy(value: object, text: str) -> None:
    with pytest.raises(Unserialisable, match=text) as caught:
        pack(value)
    assert caught.value.code is Code.MODEL_ERROR
    assert len(str(caught.value)) < 300


def test_the_value_is_called_what_the_caller_calls_it() -> None:
    with pytest.raises(Unserialisable, match=r"^inputs\[1\] is a set"):
        pack([1, {2}], where="inputs")


def test_depth_is_limited_at_the_same_level_on_both_sides() -> None:
    def nested(levels: int) -> list[object]:
        return [nested(levels - 1)] if levels > 1 else [0]

    assert sent(nested(64)) == nested(64)
    with pytest.raises(Unserialisable, match="deeper than 64"):
        pack(nested(65))
    with pytest.raises(ProtocolError, match="deeper than 64"):
        unpack([msgpack.packb(nested(65))])


def test_the_whole_value_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "FRAME_BYTES_MAX", 2 * LARGE)
    frames = pack([bytes(LARGE)])
    with pytest.raises(Unserialisable, match="return less at once"):
        pack([bytes(LARGE), bytes(LARGE)])
    with pytest.raises(ProtocolError, match="more than"):
        unpack([frames[0], bytes(2 * LARGE)])


# --- hostile frames ----------------------------------------------------------------------------------------------


def extension(code: int, content: object) -> bytes:
    packed: bytes = msgpack.packb(msgpack.ExtType(code, msgpack.packb(content)))
    return packed


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\xc0\xc0"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 5000],
        [b"\x80", b"extra frame"],
        [msgpack.packb({b"bytes": 1})],
        [msgpack.packb({1: 1})],
        [msgpack.packb(msgpack.Timestamp(1))],
        [extension(9, 1)],
        [extension(1, ["float32", [1], b"123"])],
        [extension(1, ["float32", [-1, -1], b"1234"])],
        [extension(1, ["float32", [True], b"1234"])],
        [extension(1, ["float32", [1.0], b"1234"])],
        [extension(1, ["float32", [0, 2**62, 2**62], b""])],
        [extension(1, ["float32", [1] * 33, b"1234"])],
        [extension(1, ["float32", [2**63], b"1234"])],
        [extension(1, ["object", [1], b"12345678"])],
        [extension(1, ["O", [1], b"12345678"])],
        [extension(1, [["float32"], [1], b"1234"])],
        [extension(1, "float32")],
        [extension(2, ["float32", [1], 1])],
        [extension(2, ["float32", [1], 0]), b"1234"],
        [extension(2, ["float32", [1], 2]), b"1234"],
        [extension(2, ["float32", [1], b"1234"]), b"1234"],
        [extension(3, 2), b"1234"],
        [extension(3, [1]), b"1234"],
        [msgpack.packb([msgpack.ExtType(3, b"\x01"), msgpack.ExtType(3, b"\x01")]), b"1234"],
        [msgpack.packb(msgpack.ExtType(3, b""))],
        [msgpack.packb(msgpack.ExtType(4, bytes(129)))],
    ],
    ids=lambda frames: frames[0][:12].hex() if frames else "none",
)
def test_malformed_values_raise_protocol_errors(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        unpack(frames)


@given(st.lists(st.binary(max_size=40), max_size=3))
def test_random_frames_raise_protocol_errors_only(frames: list[bytes]) -> None:
    only_protocol_errors(frames)


@given(st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_damaged_values_raise_protocol_errors_only(chance: random.Random) -> None:
    value = [{"text": "a", "array": numpy.arange(6, dtype="int16").reshape(2, 3), "id": 2**70}, bytes(LARGE), 0.5, None]
    head, *own_frames = (bytes(frame) for frame in pack(value))
    damaged = bytearray(head)
    for _ in range(chance.randint(1, 4)):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    only_protocol_errors([bytes(damaged), *own_frames])


def only_protocol_errors(frames: list[bytes]) -> None:
    try:
        value = unpack(frames)
    except ProtocolError:
        return
    pack(value)


# --- what a front worker pays ------------------------------------------------------------------------------------


def test_text_travels_without_numpy_or_torch() -> None:
    code = (
        "import sys; from shared.values import pack, unpack; from shared.json_text import dump_json; "
        "dump_json(unpack(pack({'text': ['a', 1, b'b']}))); "
        "print([name for name in ('numpy', 'torch', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_arrays_are_unpacked_without_torch() -> None:
    head = bytes(pack(torch.tensor([1.5], dtype=torch.bfloat16))[0])
    code = (
        "import sys; from shared.values import unpack; "
        f"print(unpack([bytes.fromhex('{head.hex()}')]).tolist(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[1.5] False"

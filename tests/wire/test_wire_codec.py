"""The codec keeps every message, and refuses whatever the protocol does not allow."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgpack
import numpy
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from shared import wire
from shared.errors import Code, ProtocolError
from shared.messages import (
    FRAMES_MAX,
    KINDS,
    RECORDS_MAX,
    Batch,
    Cancel,
    ChunkHeader,
    Drain,
    FrontPulse,
    ItemResult,
    Message,
    ModelCounters,
    Phase,
    Reply,
    ReplyHeader,
    RequestHeader,
    RequestId,
    Result,
    State,
    Stop,
    Submit,
    Timings,
)
from shared.wire import decode, encode, split_frames
from tests.wire_records import messages, records

ID = RequestId(bytes(range(16)))
HEADER = RequestHeader(ID, "qa", "predict", b"key", 7, 1000, 0, False, True, 1, "r-1", "00-trace")
SUBMIT_BYTES = bytes.fromhex(
    "91919cc410000102030405060708090a0b0c0d0e0fa27161a770726564696374c4036b657907cd03e800c2c301a3722d31a830302d7472616365"
)


def header_of(message: Message, frames: tuple[bytes, ...] = ()) -> Any:
    return msgpack.unpackb(encode(message, frames)[1])


def altered(message: Message, change: Callable[[Any], object], frames: tuple[bytes, ...] = ()) -> list[bytes]:
    """The encoded message with its header changed."""
    prefix = bytes(encode(message, frames)[0])
    header = header_of(message, frames)
    change(header)
    return [prefix, msgpack.packb(header), *frames]


@given(messages())
@settings(max_examples=400)
def test_every_message_survives_the_wire(sent: tuple[Message, list[bytes]]) -> None:
    message, frames = sent
    received, received_frames = decode(encode(message, frames))
    assert received == message
    assert type(received) is type(message)
    assert received_frames == frames


@pytest.mark.parametrize("record", list(KINDS), ids=lambda record: record.__name__)
def test_each_kind_has_its_own_prefix(record: type) -> None:
    @given(records(record))
    @settings(max_examples=5)
    def check(message: Any) -> None:
        frames = [b""] * sum(r.frame_count for r in framed(message))
        assert bytes(encode(message, frames)[0]) == bytes([1, KINDS[record]])

    check()


def framed(message: Any) -> list[Any]:
    values = [getattr(message, name) for name in message.__struct_fields__]
    return [
        record for value in values if isinstance(value, tuple) for record in value if hasattr(record, "frame_count")
    ]


def test_the_bytes_of_a_submit_never_change() -> None:
    assert encode(Submit((HEADER,)), [b"payload"]) == [b"\x01\x02", SUBMIT_BYTES, b"payload"]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, zmq.Frame], ids=lambda make: make.__name__)
def test_frames_may_be_any_buffer(make: Callable[[bytes], Any]) -> None:
    parts = [make(bytes(part)) for part in encode(Submit((HEADER,)), [b"payload"])]
    message, frames = decode(parts)
    assert message == Submit((HEADER,))
    assert frames == [parts[2]]
    assert frames[0] is parts[2], "payload frames are handed over uncopied"


def test_each_record_gets_its_own_frames() -> None:
    counts = [0, 2, 1, 0]
    chunks = tuple(ChunkHeader(ID, 1, index, count) for index, count in enumerate(counts))
    assert [(chunk.index, frames) for chunk, frames in split_frames(chunks, [b"a", b"b", b"c"])] == [
        (0, []),
        (1, [b"a", b"b"]),
        (2, [b"c"]),
        (3, []),
    ]


# --- versions ----------------------------------------------------------------------------------------------------


def test_another_version_is_refused_with_both_numbers() -> None:
    with pytest.raises(ProtocolError, match=r"version 2 .* version 1"):
        decode([b"\x02\x02", b"\x90"])


def test_fields_of_a_newer_peer_are_ignored() -> None:
    parts = altered(Submit((HEADER,)), lambda header: (header[0][0].append("new"), header.append({})), (b"payload",))
    assert decode(parts)[0] == Submit((HEADER,))


def test_missing_trailing_fields_take_their_defaults() -> None:
    header = ReplyHeader(ID, Code.OK, 0)
    parts = altered(Reply((header,)), lambda row: row[0][0].__delitem__(slice(3, None)))
    assert decode(parts)[0] == Reply((header,))


def test_defaults_are_not_shared_between_messages() -> None:
    parts = altered(Reply((ReplyHeader(ID, Code.OK, 0),)), lambda row: row[0][0].__delitem__(slice(3, None)))
    first, second = (decode(parts)[0] for _ in range(2))
    assert isinstance(first, Reply)
    assert isinstance(second, Reply)
    assert first.replies[0].detail is not second.replies[0].detail


def test_a_missing_field_without_default_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"RequestHeader is refused: .* at least length 10, got 9"):
        decode(altered(Submit((HEADER,)), lambda row: row[0][0].__delitem__(slice(9, None)), (b"payload",)))


# --- what is not allowed -----------------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[str, object]] = [
    ("id", b"short"),
    ("id", bytes(17)),
    ("id", "0123456789abcdef"),
    ("model", "m" * 257),
    ("model", b"qa"),
    ("model", None),
    ("batch_key", bytes(257)),
    ("cost_hint", -1),
    ("cost_hint", 2**63),
    ("cost_hint", 1.0),
    ("cost_hint", True),
    ("remaining_ms", 2**31),
    ("priority", -(2**31)),
    ("stream", 1),
    ("retryable", None),
    ("frame_count", -1),
    ("frame_count", FRAMES_MAX + 1),
    ("request_id", ["r"]),
    ("traceparent", {}),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda value: repr(value)[:20])
def test_a_field_out_of_bounds_is_refused_by_name(field: str, value: object) -> None:
    position = RequestHeader.__struct_fields__.index(field)
    with pytest.raises(ProtocolError, match=f"RequestHeader.{field} "):
        decode(altered(Submit((HEADER,)), lambda row: row[0][0].__setitem__(position, value), (b"payload",)))


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda value: repr(value)[:20])
def test_what_would_be_refused_is_not_sent(field: str, value: Any) -> None:
    bad = structs.replace(HEADER, **{field: value})
    with pytest.raises(ProtocolError, match=f"RequestHeader.{field} "):
        wire.check(bad)
    with pytest.raises(ProtocolError, match=f"RequestHeader.{field} "):
        encode(Submit((HEADER, bad)), [b"", b""])


def test_text_that_is_not_unicode_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="RequestHeader"):
        wire.check(structs.replace(HEADER, model="\ud800"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_floats_that_would_stay_in_every_sum_are_refused(value: float) -> None:
    with pytest.raises(ProtocolError, match=r"Timings.forward_ms is refused"):
        encode(Reply((ReplyHeader(ID, Code.OK, 0, timings=Timings(forward_ms=value)),)))
    sent = altered(Reply((ReplyHeader(ID, Code.OK, 0),)), lambda row: row[0][0][7].__setitem__(2, value))
    with pytest.raises(ProtocolError, match=r"Timings.forward_ms is refused"):
        decode(sent)


def test_a_whole_number_is_a_float_too() -> None:
    parts = altered(Reply((ReplyHeader(ID, Code.OK, 0),)), lambda row: row[0][0][7].__setitem__(2, 3))
    message, _ = decode(parts)
    assert isinstance(message, Reply)
    assert repr(message.replies[0].timings.forward_ms) == "3.0"


def test_numbers_of_numpy_are_sent_as_plain_ones() -> None:
    timings = Timings(forward_ms=numpy.float64(1.5))
    assert header_of(Reply((ReplyHeader(ID, Code.OK, 0, timings=timings),)))[0][0][7][2] == 1.5


def test_unknown_codes_and_phases_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"ReplyHeader.code is refused: .* 'fine'"):
        decode(altered(Reply((ReplyHeader(ID, Code.OK, 0),)), lambda row: row[0][0].__setitem__(1, "fine")))
    with pytest.raises(ProtocolError, match=r"State.phase is refused: .* 'asleep'"):
        decode(altered(State("qa/0", 1, Phase.READY), lambda row: row.__setitem__(2, "asleep")))


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown kind of message: prefix 01ff"):
        decode([b"\x01\xff", b"\x90"])


@pytest.mark.parametrize("prefix", [b"", b"\x01", b"\x01\x02\x00", b"\x01" * 100_000])
def test_a_prefix_has_two_bytes(prefix: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode([prefix, SUBMIT_BYTES, b"payload"])


@pytest.mark.parametrize("frames", [[], [b"a", b"b"]], ids=["one too few", "one too many"])
def test_frames_have_to_add_up(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="Submit announces 1 frames and has"):
        encode(Submit((HEADER,)), frames)
    with pytest.raises(ProtocolError, match="Submit announces 1 frames and has"):
        decode([b"\x01\x02", SUBMIT_BYTES, *frames])


def test_messages_without_records_have_no_frames() -> None:
    with pytest.raises(ProtocolError, match="FrontPulse announces 0 frames and has 1"):
        decode([*encode(FrontPulse(1)), b"extra"])


def test_ids_in_a_list_are_checked_too() -> None:
    with pytest.raises(ProtocolError, match=r"Cancel.ids is refused"):
        encode(Cancel((ID, RequestId(b"x"))))
    with pytest.raises(ProtocolError, match=r"Cancel.ids is refused"):
        decode(altered(Cancel((ID,)), lambda row: row[0].append("x")))


def test_too_many_records_are_refused() -> None:
    ids = (ID,) * (RECORDS_MAX + 1)
    with pytest.raises(ProtocolError, match=r"Cancel.ids is refused: .* length <= 65536"):
        encode(Cancel(ids))
    with pytest.raises(ProtocolError, match=r"Cancel.ids is refused: .* length <= 65536"):
        decode([b"\x01\x03", msgpack.packb([list(ids)])])


def test_a_header_too_large_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(ProtocolError, match="more than 16777216"):
        decode([b"\x01\x02", b"\xc1" * (wire.HEADER_BYTES_MAX + 1)])
    texts = tuple(ReplyHeader(ID, Code.INTERNAL, 0, message="x" * 4096) for _ in range(5000))
    with pytest.raises(ProtocolError, match="send less at once"):
        encode(Reply(texts))


def test_counts_are_whole_numbers_under_names() -> None:
    counters = ModelCounters("qa", 0, {"ok": 1}, {}, 0, 0, 0, {}, 0.0, {}, 0.0, {}, {})
    wire.check(counters)
    bad_counts: list[Any] = [{"ok": -1}, {"ok": True}, {"ok": 1.5}, {b"ok": 1}, {"k" * 300: 1}]
    for bad in bad_counts:
        with pytest.raises(ProtocolError, match=r"ModelCounters.ended is refused"):
            wire.check(structs.replace(counters, ended=bad))


# --- reports of failures do not fail -----------------------------------------------------------------------------


def test_long_and_broken_texts_are_cut_not_refused() -> None:
    message, _ = decode(encode(Reply((ReplyHeader(ID, Code.MODEL_ERROR, 0, message="\ud800" + "é" * 10_000),))))
    assert isinstance(message, Reply)
    text = message.replies[0].message
    assert text == "?" + "é" * 4094 + "…"


def test_details_of_any_type_arrive_as_plain_values() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    loop: dict[str, object] = {}
    loop["self"] = loop
    detail: dict[str, object] = {
        "limit": numpy.int64(512),
        "share": numpy.float32(0.5),
        "array": numpy.zeros(3),
        "set": {1},
        "decimal": Decimal(1),
        "wide": 2**64 - 1,
        "huge": 10**5000,
        "tuple": (1, [2.5]),
        "loop": loop,
        "broken": Broken(),
        "text": "x" * 10_000,
        "nan": float("nan"),
    }
    detail[3] = None  # type: ignore[index]
    message, _ = decode(encode(Result("qa/0", 1, (ItemResult(ID, 1, Code.MODEL_ERROR, 0, detail=detail),))))
    assert isinstance(message, Result)
    received: Any = message.results[0].detail
    assert (received["limit"], received["share"], received["tuple"]) == (512, 0.5, [1, [2.5]])
    assert received["array"].startswith("array([")
    assert len(received["text"]) == 4096
    assert "Broken" in received["broken"]
    assert received["wide"] == 2**64 - 1
    assert received["huge"] == "<int>"
    assert received["3"] is None
    assert received["nan"] != received["nan"]


def test_maps_are_bounded_in_depth_and_type() -> None:
    def nested(depth: int) -> Any:
        return {"k": nested(depth - 1)} if depth else 1

    def sent(detail: Any) -> list[bytes]:
        return altered(Reply((ReplyHeader(ID, Code.OK, 0),)), lambda row: row[0][0].__setitem__(9, detail))

    decode(sent(nested(8)))
    with pytest.raises(ProtocolError, match=r"ReplyHeader.detail is refused"):
        decode(sent(nested(9)))
    for bad in (
        {b"k": 1},
        {"k": {b"k": 1}},
        {"k": b"bytes"},
        {"k": msgpack.Timestamp(1)},
        {"k": msgpack.ExtType(5, b"x")},
    ):
        with pytest.raises(ProtocolError, match=r"ReplyHeader.detail is refused"):
            decode(sent(bad))


def test_extension_types_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"FrontPulse.pending is refused: .* got `ext`"):
        decode([b"\x01\x04", msgpack.packb([msgpack.ExtType(5, b"x")])])


# --- hostile bytes -----------------------------------------------------------------------------------------------

HOSTILE_HEADERS = [
    b"",
    b"\xc1",
    b"\x90\x90",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xffabc",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\x91" * 100_000,
    b"\x81\xa1k" * 100_000,
    b"\x81\x90\x01",
    b"\xd9\x02\xff\xff",
    b"\xc7\x0c\xff" + b"\xff" * 12,
    pickle.dumps({"run": "me"}),
    b"GET / HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("kind", [int(kind) for kind in KINDS.values()])
@pytest.mark.parametrize("header", HOSTILE_HEADERS, ids=lambda header: header[:6].hex())
def test_hostile_headers_raise_protocol_errors_only(kind: int, header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode([bytes([1, kind]), header])


@given(st.lists(st.binary(max_size=64), max_size=4))
@example([])
@example([b"\x01\x33", b"\x90"])
def test_random_frames_raise_protocol_errors_only(parts: list[bytes]) -> None:
    only_protocol_errors(parts)


@given(messages(), st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_damaged_messages_raise_protocol_errors_only(sent: tuple[Message, list[bytes]], chance: random.Random) -> None:
    prefix, header, *frames = (bytes(part) for part in encode(*sent))
    for cut in range(min(len(header), 40)):
        only_protocol_errors([prefix, header[:cut], *frames])
    for _ in range(20):
        damaged = bytearray(header)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        only_protocol_errors([prefix, bytes(damaged), *frames])


@given(
    st.sampled_from(list(KINDS.values())),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=17),
        lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=30,
    ),
)
@settings(max_examples=300)
def test_wrong_structures_raise_protocol_errors_only(kind: int, header: object) -> None:
    only_protocol_errors([bytes([1, kind]), msgpack.packb(header)])


def only_protocol_errors(parts: list[bytes]) -> None:
    """What decodes must also be a message that could be sent."""
    try:
        message, frames = decode(parts)
    except ProtocolError:
        return
    sent = encode(message, frames)
    # Not the messages themselves: a map may hold NaN, which equals nothing.
    assert encode(*decode(sent)) == sent


def test_messages_without_fields_are_empty_arrays() -> None:
    assert encode(Stop()) == [b"\x01\x33", b"\x90"]
    assert header_of(Drain(5)) == [5]
    assert header_of(Batch(1, True, ())) == [1, True, []]

"""`PROTOCOL.md` and the code say the same, field by field and byte by byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgpack
import pytest
from msgspec import NODEFAULT, inspect

from shared import messages, sockets, tensors, values, wire
from shared.errors import Code
from shared.json_text import dump_json
from shared.messages import FRAME_BYTES_MAX, KINDS, TEXT_CHARS_MAX, WIRE_VERSION, Kind, Phase
from tests.wire_records import record_fields

TEXT = (Path(messages.__file__).parent / "PROTOCOL.md").read_text()
DIRECTIONS = {
    "front to broker": messages.FrontMessage,
    "broker to front": messages.ToFrontMessage,
    "replica to broker": messages.ReplicaMessage,
    "broker to replica": messages.ToReplicaMessage,
}


class Section(NamedTuple):
    title: str
    body: str


def sections() -> list[Section]:
    """What stands below each `###` heading, up to the next heading."""
    parts = re.split(r"^(#{2,3}) (.+)$", TEXT, flags=re.MULTILINE)[1:]
    triples = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return [Section(title, body) for marks, title, body in triples if marks == "###"]


def message_sections() -> dict[str, Section]:
    return {section.title.split()[0]: section for section in sections() if "(" in section.title}


def record_sections() -> dict[str, Section]:
    return {section.title: section for section in sections() if "(" not in section.title}


def rows(body: str) -> list[list[str]]:
    lines = [line for line in body.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def notation(value: Any) -> str:
    """JSON, with bytes as `h'…'`."""
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    if isinstance(value, list):
        return "[" + ", ".join(map(notation, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{notation(key)}: {notation(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def number(value: float) -> str:
    return {2**63 - 1: "2^63-1", 2**31 - 1: "2^31-1", 1 - 2**31: "-(2^31-1)"}.get(int(value), str(value))


def kind(field: inspect.Type) -> str:
    """The type of a field, in the words of the page."""
    match field:
        case inspect.BytesType(min_length=16):
            return "id"
        case inspect.BytesType():
            return "bytes"
        case inspect.StrType(max_length=limit):
            return "text" if limit == TEXT_CHARS_MAX else "str"
        case inspect.DictType(value_type=inspect.UnionType()):
            return "map"
        case inspect.DictType(value_type=value):
            return f"map of {kind(value)}"
        case inspect.VarTupleType(item_type=item):
            return f"array of {kind(item)}"
        case inspect.StructType(cls=record) | inspect.EnumType(cls=record):
            return record.__name__
    return type(field).__name__.removesuffix("Type").lower()


def allowed(field: inspect.Type) -> str:
    match field:
        case inspect.FloatType():
            return "finite"
        case inspect.IntType(ge=low, le=high):
            assert low is not None
            assert high is not None
            return f"{number(low)} to {number(high)}"
        case inspect.BytesType(min_length=16, max_length=16):
            return "16 bytes"
        case inspect.BytesType(max_length=limit):
            return f"up to {limit} bytes"
        case inspect.StrType(max_length=limit):
            return f"up to {limit} characters"
        case inspect.DictType(max_length=limit) | inspect.VarTupleType(max_length=limit):
            return f"up to {limit} entries"
    return ""


def default(field: inspect.Field) -> str:
    if field.default is not NODEFAULT:
        return f"`{notation(field.default)}`"
    if field.default_factory is NODEFAULT:
        return "required"
    made = field.default_factory()
    return f"`{notation(list(made.by_name().values()) if isinstance(made, messages.Timings) else made)}`"


def expected_rows(record: type) -> list[list[str]]:
    return [
        [f"`{field.name}`", kind(field.type), allowed(field.type), default(field)] for field in record_fields(record)
    ]


def test_the_versions_are_equal() -> None:
    assert TEXT.startswith(f"# The wire protocol, version {WIRE_VERSION}\n")
    assert f"- **{WIRE_VERSION}**: " in TEXT.partition("## Changelog")[2]


def test_every_kind_is_described_with_its_number_record_and_direction() -> None:
    directions = {record: name for name, union in DIRECTIONS.items() for record in get_args(union)}
    expected = [
        f"{kind.name} ({kind.value}): {record.__name__}, {directions[record]}" for record, kind in KINDS.items()
    ]
    assert [section.title for section in message_sections().values()] == expected
    assert sorted(KINDS.values()) == sorted(Kind)


@pytest.mark.parametrize("record", list(KINDS), ids=lambda record: record.__name__)
def test_every_field_of_a_message_is_described_in_wire_order(record: type) -> None:
    body = message_sections()[KINDS[record].name].body
    described = rows(body)
    assert [row[:4] for row in described] == expected_rows(record)
    assert all(row[4].endswith(".") for row in described)


def nested_records() -> list[type]:
    found: list[type] = []

    def visit(record: type) -> None:
        for field in record_fields(record):
            inner = field.type.item_type if isinstance(field.type, inspect.VarTupleType) else field.type
            if isinstance(inner, inspect.StructType) and inner.cls not in found:
                found.append(inner.cls)
                visit(inner.cls)

    for record in KINDS:
        visit(record)
    return found


def test_every_nested_record_is_described_and_no_other() -> None:
    assert sorted(record_sections()) == sorted(record.__name__ for record in nested_records())


@pytest.mark.parametrize("record", nested_records(), ids=lambda record: record.__name__)
def test_every_field_of_a_record_is_described_in_wire_order(record: type) -> None:
    described = rows(record_sections()[record.__name__].body)
    assert [row[:4] for row in described] == expected_rows(record)


@pytest.mark.parametrize("record", list(KINDS), ids=lambda record: record.__name__)
def test_every_example_decodes_to_what_is_printed(record: type) -> None:
    (block,) = re.findall(r"```wire\n(.*?)```", message_sections()[KINDS[record].name].body, re.DOTALL)
    example = dict(line.split(maxsplit=1) for line in block.splitlines())
    prefix, header = bytes.fromhex(example["prefix"]), bytes.fromhex(example["header"])
    frames = [b""] * int(example["frames"])
    message, received_frames = wire.decode([prefix, header, *frames])
    assert type(message) is record
    assert received_frames == frames
    assert notation(msgpack.unpackb(header)) == example["is"]
    assert wire.encode(message, frames) == [prefix, header, *frames]


VALUE_EXAMPLES = re.findall(r"```value\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", VALUE_EXAMPLES, ids=lambda block: block.split()[1][:16])
def test_every_value_example_is_what_its_frames_say(block: str) -> None:
    *frame_lines, json_line = block.splitlines()
    frames = [
        bytes.fromhex(content) if word == "frame" else bytes(int(content))
        for word, content in (line.split() for line in frame_lines)
    ]
    value = values.unpack(frames)
    text = dump_json(value).decode()
    cut = text if len(text) < 300 else f"{text[:60]}… ({len(text)} characters)"
    assert f"json  {cut}" == json_line


def test_value_examples_show_every_extension_type() -> None:
    heads = [bytes.fromhex(block.split()[1]) for block in VALUE_EXAMPLES]
    codes: set[int] = set()
    for head in heads:
        msgpack.unpackb(head, ext_hook=lambda code, data: codes.add(code))
    assert codes == {values.ARRAY, values.ARRAY_FRAME, values.BYTES_FRAME, values.BIG_INT}


def table_words(heading: str) -> list[str]:
    body = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [row[0].strip("`") for row in rows(body)]


def test_every_code_and_phase_is_listed() -> None:
    assert table_words("Codes") == [code.value for code in Code]
    assert "Phases: " + ", ".join(f"`{phase.value}`" for phase in Phase) + "." in TEXT


def test_the_limits_are_those_of_the_code() -> None:
    flat = " ".join(TEXT.split())
    for sentence in (
        f"A header has at most {wire.HEADER_BYTES_MAX} bytes, an array in it at most {messages.RECORDS_MAX} entries, "
        f"a map at most {messages.MAP_ENTRIES_MAX}.",
        f"at most {messages.MAP_DEPTH_MAX} levels deep",
        f"Parts of {values.OWN_FRAME_BYTES_MIN} bytes and more go as frames of their own.",
        f"Arrays and maps are nested at most {values.DEPTH_MAX} levels deep. "
        f"A value has at most {FRAME_BYTES_MAX} bytes in all, and {messages.FRAMES_MAX} frames.",
        f"| `MAXMSGSIZE` | {FRAME_BYTES_MAX} bytes |",
        f"| `LINGER` | {sockets.LINGER_MS} ms |",
        f"A path may have {sockets.SOCKET_PATH_BYTES_MAX} bytes.",
        f"9 to {values.BIG_INT_BYTES_MAX} bytes",
        f"an array of at most {tensors.DIMENSIONS_MAX} sizes",
    ):
        assert sentence in flat, sentence
    listed = re.search(r"`dtype` is (.*?)\. `shape`", flat)
    assert listed
    assert re.findall(r"`(\w+)`", listed[1]) == list(tensors.ITEM_BYTES)


def test_a_value_of_the_largest_size_fits_the_frames_of_a_record() -> None:
    assert messages.FRAMES_MAX == FRAME_BYTES_MAX // values.OWN_FRAME_BYTES_MIN + 1

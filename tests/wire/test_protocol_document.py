"""`PROTOCOL.md` and the code say the same, field by field and byte by byte."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgpack
import pytest

from shared import messages, sockets, tensors, values, wire
from shared.errors import Code
from shared.json_text import dump_json
from shared.messages import FRAME_BYTES_MAX, KINDS, WIRE_VERSION, Kind, Phase

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


def allowed(rule: wire.Rule) -> str:
    if rule.kind == "float":
        return "finite"
    if rule.range:
        return " to ".join(number(bound) for bound in rule.range)
    if rule.kind == "id":
        return "16 bytes"
    if not rule.lengths:
        return ""
    unit = {"bytes": "bytes", "str": "characters", "text": "characters"}.get(rule.kind, "entries")
    return f"up to {rule.lengths[1]} {unit}"


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{notation(field.default)}`"
    if field.default_factory is dataclasses.MISSING:
        return "required"
    made = field.default_factory()
    return f"`{notation(list(dataclasses.astuple(made)) if isinstance(made, messages.Timings) else made)}`"


def expected_rows(record: type) -> list[list[str]]:
    return [
        [f"`{rule.name}`", rule.kind, allowed(rule), default(field)]
        for rule, field in zip(wire.rules(record), dataclasses.fields(record), strict=True)
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

    def visit(hint: Any) -> None:
        for inner in get_args(hint) or [hint]:
            if isinstance(inner, type) and dataclasses.is_dataclass(inner) and inner not in found:
                found.append(inner)
                for nested in get_type_hints(inner).values():
                    visit(nested)

    for record in KINDS:
        for hint in get_type_hints(record).values():
            visit(hint)
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
        f"A header has at most {wire.HEADER_BYTES_MAX} bytes, an array in it at most {wire.RECORDS_MAX} entries, "
        f"a map at most {wire.MAP_ENTRIES_MAX}.",
        f"at most {wire.MAP_DEPTH_MAX} levels deep",
        f"Parts of {values.OWN_FRAME_BYTES_MIN} bytes and more go as frames of their own.",
        f"Arrays and maps are nested at most {values.DEPTH_MAX} levels deep. "
        f"A value has at most {FRAME_BYTES_MAX} bytes in all, and {wire.FRAMES_MAX} frames.",
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
    assert wire.FRAMES_MAX == FRAME_BYTES_MAX // values.OWN_FRAME_BYTES_MIN + 1

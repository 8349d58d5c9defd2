"""Log lines: one per event, the same for every library, and no value can pass for another line."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from shared.logs import FIELD_CHARS_MAX, ConsoleFormatter, JsonFormatter, RateLimiter, log_config, log_event

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "a\nb\r\x1b[31m\x9b2J\u2028\u202e\ud800\x00"


class Lines:
    """A logger with our formatter, and what it wrote."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(formatter)
        self.logger = logging.Logger("tests", logging.DEBUG)
        self.logger.addHandler(handler)

    def last(self) -> str:
        return self.stream.getvalue().splitlines()[-1]

    def text(self) -> str:
        return self.stream.getvalue()


@pytest.fixture
def console() -> Lines:
    return Lines(ConsoleFormatter("front"))


@pytest.fixture
def machine() -> Lines:
    return Lines(JsonFormatter("front"))


def fields_of(line: str) -> str:
    """What stands behind the time."""
    matched = re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (.*)", line)
    assert matched, line
    return matched[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("qa/0", "qa/0"),
        (9, "9"),
        (-0.25, "-0.25"),
        (1 / 3, "0.333333"),
        (float("nan"), "nan"),
        (True, "true"),
        (None, "none"),
        (b"\x01\xff", "01ff"),
        ("", '""'),
        ("two words", '"two words"'),
        ('quote"', '"quote\\""'),
        ("key=value", '"key=value"'),
        ("[1]", '"[1]"'),
        ("naïve", "naïve"),
        ({"a": [1, b"\x01"]}, '{"a":[1,"01"]}'),
        ((1, "x y"), '[1,"x y"]'),
        (Path("/run/x"), "/run/x"),
        ({"k": "a\nb"}, '{"k":"a\\nb"}'),
    ],
    ids=ascii,
)
def test_console_fields_can_be_split_at_spaces(console: Lines, value: object, text: str) -> None:
    log_event(console.logger, "info", "replica_exited", slot=value, last=1)
    assert fields_of(console.last()) == f"INFO front replica_exited slot={text} last=1"


def test_json_lines_hold_the_same_fields(machine: Lines) -> None:
    log_event(machine.logger, "warning", "replica_exited", slot="qa/0", signal=9, load={"a": [1, b"\x01"]}, id=b"\x02")
    line = json.loads(machine.last())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning",
        "program": "front",
        "event": "replica_exited",
        "slot": "qa/0",
        "signal": 9,
        "load": {"a": [1, "01"]},
        "id": "02",
    }


@pytest.mark.parametrize(
    "value",
    [float("nan"), 2**200, HOSTILE, {HOSTILE: HOSTILE}, object(), [float("inf")]],
    ids=["nan", "int", "text", "map", "object", "inf"],
)
def test_json_lines_are_strict_json_whatever_is_in_them(machine: Lines, value: object) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    log_event(machine.logger, "info", "seen", value=value)
    assert "value" in json.loads(machine.text(), parse_constant=refuse)


def test_no_value_forges_a_line_or_reaches_the_terminal(console: Lines, machine: Lines) -> None:
    for lines in (console, machine):
        log_event(lines.logger, "info", "seen", text=HOSTILE, nested={HOSTILE: [HOSTILE]})
        lines.logger.info("library text %s", HOSTILE)
        assert lines.text().count("\n") == 2
        assert lines.text().replace("\n", "").isprintable()


def test_a_traceback_follows_indented(console: Lines, machine: Lines) -> None:
    for lines in (console, machine):
        try:
            raise ValueError("first\n2026-01-31 10:00:00.000 INFO front forged\x1b[0m")
        except ValueError as error:
            log_event(lines.logger, "error", "stage_failed", exception=error, slot="qa/0")
    first, *rest = console.text().splitlines()
    assert fields_of(first) == "ERROR front stage_failed slot=qa/0"
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    line = json.loads(machine.last())
    assert line["event"] == "stage_failed"
    assert line["traceback"].startswith("Traceback")
    assert "exception" not in line


def test_an_exception_as_text_is_a_field_like_any_other(console: Lines) -> None:
    log_event(console.logger, "info", "seen", exception="KeyError")
    assert fields_of(console.last()) == "INFO front seen exception=KeyError"


def test_long_values_are_cut(console: Lines) -> None:
    log_event(console.logger, "info", "seen", text="x" * (FIELD_CHARS_MAX + 5))
    assert console.last().endswith("x…(+5)")


def test_fields_may_have_any_name(console: Lines, machine: Lines) -> None:
    names: dict[str, object] = {"level": 1, "event": 2, "logger": 3, "program": 4, "time": 5, "message": 6, "args": 7}
    log_event(console.logger, "info", "seen", **names)
    assert fields_of(console.last()) == "INFO front seen " + " ".join(
        f"{name}={value}" for name, value in names.items()
    )
    log_event(machine.logger, "info", "seen", **names)
    line = json.loads(machine.last())
    assert (line["event"], line["level"]) == ("seen", "info")
    assert (line["event_"], line["level_"], line["time_"], line["program_"], line["args"]) == (2, 1, 5, 4, 7)


def test_levels_below_the_configured_one_cost_nothing(console: Lines) -> None:
    class Untouchable:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    console.logger.setLevel(logging.INFO)
    log_event(console.logger, "debug", "seen", value=Untouchable())
    assert console.text() == ""


def test_text_of_libraries_comes_out_in_the_same_form(console: Lines) -> None:
    console.logger.name = "uvicorn.error"
    console.logger.info("Started server process [%d]", 12)
    assert fields_of(console.last()) == 'INFO front uvicorn.error message="Started server process [12]"'


# --- the process's configuration ---------------------------------------------------------------------------------


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_uvicorn_takes_the_configuration(restored: None, capsys: pytest.CaptureFixture[str]) -> None:
    config = log_config("warning", "json", program="frontend")
    assert json.loads(json.dumps(config)) == config, "plain data, so that it can be handed to worker processes"
    uvicorn.Config("frontend.app:app", log_config=config)
    logging.getLogger("uvicorn.error").info("not written")
    logging.getLogger("uvicorn.error").warning("written once")
    line = json.loads(capsys.readouterr().err)
    assert (line["program"], line["event"], line["message"]) == ("frontend", "uvicorn.error", "written once")


WRITER = """
import logging
from shared.logs import configure, log_event
configure("info", "console", program="server")
log_event(logging.getLogger("any"), "info", "server_started", pid=1)
"""


def test_lines_go_to_stderr_without_colour_when_it_is_no_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", WRITER], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == ""
    assert fields_of(done.stderr.rstrip("\n")) == "INFO server server_started pid=1"


def test_lines_are_coloured_on_a_terminal_unless_refused() -> None:
    assert "\x1b[32mINFO\x1b[0m" in on_a_terminal({})
    assert "\x1b" not in on_a_terminal({"NO_COLOR": "1"})


def on_a_terminal(environment: dict[str, str]) -> str:
    master, slave = pty.openpty()
    with open(master, "rb", buffering=0) as terminal, open(slave, "wb") as stderr:
        subprocess.run([sys.executable, "-c", WRITER], stderr=stderr, check=True, cwd=ROOT, env=environment)
        return terminal.read(4096).decode()


@pytest.mark.parametrize("name", ["console", "machine"])
def test_exception_of_any_size_leaves_a_readable_traceback(name: str, request: pytest.FixtureRequest) -> None:
    lines: Lines = request.getfixturevalue(name)
    try:
        raise ValueError("x" * 1_000_000 + "\n" * 100_000 + "the end")
    except ValueError as error:
        log_event(lines.logger, "error", "request_failed", exception=error)
    text = lines.text()
    assert len(text) < 20_000
    assert "ValueError: xxx" in text
    assert "the end" in text


# --- floods ------------------------------------------------------------------------------------------------------


def test_a_flood_is_one_line_a_minute_with_a_count(console: Lines) -> None:
    now_s = [100.0]
    limiter = RateLimiter(console.logger, "warning", "message_malformed", clock=lambda: now_s[0])
    for _ in range(10):
        limiter.log(reason="bad")
    now_s[0] += 59.9
    limiter.log(reason="bad")
    assert [fields_of(line) for line in console.text().splitlines()] == ["WARNING front message_malformed reason=bad"]
    now_s[0] += 0.1
    limiter.log(reason="worse")
    limiter.log(reason="bad")
    assert fields_of(console.last()) == "WARNING front message_malformed reason=worse held_back=10"
    now_s[0] += 3600
    limiter.log(reason="late")
    assert fields_of(console.last()) == "WARNING front message_malformed reason=late held_back=1"
    assert len(console.text().splitlines()) == 3

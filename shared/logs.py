"""Log lines: one event a line, with key=value fields, for people (`console`) or for machines (`json`).

Owns how a line looks and that no value can forge another line or colour a terminal. Built on the standard `logging`,
so that records of uvicorn and of libraries come out in the same form. Refuses to decide what is logged; payloads and
credentials are never handed to it.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import orjson

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["console", "json"]

# A line longer than this hides its neighbours, and some collectors cut lines at 16 KiB.
FIELD_CHARS_MAX = 2000
TRACEBACK_LINES_MAX = 200

_LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# Text that needs no quotes: a reader can split the line at spaces, and the pair at its first "=".
_BARE = re.compile(r"[^\s\"=\\{}\[\]]+")
_COLOURS = {logging.DEBUG: "2", logging.INFO: "32", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
_RESERVED = ("time", "level", "program", "event", "traceback")
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1


def log_event(logger: logging.Logger, level: Level, event: str, /, **fields: object) -> None:
    """Writes one event: `log_event(logger, "info", "replica_exited", slot="qa/0", signal=9)`.

    `event` is snake case, past tense, and constant, so that it can be searched for. A field `exception` that is an
    exception is written as its traceback, in lines of its own.
    """
    number = _LEVELS[level]
    if logger.isEnabledFor(number):
        exception = fields.get("exception")
        if isinstance(exception, BaseException):
            fields = {key: value for key, value in fields.items() if key != "exception"}
            logger.log(number, event, exc_info=exception, extra={"event_fields": fields})
        else:
            logger.log(number, event, extra={"event_fields": fields})


def configure(level: Level, format: Format, *, program: str, stream: TextIO | None = None) -> None:
    """Sends all logging of this process to `stream`, else to stderr, in one form. `program` names it in each line."""
    config = log_config(level, format, program=program)
    if stream is not None:
        config["handlers"]["stderr"]["stream"] = stream
    logging.config.dictConfig(config)


def log_config(level: Level, format: Format, *, program: str) -> dict[str, Any]:
    """The same as a `logging.config` dictionary: plain data, to be passed to uvicorn as its `log_config`.

    uvicorn's own loggers keep no handlers of their own and write through the root; what it tells of each worker's
    start and stop is left to level `debug`. Its access log needs `access_log=False` to be off.
    """
    formatter: dict[str, Any] = {"program": program}
    if format == "json":
        formatter["()"] = "shared.logs.JsonFormatter"
    else:
        formatter["()"] = "shared.logs.ConsoleFormatter"
        formatter["colour"] = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    through_root = {"level": "NOTSET", "handlers": [], "propagate": True}
    quiet = through_root | {"level": "WARNING" if level == "info" else "NOTSET"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {"uvicorn": through_root, "uvicorn.error": quiet, "uvicorn.access": through_root},
    }


class ConsoleFormatter(logging.Formatter):
    """`2026-01-31 10:00:00.123 INFO model_worker replica_exited slot=qa/0 signal=9`, in local time."""

    def __init__(self, program: str, *, colour: bool = False) -> None:
        super().__init__()
        self._program = program
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _event(record)
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = record.levelname
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelno, '0')}m{level}\x1b[0m"
        pairs = "".join(f" {key}={_console_text(value)}" for key, value in fields.items())
        line = f"{moment}.{int(record.msecs):03d} {level} {self._program} {event}{pairs}"
        if record.exc_info:
            # Indented, so that no line of a traceback can pass for an event.
            traceback = _clip_lines(self.formatException(record.exc_info))
            line += "".join(f"\n    {_printable(text)}" for text in traceback)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with `time` in UTC; a field with a reserved name gets an underscore behind it."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _event(record)
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "program": self._program,
            "event": event,
        }
        for key, value in fields.items():
            line[f"{key}_" if key in _RESERVED else key] = _json_value(value)
        if record.exc_info:
            line["traceback"] = _unicode("\n".join(_clip_lines(self.formatException(record.exc_info))))
        # Everything outside of strings is printable already, and inside of them the escapes are JSON's own.
        return _printable(orjson.dumps(line).decode())


class RateLimiter:
    """One event that may come in floods: the first is written at once, then at most one in `interval_s` seconds.

    A line after others were held back says how many, as `held_back`. For the use of one thread.
    """

    def __init__(
        self,
        logger: logging.Logger,
        level: Level,
        event: str,
        *,
        interval_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._level: Level = level
        self._event = event
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = clock()
        self._held_back = 0

    def log(self, **fields: object) -> None:
        """Writes the event with these fields, or counts it."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._held_back += 1
            return
        if self._held_back:
            fields["held_back"] = self._held_back
        self._next_s = now_s + self._interval_s
        self._held_back = 0
        log_event(self._logger, self._level, self._event, **fields)


def _event(record: logging.LogRecord) -> tuple[str, Mapping[str, object]]:
    fields = getattr(record, "event_fields", None)
    if fields is not None:
        return record.msg, fields
    # A library's free text: the logger is the event, the text is a field.
    return _printable(record.name), {"message": record.getMessage()}


def _console_text(value: object) -> str:
    match value:
        case None | bool():
            return str(value).lower()
        case float():
            return f"{value:.6g}"
        case dict() | list() | tuple():
            return _clip(_printable(json.dumps(_json_value(value), ensure_ascii=False, separators=(",", ":"))))
    text = value.hex() if isinstance(value, bytes) else str(value)
    text = _clip(text)
    if _BARE.fullmatch(text) and text.isprintable():
        return text
    return _printable(json.dumps(text, ensure_ascii=False))


def _json_value(value: object) -> object:
    match value:
        case None | bool() | float():
            return value
        case int():
            # Beyond 64 bits most readers of JSON lose digits.
            return value if _INT64_MIN <= value <= _UINT64_MAX else str(value)
        case bytes():
            return _clip(value.hex())
        case dict():
            return {_unicode(str(key)): _json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [_json_value(item) for item in value]
    return _unicode(_clip(str(value)))


def _clip(text: str) -> str:
    if len(text) <= FIELD_CHARS_MAX:
        return text
    return f"{text[:FIELD_CHARS_MAX]}…(+{len(text) - FIELD_CHARS_MAX})"


def _clip_lines(traceback: str) -> list[str]:
    """The text of an exception may be anything that a model's code was given; a traceback's end says the most."""
    lines = [_clip(line) for line in traceback.splitlines()]
    left_out = len(lines) - TRACEBACK_LINES_MAX
    if left_out > 0:
        lines[TRACEBACK_LINES_MAX // 2 : -TRACEBACK_LINES_MAX // 2] = [f"…(+{left_out} lines)"]
    return lines


def _printable(text: str) -> str:
    """Writes line ends, terminal escapes, direction marks and lone surrogates the way JSON escapes them."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else json.dumps(character, ensure_ascii=True)[1:-1] for character in text
    )


def _unicode(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()

"""`headwaiter logs`: what the programs and the model processes have written, of one of them or about one request.

Owns which line belongs to whom. A line of ours names its program, and often a slot, a model or a request; a traceback
belongs to the line above it. What the code of a model prints names nobody, so it is shown only where all is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags, load_config
from model_worker.commands.kept_log import LogReader
from model_worker.commands.observer import Unreachable, fetch_snapshot
from shared.config import Config
from shared.suggestions import did_you_mean

PROGRAMS = ("frontend", "model_worker")
SUPERVISOR = "supervisord"
LOOK_EVERY_S = 0.25
# A model server that is there answers within milliseconds, and its names are only for a message.
NAMES_TIMEOUT_S = 1.0
# As `shared/logs.py` writes them.
_EVENT = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [A-Z]+ (\S+) \S+(.*)", re.DOTALL)
_FIELD = re.compile(r" (slot|model|request_id)=(\"(?:[^\"\\]|\\.)*\"|\S*)| \w+=(?:\"(?:[^\"\\]|\\.)*\"|\S*)")
_SUPERVISOR = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ (.*)", re.DOTALL)
_CONTINUED = b"    "


@dataclass(frozen=True, slots=True)
class Wanted:
    about: str = ""
    """A program, a slot or a model; empty: all."""
    request_id: str = ""
    """Empty: also what belongs to no request."""

    def fits(self, origin: Origin) -> bool:
        return origin.concerns(self.about) and self.request_id in ("", origin.request_id)


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose line it is; nothing, for one that names nobody."""

    names: frozenset[str] = field(default_factory=frozenset)
    """The program, the slot, the model; and what supervisord writes about."""
    request_id: str = ""

    def concerns(self, about: str) -> bool:
        return not about or any(name == about or name.startswith(f"{about}/") for name in self.names)


def run_logs(flags: Flags, wanted: Wanted, lines: int, follow: bool) -> Exit:
    """Prints the last `lines` that fit; with `follow`, goes on until Ctrl-C.

    Raises:
        ConfigurationError: the configuration, which names the run directory, is refused.
    """
    config = load_config(flags)
    known = _names(config)
    if wanted.about and known and wanted.about not in known:
        text = f"nothing is called {wanted.about!r}{did_you_mean(wanted.about, known)}; known: {', '.join(known)}"
        print(f"headwaiter: {text}", file=sys.stderr)
        return Exit.USAGE
    reader = LogReader(config.run_directory)
    if not reader.is_there:
        print(f"headwaiter: {_why_none(config)}", file=sys.stderr)
        return Exit.UNAVAILABLE
    try:
        with contextlib.closing(reader):
            _print(reader, wanted, lines, follow)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Its reader has what it wanted; nothing is left to be flushed into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.OK


def _print(reader: LogReader, wanted: Wanted, lines: int, follow: bool) -> None:
    out = sys.stdout.buffer
    sorter = Sorter(wanted)
    out.writelines(deque(sorter.fitting(reader.kept()), maxlen=lines))
    out.flush()
    while follow:
        time.sleep(LOOK_EVERY_S)
        out.writelines(sorter.fitting(reader.news()))
        out.flush()


class Sorter:
    """Picks lines, in their order."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._last = Origin()

    def fitting(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            if not line.startswith(_CONTINUED):
                self._last = origin_of(line)
            if self._wanted.fits(self._last):
                yield line


def origin_of(line: bytes) -> Origin:
    """
    >>> sorted(origin_of(b"2026-01-31 10:00:00.123 INFO model_worker replica_exited slot=qa/0 signal=9").names)
    ['model_worker', 'qa/0']
    """
    if line.startswith(b"{"):
        with contextlib.suppress(ValueError):
            return _origin_of_fields(json.loads(line))
    if (event := _EVENT.match(line)) is not None:
        said = {match[1]: _value(match[2]) for match in _FIELD.finditer(event[2].decode(errors="replace")) if match[1]}
        return _origin_of_fields(said | {"program": event[1].decode(errors="replace")})
    if (told := _SUPERVISOR.match(line)) is not None:
        about = {name for name in PROGRAMS if name in re.findall(r"\w+", told[1].decode(errors="replace"))}
        return Origin(frozenset({SUPERVISOR, *about}))
    return Origin()


def _origin_of_fields(fields: object) -> Origin:
    if not isinstance(fields, dict):
        return Origin()
    names = frozenset(str(fields[key]) for key in ("program", "slot", "model") if fields.get(key))
    return Origin(names, str(fields.get("request_id", "")))


def _value(text: str) -> str:
    with contextlib.suppress(ValueError):
        return str(json.loads(text)) if text.startswith('"') else text
    return text


def _names(config: Config) -> list[str]:
    """What can be asked for; nothing, where only the programs are known."""
    try:
        snapshot = fetch_snapshot(config.run_directory, NAMES_TIMEOUT_S)
    except Unreachable:
        models = [(model.name, model.replicas or len(model.devices)) for model in config.models]
        slots = [f"{name}/{number}" for name, count in models for number in range(count)]
        names = [name for name, _ in models] + slots
    else:
        names = [model.name for model in snapshot.models] + [slot.slot for slot in snapshot.slots]
    return [*PROGRAMS, SUPERVISOR, *names] if names else []


def _why_none(config: Config) -> str:
    if not config.logging.kept_bytes_max:
        return "no log is kept, because logging.kept_bytes_max is 0: look where the output of headwaiter serve goes"
    return (
        f"no log is kept in {config.run_directory}, which headwaiter serve does: what the programs write without it is "
        "where their standard error goes, such as journalctl"
    )

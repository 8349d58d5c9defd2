"""`headwaiter config`: the configuration in force, with where each value came from.

Owns the rendering as TOML and JSON. The TOML can be used as a configuration file again, except for secrets, which are
masked.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags, load_config
from shared.config import CONFIG_FILE_VARIABLE, DEFAULT_CONFIG_FILE, ENV_PREFIX

SECTIONS = ("http", "server", "logging")


def run_config(flags: Flags, as_json: bool, out: TextIO = sys.stdout) -> Exit:
    """Prints it.

    Raises:
        ConfigurationError: it is not valid.
    """
    by_flag = frozenset(flags.variables())
    config = load_config(flags)
    values = config.model_dump(mode="json")
    if as_json:
        print(json.dumps(values, indent=2, ensure_ascii=False), file=out)
        return Exit.OK
    file = configuration_file()
    written = tomllib.loads(file.read_text(encoding="utf-8")) if file else {}
    for line in _toml(values, _Origins(file, written, by_flag)):
        print(line, file=out)
    return Exit.OK


def configuration_file() -> Path | None:
    """The file that `Config.load()` reads, if there is one."""
    named = os.environ.get(CONFIG_FILE_VARIABLE)
    file = Path(named or DEFAULT_CONFIG_FILE)
    return file if named or file.exists() else None


class _Origins:
    """Tells for each value whether a flag, a variable, the file or nobody set it."""

    def __init__(self, file: Path | None, written: Mapping[str, object], by_flag: frozenset[str]) -> None:
        self._file = file
        self._written = written
        self._by_flag = by_flag

    def of(self, section: str, key: str) -> str:
        in_file = self._written.get(section) if section else self._written
        variables = (f"{section}__{key}", section) if section else (key,)
        for variable in (ENV_PREFIX + name.upper() for name in variables):
            if variable in os.environ:
                return "command line" if variable in self._by_flag else variable
        if isinstance(in_file, Mapping) and key in in_file:
            return str(self._file)
        return "default"


def _toml(values: Mapping[str, object], origins: _Origins) -> Iterator[str]:
    for key, value in values.items():
        if key not in SECTIONS and key != "models":
            yield from _line("", key, value, origins)
    for section in SECTIONS:
        yield ""
        yield f"[{section}]"
        table = values[section]
        assert isinstance(table, Mapping)
        for key, value in table.items():
            yield from _line(section, key, value, origins)
    models = values["models"]
    assert isinstance(models, list)
    for model in models:
        yield ""
        yield f"[[models]]  # {origins.of('', 'models')}"
        for key, value in model.items():
            yield f"{key} = {_value(value)}" if value is not None else f"# {key} is not set"


def _line(section: str, key: str, value: object, origins: _Origins) -> Iterator[str]:
    if value is None:
        yield f"# {key} is not set"
    else:
        yield f"{key} = {_value(value)}  # {origins.of(section, key)}"


def _value(value: object) -> str:
    """A TOML value on one line."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(key)} = {_value(entry)}" for key, entry in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    # What JSON writes for texts, numbers and booleans is TOML as well.
    return json.dumps(value, ensure_ascii=False)

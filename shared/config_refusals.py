"""How a refused configuration is told: in one line, in the terms of the file, variable or flag that it came from.

Owns the wording of everything that pydantic finds wrong, and the refusal of variables that pydantic-settings would pass
over. Each message names the key, its value and what it may be; a secret's value is in none. Knows the keys only as they
are given: `shared/config.py` has them.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.errors import ConfigurationError
from shared.key_words import allowed_words, choices, entry_of, kind_words, section_of, value_words
from shared.suggestions import did_you_mean

Location = tuple[int | str, ...]
Fields = Mapping[str, FieldInfo]

_UNKNOWN = "extra_forbidden"
# By what a variable must be; for any other list, of two texts.
_JSON_EXAMPLES = {"a table": '{"key": 1}', "a list of tables": '[{"name": "a", "model": "./a"}]'}


@dataclass(frozen=True, slots=True)
class Origins:
    """Where each value of one configuration came from."""

    file: str
    """What to name for a value that neither a flag nor a variable has set."""
    flags: Mapping[Location, str]
    """The command line's names, such as `--port`, of the keys that it has put into the environment."""
    environment: Mapping[str, str]
    prefix: str
    """Of the variables."""
    model_names: Sequence[object]
    """What each `[[models]]` entry has for a name, whether that can be one or not."""

    def flag_of(self, location: Location) -> str | None:
        """The flag that has set this key, or what the key belongs to."""
        return next((self.flags[place] for place in _above(location) if place in self.flags), None)

    def source_of(self, location: Location) -> str:
        """The variable that has set this key or its whole section, or else the file."""
        variables = (self.prefix + "__".join(str(step).upper() for step in place) for place in _above(location[:2]))
        found = next((variable for variable in variables if variable in self.environment), None)
        return f"environment variable {found}" if found else self.file


@dataclass(frozen=True, slots=True)
class _Table:
    """The top of the configuration, a section of it, or one `[[models]]` entry."""

    location: Location
    label: str
    """For people; empty for the top."""
    fields: Fields
    known: tuple[str, ...]
    """Its keys, and other names that they go by."""


def told(error: ValidationError, fields: Fields, origins: Origins) -> str:
    """All that is wrong, in one line."""
    problems = [_to_the_key(problem) for problem in error.errors(include_url=False)]
    messages: dict[str, list[str]] = {}
    for problem in problems:
        location = problem["loc"]
        table = _table_of(location, fields, origins.model_names)
        flag = origins.flag_of(location)
        if problem["type"] != _UNKNOWN:
            text = _problem_words(problem, table, flag)
        else:
            # All unknown keys of one table are told at once, with the known ones behind them.
            others = [each for each in problems if each["type"] == _UNKNOWN and each["loc"][:-1] == location[:-1]]
            if problem is not others[0]:
                continue
            text = _unknown_keys(others, table, fields)
        messages.setdefault("" if flag else f"{origins.source_of(location)}: ", []).append(text)
    return "; ".join(source + "; ".join(texts) for source, texts in messages.items())


def _to_the_key(problem: ErrorDetails) -> ErrorDetails:
    """A validator of a whole table may say which of its keys is wrong."""
    key = problem.get("ctx", {}).get("key")
    return {**problem, "loc": (*problem["loc"], key)} if isinstance(key, str) else problem


def _above(location: Location) -> Iterator[Location]:
    """The location itself, and then each thing that it is part of."""
    return (location[:length] for length in range(len(location), 0, -1))


def _table_of(location: Location, fields: Fields, model_names: Sequence[object]) -> _Table:
    """The table that the value at `location` stands in."""
    field = fields.get(str(location[0])) if location else None
    if field is not None and len(location) > 1:
        if section := section_of(field.annotation):
            return _Table(location[:1], str(location[0]), section.model_fields, _known(section))
        entry, index = entry_of(field.annotation), location[1]
        if entry and isinstance(index, int):
            name = model_names[index] if index < len(model_names) else None
            label = f"model {name!r:.80}" if isinstance(name, str) and name else f"[[{location[0]}]] entry {index + 1}"
            return _Table(location[:2], label, entry.model_fields, _known(entry))
    return _Table((), "", fields, tuple(fields))


def _known(section: type[BaseModel]) -> tuple[str, ...]:
    other_names: Mapping[str, str] = getattr(section, "OTHER_NAMES", {})
    return (*section.model_fields, *other_names)


def _unknown_keys(problems: Sequence[ErrorDetails], table: _Table, fields: Fields) -> str:
    named = []
    for problem in problems:
        key = str(problem["loc"][-1])
        # What is a table itself has a wrong name; a single value may have a right one, and stand in the wrong table.
        is_table = isinstance(problem["input"], (dict, list))
        home = None if is_table else _home_of(key, fields)
        named.append(f"{key!r} (it belongs into {home})" if home else f"{key!r}{did_you_mean(key, table.known)}")
    where = f"{table.label}: " if table.label else ""
    keys = "unknown key" if len(named) == 1 else "unknown keys"
    return f"{where}{keys} {', '.join(named)}; known keys here: {', '.join(table.known)}"


def _home_of(key: str, fields: Fields) -> str | None:
    """The table that has a key of this name."""
    for name, field in fields.items():
        section, entry = section_of(field.annotation), entry_of(field.annotation)
        if section and key in _known(section):
            return f"[{name}]"
        if entry and key in _known(entry):
            return f"[[{name}]]"
    return None


def _problem_words(problem: ErrorDetails, table: _Table, flag: str | None) -> str:
    inside, value = problem["loc"][len(table.location) :], problem["input"]
    where = flag or _where(table, inside)
    if problem["type"] == "missing":
        return f"{table.label}: the key {inside[-1]!r} is missing"
    if problem["type"] == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
        if flag:
            text = text.replace("replicas = ", "--replicas ")
        return f"{where}: {text}" if where else text
    if not inside:
        return f"{where} must be a table, got {kind_words(value)}"
    field = table.fields[str(inside[0])]
    if len(inside) > 1:
        if typing.get_origin(field.annotation) is dict:
            return f"{where} must be what JSON can hold as well, got {kind_words(value)}"
        field = FieldInfo.from_annotation(typing.get_args(field.annotation)[0])
    # Of a secret, or of a table that may hold one, only the kind is told.
    is_open = "Secret" not in str(field.annotation) and not section_of(field.annotation)
    guess = did_you_mean(value, choices(field)) if isinstance(value, str) else ""
    return f"{where} must be {allowed_words(field)}, got {value_words(value) if is_open else kind_words(value)}{guess}"


def _where(table: _Table, inside: Location) -> str:
    """For people: `run_dir`, `http.api_keys[1]`, or `model 'a': cores`."""
    if not inside:
        return table.label
    key = str(inside[0]) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in inside[1:])
    if not table.label:
        return key
    return f"{table.label}: {key}" if len(table.location) > 1 else f"{table.label}.{key}"


def check_variables(environment: Mapping[str, str], prefix: str, own: frozenset[str], fields: Fields) -> None:
    """Refuses variables that pydantic-settings would pass over, or could not read without being able to say which.

    Raises:
        ConfigurationError: names the variable, and those there are.
    """
    top = {key.upper(): field for key, field in fields.items()}
    below = {key: _upper_keys(section_of(field.annotation)) for key, field in top.items()}
    for variable, text in sorted(environment.items()):
        if not variable.upper().startswith(prefix) or variable in own:
            continue
        first, _, rest = variable.removeprefix(prefix).partition("__")
        field = below.get(first, {}).get(rest) if rest else top.get(first)
        if field is None:
            here = [f"{first}__{key}" for key in below[first]] if first in top else list(top)
            every = [*top, *(f"{key}__{inner}" for key, inners in below.items() for inner in inners)]
            raise ConfigurationError(
                f"environment variable {variable} is no configuration key"
                f"{did_you_mean(variable, [prefix + key for key in every])}; known here: "
                + ", ".join(prefix + key for key in here)
                + _kubernetes_remedy(variable, text)
            )
        if section_of(field.annotation) or typing.get_origin(field.annotation) in (tuple, dict):
            _check_json(variable, text, allowed_words(field))


def _upper_keys(section: type[BaseModel] | None) -> Fields:
    return {key.upper(): field for key, field in section.model_fields.items()} if section else {}


def _check_json(variable: str, text: str, allowed: str) -> None:
    try:
        value: object = json.loads(text)
    except ValueError as error:
        example = _JSON_EXAMPLES.get(allowed, '["a", "b"]')
        raise ConfigurationError(
            f"environment variable {variable} must be {allowed} as JSON, such as {example}, and is not JSON: {error}"
        ) from None
    if value is None:
        # pydantic-settings would take the file's value.
        raise ConfigurationError(
            f"environment variable {variable} must be {allowed} as JSON, got null: to leave it out, unset it"
        )


def _kubernetes_remedy(variable: str, text: str) -> str:
    if "_SERVICE_" not in variable and "://" not in text:
        return ""
    return "; if Kubernetes made it for a Service of that name: set enableServiceLinks: false for the pod"

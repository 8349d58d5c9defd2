"""In words, what a key of the configuration may hold: for the reference page and for what is refused.

Owns the names of types and limits, so that the page and the messages cannot say different things. Refuses a type that
it has no words for.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_PATTERN_WORDS = {
    NAME_PATTERN: "at most 64 letters, digits, dots, underscores and hyphens, the first a letter or digit",
}
_TYPE_WORDS: dict[object, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
    SecretStr: "secret text",
}
_ARTICLES = {"integer": "an", "number": "a", "path": "a", "list": "a", "table": "a"}


def type_words(field: FieldInfo) -> str:
    """For a table: `integer, at least 1 and at most 256`. Choices are marked as code."""
    words = _annotation_words(field.annotation)
    limits = list(_limits(field.metadata))
    return f"{words}, {' and '.join(limits)}" if limits else words


def allowed_words(field: FieldInfo) -> str:
    """For a sentence, behind "must be": `an integer, at least 1 and at most 256`, or `one of console, json`."""
    if typing.get_origin(field.annotation) is Literal:
        return f"one of {', '.join(choices(field))}"
    words = type_words(field)
    article = _ARTICLES.get(words.partition(" ")[0].rstrip(","))
    return f"{article} {words}" if article else words


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The values of a key that has a closed list of them; empty for any other."""
    return typing.get_args(field.annotation) if typing.get_origin(field.annotation) is Literal else ()


def section_of(annotation: object) -> type[BaseModel] | None:
    """The class of a key's value, if the value is a table with keys of its own."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def entry_of(annotation: object) -> type[BaseModel] | None:
    """The class of each entry, if the value is a list of such tables."""
    return section_of(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is tuple else None


def value_words(value: object) -> str:
    """A value as TOML and JSON write it, if it is a short one; else its kind.

    >>> value_words(None), value_words(True), value_words("a"), value_words([1])
    ('null', 'true', "'a'", 'a list')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value!r:.200}" if isinstance(value, (str, int, float)) else kind_words(value)


def kind_words(value: object) -> str:
    """What kind of value it is, and nothing of the value."""
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (NoneType, "null"),
        (bool, "true or false"),
        (str, "text"),
        ((int, float), "a number"),
        (dict, "a table"),
        ((list, tuple), "a list"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def _annotation_words(annotation: object) -> str:
    if annotation in _TYPE_WORDS:
        return _TYPE_WORDS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _annotation_words(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return _annotation_words(next(argument for argument in arguments if argument is not NoneType))
    if origin is tuple:
        return "list of tables" if entry_of(annotation) else f"list of {_annotation_words(arguments[0])}"
    if origin is dict or section_of(annotation):
        return "table"
    raise TypeError(f"no words for the type {annotation!r}: add them to _TYPE_WORDS")


def _limits(metadata: Iterable[object]) -> Iterator[str]:
    for limit in metadata:
        if isinstance(limit, annotated_types.Ge):
            yield f"at least {limit.ge:g}" if isinstance(limit.ge, float) else f"at least {limit.ge}"
        elif isinstance(limit, annotated_types.Gt):
            yield f"more than {limit.gt}"
        elif isinstance(limit, annotated_types.Le):
            yield f"at most {limit.le}"
        elif isinstance(limit, annotated_types.MinLen):
            yield "not empty"
        elif pattern := getattr(limit, "pattern", None):
            yield _PATTERN_WORDS[pattern]

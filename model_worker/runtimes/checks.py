"""Checks of one parameter's value, each with an error that names the parameter, the value and what would do.

Owns the wording; refuses to know what any parameter means. Booleans are not numbers here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shared.errors import InvalidInput

_SHOWN_LENGTH_MAX = 60
# Each is tokenised by itself before it is known how long all of them are: so many take less than a second, in which
# the requests behind this one wait.
_ENTRIES_MAX = 8192


def shown(value: object) -> str:
    """A value as it may stand in an error: short, whatever it is, and `null`, `true` and `false` as JSON has them."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_LENGTH_MAX else text[: _SHOWN_LENGTH_MAX - 1] + "…"


def refuse_unknown(parameters: Mapping[str, Any], known: Iterable[str]) -> None:
    """
    Raises:
        InvalidInput: names the first unknown parameter and the known ones.
    """
    names = sorted(known)
    for name in parameters:
        if name not in names:
            listed = f"known parameters: {', '.join(names)}" if names else "this model takes none"
            raise InvalidInput(f"unknown parameter {name!r}; {listed}")


def whole_number(name: str, value: object, *, at_least: int, at_most: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{name} must be a whole number, got {shown(value)}")
    if value < at_least:
        raise InvalidInput(f"{name} must be at least {at_least}, got {shown(value)}")
    if at_most is not None and value > at_most:
        raise InvalidInput(f"{name} must be at most {at_most}, got {shown(value)}")
    return value


def number(name: str, value: object, *, at_least: float, at_most: float) -> float:
    # The comparison also refuses NaN.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise InvalidInput(f"{name} must be a number from {at_least:g} to {at_most:g}, got {shown(value)}")
    return float(value)


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be true or false, got {shown(value)}")
    return value


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name} must be a string, got {shown(value)}")
    return value


def choice(name: str, value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value.lower() not in choices:
        raise InvalidInput(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
    return value.lower()


def texts(name: str, value: object) -> list[str]:
    """A string, or a list of strings with at least one, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidInput(f"{name} must be a string or a list of strings, got {shown(value)}")
    if not value:
        raise InvalidInput(f"{name} is an empty list: give at least one string")
    bounded(name, value)
    for index, entry in enumerate(value):
        text(f"{name}[{index}]", entry)
    return value


def bounded(name: str, values: Sequence[object]) -> None:
    """
    Raises:
        InvalidInput: more than one request may bring.
    """
    if len(values) > _ENTRIES_MAX:
        raise InvalidInput(f"{name} holds {len(values)} entries; one request may have {_ENTRIES_MAX}: send several")


def too_long(name: str, length_tokens: int, limit_tokens: int, remedy: str) -> InvalidInput:
    return InvalidInput(
        f"{name} is {length_tokens} tokens long, the model takes at most {limit_tokens}: {remedy}",
        detail={"length_tokens": length_tokens, "limit_tokens": limit_tokens},
    )


def token_ids(name: str, largest_id: int, limit: int | None) -> None:
    """`limit` is how many ids the model knows; None: all that its tokenizer makes."""
    if limit is not None and largest_id >= limit:
        # Looked up all the same it would raise on a CPU, and on an accelerator end the process for everybody.
        raise InvalidInput(
            f"{name} holds the token {largest_id}, which the tokenizer makes and the model does not know: "
            f"its tokens are 0 to {limit - 1}"
        )

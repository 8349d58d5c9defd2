"""Request bodies that are JSON objects, and what is wrong with those that are not.

Owns the reading of bytes. Refuses to know what belongs into a body: a dialect does. The Content-Type is not looked at:
clients send all kinds.
"""

from __future__ import annotations

import orjson

from shared.errors import Code, RequestError


def read_object(body: bytes, example: str) -> dict[str, object]:
    """`example` shows what to send instead of what was sent.

    Raises:
        RequestError: `bad_request`, where it is not JSON; `invalid_input`, where it is not an object.
    """
    if not body:
        raise RequestError(f"the request body is empty: send {example}", code=Code.BAD_REQUEST)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        _check_text(body)
        text = f"the request body is not JSON: {error.msg}, at line {error.lineno}, column {error.colno}"
        detail: dict[str, object] = {"line": error.lineno, "column": error.colno, "position": error.pos}
        raise RequestError(text, code=Code.BAD_REQUEST, detail=detail) from None
    if not isinstance(value, dict):
        text = f"the request body is {json_type(value)}, not an object: send {example}"
        raise RequestError(text, code=Code.INVALID_INPUT)
    return value


def json_type(value: object) -> str:
    """What a value is called in JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _check_text(body: bytes) -> None:
    """The parser finds bytes that are no text as well, but not where they are.

    Raises:
        RequestError: `bad_request`, naming the first such byte.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        text = (
            f"the request body is not UTF-8: byte 0x{body[error.start]:02x} at position {error.start} is out of place"
        )
        raise RequestError(text, code=Code.BAD_REQUEST, detail={"position": error.start}) from None

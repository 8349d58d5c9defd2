"""Requests as forms (`multipart/form-data`), as `curl -F` and browsers send them: a file, and settings beside it.

Owns their reading: `inputs`, or the one file whatever it is called, is the input; every other field is a parameter.
Refuses what is cut off. Pure: bytes in, values out.
"""

from __future__ import annotations

import re

import orjson

from shared.errors import Code, InvalidInput, RequestError

# A request has an input and a handful of parameters.
_FIELDS_MAX = 64
_BOUNDARY = re.compile(
    rb'\Amultipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE | re.DOTALL
)
_NAME = re.compile(rb'^content-disposition:\s*form-data\b[^\r\n]*?;\s*name="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE)
_IS_FILE = re.compile(rb"^content-disposition:[^\r\n]*;\s*filename\*?=", re.IGNORECASE | re.MULTILINE)
_INPUTS = "inputs"
_PARAMETERS = "parameters"


def boundary_of(content_type: bytes) -> bytes | None:
    """What separates the fields of a form; None: the body is no form."""
    match = _BOUNDARY.match(content_type)
    return match and (match[1] or match[2])


def read_form(body: bytes, boundary: bytes) -> dict[str, object]:
    """`{"inputs", "parameters"}`, as the body of a request in JSON would have them; a file is `bytes`.

    Raises:
        RequestError: `bad_request`, where it is no whole form; `invalid_input`, where it is no request.
    """
    # (https://www.rfc-editor.org/rfc/rfc2046#section-5.1: the line's end before a boundary belongs to the boundary.)
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary, _FIELDS_MAX + 2)
    if len(pieces) > _FIELDS_MAX + 2:
        raise InvalidInput(f"the form has more than {_FIELDS_MAX} fields")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise RequestError("the request body is no whole form: its end is missing", code=Code.BAD_REQUEST)
    inputs: list[object] = []
    parameters: dict[str, object] = {}
    for piece in pieces[1:-1]:
        head, _, content = piece.partition(b"\r\n\r\n")
        name_match = _NAME.search(head)
        if name_match is None:
            raise RequestError("a field of the form has no name", code=Code.BAD_REQUEST)
        name = name_match[1].decode(errors="replace")
        if _IS_FILE.search(head):
            inputs.append(content)
        elif name == _INPUTS:
            inputs.append(_text(name, content))
        elif name == _PARAMETERS:
            parameters.update(_object(content))
        else:
            parameters[name] = _value(name, content)
    if len(inputs) != 1:
        raise InvalidInput(f"a form has one file, or one field {_INPUTS!r}, as its input; this one has {len(inputs)}")
    return {_INPUTS: inputs[0], _PARAMETERS: parameters}


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"the field {name[:60]!r} of the form is not UTF-8; send it as a file") from None


def _object(content: bytes) -> dict[str, object]:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the field {_PARAMETERS!r} of the form is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"the field {_PARAMETERS!r} of the form must be a JSON object")
    return value


def _value(name: str, content: bytes) -> object:
    """Numbers, lists and the like as JSON has them; anything else is text."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return _text(name, content)

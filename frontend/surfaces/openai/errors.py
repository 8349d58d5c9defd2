"""What goes wrong, in OpenAI's words: `{"error": {"message", "type", "param", "code"}}`.

Owns the translation of our codes, and of the names that a model's own errors use. Refuses to invent statuses: those are
the other dialects', but for input that a model refuses, which is 400 here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from frontend.responses import status_of
from shared.errors import Code, InvalidInput, RequestError
from shared.json_text import dump_json

# Programs look at these; where OpenAI has no code of its own, ours stands.
_CODES: dict[str, str] = {
    Code.UNKNOWN_MODEL: "model_not_found",
    Code.UNAUTHORIZED: "invalid_api_key",
    Code.OVERLOADED: "rate_limit_exceeded",
    Code.INVALID_INPUT: "invalid_value",
    "not_found": "unknown_url",
}
_NAME = re.compile(r"[a-z_]+")


def invalid(param: str, message: str, code: str = "invalid_value") -> InvalidInput:
    """What a request says cannot be done; `param` is the place in its body."""
    return InvalidInput(message, detail={"param": param, "code": code})


def unsupported(param: str, message: str) -> InvalidInput:
    """What is meant is clear, and this service does not do it."""
    return invalid(param, message, "unsupported_parameter")


def in_callers_words(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """An error that a model has raised on this input, with the caller's names for what it is about.

    `names` holds the caller's name for each of the model's. Other errors come back as they are.
    """
    if error.code is not Code.INVALID_INPUT or "param" in error.detail:
        return error
    first = _NAME.match(error.message)
    param = names.get(first[0]) if first else None
    message = re.sub(r"\b[a-z_]+\b", lambda match: names.get(match[0], match[0]), error.message)
    code = "context_length_exceeded" if "limit_tokens" in error.detail else _CODES[Code.INVALID_INPUT]
    return InvalidInput(message, detail={**error.detail, "param": param, "code": code})


def http_status(error: RequestError) -> int:
    return 400 if error.code is Code.INVALID_INPUT else status_of(error)


def body_of(error: RequestError) -> bytes:
    code = error.detail.get("code") if error.code is Code.INVALID_INPUT else None
    param = "model" if error.code is Code.UNKNOWN_MODEL else error.detail.get("param")
    return body(http_status(error), error.message, str(code or error.code), param)


def body(status: int, message: str, code: str, param: object = None) -> bytes:
    error = {"message": message, "type": _type(status), "param": param, "code": _CODES.get(code, code)}
    return dump_json({"error": error})


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"

"""What goes wrong, as Hugging Face's clients read it: `{"error", "error_type", "code"}`.

Owns the translation of our codes into the few types for which those clients have an exception of their own. Refuses to
invent statuses: they are those of the native routes.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import Code, RequestError
from shared.json_text import dump_json

# `validation`, `overloaded`, `generation` and `incomplete_generation` become exceptions of text generation; whatever
# else stands there becomes one of an unknown kind.
_TYPES: Mapping[str, str] = {
    Code.BAD_REQUEST: "validation",
    Code.INVALID_INPUT: "validation",
    Code.UNKNOWN_MODEL: "validation",
    Code.TOO_LARGE: "validation",
    Code.OVERLOADED: "overloaded",
    Code.MODEL_LOADING: "overloaded",
    Code.DRAINING: "overloaded",
    Code.SERVER_UNAVAILABLE: "overloaded",
    Code.MODEL_ERROR: "generation",
    Code.OUT_OF_MEMORY: "generation",
    Code.POISON_INPUT: "generation",
    Code.MODEL_CRASHED: "worker_lost",
    Code.DEADLINE_EXCEEDED: "timeout",
    # What no model was asked.
    "not_found": "validation",
    "method_not_allowed": "validation",
}


def body_of(error: RequestError) -> bytes:
    return body(error.message, error.code, error.detail)


def body(message: str, code: str, detail: Mapping[str, object] | None = None) -> bytes:
    """`code` is a word of ours, which is told beside the type."""
    value: dict[str, object] = {"error": message, "error_type": _TYPES.get(code, code), "code": code}
    if detail:
        value["detail"] = detail
    return dump_json(value)


def body_in_stream(error: RequestError) -> bytes:
    """For an answer of which some was sent already."""
    if error.code is Code.MODEL_CRASHED:
        return dump_json({"error": error.message, "error_type": "incomplete_generation", "code": error.code})
    return body_of(error)

"""What goes wrong, in the protocol's words: `{"error": "…"}`, and 400 for input that a model refuses."""

from __future__ import annotations

from frontend.responses import status_of
from shared.errors import Code, RequestError
from shared.json_text import dump_json


def http_status(error: RequestError) -> int:
    return 400 if error.code is Code.INVALID_INPUT else status_of(error)


def body(message: str) -> bytes:
    return dump_json({"error": message})

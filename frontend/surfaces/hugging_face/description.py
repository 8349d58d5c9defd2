"""What `/openapi.json` says of Hugging Face's routes. Nothing here runs while a request is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from frontend.openapi import error_responses, post_operation
from frontend.surfaces.openai.description import CHAT_SCHEMA
from shared.errors import RequestError

_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "inputs": {"description": "What the model works on; each task has its own."},
        "parameters": {"type": ["object", "null"], "description": "What the task takes beside its inputs."},
        "stream": {"type": ["boolean", "null"], "description": "For text generation: send tokens as they are made."},
    },
}
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error", "error_type", "code"],
    "properties": {
        "error": {"type": "string", "description": "What went wrong, in one line."},
        "error_type": {"type": "string", "description": "`validation`, `overloaded`, `generation`, or another word."},
        "code": {"type": "string", "description": "A stable code, as on the native routes."},
        "detail": {"type": "object", "description": "Values that a program can use, where there are any."},
    },
}
_EXAMPLE = {"inputs": "I like it.", "parameters": {"top_k": 2}}
_CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


def paths(error_body: Callable[[RequestError], bytes], *, secured: bool) -> dict[str, Any]:
    """OpenAPI 3.1 path items by path."""
    described = (
        ("/hf/{name}", "Ask a model, whatever its task", _REQUEST_SCHEMA, _EXAMPLE),
        ("/hf/{name}/v1/chat/completions", "Answer a conversation", CHAT_SCHEMA, _CHAT_EXAMPLE),
    )
    return {
        path: {
            **post_operation(
                summary=summary,
                description="As Hugging Face's clients send it. Pictures and recordings may be sent as they are.",
                tag="Hugging Face",
                request_schema=schema,
                request_examples={"one": {"value": example}},
                responses=error_responses(_ERROR_SCHEMA, error_body),
                secured=secured,
                answer="As Hugging Face's clients read it.",
            ),
            "parameters": [_NAME],
        }
        for path, summary, schema, example in described
    }

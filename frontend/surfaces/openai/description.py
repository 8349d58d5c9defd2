"""What `/openapi.json` says of OpenAI's routes. Nothing here runs while a request is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

from frontend.openapi import error_responses, post_operation
from shared.errors import RequestError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
# Shown to whoever sends something else.
CHAT_EXAMPLE = '{"model": …, "messages": [{"role": "user", "content": …}]}'
COMPLETION_EXAMPLE = '{"model": …, "prompt": …}'
EMBEDDING_EXAMPLE = '{"model": …, "input": …}'


class Model(BaseModel):
    id: str = Field(description="What a request names as `model`.")
    object: str = "model"
    created: int = Field(description="Unix time, in seconds, since when it can be asked here.")
    owned_by: str = "headwaiter"


class ModelList(BaseModel):
    object: str = "list"
    data: list[Model] = Field(description="In the order of the configuration.")


_MODEL = {"type": "string", "description": "A name that `GET /v1/models` lists."}
_NUMBER = {"type": ["number", "null"]}
_WHOLE = {"type": ["integer", "null"]}
_FLAG = {"type": ["boolean", "null"]}
_GENERATION: dict[str, Any] = {
    "model": _MODEL,
    "max_tokens": {**_WHOLE, "minimum": 1},
    "temperature": {**_NUMBER, "description": "0, or nothing, takes the likeliest token each time."},
    "top_p": _NUMBER,
    "frequency_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "seed": _WHOLE,
    "stop": {"type": ["string", "array", "null"], "items": {"type": "string"}},
    "n": {**_WHOLE, "minimum": 1, "description": "How many answers; for several, tokens are drawn."},
    "stream": _FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "top_k": {**_WHOLE, "description": "Not OpenAI's."},
    "min_p": {**_NUMBER, "description": "Not OpenAI's."},
    "repetition_penalty": {**_NUMBER, "description": "Not OpenAI's."},
}
CHAT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        **_GENERATION,
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"type": "string"},
                    "content": {
                        "type": ["string", "array"],
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                },
            },
        },
        "max_completion_tokens": {**_WHOLE, "minimum": 1, "description": "Counts in place of `max_tokens`."},
        "logprobs": _FLAG,
        "top_logprobs": {**_WHOLE, "minimum": 0, "maximum": 20},
    },
}
_COMPLETION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        **_GENERATION,
        "prompt": {
            "type": ["string", "array"],
            "description": "A text, a list of texts, a list of token ids, or a list of those.",
            "items": {"type": ["string", "integer", "array"]},
        },
        "echo": {**_FLAG, "description": "Put the prompt before its answer."},
        "best_of": {**_WHOLE, "minimum": 1, "description": "Make so many answers, and send the `n` likeliest."},
        "logprobs": {**_WHOLE, "minimum": 0, "maximum": 20},
    },
}
_EMBEDDING_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": _MODEL,
        "input": {"type": ["string", "array"], "items": {"type": "string"}, "minItems": 1},
        "encoding_format": {"enum": ["float", "base64"], "default": "float"},
        "dimensions": {**_WHOLE, "minimum": 1, "description": "Keep so many, the first ones."},
    },
}
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What went wrong, in one line."},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "The place in the body that it is about."},
                "code": {"type": "string", "description": "A stable code."},
            },
        }
    },
}
_HELLO = [{"role": "user", "content": "What is the capital of France?"}]


def paths(error_body: Callable[[RequestError], bytes], *, secured: bool) -> dict[str, Any]:
    """OpenAPI path items by path."""
    described = (
        (CHAT, "Answer a conversation", CHAT_SCHEMA, {"model": "smollm2", "messages": _HELLO}),
        (COMPLETIONS, "Write on", _COMPLETION_SCHEMA, {"model": "smollm2", "prompt": "The capital of France is"}),
        (EMBEDDINGS, "Turn texts into vectors", _EMBEDDING_SCHEMA, {"model": "minilm", "input": "A great day."}),
    )
    # What a model refuses is 400 here.
    responses = error_responses(_ERROR_SCHEMA, error_body)
    del responses["422"]
    return {
        path: post_operation(
            summary=summary,
            description="As OpenAI's clients send it. Fields that are not known are ignored.",
            tag="OpenAI",
            request_schema=schema,
            request_examples={"one": {"value": example}},
            responses=responses,
            secured=secured,
            answer="As OpenAI's clients read it.",
        )
        for path, summary, schema, example in described
    }

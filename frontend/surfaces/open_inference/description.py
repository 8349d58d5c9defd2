"""The description of the routes that ask a model, for `/openapi.json` and `/docs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from frontend.openapi import error_responses, post_operation
from frontend.surfaces.open_inference.tensors import BYTES, NUMBERS
from shared.errors import RequestError

_PARAMETERS: dict[str, Any] = {"type": "object"}
_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"enum": [*NUMBERS, BYTES]},
        "parameters": _PARAMETERS,
        "data": {"type": "array", "items": {}, "description": "Flat, in row-major order, or nested as the shape is."},
    },
}
_INFER: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": _PARAMETERS,
        "inputs": {"type": "array", "items": _TENSOR, "minItems": 1},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
            },
        },
    },
}
_EXAMPLE = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["I like it."]}]}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "What went wrong, in one line."}},
}
_INDEX: dict[str, Any] = {
    "type": "object",
    "properties": {"ready": {"type": "boolean", "description": "Only the models that are ready."}},
}
_TAG = "Open Inference Protocol"


def paths(
    error_body: Callable[[RequestError], bytes], names: Sequence[str], version: str, *, secured: bool
) -> dict[str, Any]:
    """OpenAPI path items by path. `names` are those of the models, `version` is that of each."""
    # What a model refuses is 400 here.
    responses = error_responses(_ERROR, error_body)
    del responses["422"]
    common: dict[str, Any] = {"tag": _TAG, "responses": responses, "secured": secured}
    infer = post_operation(
        summary="Ask a model",
        description="In JSON, or with tensors as bytes behind it, as `Inference-Header-Content-Length` says.",
        request_schema=_INFER,
        request_examples={"one text": {"value": _EXAMPLE}},
        answer="The outputs, in JSON, or with tensors as bytes behind it.",
        **common,
    )
    index = post_operation(
        summary="List the models",
        description="With their states. The body may be empty.",
        request_schema=_INDEX,
        request_examples={"all": {"value": {}}},
        answer="A list of `name`, `version`, `state` and `reason`.",
        **common,
    )
    name_in_path, version_in_path = _in_path("name", names), _in_path("version", [version])
    return {
        "/v2/models/{name}/infer": infer | {"parameters": [name_in_path]},
        "/v2/models/{name}/versions/{version}/infer": infer | {"parameters": [name_in_path, version_in_path]},
        "/v2/repository/index": index,
    }


def _in_path(name: str, values: Sequence[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if values:
        schema["enum"] = list(values)
    return {"name": name, "in": "path", "required": True, "schema": schema}

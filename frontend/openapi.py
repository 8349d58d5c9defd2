"""The description of the hot routes for `/openapi.json` and `/docs`.

FastAPI describes only the routes that it validates itself; ours are plain ASGI. Owns the shape of the description;
the surfaces bring the texts and schemas. Nothing here runs while a request is served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from frontend.responses import status_of
from frontend.surfaces.base import Surface
from shared.errors import Code, RequestError, UnknownModel

if TYPE_CHECKING:
    from frontend.own_routes import OwnRoutes

HEADERS: list[dict[str, Any]] = [
    {
        "name": "X-Request-Timeout",
        "in": "header",
        "required": False,
        "description": "How long to wait for the answer, in seconds; more than the service allows is refused.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "X-Request-Priority",
        "in": "header",
        "required": False,
        "description": "A lower number is more urgent. Requests that wait grow more urgent, so none waits for ever.",
        "schema": {"type": "integer", "default": 0},
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "description": "Comes back with the answer, and is in the logs.",
        "schema": {"type": "string"},
    },
]

ERROR_EXAMPLES: dict[int, RequestError] = {
    status_of(error): error
    for error in (
        RequestError("the request body is not JSON: unexpected character, at line 1, column 3", code=Code.BAD_REQUEST),
        RequestError("this service needs an API key: send it as `Authorization: Bearer KEY`", code=Code.UNAUTHORIZED),
        UnknownModel("x", ["minilm"]),
        RequestError("a request body of 99 bytes is larger than this service takes", code=Code.TOO_LARGE),
        RequestError("parameters is a string, not an object", code=Code.INVALID_INPUT),
        RequestError("1024 requests wait for this model already", code=Code.OVERLOADED),
        RequestError("the model raised an error", code=Code.MODEL_ERROR),
        RequestError("the model process died under this request", code=Code.MODEL_CRASHED),
        RequestError("the model is loading", code=Code.MODEL_LOADING),
        RequestError("no answer before the deadline", code=Code.DEADLINE_EXCEEDED),
    )
}
DESCRIPTIONS: dict[int, str] = {
    400: "The request cannot be read.",
    401: "No API key, or one that is not known.",
    404: "No such model.",
    413: "The body is larger than the service takes.",
    422: "The request can be read, but the model cannot use it.",
    429: "Too much waits already; `Retry-After` says when to come back.",
    500: "The model failed on this request.",
    502: "The model process died under this request.",
    503: "The model, or the model server, is not there; `Retry-After` says when to come back, if that can help.",
    504: "The deadline passed.",
}


def post_operation(
    *,
    summary: str,
    description: str,
    tag: str,
    request_schema: dict[str, Any],
    request_examples: dict[str, Any],
    responses: dict[str, Any],
    secured: bool,
    answer: str = "The model's result, as it is.",
) -> dict[str, Any]:
    """One path item with a POST that takes and gives JSON."""
    operation: dict[str, Any] = {
        "summary": summary,
        "description": description,
        "tags": [tag],
        "parameters": HEADERS,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": request_schema, "examples": request_examples}},
        },
        "responses": {
            "200": {
                "description": answer,
                "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}},
            },
            **responses,
        },
    }
    if secured:
        operation["security"] = [{"bearer": []}]
    return {"post": operation}


def error_responses(schema: dict[str, Any], body_of: Callable[[RequestError], bytes]) -> dict[str, Any]:
    """What can go wrong, by status, each with an example in the dialect of `body_of`."""
    return {
        str(status): {
            "description": DESCRIPTIONS[status],
            "content": {"application/json": {"schema": schema, "example": json.loads(body_of(error))}},
        }
        for status, error in sorted(ERROR_EXAMPLES.items())
    }


def describe(app: FastAPI, surfaces: Iterable[Surface], own_routes: OwnRoutes, *, secured: bool) -> None:
    """Makes `app.openapi()` cover the surfaces' routes, and those of the user's own, as well."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            routes = [*app.routes, *own_routes.container.routes]
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=routes)
            ours = {path: item for surface in surfaces for path, item in surface.openapi_paths().items()}
            # One path may have operations of both.
            schema["paths"] = {
                path: ours.get(path, {}) | schema["paths"].get(path, {}) for path in [*ours, *schema["paths"]]
            }
            for entry in own_routes.entries if secured else ():
                for operation in schema["paths"].get(entry.described_as, {}).values():
                    operation["security"] = [{"bearer": []}]
            schema.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

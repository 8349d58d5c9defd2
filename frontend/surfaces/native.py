"""The native dialect: `POST /models/{name}` with `{"inputs": …, "parameters": {…}}`.

The answer is the model's result as it is, without an envelope. With one model configured, `POST /` asks that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import Route

from frontend.json_bodies import json_type, read_object
from frontend.openapi import error_responses, post_operation
from frontend.pending import Answer
from frontend.responses import server_sent_event
from frontend.surfaces.base import Exchange, Surface, timing_headers
from shared.errors import Code, RequestError
from shared.json_text import dump_json

KEYS = ("inputs", "parameters", "stream")

REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "inputs": {"description": "What the model works on: a text, an object, an array; each task has its own."},
        "parameters": {
            "type": ["object", "null"],
            "description": "What the task takes beside its inputs.",
            "default": None,
        },
        "stream": {
            "type": "boolean",
            "description": "Send the answer in pieces, as server-sent events, as the model makes them.",
            "default": False,
        },
    },
}
REQUEST_EXAMPLES: dict[str, Any] = {
    "one input": {"value": {"inputs": "I like it."}},
    "with parameters": {"value": {"inputs": "I like it.", "parameters": {"top_k": 2}}},
    "question answering": {"value": {"inputs": {"question": "Who waits?", "context": "The head waiter waits."}}},
}
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {
        "error": {"type": "string", "description": "What went wrong, in one line."},
        "error_type": {"type": "string", "description": "A stable code.", "enum": [str(c) for c in Code if c != "ok"]},
        "detail": {"type": "object", "description": "Values that a program can use, where there are any."},
    },
}


class _ModelName(PathConvertor):
    """Any path, but for those below a model that belong to another dialect."""

    regex = r"(?!.*/(?:pipeline/[^/]*|v1/chat/completions)$).*"


register_url_convertor("model_name", _ModelName())


class NativeSurface(Surface):
    """See the module."""

    name: ClassVar[str] = "native"

    def routes(self) -> Iterable[Route]:
        return [self.hot_route("/models/{name:model_name}", self._named), self.hot_route("/", self._only)]

    def error_body(self, error: RequestError) -> bytes:
        return error_body(error.message, error.code, error.detail)

    def framework_error_body(self, status: int, text: str, error_type: str) -> bytes:
        return error_body(text, error_type)

    async def _named(self, exchange: Exchange, body: bytes) -> int:
        exchange.choose_model(exchange.scope["path_params"]["name"])
        return await self._ask(exchange, body)

    async def _only(self, exchange: Exchange, body: bytes) -> int:
        names = self.services.client.model_names()
        if len(names) != 1:
            text = f"POST / is for a service with one model; this one has {len(names)}: POST /models/NAME"
            text += f" with NAME one of {', '.join(names)}" if names else ""
            raise RequestError(text, code=Code.UNKNOWN_MODEL)
        exchange.choose_model(names[0])
        return await self._ask(exchange, body)

    async def _ask(self, exchange: Exchange, body: bytes) -> int:
        inputs, parameters, stream = parse_request(body)
        if stream:
            return await exchange.stream(inputs, parameters, NativeEvents())
        answer = await exchange.predict(inputs, parameters)
        return await exchange.respond(200, timing_headers(answer), dump_json(answer.value))

    def openapi_paths(self) -> dict[str, Any]:
        models = self.services.config.models
        paths = {
            f"/models/{model.name}": self._path_item(
                f"Ask {model.name}",
                f"{model.task or ('A class of your own' if model.is_custom else 'Model')}: {model.model}",
            )
            for model in models
        }
        if len(models) == 1:
            paths["/"] = self._path_item(f"Ask {models[0].name}", "The same, for a service with one model.")
        if not models:
            paths["/models/{name}"] = self._path_item("Ask a model", "By its name in the configuration.") | {
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
            }
        return paths

    def _path_item(self, summary: str, description: str) -> dict[str, Any]:
        return post_operation(
            summary=summary,
            description=description,
            tag="models",
            request_schema=REQUEST_SCHEMA,
            request_examples=REQUEST_EXAMPLES,
            responses=error_responses(ERROR_SCHEMA, self.error_body),
            secured=bool(self.services.config.http.api_keys),
        )


class NativeEvents:
    """Unnamed events for the pieces, then one named `done` with what came behind them, or one named `error`."""

    def begin(self) -> bytes:
        return b""

    def piece(self, value: object) -> bytes:
        return server_sent_event(dump_json(value))

    def end(self, answer: Answer) -> bytes:
        return server_sent_event(dump_json(answer.value), event="done")

    def error(self, error: RequestError) -> bytes:
        return server_sent_event(error_body(error.message, error.code, error.detail), event="error")


def error_body(message: str, error_type: str, detail: Mapping[str, object] | None = None) -> bytes:
    """Also the shape of what FastAPI itself refuses: unknown paths, wrong methods."""
    body: dict[str, object] = {"error": message, "error_type": error_type}
    if detail:
        body["detail"] = detail
    return dump_json(body)


def parse_request(body: bytes) -> tuple[object, dict[str, object] | None, bool]:
    """Inputs, parameters, and whether to stream. The Content-Type is not looked at: clients send all kinds.

    Raises:
        RequestError: `bad_request`, where it is not JSON; `invalid_input`, where it is not a request.
    """
    request = read_object(body, '{"inputs": …}')
    unknown = [key for key in request if key not in KEYS]
    if unknown:
        names = ", ".join(repr(key[:60]) for key in unknown[:5])
        keys = "unknown key" if len(unknown) == 1 else "unknown keys"
        text = f"{keys} {names}: a request has {', '.join(KEYS)}; what a task takes goes into parameters"
        raise RequestError(text, code=Code.INVALID_INPUT, detail={"unknown": [key[:60] for key in unknown[:5]]})
    if "inputs" not in request:
        raise RequestError('the request has no inputs: send {"inputs": …}', code=Code.INVALID_INPUT)
    parameters = request.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"parameters is {json_type(parameters)}, not an object", code=Code.INVALID_INPUT)
    stream = request.get("stream", False)
    if not isinstance(stream, bool):
        raise RequestError(f"stream is {json_type(stream)}, not true or false", code=Code.INVALID_INPUT)
    return request["inputs"], parameters, stream

"""Administration over HTTP, below `/admin`: models are reloaded, scaled, loaded and unloaded, the service is drained.

Owns what an operator may order here, which keys open it, and how long its end is waited for. What becomes of an order
the model server decides. Errors have the native shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar
from urllib.parse import parse_qs

from starlette.routing import Route

from frontend.guards import AdministrationClosed, check_timeout
from frontend.json_bodies import json_type, read_object
from frontend.openapi import HEADERS, error_responses
from frontend.responses import JSON, MANAGED_STATUS, status_of
from frontend.surfaces.base import Exchange, Handler, Surface
from frontend.surfaces.native import ERROR_SCHEMA, error_body
from shared.errors import Code, InvalidInput, RequestError
from shared.json_text import dump_json

# As in the configuration.
REPLICAS_MAX = 1024
# The end of each path, and what it orders.
OF_MODEL = {
    "reload": "Give each replica of a model a new process, one after the other",
    "scale": "Change the number of a model's replicas",
    "load": "Load a model that was unloaded, is idle, or has failed",
    "unload": "End the processes of a model",
}
OF_SERVICE = {
    "drain": "Refuse new requests, and finish what there is",
    "resume": "Take requests again after a drain",
}
GOES_ON = 202


class AdministrationSurface(Surface):
    """See the module."""

    name: ClassVar[str] = "administration"
    prefix: ClassVar[str] = "/admin"

    def routes(self) -> Iterable[Route]:
        keys = self.services.admin_keys
        for action in OF_MODEL:
            yield self.hot_route(f"/admin/models/{{name:path}}/{action}", self._about_model(action), keys)
        for action in OF_SERVICE:
            yield self.hot_route(f"/admin/{action}", self._about_service(action), keys)

    def _about_model(self, action: str) -> Handler:
        async def handle(exchange: Exchange, body: bytes) -> int:
            exchange.choose_model(exchange.scope["path_params"]["name"])
            return await self._order(exchange, action, read_replicas(action, body))

        return handle

    def _about_service(self, action: str) -> Handler:
        async def handle(exchange: Exchange, body: bytes) -> int:
            return await self._order(exchange, action, read_replicas(action, body))

        return handle

    async def _order(self, exchange: Exchange, action: str, replicas: int) -> int:
        max_s = self.services.config.http.request_timeout_max_s
        timeout_s = asked_timeout_s(exchange.scope["query_string"], max_s)
        if timeout_s is not None:
            exchange.deadline_s = exchange.started_s + timeout_s
        managed = await exchange.manage(action, replicas)
        if managed is None:
            text = f"the {action} goes on: /status shows how far it is"
            return await exchange.respond(GOES_ON, [JSON], dump_json({"outcome": "goes_on", "text": text}))
        status = MANAGED_STATUS[managed.outcome]
        if managed.outcome == "done":
            body = dump_json({"outcome": managed.outcome, "text": managed.text})
        else:
            body = error_body(managed.text, managed.outcome)
        return await exchange.respond(status, [JSON], body)

    # --- what goes wrong, and what is told of all this ---

    def status_of(self, error: RequestError) -> int:
        return 403 if isinstance(error, AdministrationClosed) else status_of(error)

    def error_body(self, error: RequestError) -> bytes:
        return error_body(error.message, error.code, error.detail)

    def framework_error_body(self, status: int, text: str, error_type: str) -> bytes:
        return error_body(text, error_type)

    def openapi_paths(self) -> dict[str, Any]:
        names = [model.name for model in self.services.config.models]
        schema = {"type": "string", "enum": names} if names else {"type": "string"}
        name = {"name": "name", "in": "path", "required": True, "schema": schema}
        paths = {}
        for action, summary in OF_MODEL.items():
            paths[f"/admin/models/{{name}}/{action}"] = self._path_item(action, summary) | {"parameters": [name]}
        return paths | {f"/admin/{action}": self._path_item(action, text) for action, text in OF_SERVICE.items()}

    def _path_item(self, action: str, summary: str) -> dict[str, Any]:
        scales = action == "scale"
        known = error_responses(ERROR_SCHEMA, self.error_body)
        operation: dict[str, Any] = {
            "summary": summary,
            "description": "Takes one of `http.admin_keys`, and waits for the end.",
            "tags": ["administration"],
            "parameters": [header for header in HEADERS if header["name"] != "X-Request-Priority"] + [_TIMEOUT],
            "requestBody": {
                "required": scales,
                "content": {
                    "application/json": {"schema": _SCALE if scales else {"type": "object", "maxProperties": 0}}
                },
            },
            "responses": {
                "200": _described("It is done.", _OUTCOME),
                "202": _described("It goes on; the time to wait for its end has passed.", _OUTCOME),
                "403": _described("No administration key is configured.", _ERROR),
                "409": _described("The model server refused it, and changed nothing.", _ERROR),
                "502": _described("It was begun, and failed.", _ERROR),
                **{status: known[status] for status in ("400", "401", "404", "413", "422", "429", "503", "504")},
            },
            "security": [{"bearer": []}],
        }
        return {"post": operation}


def read_replicas(action: str, body: bytes) -> int:
    """What the body of an order says: `replicas` for a `scale`, and nothing, or an empty object, for any other; 0 then.

    Raises:
        RequestError: `bad_request` or `invalid_input`: it says something else.
    """
    example = '{"replicas": 2}' if action == "scale" else "none, or {}"
    request = read_object(body, example) if action == "scale" or body.strip() else {}
    known = {"replicas"} if action == "scale" else set()
    if set(request) != known:
        told = ", ".join(repr(key[:60]) for key in list(request)[:5]) or "nothing"
        raise InvalidInput(f"the body of a {action} has {told}: send {example}")
    if action != "scale":
        return 0
    replicas = request["replicas"]
    if not isinstance(replicas, int) or isinstance(replicas, bool):
        raise InvalidInput(f"replicas is {json_type(replicas)}, not a whole number")
    if not 1 <= replicas <= REPLICAS_MAX:
        raise InvalidInput(f"replicas is {replicas}, not a number from 1 to {REPLICAS_MAX}; unload ends all of them")
    return replicas


def asked_timeout_s(query: bytes, max_s: float) -> float | None:
    """`timeout_s` of a query, in seconds; None without one. The last of several counts.

    Raises:
        RequestError: `bad_request`, where it is not a positive number; `invalid_input`, where it is more than `max_s`.
    """
    said = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("timeout_s")
    if said is None:
        return None
    try:
        seconds = float(said[-1])
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        text = f"timeout_s={said[-1][:40]!r} is not a positive number of seconds, such as 300"
        raise RequestError(text, code=Code.BAD_REQUEST)
    check_timeout(f"timeout_s={seconds:g}", seconds, max_s, remedy=f"send at most {max_s:g}, and ask again after a 202")
    return seconds


def _described(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


_SCALE: dict[str, Any] = {
    "type": "object",
    "required": ["replicas"],
    "additionalProperties": False,
    "properties": {"replicas": {"type": "integer", "minimum": 1, "maximum": REPLICAS_MAX}},
}
_OUTCOME: dict[str, Any] = {
    "type": "object",
    "required": ["outcome", "text"],
    "properties": {
        "outcome": {"type": "string", "enum": ["done", "goes_on"]},
        "text": {"type": "string", "description": "What happened, in one line."},
    },
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {
        "error": {"type": "string", "description": "What went wrong, in one line."},
        "error_type": {"type": "string", "enum": ["refused", "failed", "unauthorized"]},
    },
}
_TIMEOUT: dict[str, Any] = {
    "name": "timeout_s",
    "in": "query",
    "required": False,
    "description": "How long to wait for the end, in seconds, as `X-Request-Timeout`; then the answer is 202.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}

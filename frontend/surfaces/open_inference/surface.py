"""The protocol's routes, all below `/v2`.

Owns which model a request may ask, in which version, and what is refused because it is not possible here. A model's
name may have slashes, which the clients do not escape: paths are read from their end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route

from frontend.guards import check_timeout
from frontend.health import NOT_HEARD, SCRAPE_TIMEOUT_S, readiness
from frontend.json_bodies import read_object
from frontend.responses import JSON, MANAGED_STATUS, json_response, server_timing
from frontend.surfaces.base import Exchange, Surface
from frontend.surfaces.open_inference import description, errors, metadata
from frontend.surfaces.open_inference.answers import check_wanted, write_answer
from frontend.surfaces.open_inference.bodies import Inference, check_load, read_inference
from frontend.surfaces.open_inference.signatures import Signature, signature_of
from shared.errors import Code, InvalidInput, RequestError, UnknownModel
from shared.json_text import dump_json

MODEL = "/v2/models/{name:path}"
VERSION = MODEL + "/versions/{version}"
REPOSITORY_MODEL = "/v2/repository/models/{name:path}"
# Routes of the clients for what this service does not have, and what to say of each.
UNSUPPORTED = {
    "/v2/systemsharedmemory/{rest:path}": "shared memory is not supported: send the tensors' content",
    "/v2/cudasharedmemory/{rest:path}": "shared memory is not supported: send the tensors' content",
    "/v2/trace/setting": "traces are not supported: send a traceparent header",
    f"{MODEL}/trace/setting": "traces are not supported: send a traceparent header",
    "/v2/logging": "the log's settings are those of the configuration (logging.level, logging.format)",
}


class OpenInferenceSurface(Surface):
    """See the module."""

    name: ClassVar[str] = "open_inference"
    prefix: ClassVar[str] = "/v2"

    # --- requests for models ---

    def routes(self) -> Iterable[Route]:
        return [
            self.hot_route(f"{VERSION}/infer", self._infer),
            self.hot_route(f"{MODEL}/infer", self._infer),
            self.hot_route("/v2/repository/index", self._index),
            self.hot_route(f"{REPOSITORY_MODEL}/load", self._load),
            self.hot_route(f"{REPOSITORY_MODEL}/unload", self._load),
        ]

    async def _infer(self, exchange: Exchange, body: bytes) -> int:
        where = exchange.scope["path_params"]
        exchange.choose_model(where["name"])
        _check_version(exchange.model, where.get("version"))
        request = read_inference(body, exchange.headers)
        self._schedule(exchange, request)
        signature = self._signature(exchange.model)
        if signature.outputs:
            check_wanted(request.outputs, (output.name for output in signature.outputs))
        questions = signature.questions(request.inputs, is_raw=request.is_raw)
        with _naming_item(len(questions)):
            answers = await exchange.predict_all([(question, request.parameters) for question in questions])
        outputs = signature.answers([answer.value for answer in answers])
        headers, text = write_answer(request, exchange.model, metadata.MODEL_VERSION, outputs)
        headers.append((b"server-timing", server_timing(answers[0].timings)))
        return await exchange.respond(200, headers, text)

    def _schedule(self, exchange: Exchange, request: Inference) -> None:
        """What the body says counts before what the headers say."""
        if request.timeout_s is not None:
            max_s = self.services.config.http.request_timeout_max_s
            said = f"the parameter timeout, {request.timeout_s:g} seconds,"
            check_timeout(said, request.timeout_s, max_s, remedy=f"send at most {round(max_s * 1e6)}, in microseconds")
            exchange.deadline_s = exchange.started_s + request.timeout_s
        if request.priority is not None:
            exchange.priority = request.priority

    def _signature(self, name: str) -> Signature:
        """
        Raises:
            RequestError: `server_unavailable`, as long as nobody knows what the model does.
        """
        for state in self.services.client.models():
            if state.name == name:
                return signature_of(state.task)
        configured = self.services.config.model(name)
        task = configured.model if configured.is_custom else configured.task
        if not task:
            text = f"{NOT_HEARD}, and it is the one that knows the task of model {name!r}"
            raise RequestError(text, code=Code.SERVER_UNAVAILABLE, retry_after_s=1.0)
        return signature_of(task)

    # --- the repository, which is the configuration ---

    async def _index(self, exchange: Exchange, body: bytes) -> int:
        client = self.services.client
        is_ready = read_object(body, "{}").get("ready", False) if body.strip() else False
        if not isinstance(is_ready, bool):
            raise InvalidInput("ready must be true, for the models that are ready alone, or false")
        entries = metadata.index(client.model_names(), client.models(), "" if client.server_heard() else NOT_HEARD)
        told = [entry for entry in entries if entry["state"] == "READY" or not is_ready]
        return await exchange.respond(200, [JSON], dump_json(told))

    async def _load(self, exchange: Exchange, body: bytes) -> int:
        exchange.choose_model(exchange.scope["path_params"]["name"])
        action = exchange.scope["path"].rpartition("/")[2]
        if not self.services.admin_keys.knows(exchange.headers):
            raise RequestError(
                f"{action} is not supported: the models of this service are those of its configuration, which loads "
                "them when it starts and replaces them when they fail; change the configuration, and restart, or send "
                "one of http.admin_keys",
                code=Code.BAD_REQUEST,
            )
        check_load(body)
        managed = await exchange.manage(action)
        if managed is None:
            raise RequestError(
                f"the {action} goes on, beyond the deadline of this request", code=Code.DEADLINE_EXCEEDED
            )
        told = b"" if managed.outcome == "done" else errors.body(managed.text)
        return await exchange.respond(MANAGED_STATUS[managed.outcome], [JSON], told)

    # --- what there is, and how it is ---

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Open Inference Protocol"], default_response_class=Response)
        described: tuple[tuple[str, Callable[..., Any], type[BaseModel] | None], ...] = (
            ("/v2", self.server_metadata, metadata.ServerMetadata),
            ("/v2/health/live", self.live, metadata.Live),
            ("/v2/health/ready", self.ready, metadata.Ready),
            ("/v2/models/stats", self.statistics, None),
            *_both("/ready", self.model_ready, metadata.ModelReady),
            *_both("/config", self.model_config, None),
            *_both("/stats", self.model_statistics, None),
        )
        for path, handler, answer in described:
            _add(router, path, handler, answer)
        for path in UNSUPPORTED:
            router.add_api_route(path, self.unsupported, methods=["GET", "POST"], include_in_schema=False)
        for path in (f"{VERSION}/infer", f"{MODEL}/infer"):
            router.add_api_route(path, _only_post, methods=["GET", "HEAD"], include_in_schema=False)
        # Last: its pattern fits all that ends otherwise.
        for path, handler, answer in _both("", self.model_metadata, metadata.ModelMetadata):
            _add(router, path, handler, answer)
        return router

    async def server_metadata(self, request: Request) -> Response:
        """What this service is, and which extensions of the protocol it has."""
        self._check_key(request)
        return json_response(metadata.server().model_dump())

    async def live(self) -> Response:
        """As `/livez`."""
        return json_response({"live": True})

    async def ready(self) -> Response:
        """As `/readyz`."""
        required = frozenset(model.name for model in self.services.config.models if model.required)
        state = readiness(self.services.client, required)
        return _readiness({"ready": state.ready}, state.reason)

    async def model_ready(self, request: Request, name: str, version: str | None = None) -> Response:
        """Whether this model takes requests; 503 if not."""
        self._check_model(request, name, version)
        client = self.services.client
        is_ready = client.ready(name)
        reasons = [state.reason or state.state for state in client.models() if state.name == name]
        reason = reasons[0] if reasons and client.server_heard() else NOT_HEARD
        return _readiness({"name": name, "ready": is_ready}, "" if is_ready else reason)

    async def model_metadata(self, request: Request, name: str, version: str | None = None) -> Response:
        """The tensors that this model takes and gives."""
        self._check_model(request, name, version)
        return json_response(metadata.model(name, self._signature(name)).model_dump())

    async def model_config(self, request: Request, name: str, version: str | None = None) -> Response:
        """The same in the words of Triton's model configuration."""
        self._check_model(request, name, version)
        return json_response(metadata.config(name, self._signature(name)))

    async def model_statistics(self, request: Request, name: str, version: str | None = None) -> Response:
        """What the model server has counted of this model since it was started."""
        self._check_model(request, name, version)
        return await self._counted(name)

    async def statistics(self, request: Request) -> Response:
        """What the model server has counted of every model since it was started."""
        self._check_key(request)
        return await self._counted(None)

    async def unsupported(self, request: Request) -> Response:
        self._check_key(request)
        raise RequestError(UNSUPPORTED[request.scope["route"].path], code=Code.BAD_REQUEST)

    async def _counted(self, name: str | None) -> Response:
        snapshot = await self.services.client.inspect(SCRAPE_TIMEOUT_S)
        return json_response(
            metadata.statistics(counted for counted in snapshot.counters if name in (None, counted.model))
        )

    def _check_model(self, request: Request, name: str, version: str | None) -> None:
        self._check_key(request)
        names = self.services.client.model_names()
        if name not in names:
            raise UnknownModel(name, names)
        _check_version(name, version)

    def _check_key(self, request: Request) -> None:
        self.services.keys.check(dict(request.scope["headers"]))

    # --- what goes wrong, and what is told of all this ---

    def status_of(self, error: RequestError) -> int:
        return errors.http_status(error)

    def error_body(self, error: RequestError) -> bytes:
        return errors.body(error.message)

    def framework_error_body(self, status: int, text: str, error_type: str) -> bytes:
        return errors.body(text)

    def openapi_paths(self) -> dict[str, Any]:
        names = [model.name for model in self.services.config.models]
        secured = bool(self.services.config.http.api_keys)
        return description.paths(self.error_body, names, metadata.MODEL_VERSION, secured=secured)


async def _only_post(request: Request) -> Response:
    """Else the pattern of a model's metadata would take the whole path for a name, and say that there is none."""
    raise HTTPException(405, "Method Not Allowed", {"Allow": "POST"})


def _both(
    suffix: str, handler: Callable[..., Any], answer: type[BaseModel] | None
) -> tuple[tuple[str, Callable[..., Any], type[BaseModel] | None], ...]:
    """A model's path with a version and without."""
    return (VERSION + suffix, handler, answer), (MODEL + suffix, handler, answer)


def _add(router: APIRouter, path: str, handler: Callable[..., Any], answer: type[BaseModel] | None) -> None:
    # As in the catalogue: the classes are for the description alone.
    router.add_api_route(path, handler, methods=["GET"], response_model=answer, response_class=JSONResponse)
    router.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)


def _readiness(told: dict[str, object], reason: str) -> Response:
    if not reason:
        return json_response(told)
    return json_response({**told, "error": reason}, 503, {"retry-after": "1"})


def _check_version(model: str, version: str | None) -> None:
    """
    Raises:
        RequestError: `unknown_model`: it is not the one that there is.
    """
    if version not in (None, metadata.MODEL_VERSION):
        text = f"model {model!r} has no version {str(version)[:40]!r}: its only one is {metadata.MODEL_VERSION!r}"
        raise RequestError(text, code=Code.UNKNOWN_MODEL)


@contextmanager
def _naming_item(count: int) -> Iterator[None]:
    """Of several items, the one that a model has refused is named by its number."""
    try:
        yield
    except RequestError as error:
        if count == 1 or error.code is not Code.INVALID_INPUT or "question" not in error.detail:
            raise
        raise InvalidInput(f"item {error.detail['question']}: {error.message}") from None

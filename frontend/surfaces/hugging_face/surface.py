"""Hugging Face's routes: `/hf/NAME` for what `huggingface_hub.InferenceClient` posts, whatever the task.

Owns which model and which task a path means. These answers have the shapes that Hugging Face's clients read, and those
of the native routes are the pipelines' own; nothing in such a client's request says which of the two it wants, so the
path does. `/models/NAME/pipeline/TASK` and `/models/NAME/v1/chat/completions` are paths of this dialect as well, and
`/v1` is where a client that was given the base URL of OpenAI's dialect posts everything but chats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from frontend.json_bodies import json_type, read_object
from frontend.responses import json_response, server_sent_event
from frontend.surfaces.base import Exchange, Surface, timing_headers
from frontend.surfaces.hugging_face import description, errors, forms, generation, tasks
from frontend.surfaces.hugging_face.tasks import TEXT_GENERATION, Parameters
from frontend.surfaces.openai.answers import ChatFormat, Events
from frontend.surfaces.openai.bodies import read_chat
from frontend.surfaces.openai.description import CHAT_EXAMPLE
from frontend.surfaces.openai.errors import in_callers_words
from shared.errors import Code, InvalidInput, RequestError, UnknownModel
from shared.json_text import dump_json
from shared.version import VERSION

CHAT = "/v1/chat/completions"
# `options` is what the hosted API took beside the rest (`wait_for_model`, `use_cache`); requests always wait here.
_KEYS = ("inputs", "parameters", "stream", "options")

# Enough of a body to see whether it is JSON.
_HEAD_BYTES = 64


class HuggingFaceSurface(Surface):
    """See the module."""

    name: ClassVar[str] = "hugging_face"
    prefix: ClassVar[str] = "/hf"

    # --- paths ---

    def routes(self) -> Iterable[Route]:
        return [
            self.hot_route(f"/models/{{name:path}}{CHAT}", self._chat),
            self.hot_route("/models/{name:path}/pipeline/{task}", self._task),
            self.hot_route(f"/hf{CHAT}", self._chat),
            self.hot_route(f"/hf/{{name:path}}{CHAT}", self._chat),
            self.hot_route("/hf/{name:path}/pipeline/{task}", self._task),
            self.hot_route("/hf/{name:path}", self._task),
            self.hot_route("/hf", self._task),
            self.hot_route("/v1", self._task),
            self.hot_route("/v1/", self._task),
        ]

    def _choose_model(self, exchange: Exchange) -> None:
        """By the path: `NAME`, `NAME/` and `NAME/v1`; without a name the only model."""
        exchange.choose_model(self._name(exchange.scope["path_params"].get("name", "")))

    def _name(self, path: str) -> str:
        names = self.services.client.model_names()
        if path in names:
            return path
        name = f"/{path}".rstrip("/").removesuffix("/v1")[1:]
        if name:
            return name
        if len(names) != 1:
            text = f"a path without a name is for a service with one model; this one has {len(names)}: POST /hf/NAME"
            text += f" with NAME one of {', '.join(names)}" if names else ""
            raise RequestError(text, code=Code.UNKNOWN_MODEL)
        return names[0]

    async def _task_of(self, exchange: Exchange) -> str:
        """What the chosen model does, or the class of the user's own that it is."""
        left_s = exchange.deadline_s - asyncio.get_running_loop().time()
        # The configuration may leave a task to be found out, and only the model server does.
        if not await self.services.client.wait_for_server(max(0.0, left_s)):
            raise RequestError("the model server is not there", code=Code.SERVER_UNAVAILABLE)
        state = next((state for state in self.services.client.models() if state.name == exchange.model), None)
        if state is None:
            raise UnknownModel(exchange.model, self.services.client.model_names())
        return tasks.canonical(state.task)

    # --- requests for models ---

    async def _task(self, exchange: Exchange, body: bytes) -> int:
        self._choose_model(exchange)
        task = await self._task_of(exchange)
        asked = exchange.scope["path_params"].get("task")
        if asked is not None:
            tasks.check_asked_as(exchange.model, task, asked)
        content_type = exchange.headers.get(b"content-type", b"")
        inputs, parameters, stream = read_request(body, tasks.task_of(task), content_type)
        if task == TEXT_GENERATION:
            return await self._generate(exchange, inputs, parameters, stream=stream)
        if stream:
            raise InvalidInput(f"stream is for text-generation, and model {exchange.model!r} is for {task}")
        question = tasks.task_of(task).ask(inputs, parameters)
        answer = await exchange.predict(question.inputs, question.parameters)
        value = question.read(answer.value)
        if isinstance(value, tasks.File):
            return await exchange.respond(200, [(b"content-type", value.media_type)], value.content)
        return await exchange.respond(200, timing_headers(answer), dump_json(value))

    async def _generate(self, exchange: Exchange, inputs: object, given: Parameters, *, stream: bool) -> int:
        request = generation.read(given)
        with _callers_words(request.names):
            if stream:
                return await exchange.stream(inputs, request.parameters, generation.TokenEvents(request))
            answer = await exchange.predict(inputs, request.parameters)
        return await exchange.respond(200, timing_headers(answer), dump_json(request.whole(answer.value)))

    async def _chat(self, exchange: Exchange, body: bytes) -> int:
        self._choose_model(exchange)
        # What the body calls the model is up to the client, which knows a URL and no name.
        request = read_chat({**read_object(body, CHAT_EXAMPLE), "model": exchange.model})
        task = await self._task_of(exchange)
        if task != TEXT_GENERATION and not tasks.is_own_class(task):
            raise InvalidInput(f"model {exchange.model!r} is for {task}, and this path for {TEXT_GENERATION}")
        form = ChatFormat(request)
        with _callers_words(request.names):
            if request.stream:
                return await exchange.stream_all(request.questions(), _ChatEvents(form))
            answers = await exchange.predict_all(request.questions())
        return await exchange.respond(200, timing_headers(answers[0]), form.whole(answers))

    # --- what a client asks about a model ---

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Hugging Face"], default_response_class=Response)
        for path, handler in (("health", self.health), ("info", self.info)):
            for where in (f"/hf/{{name:path}}/{path}", f"/hf/{path}"):
                router.add_api_route(where, handler, methods=["GET"], response_model=None)
                router.add_api_route(where, handler, methods=["HEAD"], response_model=None, include_in_schema=False)
        return router

    async def health(self, request: Request, name: str = "") -> Response:
        """Whether this model takes requests: 200, else 503."""
        model = self._asked_about(request, name)
        is_ready = self.services.client.ready(model)
        return json_response({"model_id": model, "ready": is_ready}, 200 if is_ready else 503)

    async def info(self, request: Request, name: str = "") -> Response:
        """What this model is."""
        model = self._asked_about(request, name)
        task = next((state.task for state in self.services.client.models() if state.name == model), None)
        return json_response({"model_id": model, "model_pipeline_tag": task, "version": VERSION})

    def _asked_about(self, request: Request, name: str) -> str:
        self.services.keys.check(dict(request.scope["headers"]))
        model, names = self._name(name), self.services.client.model_names()
        if model not in names:
            raise UnknownModel(model, names)
        return model

    # --- what goes wrong, and what is told of all this ---

    def error_body(self, error: RequestError) -> bytes:
        return errors.body_of(error)

    def framework_error_body(self, status: int, text: str, error_type: str) -> bytes:
        return errors.body(text, error_type)

    def openapi_paths(self) -> dict[str, Any]:
        return description.paths(self.error_body, secured=bool(self.services.config.http.api_keys))


class _ChatEvents(Events):
    """The same events, with our own word for what goes wrong."""

    def error(self, error: RequestError) -> bytes:
        return server_sent_event(errors.body_in_stream(error))


@contextmanager
def _callers_words(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise in_callers_words(error, names) from None


def read_request(body: bytes, task: tasks.Task, content_type: bytes = b"") -> tuple[object, Parameters, bool]:
    """Inputs, parameters, and whether to stream. The Content-Type tells forms; else clients send all kinds, or none.

    Raises:
        RequestError: `bad_request`, where it is not JSON; `invalid_input`, where it is not a request.
    """
    boundary = forms.boundary_of(content_type)
    if boundary is None and task.takes_bytes and body and not body[:_HEAD_BYTES].lstrip().startswith(b"{"):
        # No picture and no recording begins so.
        return body, {}, False
    request = read_object(body, '{"inputs": …}') if boundary is None else forms.read_form(body, boundary)
    keys = (*_KEYS, *task.keys, *filter(None, [task.other_inputs]))
    unknown = [key[:60] for key in request if key not in keys]
    if unknown:
        text = f"unknown key {unknown[0]!r}: a request has {', '.join(keys)}; what a task takes goes into parameters"
        raise InvalidInput(text, detail={"unknown": unknown[:5]})
    if task.other_inputs in request and "inputs" not in request:
        request["inputs"] = {task.other_inputs: request.pop(task.other_inputs)}
    if "inputs" not in request:
        raise InvalidInput('the request has no inputs: send {"inputs": …}')
    parameters = request.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidInput(f"parameters is {json_type(parameters)}, not an object")
    beside = {key: request[key] for key in task.keys if request.get(key) is not None}
    stream = request.get("stream") or False
    if not isinstance(stream, bool):
        raise InvalidInput(f"stream is {json_type(stream)}, not true or false")
    return request["inputs"], {**parameters, **beside}, stream

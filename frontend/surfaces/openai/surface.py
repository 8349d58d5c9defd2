"""OpenAI's routes: `/v1/models`, `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`.

Owns which model a request may ask. Refuses to look into texts: templates and tokens are the model process's business.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from frontend.json_bodies import read_object
from frontend.read_routes import add_read_route
from frontend.responses import json_response
from frontend.services import Services
from frontend.surfaces.base import Exchange, Surface, timing_headers
from frontend.surfaces.openai import description, errors
from frontend.surfaces.openai.answers import ChatFormat, CompletionFormat, Events, Format
from frontend.surfaces.openai.bodies import Generation, read_chat, read_completion, read_embedding
from frontend.surfaces.openai.vectors import write_vectors
from shared.errors import Code, RequestError, UnknownModel

TEXT_GENERATION = "text-generation"
EMBEDDING = "embedding"
# What Hugging Face's client calls a model of which it knows the URL alone.
NAMELESS = "dummy"


class OpenAISurface(Surface):
    """See the module."""

    name: ClassVar[str] = "openai"
    prefix: ClassVar[str] = "/v1"

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        # Nobody here knows when a model was made; this is when it could first be asked.
        self._started_s = int(time.time())

    # --- requests for models ---

    def routes(self) -> Iterable[Route]:
        handlers: dict[str, Callable[[Exchange, bytes], Awaitable[int]]] = {
            description.CHAT: self._chat,
            description.COMPLETIONS: self._complete,
            description.EMBEDDINGS: self._embed,
        }
        return [self.hot_route(path, handler) for path, handler in handlers.items()]

    async def _chat(self, exchange: Exchange, body: bytes) -> int:
        request = read_chat(self._named(read_object(body, description.CHAT_EXAMPLE)))
        return await self._generate(exchange, request, ChatFormat(request))

    async def _complete(self, exchange: Exchange, body: bytes) -> int:
        request = read_completion(read_object(body, description.COMPLETION_EXAMPLE))
        return await self._generate(exchange, request, CompletionFormat(request))

    async def _generate(self, exchange: Exchange, request: Generation, form: Format) -> int:
        self._choose_model(exchange, request.model, TEXT_GENERATION)
        with _callers_words(request.names):
            if request.stream:
                return await exchange.stream_all(request.questions(), Events(form))
            answers = await exchange.predict_all(request.questions())
        return await exchange.respond(200, timing_headers(answers[0]), form.whole(answers))

    async def _embed(self, exchange: Exchange, body: bytes) -> int:
        request = read_embedding(read_object(body, description.EMBEDDING_EXAMPLE))
        self._choose_model(exchange, request.model, EMBEDDING)
        with _callers_words(request.names):
            answer = await exchange.predict(request.texts, request.parameters)
        vectors = write_vectors(answer.value, len(request.texts), request.model, is_base64=request.is_base64)
        return await exchange.respond(200, timing_headers(answer), vectors)

    def _named(self, fields: dict[str, object]) -> dict[str, object]:
        """The same fields, with the only model for text in place of the word for a model without a name."""
        if fields.get("model") != NAMELESS or NAMELESS in self.services.client.model_names():
            return fields
        names = [name for name, task in self._tasks().items() if task == TEXT_GENERATION]
        if len(names) != 1:
            fitting = ", ".join(names) or "none here"
            text = f"model {NAMELESS!r} means the only one for {TEXT_GENERATION}; those there are: {fitting}"
            raise RequestError(f"{text}: name one, or ask /hf/NAME", code=Code.UNKNOWN_MODEL)
        return {**fields, "model": names[0]}

    def _choose_model(self, exchange: Exchange, name: str, task: str) -> None:
        exchange.choose_model(name)
        tasks = self._tasks()
        # A class of the user's own has its name in place of a task; what it can do shows in its answer.
        if tasks.get(name, task) != task and ":" not in tasks[name]:
            fitting = ", ".join(model for model, its_task in tasks.items() if its_task == task) or "none here"
            text = f"model {name!r} is for {tasks[name]}, and this route for {task}; models that fit: {fitting}"
            raise errors.invalid("model", text)

    def _tasks(self) -> dict[str, str]:
        return {model.name: model.task for model in self.services.client.models()}

    # --- which models there are ---

    def router(self) -> APIRouter:
        router = APIRouter(tags=["OpenAI"], default_response_class=Response)
        for path, handler, described_by in (
            ("/v1/models", self.models, description.ModelList),
            ("/v1/models/{id:path}", self.model, description.Model),
        ):
            add_read_route(router, path, handler, described_by=described_by)
        return router

    async def models(self, request: Request) -> Response:
        """Every model of this service, as OpenAI's clients read it."""
        self._check_key(request)
        names = self.services.client.model_names()
        return json_response({"object": "list", "data": [self._describe(name) for name in names]})

    async def model(self, request: Request, id: str) -> Response:
        """One model of this service, as OpenAI's clients read it."""
        self._check_key(request)
        names = self.services.client.model_names()
        if id not in names:
            raise UnknownModel(id, names)
        return json_response(self._describe(id))

    def _describe(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started_s, "owned_by": "headwaiter"}

    def _check_key(self, request: Request) -> None:
        self.services.keys.check(dict(request.scope["headers"]))

    # --- what goes wrong, and what is told of all this ---

    def status_of(self, error: RequestError) -> int:
        return errors.http_status(error)

    def error_body(self, error: RequestError) -> bytes:
        return errors.body_of(error)

    def framework_error_body(self, status: int, text: str, error_type: str) -> bytes:
        return errors.body(status, text, error_type)

    def openapi_paths(self) -> dict[str, Any]:
        return description.paths(self.error_body, secured=bool(self.services.config.http.api_keys))


@contextmanager
def _callers_words(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise errors.in_callers_words(error, names) from None

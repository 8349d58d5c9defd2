"""The routes that say which models there are.

Owns what a client is told about models before it asks one. Answers from what the model server said last, and waits for
nothing.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from frontend.health import NOT_HEARD
from frontend.read_routes import add_read_route
from frontend.responses import json_response
from frontend.services import Services
from shared.errors import UnknownModel
from shared.messages import ModelState


class ListedModel(BaseModel):
    name: str = Field(description="Ask it with `POST /models/NAME`.")
    task: str = Field(description="What it does, or the class of your own that it is.")
    state: str = Field(
        description="`ready`, `loading`, `failed`, `idle` (loaded for its next request), `unloaded` by an operator, or "
        "`unknown` while the model server is not heard."
    )


class ModelList(BaseModel):
    models: list[ListedModel] = Field(description="In the order of the configuration.")


class DescribedModel(ListedModel):
    reason: str = Field(description="Why it is not ready, in one line; empty if it is.")
    required: bool = Field(description="Whether `/readyz` waits for it.")
    replicas_ready: int = Field(description="Model processes that take requests.")
    replicas_total: int = Field(description="Model processes by plan.")
    queued: int = Field(description="Requests that wait for it.")


class CatalogueRoutes:
    """See the module. Needs a key where models do."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def router(self) -> APIRouter:
        router = APIRouter(tags=["models"], default_response_class=Response)
        for path, handler, described_by in (
            ("/models", self.models, ModelList),
            ("/models/{name:path}", self.model, DescribedModel),
        ):
            add_read_route(router, path, handler, described_by=described_by)
        return router

    async def models(self, request: Request) -> Response:
        """Every model of this service: its name, its task, and how it is."""
        self._check_key(request)
        listed = [model.model_dump(include={*ListedModel.model_fields}) for model in self._described()]
        return json_response({"models": listed})

    async def model(self, request: Request, name: str) -> Response:
        """One model of this service."""
        self._check_key(request)
        described = self._described()
        for model in described:
            if model.name == name:
                return json_response(model.model_dump())
        raise UnknownModel(name, [model.name for model in described])

    def _check_key(self, request: Request) -> None:
        self._services.keys.check(dict(request.scope["headers"]))

    def _described(self) -> list[DescribedModel]:
        client = self._services.client
        known = {model.name: model for model in client.models()}
        return [self._describe(name, known.get(name)) for name in client.model_names()]

    def _describe(self, name: str, state: ModelState | None) -> DescribedModel:
        """`state` is None until a model server was heard: then the configuration is all there is."""
        if state is None:
            configured = self._services.config.model(name)
            return DescribedModel(
                name=name,
                task=configured.task or configured.model,
                state="unknown",
                reason=NOT_HEARD,
                required=configured.required,
                replicas_ready=0,
                replicas_total=0,
                queued=0,
            )
        is_heard = self._services.client.server_heard()
        return DescribedModel(
            name=name,
            task=state.task,
            state=state.state if is_heard else "unknown",
            reason=state.reason if is_heard else NOT_HEARD,
            required=state.required,
            replicas_ready=state.replicas_ready if is_heard else 0,
            replicas_total=state.replicas_total,
            queued=state.queued,
        )

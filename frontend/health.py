"""The routes for operators and their machines: probes, status, metrics.

Owns what alive, started and ready mean. None of these routes waits for a model: probes answer from what the model
server said last, and the other two give it a moment and then do without.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from frontend.read_routes import add_read_route
from frontend.responses import json_response
from frontend.server_metrics import ServerCollector
from frontend.services import Services
from shared.errors import RequestError
from shared.messages import ModelState, Snapshot

if TYPE_CHECKING:
    from frontend.client import ModelClient

# Prometheus waits 10 s for a scrape; half of our numbers are better than none.
SCRAPE_TIMEOUT_S = 2.0
NOT_HEARD = "the model server was not heard within 3 s"


@dataclasses.dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this service can answer, model by model."""

    ready: bool
    reason: str
    models: dict[str, dict[str, object]]

    def response(self) -> Response:
        headers = {} if self.ready else {"retry-after": "1"}
        return json_response(dataclasses.asdict(self), 200 if self.ready else 503, headers)


def readiness(client: ModelClient, required_names: frozenset[str]) -> Readiness:
    """Ready is: every required model answers requests, by news no older than 3 s. One that is idle does, after a load.

    Required is what the model server calls so, and what this front's own configuration does.
    """
    states = client.models()
    by_name = {state.name: state for state in states}
    missing = sorted(required_names - by_name.keys())
    models = {name: _model(state) for name, state in by_name.items()}
    models |= {name: {"state": "unknown", "reason": "the model server does not serve it"} for name in missing}
    unready = [state.name for state in states if state.required and not state.answers]
    if not client.server_heard():
        reason = NOT_HEARD
    elif client.server_draining():
        reason = "the model server is about to stop, or was drained by an operator"
    elif not states:
        reason = "no model is configured"
    elif missing or unready:
        reason = f"not ready: {', '.join([*unready, *missing])}"
    else:
        return Readiness(True, "", models)
    return Readiness(False, reason, models)


def why_not_started(client: ModelClient, required_names: frozenset[str]) -> str:
    """What is still missing; nothing once every required model has been ready in this life of the model server.

    What happens later is for `readiness` to say. The model server's last word counts, also when it is not heard now.
    """
    was_ready = {state.name: state.was_ready for state in client.models()}
    required = required_names | {state.name for state in client.models() if state.required}
    waiting = sorted(name for name in required if not was_ready.get(name, False))
    if not was_ready:
        return "no model is configured" if client.server_heard() else NOT_HEARD
    return f"not ready yet: {', '.join(waiting)}" if waiting else ""


def _model(state: ModelState) -> dict[str, object]:
    return {
        "state": state.state,
        "reason": state.reason,
        "required": state.required,
        "replicas_ready": state.replicas_ready,
        "replicas_total": state.replicas_total,
    }


class HealthRoutes:
    """The handlers. They remember nothing, so that each front worker, however young, says the same."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._required = frozenset(model.name for model in services.config.models if model.required)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["operations"], default_response_class=Response)
        for path, handler in (
            ("/livez", self.livez),
            ("/readyz", self.readyz),
            ("/startupz", self.startupz),
            ("/status", self.status),
            ("/metrics", self.metrics),
        ):
            add_read_route(router, path, handler)
        return router

    async def livez(self) -> Response:
        """This front worker's event loop runs. Says nothing about models."""
        return json_response({"live": True})

    async def readyz(self) -> Response:
        """Every required model takes requests; 503 if not, and while the model server drains."""
        return readiness(self._services.client, self._required).response()

    async def startupz(self) -> Response:
        """Every required model has been ready since the model server was started; 503 until then."""
        reason = why_not_started(self._services.client, self._required)
        if reason:
            return json_response({"started": False, "reason": reason}, 503, {"retry-after": "1"})
        return json_response({"started": True})

    async def status(self, request: Request) -> Response:
        """Everything the model server knows: slots, processes, queues, totals. Needs a key where models do."""
        self._services.keys.check(dict(request.scope["headers"]))
        snapshot = await self._services.client.inspect()
        return json_response(snapshot.by_name())

    async def metrics(self) -> Response:
        """Prometheus: the totals of all front workers, and the model server's numbers."""
        registry = CollectorRegistry()
        registry.register(_Families(await asyncio.to_thread(self._services.metrics.families)))
        registry.register(ServerCollector(await self._snapshot()))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _snapshot(self) -> Snapshot | None:
        try:
            return await self._services.client.inspect(SCRAPE_TIMEOUT_S)
        except RequestError:
            # The family `headwaiter_model_server_up` says so.
            return None


class _Families(Collector):
    """Families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families

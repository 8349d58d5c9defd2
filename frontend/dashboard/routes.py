"""`/dashboard`: a page that shows the service as it is, and lets one try its models.

Owns the page's files, the headers they go out with, and the one document that its charts are drawn from. The files
hold no data, so they need no key; the data needs one where models do. Nothing is built, and nothing comes from
another host: the browser is told to refuse both that and any script that is not a file from here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client.metrics_core import Metric
from starlette.exceptions import HTTPException

from frontend.read_routes import add_read_route
from frontend.responses import json_response
from frontend.services import Services
from shared.errors import RequestError
from shared.messages import Snapshot

DIRECTORY = Path(__file__).parent
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page asks every few seconds, and rather draws a gap than waits.
INSPECT_TIMEOUT_S = 2.0
HEADERS = {
    # Nothing but files from here: no inline script or style, no other host, no frame around it, no form that leaves.
    # Pictures and sounds that the user picks, or a model makes, are blobs of the page itself.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # Asked for again each time, and sent again only when it has changed: a new version is never mixed with an old one.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """One file of the page, as it is sent."""

    content: bytes
    media_type: str
    etag: str


def read_files() -> dict[str, File]:
    """The page's files by name; a few ten kilobytes in all."""
    return {
        path.name: File(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
        for path in sorted(DIRECTORY.iterdir())
        if path.suffix in MEDIA_TYPES
        for content in (path.read_bytes(),)
    }


class DashboardRoutes:
    """See the module."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._files = read_files()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["operations"], default_response_class=Response)
        # The data's path first: the last one takes any name.
        for path, handler in (
            ("/dashboard", self.page),
            ("/dashboard/data", self.data),
            ("/dashboard/{name}", self.file),
        ):
            add_read_route(router, path, handler, is_described=path != "/dashboard/{name}")
        return router

    async def page(self, request: Request) -> Response:
        """A page for people: the machine as it is, live charts, and a form to try each model."""
        return self._send("index.html", request)

    async def file(self, name: str, request: Request) -> Response:
        """One of the page's own files."""
        if name not in self._files:
            raise HTTPException(404, "the page has no such file")
        return self._send(name, request)

    async def data(self, request: Request) -> Response:
        """What the page is drawn from: `/status`, and the totals of all front workers. Needs a key where models do."""
        services = self._services
        services.keys.check(dict(request.scope["headers"]))
        snapshot, problem = await self._inspect()
        families = await asyncio.to_thread(services.metrics.families)
        return json_response(
            {
                "status": None if snapshot is None else snapshot.by_name(),
                "problem": problem,
                "front_workers": services.config.http.workers,
                "http": http_totals(families),
            },
            headers={"cache-control": "no-store"},
        )

    async def _inspect(self) -> tuple[Snapshot | None, str]:
        try:
            return await self._services.client.inspect(INSPECT_TIMEOUT_S), ""
        except RequestError as error:
            return None, error.message

    def _send(self, name: str, request: Request) -> Response:
        file = self._files[name]
        headers = {**HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def http_totals(families: Iterable[Metric]) -> dict[str, Any]:
    """What the charts need of the front workers' families, over all routes: per model the requests by status, and the
    durations as cumulative counts by upper bound in seconds."""
    models: dict[str, dict[str, Any]] = {}
    inflight = 0.0
    for sample in (sample for family in families for sample in family.samples):
        if sample.name == "headwaiter_inflight_requests":
            inflight += sample.value
            continue
        if "model" not in sample.labels:
            continue
        total = models.setdefault(sample.labels["model"], {"by_status": {}, "seconds_buckets": {}, "seconds_sum": 0.0})
        if sample.name == "headwaiter_requests_total":
            _add(total["by_status"], sample.labels["code"], sample.value)
        elif sample.name == "headwaiter_request_duration_seconds_bucket":
            _add(total["seconds_buckets"], sample.labels["le"], sample.value)
        elif sample.name == "headwaiter_request_duration_seconds_sum":
            total["seconds_sum"] += sample.value
    return {"inflight": inflight, "models": models}


def _add(counts: dict[str, float], key: str, value: float) -> None:
    counts[key] = counts.get(key, 0.0) + value

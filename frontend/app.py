"""The FastAPI application of a front worker: `create_app` makes one, `app` is one for `uvicorn frontend.app:app`.

Owns how the parts are put together, and the worker's lifespan. Importing this module reads no configuration, opens
nothing, and loads no model library, ever.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from frontend import openapi
from frontend.catalogue import CatalogueRoutes
from frontend.client import PENDING_BYTES_MAX, ModelClient
from frontend.dashboard.routes import DashboardRoutes
from frontend.dependency import STATE_NAME
from frontend.guards import AdminKeyRing, BodyReader, KeyRing
from frontend.health import HealthRoutes
from frontend.metrics import FrontMetrics
from frontend.own_routes import OwnRoutes, load_routers
from frontend.refusals import Refusals
from frontend.services import Services
from frontend.surfaces.registry import load_surfaces
from frontend.visits import Visits
from shared import logs
from shared.config import Config
from shared.errors import ConfigurationError
from shared.logs import log_event
from shared.sockets import RunDirectory
from shared.tracing import start as start_tracing
from shared.version import VERSION

logger = logging.getLogger("frontend")

# What uvicorn itself exits with when an application cannot start: its master then gives up instead of trying again.
STARTUP_FAILURE = 3
# How soon the files behind /metrics are put back after they were deleted.
KEEP_METRICS_EVERY_S = 1.0
# Paths whose routes are remembered; clients can ask for any.
FOUND_MAX = 1024
# Longer ones are matched each time: a path may have as many bytes as a head, and those kept are in memory for good.
FOUND_CHARS_MAX = 512
# How long a browser may remember what a page of another origin may ask.
PREFLIGHT_KEPT_S = 600
# A model server that is there welcomes a new worker within milliseconds, on a machine that has time for both.
FIRST_WORD_S = 3.0

if TYPE_CHECKING:
    from frontend.spans import FrontSpans

    app: FastAPI


def create_app(config: Config | None = None) -> FastAPI:
    """A front worker's application. Its model server need not run.

    Raises:
        ConfigurationError: the configuration, the run directory, or a router of the user's cannot be used.
    """
    config = config or Config.load()
    routers = load_routers(config)
    run_directory = RunDirectory(config.run_directory)
    run_directory.prepare()
    api_keys, admin_keys = (
        [key.get_secret_value() for key in keys] for keys in (config.http.api_keys, config.http.admin_keys)
    )
    spans = _spans() if config.tracing.enabled else None
    services = Services(
        config=config,
        client=ModelClient(config, is_front_worker=True),
        metrics=FrontMetrics(run_directory),
        # Whoever may unload a model may also ask it. Where nobody needs a key, the administrator needs none either.
        keys=KeyRing([*api_keys, *admin_keys] if api_keys else []),
        admin_keys=AdminKeyRing(admin_keys),
        bodies=BodyReader(body_bytes_max=config.http.body_bytes_max, total_bytes_max=PENDING_BYTES_MAX),
        visits=Visits(log_requests=config.logging.requests, spans=spans) if spans or config.logging.requests else None,
    )

    own_routes = OwnRoutes(services, routers)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        _stop_with_master()
        async with services.client, own_routes.container.lifespan_context(app) as state:
            # So that probes which meet a new worker find it informed; the server need not be there.
            if run_directory.has_server:
                await services.client.wait_for_server(FIRST_WORD_S)
            log_event(logger, "info", "front_started", pid=os.getpid(), run_dir=str(run_directory.path))
            keeping = asyncio.create_task(_keep(services.metrics))
            yield state
            keeping.cancel()
        if spans is not None:
            await asyncio.to_thread(spans.close)
        services.metrics.close()

    surfaces = load_surfaces(services)
    application = _Application(
        hot_routes=[route for surface in surfaces for route in surface.routes()],
        title="headwaiter",
        version=VERSION,
        description="Models of this service, and how they are.",
        lifespan=lifespan,
        # A redirect would go to whatever host the request names.
        redirect_slashes=False,
        # What fails is answered in the dialect of its path; a page with a traceback is for nobody.
        exception_handlers=Refusals(surfaces).handlers(),
    )
    for surface in surfaces:
        application.include_router(surface.router())
    application.include_router(CatalogueRoutes(services).router())
    application.include_router(HealthRoutes(services).router())
    application.include_router(DashboardRoutes(services).router())
    own_routes.refuse_collisions(application.router.routes)
    application.router.routes.append(own_routes)
    setattr(application.state, STATE_NAME, services.client)
    openapi.describe(application, surfaces, own_routes, secured=bool(config.http.api_keys))
    if config.http.cors_origins:
        _answer_pages_of(application, config.http.cors_origins)
    return application


def _spans() -> FrontSpans:
    """Imported here: a front that does not trace loads nothing for it."""
    tracing = start_tracing(f"front-{os.getpid()}")
    from frontend.spans import FrontSpans

    return FrontSpans(tracing)


class _Application(FastAPI):
    """FastAPI, with a way for the hot routes around its own layers, which do nothing for them and cost as much as the
    rest of a request does here. Middleware that somebody adds sees every request."""

    def __init__(self, *, hot_routes: list[Route], **settings: Any) -> None:
        super().__init__(**settings)
        self._hot_routes = hot_routes
        # What paths that were asked for lead to: matching one again costs as much as reading its request.
        self._found: dict[tuple[str, str, str], tuple[Route, Scope]] = {}
        # Also here: for other methods, and for the way through middleware.
        self.router.routes[:0] = hot_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.user_middleware and scope["type"] == "http":
            place = (scope["method"], scope["path"], scope["root_path"])
            found = self._found.get(place) or self._find(place, scope)
            if found is not None:
                route, names = found
                scope.update(names)
                await route.app(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _find(self, place: tuple[str, str, str], scope: Scope) -> tuple[Route, Scope] | None:
        for route in self._hot_routes:
            match, names = route.matches(scope)
            if match is Match.FULL:
                if len(self._found) >= FOUND_MAX:
                    self._found.clear()
                if len(scope["path"]) <= FOUND_CHARS_MAX:
                    self._found[place] = route, names
                return route, names
        return None


def _answer_pages_of(application: FastAPI, origins: Sequence[str]) -> None:
    """Lets browsers hand answers to pages of these origins. A key travels in a header that the page sets itself, and
    nothing here reads cookies, so none are allowed."""
    application.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("Retry-After", "Server-Timing", "X-Request-Id", "X-Should-Retry"),
        max_age=PREFLIGHT_KEPT_S,
    )


def __getattr__(name: str) -> FastAPI:
    """`app`, made when it is asked for, so that the module can be imported without a configuration."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        config = Config.load()
        if not logging.getLogger().hasHandlers():
            # Started by plain uvicorn, which sets up its own loggers only.
            logs.configure(config.logging.level, config.logging.format, program="frontend")
        application = create_app(config)
    except ConfigurationError as error:
        print(f"headwaiter: {error}", file=sys.stderr)
        sys.exit(STARTUP_FAILURE)
    except Exception as fault:
        # The boundary of a start: with any other exit code uvicorn's master would try again, for ever.
        log_event(logger, "error", "front_start_failed", exception=fault)
        sys.exit(STARTUP_FAILURE)
    globals()["app"] = application
    return application


async def _keep(metrics: FrontMetrics) -> None:
    while True:
        await asyncio.sleep(KEEP_METRICS_EVERY_S)
        metrics.keep()


def _stop_with_master() -> None:
    """A worker whose uvicorn master was killed would keep the port, and nobody would replace it."""
    master = multiprocessing.parent_process()
    if master is None:
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(master.sentinel)
        log_event(logger, "warning", "front_master_died", pid=os.getpid())
        # uvicorn's own handler: open requests finish first.
        os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(master.sentinel, stop)

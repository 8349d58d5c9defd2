"""Routes of the user's own, beside headwaiter's: FastAPI routers, named in `http.routers`.

Owns how they are found, what they may not be, and the guards in front of them: the same key, bounds, deadline and ids
as on every other route. They are the user's code in a front worker, so whatever is wrong with them is found out when
the application is made, and no model library may come with them.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fastapi import APIRouter, routing
from starlette.datastructures import URLPath
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, NoMatchFound, Route, compile_path
from starlette.types import Message, Receive, Scope, Send

from frontend import guards
from frontend.circumstances import Circumstances, under
from frontend.guards import ClientGone, Headers
from frontend.responses import CLIENT_CLOSED_REQUEST, status_of
from frontend.services import Services
from frontend.visits import Visit
from shared.config import Config
from shared.errors import ConfigurationError, RequestError
from shared.suggestions import did_you_mean

# What a front worker never holds; see `test_no_process_that_speaks_http_and_not_the_server_ever_holds_torch`.
MODEL_LIBRARIES = frozenset({"torch", "transformers", "tensorflow", "jax"})
OWN_PACKAGES = frozenset({"frontend", "headwaiter", "model_worker", "shared"})
# A path that a pattern matches is made of the first of these that each of its parts allows.
SAMPLES = ("any", "1", "1.5", "00000000-0000-0000-0000-000000000000", "any/path")


@dataclass(frozen=True, slots=True)
class Entry:
    """One route: what it answers."""

    path: str
    methods: frozenset[str]
    pattern: re.Pattern[str]
    sample: str
    """A path that it answers."""
    described_as: str
    """The path in `/openapi.json`."""


class OwnRoutes(BaseRoute):
    """All of the user's routers as one route of the application."""

    def __init__(self, services: Services, routers: Mapping[str, APIRouter]) -> None:
        """`routers` by their names in the configuration.

        Raises:
            ConfigurationError: one of them has something that is not served here.
        """
        self._services = services
        self.container = APIRouter(redirect_slashes=False)
        """Holds the routers; also for the description, and for their lifespans."""
        self.entries: list[Entry] = []
        self.by_name: dict[str, list[Entry]] = {}
        for name, router in routers.items():
            before = len(self.entries)
            try:
                self.container.include_router(router)
            except Exception as error:
                raise ConfigurationError(f"http.routers: {name!r} cannot be served: {error}") from None
            self.entries = list(entries(self.container.routes, name))
            self.by_name[name] = self.entries[before:]
            if not self.by_name[name]:
                raise ConfigurationError(f"http.routers: {name!r} has no routes: decorate some with @router.post(…)")

    def refuse_collisions(self, ours: Sequence[BaseRoute]) -> None:
        """
        Raises:
            ConfigurationError: a route here and one of `ours` would answer the same request.
        """
        others = list(entries(ours, None))
        for name, own_entries in self.by_name.items():
            for own in own_entries:
                for other in others:
                    common = own.methods & other.methods
                    if common and (other.pattern.match(own.sample) or own.pattern.match(other.sample)):
                        raise ConfigurationError(
                            f"http.routers: {min(common)} {own.path} of {name!r} collides with headwaiter's own "
                            f"{other.described_as}: give it another path, such as with APIRouter(prefix=…)"
                        )

    # --- a route, as Starlette's router sees it ------------------------------------------------------------------

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        best: tuple[Match, Scope] = (Match.NONE, {})
        if scope["type"] != "http":
            return best
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        for entry in self.entries:
            if entry.pattern.match(path):
                if scope["method"] in entry.methods:
                    return Match.FULL, {"headwaiter.route": entry.described_as}
                best = (Match.PARTIAL, {"headwaiter.route": entry.described_as})
        return best

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        for route in self.container.routes:
            try:
                return route.url_path_for(name, **path_params)
            except NoMatchFound:
                continue
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, route = self._services, scope["headwaiter.route"]
        began_s = time.perf_counter()
        headers: Headers = dict(scope["headers"])
        response = _Response(send, guards.request_id(headers))
        services.metrics.request_began()
        visits = services.visits
        visit = None if visits is None else visits.begin(scope, route, response.request_id, headers)
        body, error_code = b"", ""
        try:
            circumstances, body = await self._guarded(response.request_id, headers, receive, visit)
            with under(circumstances), _traced(visit):
                await self.container(_plain(scope, headers), _Replay(body, receive), response)
        except ClientGone:
            # It has closed its connection before the request was whole: there is nobody to answer.
            pass
        except RequestError as error:
            response.status, error_code = status_of(error), error.code
            raise
        except HTTPException as error:
            response.status = error.status_code
            raise
        except Exception:
            response.status = 500
            raise
        finally:
            duration_s = time.perf_counter() - began_s
            services.metrics.request_ended("", route, response.status, duration_s, len(body))
            if visits is not None and visit is not None:
                visit.error = error_code
                visits.end(visit, "", response.status, duration_s, len(body))

    async def _guarded(
        self, request_id: str, headers: Headers, receive: Receive, visit: Visit | None
    ) -> tuple[Circumstances, bytes]:
        services, http = self._services, self._services.config.http
        services.keys.check(headers)
        timeout_s = guards.request_timeout_s(headers, http.request_timeout_s, http.request_timeout_max_s)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        circumstances = Circumstances(
            request_id=request_id,
            traceparent=guards.traceparent(headers) if visit is None else visit.traceparent,
            priority=guards.request_priority(headers),
            deadline_s=deadline_s,
        )
        return circumstances, await services.bodies.read(headers, receive, deadline_s)


@contextmanager
def _traced(visit: Visit | None) -> Iterator[None]:
    """While entered, the request's span is the one that spans of the user's own code belong below."""
    if visit is None or visit.span is None:
        yield
        return
    from opentelemetry import context

    token = context.attach(visit.span.context())
    try:
        yield
    finally:
        context.detach(token)


class _Replay:
    """`receive` of a request whose body was read already."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Response:
    """`send` of a request whose response gets an id, and whose status is wanted."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = CLIENT_CLOSED_REQUEST

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            others = [header for header in message.get("headers", ()) if header[0].lower() != b"x-request-id"]
            message = {**message, "headers": [*others, (b"x-request-id", self.request_id.encode())]}
        await self._send(message)


def _plain(scope: Scope, headers: Headers) -> Scope:
    """The scope of a request whose body is not compressed any more."""
    if b"content-encoding" not in headers:
        return scope
    gone = (b"content-encoding", b"content-length")
    return {**scope, "headers": [(name, value) for name, value in scope["headers"] if name not in gone]}


# --- which routes there are ------------------------------------------------------------------------------------------


def entries(routes: Iterable[BaseRoute], router_name: str | None) -> Iterator[Entry]:
    """What these routes answer, one by one.

    Raises:
        ConfigurationError: one of them is not for requests; where it belongs to the user's `router_name`.
    """
    # Newer FastAPI keeps included routers whole, and looks into them only when it is asked.
    each: Callable[[list[BaseRoute]], Iterable[Any]] = getattr(routing, "iter_route_contexts", iter)
    for context in each(list(routes)):
        route = getattr(context, "original_route", context)
        if not isinstance(route, Route):
            if router_name is None:
                continue
            kind = type(route).__name__.removeprefix("API")
            raise ConfigurationError(
                f"http.routers: {router_name!r} has a {kind} at {getattr(context, 'path', '?')}: front workers serve "
                "HTTP routes alone; an application of your own, with a ModelClient, may have the rest"
            )
        pattern, described_as, convertors = compile_path(context.path)
        values = {
            name: next(sample for sample in SAMPLES if re.fullmatch(convertor.regex, sample))
            for name, convertor in convertors.items()
        }
        methods = frozenset(context.methods or ())
        yield Entry(context.path, methods, pattern, described_as.format_map(values), described_as)


# --- finding them ----------------------------------------------------------------------------------------------------


def load_routers(config: Config) -> dict[str, APIRouter]:
    """The routers that the configuration names.

    Raises:
        ConfigurationError: one of them cannot be imported, is not there, or is something else.
    """
    for directory in map(str, config.python_path):
        # Behind everything else: a directory of the user's cannot shadow an installed module.
        if config.http.routers and directory not in sys.path:
            sys.path.append(directory)
    return {name: _load_router(name, config) for name in config.http.routers}


def _load_router(name: str, config: Config) -> APIRouter:
    module_name, _, attribute = name.partition(":")
    module = _imported(name, module_name, config)
    router = getattr(module, attribute, None)
    if isinstance(router, APIRouter):
        return router
    if router is None:
        routers = [found for found, value in vars(module).items() if isinstance(value, APIRouter)]
        guess = did_you_mean(attribute, routers) or (f"; it has {', '.join(routers)}" if routers else "")
        raise ConfigurationError(f"http.routers: {name!r}: {module.__file__} defines no {attribute!r}{guess}")
    raise ConfigurationError(
        f"http.routers: {name!r} is a {type(router).__name__}: it has to be a fastapi.APIRouter; an application of "
        "your own runs by itself, with a ModelClient in its lifespan"
    )


def _imported(name: str, module_name: str, config: Config) -> ModuleType:
    where = f"http.routers: {name!r}"
    try:
        with _without_model_libraries():
            return importlib.import_module(module_name)
    except _ModelLibraryRefused as error:
        raise ConfigurationError(
            f"{where}: it imports {error.name}, and a front worker holds no model library: put what needs it into a "
            "class of your own, and ask that as a model"
        ) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        taken = f"; {package!r} is a package of headwaiter's own: rename yours" if package in OWN_PACKAGES else ""
        searched = ", ".join(map(str, config.python_path))
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"{where}: there is no module {error.name!r}: looked in what is installed and in {searched}; "
                f"python_path names the directories of your own routers{taken}"
            ) from None
        raise ConfigurationError(f"{where}: cannot be imported: there is no module {error.name!r}{taken}") from None
    except Exception as error:
        # The boundary of the user's module: whatever it does at import is told in its own words.
        raise ConfigurationError(f"{where}: cannot be imported: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


class _ModelLibraryRefused(ImportError):
    """A module that is being imported wants a model library."""


class _Refuser:
    """Stands first among the import system's finders."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in MODEL_LIBRARIES:
            raise _ModelLibraryRefused(f"{name} is not for front workers", name=name)
        return None


@contextmanager
def _without_model_libraries() -> Iterator[None]:
    """While entered, importing one fails, so that nobody waits for it, and what can do without does so."""
    sys.meta_path.insert(0, _Refuser)
    try:
        yield
    finally:
        sys.meta_path.remove(_Refuser)

"""What is answered where no hot route answers: unknown paths, wrong methods, and what FastAPI's own routes raise.

Owns which dialect a path is answered in. Refuses the bodies themselves: a surface brings those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from frontend.responses import error_headers
from frontend.surfaces.base import Surface
from shared.errors import RequestError


class Refusals:
    """The exception handlers of a front's application."""

    def __init__(self, surfaces: Sequence[Surface]) -> None:
        # The longest prefix is the most telling one.
        self._surfaces = sorted(surfaces, key=lambda surface: len(surface.prefix), reverse=True)

    def handlers(self) -> dict[Any, Callable[[Request, Any], Any]]:
        """By the exceptions that they answer."""
        return {
            HTTPException: self._refused_by_framework,
            RequestError: self._refused,
            RequestValidationError: self._refused_by_validation,
            Exception: self._failed,
        }

    async def _refused(self, request: Request, error: RequestError) -> Response:
        surface = self._surface(request)
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        return _json(surface.error_body(error), surface.status_of(error), headers)

    async def _refused_by_framework(self, request: Request, error: HTTPException) -> Response:
        asked = f"{request.method[:20]} {request.url.path[:200]}"
        headers = dict(error.headers) if isinstance(error.headers, dict) else {}
        text, error_type = f"{asked}: {error.detail}", "bad_request"
        if error.status_code == 404:
            text, error_type = f"{text}; /docs lists what there is", "not_found"
        elif error.status_code == 405:
            methods = _methods(request)
            text, error_type = f"{asked}: this path takes {' or '.join(methods)}", "method_not_allowed"
            headers = {"allow": ", ".join(methods)}
        return self._answer(request, error.status_code, text, error_type, headers)

    async def _refused_by_validation(self, request: Request, error: RequestValidationError) -> Response:
        parts = [f"{'.'.join(str(step) for step in problem['loc'])}: {problem['msg']}" for problem in error.errors()]
        return self._answer(request, 422, "; ".join(parts), "invalid_input")

    async def _failed(self, request: Request, error: Exception) -> Response:
        return self._answer(request, 500, "headwaiter failed on this request; its log says why", "internal")

    def _answer(
        self, request: Request, status: int, text: str, error_type: str, headers: dict[str, str] | None = None
    ) -> Response:
        return _json(self._surface(request).framework_error_body(status, text, error_type), status, headers)

    def _surface(self, request: Request) -> Surface:
        # Where the application is mounted, `path` begins with the path of the mount.
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        return next(
            surface
            for surface in self._surfaces
            if not surface.prefix or path == surface.prefix or path.startswith(f"{surface.prefix}/")
        )


def _methods(request: Request) -> list[str]:
    """What the path of this request can be asked with: all of its routes, not only the one that refused it."""
    routes = request.app.router.routes
    scopes = {method: {**request.scope, "method": method} for method in ("GET", "HEAD", "POST")}
    return [
        method for method, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)
    ]


def _json(body: bytes, status: int, headers: dict[str, str] | None) -> Response:
    return Response(body, status, headers, media_type="application/json")

"""Routes that only read: the same path for GET and HEAD.

Owns how they are added to a router. What is sent is made by the handlers; a class is for the description alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.responses import Response


def add_read_route(
    router: APIRouter,
    path: str,
    handler: Callable[..., Awaitable[Response]],
    *,
    described_by: type | None = None,
    is_described: bool = True,
) -> None:
    """`described_by` is the shape of the body in `/openapi.json`, where the route stands if `is_described`. HEAD is for
    load balancers that probe with it."""
    response_class = Response if described_by is None else JSONResponse
    router.add_api_route(
        path,
        handler,
        methods=["GET"],
        response_model=described_by,
        response_class=response_class,
        include_in_schema=is_described,
    )
    router.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)

"""The front's application below middleware that users add: one that wraps `receive` and `send`, and compression."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.middleware.base import RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware

from frontend.app import create_app

app = create_app()
app.add_middleware(GZipMiddleware, minimum_size=1)


@app.middleware("http")
async def mark(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers["x-wrapped"] = "yes"
    return response

"""The front's application below a path of somebody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Mount

from frontend.app import create_app

front = create_app()


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """A mounted application's lifespan is its owner's to run."""
    async with front.router.lifespan_context(front):
        yield


app = Starlette(routes=[Mount("/ai", front)], lifespan=lifespan)

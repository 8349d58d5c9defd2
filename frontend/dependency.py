"""`headwaiter_client`: how a FastAPI route gets at the client of its process.

Owns the dependency, and the name under which an application keeps its client. Opens nothing.
"""

from __future__ import annotations

from fastapi.requests import HTTPConnection

from frontend.client import ModelClient
from shared.errors import UsageError

STATE_NAME = "headwaiter_client"


def headwaiter_client(connection: HTTPConnection) -> ModelClient:
    """The `ModelClient` of this process, as a dependency: `client: Annotated[ModelClient, Depends(headwaiter_client)]`.

    In a front worker it is the one that the worker itself asks models with. In an application of your own it is the one
    that the lifespan has put into `app.state.headwaiter_client`.

    Raises:
        UsageError: the application has none there.
    """
    client = getattr(connection.app.state, STATE_NAME, None)
    if not isinstance(client, ModelClient):
        raise UsageError(
            f"this application has no client: in its lifespan, `async with ModelClient() as client:` and "
            f"`app.state.{STATE_NAME} = client`"
        )
    return client

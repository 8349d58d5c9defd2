"""What a request of an own route has come with, for the requests to models that are made on its behalf.

Owns the context variable that carries it from the guard of a route to the client, and the dependency that hands the
client out. Refuses everything else: routes are guarded in `own_routes.py`, requests are made in `outgoing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Defaults for `RequestOptions`, as the caller of the route has named them in headers."""

    request_id: str
    traceparent: str
    priority: int
    deadline_s: float
    """On the event loop's clock."""


_PRESENT: ContextVar[Circumstances | None] = ContextVar("headwaiter_circumstances", default=None)


def present() -> Circumstances | None:
    """Those of the request that this task works for; None outside of own routes."""
    return _PRESENT.get()


@contextmanager
def under(circumstances: Circumstances) -> Iterator[None]:
    """While entered, in this task and in those that it starts, they are `present`."""
    token = _PRESENT.set(circumstances)
    try:
        yield
    finally:
        _PRESENT.reset(token)

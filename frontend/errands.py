"""What a client asks of the model server itself, and not of a model: how it is, and an operator's orders.

Owns the answers that are waited for, by their tokens, and what becomes of them when the model server goes away. Refuses
requests for models, and the connection's own affairs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from frontend.calls import Order
from frontend.connection import Connection
from frontend.link import unavailable
from shared.errors import Code, RequestError
from shared.messages import Inspect, Manage, Managed, Snapshot


class Errands:
    """Those of one client. Every method runs on the event loop of its connection."""

    def __init__(self) -> None:
        self._inspections: dict[int, asyncio.Future[Snapshot]] = {}
        self._orders: dict[int, Order] = {}
        self._tokens = itertools.count()

    async def inspect(self, connection: Connection, timeout_s: float) -> Snapshot:
        """
        Raises:
            RequestError: `server_unavailable`, if there is no answer in `timeout_s` seconds.
        """
        token = next(self._tokens)
        answered: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._inspections[token] = answered
        try:
            if not connection.send(Inspect(token)):
                raise unavailable()
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise RequestError(
                f"the model server did not answer within {timeout_s:g} s",
                code=Code.SERVER_UNAVAILABLE,
                retry_after_s=1.0,
            ) from None
        finally:
            del self._inspections[token]

    def manage(self, connection: Connection, action: str, model: str, replicas: int) -> Order:
        """
        Raises:
            RequestError: `server_unavailable`: there is nobody to give the order to.
        """
        order = Order(next(self._tokens), connection.link.epoch, asyncio.get_running_loop(), self._forget)
        if not (connection.link.is_up and connection.send(Manage(order.token, action, model, replicas))):
            raise unavailable()
        self._orders[order.token] = order
        return order

    def told(self, snapshot: Snapshot) -> None:
        inspection = self._inspections.get(snapshot.token)
        if inspection is not None and not inspection.done():
            inspection.set_result(snapshot)

    def done(self, managed: Managed) -> None:
        if (order := self._orders.pop(managed.token, None)) is not None:
            order.resolve(managed)

    def lose_orders(self, ended: Callable[[Order], bool]) -> None:
        """Fails those of which nobody will hear any more."""
        for order in [order for order in self._orders.values() if ended(order)]:
            self._forget(order.token)
            order.fail(unavailable("the model server ended before this was done: a new one begins as it is configured"))

    def close(self) -> None:
        """Nobody waits any more. Orders are carried out all the same."""
        for inspection in self._inspections.values():
            if not inspection.done():
                inspection.set_exception(unavailable("this front stops"))
        for order in tuple(self._orders.values()):
            order.abandon()

    def _forget(self, token: int) -> None:
        self._orders.pop(token, None)

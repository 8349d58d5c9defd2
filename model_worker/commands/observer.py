"""Looks at a running model server through its front socket, and hands it an operator's orders.

Owns one DEALER connection. Blocking is the caller's choice: `socket` can go into a poller.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from shared.errors import HeadwaiterError, ProtocolError
from shared.messages import Inspect, Manage, Managed, Snapshot
from shared.sockets import RunDirectory, connect_dealer, drain, send
from shared.version import VERSION
from shared.wire import decode, encode

# A server answers an Inspect within one turn of its loop.
ANSWER_TIMEOUT_S = 3.0
MESSAGES_PER_READ_MAX = 1000


class Unreachable(HeadwaiterError):
    """No model server answers at this run directory."""


class Observer:
    """One connection. It outlives restarts of the model server: ZeroMQ connects again by itself."""

    def __init__(self, run_directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self.socket = connect_dealer(self._context, RunDirectory(run_directory).front_endpoint)
        self._token = 0
        self._answered = True
        self._asked_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()

    def ask(self) -> None:
        """Asks for a `Snapshot`, unless an answer is still due: nothing piles up for a server that is away."""
        now_s = time.monotonic()
        if not self._answered and now_s - self._asked_s < ANSWER_TIMEOUT_S:
            return
        self._token += 1
        self._answered = False
        self._asked_s = now_s
        send(self.socket, encode(Inspect(self._token)))

    def order(self, action: str, model: str = "", replicas: int = 0) -> int:
        """Gives an order, as `Manage` has them. Returns the token that will be in the `Managed`."""
        self._token += 1
        send(self.socket, encode(Manage(self._token, action, model, replicas)))
        return self._token

    def news(self) -> Iterator[Snapshot | Managed]:
        """What has arrived since the last call. Never blocks.

        Raises:
            ProtocolError: the model server speaks another version of the protocol.
        """
        for parts in drain(self.socket, MESSAGES_PER_READ_MAX):
            message, _ = decode(parts)
            if isinstance(message, Snapshot):
                self._answered = True
            if isinstance(message, (Snapshot, Managed)):
                yield message

    def snapshots(self) -> Iterator[Snapshot]:
        """As `news`, for those who give no orders."""
        for message in self.news():
            if isinstance(message, Snapshot):
                yield message


def fetch_snapshot(run_directory: Path, timeout_s: float = ANSWER_TIMEOUT_S) -> Snapshot:
    """One `Snapshot`, waited for.

    Raises:
        Unreachable: nobody answered within `timeout_s`, or what answered is not a model server of this version.
    """
    endpoint = RunDirectory(run_directory).front_endpoint
    path = Path(endpoint.removeprefix("ipc://"))
    if not path.exists():
        raise Unreachable(
            f"no model server runs for {run_directory} ({path.name} does not exist): start one with headwaiter serve"
        )
    until_s = time.monotonic() + timeout_s
    with Observer(run_directory) as observer:
        observer.ask()
        while (left_s := until_s - time.monotonic()) > 0:
            observer.socket.poll(int(left_s * 1000) + 1)
            try:
                for snapshot in observer.snapshots():
                    return snapshot
            except ProtocolError as error:
                raise Unreachable(
                    f"the process at {path} is not a model server of version {VERSION}: {error}"
                ) from None
    raise Unreachable(
        f"no answer from {path} within {timeout_s:g} s: the model server hangs, or died without cleaning up"
    )

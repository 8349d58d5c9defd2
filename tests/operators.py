"""An operator of a real model server, over its front socket: orders, and how they ended.

Owns one DEALER connection that sends `Manage` and nothing else, as a command line does.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from shared.messages import Manage, Managed
from shared.sockets import RunDirectory, connect_dealer, drain, send
from shared.wire import decode, encode

WITHIN_S = 60.0


class Operator:
    """One connection."""

    def __init__(self, run_directory: Path) -> None:
        self._context = zmq.Context()
        self._socket = connect_dealer(self._context, RunDirectory(run_directory).front_endpoint)
        self._token = 0
        self._answers: list[Managed] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def order(self, action: str, model: str = "", replicas: int = 0) -> Managed:
        """Its one answer, waited for."""
        return self.answer(self.begin(action, model, replicas))

    def begin(self, action: str, model: str = "", replicas: int = 0) -> int:
        """Orders it; returns the token."""
        self._token += 1
        assert send(self._socket, encode(Manage(self._token, action, model, replicas)))
        return self._token

    def answer(self, token: int) -> Managed:
        until_s = time.monotonic() + WITHIN_S
        while (left_s := until_s - time.monotonic()) > 0:
            for answer in self._answers:
                if answer.token == token:
                    return answer
            self._socket.poll(int(left_s * 1000) + 1)
            self._read()
        raise AssertionError(f"no answer within {WITHIN_S} s to order {token}")

    def answers(self) -> list[Managed]:
        """All that have arrived so far."""
        self._read()
        return list(self._answers)

    def _read(self) -> None:
        for parts in drain(self._socket, 1000):
            message, _ = decode(parts)
            assert isinstance(message, Managed), message
            self._answers.append(message)

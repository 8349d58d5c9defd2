"""Which requests wait for an answer, and which of them the model server does not have yet.

Owns the bounded table from a request's id to its caller, and the order in which requests go out. Pure: it knows no
socket, no event loop and no clock; times are arguments, in seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct
from typing_extensions import Buffer

from shared.errors import Code, RequestError
from shared.messages import RequestHeader, RequestId, Timings


class Answer(Struct, frozen=True):
    """A result as its caller gets it."""

    value: object
    timings: Timings
    slot: str = ""
    attempt: int = 0


class Waiter(Protocol):
    """Whoever waits. Each method is called at most once after the request has left the table, and never raises."""

    def resolve(self, answer: Answer) -> None: ...

    def fail(self, error: RequestError) -> None: ...

    def push(self, value: object, size_bytes: int) -> bool:
        """Takes one piece of a streamed answer; False means that the reader is too far behind to take more."""
        ...


class PendingRequest(Struct, eq=False):
    """One request between `submit` and its one final answer."""

    id: RequestId
    model: str
    operation: str
    batch_key: bytes
    priority: int
    stream: bool
    # Whether the model server may run it again after a process died under it.
    retryable: bool
    request_id: str
    traceparent: str
    payload: tuple[Buffer, ...]
    body_bytes: int
    # When the caller stops waiting; the header carries what is left of it at the moment of sending.
    deadline_s: float
    waiter: Waiter
    # Index of the next piece of a streamed answer. Above 0 the request cannot be sent again: its caller has seen
    # part of an answer that another run would not repeat.
    next_chunk: int = 0

    def header(self, now_s: float) -> RequestHeader:
        return RequestHeader(
            id=self.id,
            model=self.model,
            operation=self.operation,
            batch_key=self.batch_key,
            cost_hint=0,
            remaining_ms=max(1, int((self.deadline_s - now_s) * 1000)),
            priority=self.priority,
            stream=self.stream,
            retryable=self.retryable,
            frame_count=len(self.payload),
            request_id=self.request_id,
            traceparent=self.traceparent,
        )


class PendingTable:
    """All unanswered requests of one front, bounded by number and bytes."""

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._requests: dict[RequestId, PendingRequest] = {}
        # The subset that the model server has not been sent, in order; a dict, so that a cancelled one leaves at once.
        self._unsent: dict[RequestId, PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(tuple(self._requests.values()))

    @property
    def body_bytes(self) -> int:
        """Payload bytes of everything that waits."""
        return self._bytes

    @property
    def unsent_count(self) -> int:
        return len(self._unsent)

    def admit(self, request: PendingRequest) -> None:
        """Takes a request in, unsent.

        Raises:
            RequestError: `overloaded`, when this front already holds as many requests, or bytes, as it may.
        """
        if len(self._requests) >= self._count_max:
            raise RequestError(
                f"this front worker already waits for {len(self._requests)} answers, the most it may",
                code=Code.OVERLOADED,
                retry_after_s=1.0,
            )
        if self._bytes + request.body_bytes > self._bytes_max:
            raise RequestError(
                f"this front worker already holds {self._bytes} bytes of requests; {request.body_bytes} more would "
                f"pass its limit of {self._bytes_max}",
                code=Code.OVERLOADED,
                retry_after_s=1.0,
            )
        self._requests[request.id] = request
        self._unsent[request.id] = request
        self._bytes += request.body_bytes

    def get(self, request_id: RequestId) -> PendingRequest | None:
        return self._requests.get(request_id)

    def is_unsent(self, request_id: RequestId) -> bool:
        return request_id in self._unsent

    def remove(self, request_id: RequestId) -> PendingRequest | None:
        """Takes a request out for good; None if it is not there (any more)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._unsent.pop(request_id, None)
        self._bytes -= request.body_bytes
        return request

    def take_unsent(self, *, count_max: int, bytes_max: int) -> list[PendingRequest]:
        """The next requests to put into one message, oldest first, now counted as sent; at least one if any waits."""
        taken: list[PendingRequest] = []
        size_bytes = 0
        for request in self._unsent.values():
            size_bytes += request.body_bytes
            if taken and (len(taken) >= count_max or size_bytes > bytes_max):
                break
            taken.append(request)
        for request in taken:
            del self._unsent[request.id]
        return taken

    def put_back(self, requests: list[PendingRequest]) -> None:
        """Undoes `take_unsent` after a send that did not happen; they keep their place at the front."""
        held = {request.id: request for request in requests if request.id in self._requests}
        self._unsent = held | self._unsent

    def unsend(self, *, started_too: bool) -> list[PendingRequest]:
        """Marks everything as unsent, oldest first, because the model server may not have it any more.

        Streams that have begun cannot start over. With `started_too` they are taken out and returned, for the caller
        to fail them; without, they stay as they are.
        """
        broken = [request for request in self._requests.values() if request.next_chunk > 0]
        self._unsent = {key: request for key, request in self._requests.items() if request.next_chunk == 0}
        if not started_too:
            return []
        for request in broken:
            self.remove(request.id)
        return broken

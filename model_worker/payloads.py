"""The payloads of admitted requests, from their arrival to their one final reply.

Owns the frames that the broker core never sees: it decides by header alone. Refuses to decode them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from shared.frames import frames_bytes
from shared.messages import RequestHeader, RequestId
from shared.sockets import Buffer


class Payload(Struct, frozen=True, gc=False):
    """What is passed on untouched from the front's request to the replica's item."""

    frames: Sequence[Buffer]
    request_id: str
    traceparent: str

    @property
    def size_bytes(self) -> int:
        return frames_bytes(self.frames)

    def digest(self) -> bytes:
        """16 bytes that name this input; the same for every request that carries the same bytes."""
        digest = hashlib.blake2b(digest_size=16)
        for frame in self.frames:
            digest.update(frame)
        return digest.digest()


class Payloads:
    """All payloads that may still be needed. Bounded by the admission limits of the core."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Payload] = {}

    def keep(self, header: RequestHeader, frames: Sequence[Buffer]) -> Payload:
        """Keeps a new request's payload; of an id that is known already, the first one stays."""
        return self._by_id.setdefault(header.id, Payload(frames, header.request_id, header.traceparent))

    def get(self, request_id: RequestId) -> Payload:
        return self._by_id[request_id]

    def forget(self, request_id: RequestId) -> None:
        self._by_id.pop(request_id, None)

"""What leaves the model server in one turn of its loop: one message per peer and kind, however much it carries.

Owns the two ROUTER sockets' sending side. Per-message cost is what limits throughput, so replies and chunks wait
here until the turn ends; order per front is kept (chunks go before the reply that ends their stream).
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from shared.messages import Chunk, ChunkHeader, Message, Reply, ReplyHeader
from shared.sockets import Buffer, send
from shared.wire import encode


class FrontOutbox:
    """Replies and chunks for one front, collected during one turn."""

    __slots__ = ("chunk_frames", "chunks", "replies", "reply_frames")

    def __init__(self) -> None:
        self.replies: list[ReplyHeader] = []
        self.reply_frames: list[Buffer] = []
        self.chunks: list[ChunkHeader] = []
        self.chunk_frames: list[Buffer] = []

    def messages(self) -> list[list[Buffer]]:
        parts = []
        if self.chunks:
            parts.append(encode(Chunk(tuple(self.chunks)), self.chunk_frames))
        if self.replies:
            parts.append(encode(Reply(tuple(self.replies)), self.reply_frames))
        return parts


class Outbox:
    """All that is to be sent to fronts, and direct sending to replicas."""

    def __init__(self, front_socket: zmq.Socket[bytes], replica_socket: zmq.Socket[bytes]) -> None:
        self._front_socket = front_socket
        self._replica_socket = replica_socket
        self._fronts: dict[bytes, FrontOutbox] = {}

    def reply(self, front: bytes, header: ReplyHeader, frames: Sequence[Buffer]) -> None:
        box = self._fronts.setdefault(front, FrontOutbox())
        box.replies.append(header)
        box.reply_frames.extend(frames)

    def chunk(self, front: bytes, header: ChunkHeader, frames: Sequence[Buffer]) -> None:
        box = self._fronts.setdefault(front, FrontOutbox())
        box.chunks.append(header)
        box.chunk_frames.extend(frames)

    def to_front(self, front: bytes, message: Message) -> bool:
        """Sends at once; False if the front is not connected."""
        return send(self._front_socket, [front, *encode(message)])

    def to_replica(self, routing_id: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Sends at once; False if the process is not connected (its exit will say so)."""
        return send(self._replica_socket, [routing_id, *encode(message, frames)])

    def flush(self) -> list[bytes]:
        """Sends what was collected; returns the fronts that could not be reached."""
        gone = []
        for front, box in self._fronts.items():
            if not all(send(self._front_socket, [front, *parts]) for parts in box.messages()):
                gone.append(front)
        self._fronts.clear()
        return gone

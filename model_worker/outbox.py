"""What leaves the model server, and how each peer is reached.

Owns the sending side of the two ROUTER sockets and the routing ids of connected replicas. Per-message cost is what
limits throughput, so replies and chunks wait here until the turn of the loop ends and leave as one message per front
and kind; their order per request is kept (chunks go before the reply that ends their stream).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from shared.messages import Chunk, ChunkHeader, Message, Reply, ReplyHeader, SlotName, Stop
from shared.sockets import Buffer, send
from shared.wire import FramedRecord, encode

Replica = tuple[SlotName, int]
"""A slot and the incarnation of the process that holds it."""

# Well below what one message may hold, and few enough that a front's event loop is not held up by one of them.
RECORDS_PER_MESSAGE_MAX = 4096


@dataclass(slots=True)
class _FrontBox:
    """Replies and chunks for one front, collected during one turn."""

    replies: list[ReplyHeader] = field(default_factory=list)
    reply_frames: list[Buffer] = field(default_factory=list)
    chunks: list[ChunkHeader] = field(default_factory=list)
    chunk_frames: list[Buffer] = field(default_factory=list)

    def messages(self) -> Iterator[list[Buffer]]:
        for chunks, frames in _portions(self.chunks, self.chunk_frames):
            yield encode(Chunk(tuple(chunks)), frames)
        for replies, frames in _portions(self.replies, self.reply_frames):
            yield encode(Reply(tuple(replies)), frames)


def _portions(
    records: list[FramedRecord], frames: list[Buffer]
) -> Iterator[tuple[list[FramedRecord], Sequence[Buffer]]]:
    """The records and their frames, in as many messages as they need: usually one."""
    if len(records) <= RECORDS_PER_MESSAGE_MAX:
        if records:
            yield records, frames
        return
    first = 0
    for start in range(0, len(records), RECORDS_PER_MESSAGE_MAX):
        portion = records[start : start + RECORDS_PER_MESSAGE_MAX]
        end = first + sum(record.frame_count for record in portion)
        yield portion, frames[first:end]
        first = end


class Outbox:
    """All that is to be sent to fronts and to replicas."""

    def __init__(self, front_socket: zmq.Socket[bytes], replica_socket: zmq.Socket[bytes]) -> None:
        self._front_socket = front_socket
        self._replica_socket = replica_socket
        self._boxes: dict[bytes, _FrontBox] = {}
        self._routing_ids: dict[Replica, bytes] = {}
        self._replicas: dict[bytes, Replica] = {}

    # --- fronts --------------------------------------------------------------------------------------------------

    def reply(self, front: bytes, header: ReplyHeader, frames: Sequence[Buffer]) -> None:
        box = self._boxes.setdefault(front, _FrontBox())
        box.replies.append(header)
        box.reply_frames.extend(frames)

    def chunk(self, front: bytes, header: ChunkHeader, frames: Sequence[Buffer]) -> None:
        box = self._boxes.setdefault(front, _FrontBox())
        box.chunks.append(header)
        box.chunk_frames.extend(frames)

    def to_front(self, front: bytes, message: Message) -> bool:
        """Sends at once; False if the front is not connected."""
        return send(self._front_socket, [front, *encode(message)])

    def flush(self) -> list[bytes]:
        """Sends what was collected; returns the fronts that could not be reached."""
        gone = []
        for front, box in self._boxes.items():
            if not all(send(self._front_socket, [front, *parts]) for parts in box.messages()):
                gone.append(front)
        self._boxes.clear()
        return gone

    # --- replicas ------------------------------------------------------------------------------------------------

    def connect(self, replica: Replica, routing_id: bytes) -> None:
        """Remembers where a replica is reached, since it said HELLO."""
        self._routing_ids[replica] = routing_id
        self._replicas[routing_id] = replica

    def disconnect(self, replica: Replica) -> None:
        """Forgets a replica that has ended."""
        routing_id = self._routing_ids.pop(replica, None)
        if routing_id is not None:
            del self._replicas[routing_id]

    def replica(self, routing_id: bytes) -> Replica | None:
        """Who speaks with this routing id; None for a stranger, or for one that has ended."""
        return self._replicas.get(routing_id)

    def is_connected(self, replica: Replica) -> bool:
        return replica in self._routing_ids

    def is_heard_out(self, replica: Replica) -> bool:
        """Whether the connection of a replica whose process has ended is known to have ended as well: everything that
        it has said has been read by then. False also for one that never said HELLO, as far as is known."""
        return self.is_connected(replica) and not self.to_replica(replica, Stop())

    def to_replica(self, replica: Replica, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Sends at once; False if the process is not connected (its exit is about to be seen)."""
        routing_id = self._routing_ids.get(replica)
        return routing_id is not None and send(self._replica_socket, [routing_id, *encode(message, frames)])

"""What sockets and codec cost the model server for a message and for each record in it, on this machine.

Owns one pair of sockets like those of the model server. Measures the processor time of the one thread that owns its
sockets: receiving and decoding, encoding and sending. ZeroMQ's own thread works beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from shared.errors import Code
from shared.messages import (
    Batch,
    BatchItem,
    ChunkHeader,
    ItemResult,
    Message,
    ReplicaChunk,
    Reply,
    ReplyHeader,
    RequestHeader,
    RequestId,
    Result,
    Submit,
    Timings,
)
from shared.wire import decode, encode

FEW, MANY = 1, 32
ROUNDS = 300
PAYLOAD = b"x" * 500
IDS = [RequestId(bytes([number]) * 16) for number in range(MANY)]


def _messages(records: int) -> dict[str, Message]:
    ids = IDS[:records]
    return {
        "submits": Submit(tuple(RequestHeader(own, "m", "predict", b"", 0, 60_000, 0, False, True, 1) for own in ids)),
        "batches": Batch(1, False, tuple(BatchItem(own, 1, "predict", 60_000, False, 1) for own in ids)),
        "results": Result("m/0", 1, tuple(ItemResult(own, 1, Code.OK, 1, 1, 0.1, 0.1, 0.1, 8) for own in ids)),
        "replies": Reply(
            tuple(ReplyHeader(own, Code.OK, 1, 1, "m/0", 1, 1, Timings(0.1, 0.1, 0.1, 0.1, 1)) for own in ids)
        ),
        "chunks": ReplicaChunk("m/0", 1, tuple(ChunkHeader(own, 1, 0, 1) for own in ids)),
    }


def measure() -> dict[str, dict[str, float]]:
    """Microseconds for a message and for each record in it, by kind."""
    with tempfile.TemporaryDirectory() as directory:
        few, many = (_measure(Path(directory), records) for records in (FEW, MANY))
    costs = {}
    for kind in few:
        record_us = max(0.0, (many[kind] - few[kind]) / (MANY - FEW))
        costs[kind] = {"message_us": max(0.0, few[kind] - FEW * record_us), "record_us": record_us}
    return costs


def _measure(directory: Path, records: int) -> dict[str, float]:
    endpoint = f"ipc://{directory}/{records}"
    context = zmq.Context(io_threads=1)
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        router.bind(endpoint)
        dealer.connect(endpoint)
        dealer.send(b"hello")
        name = router.recv_multipart()[0]
        return {kind: _cost_us(router, dealer, name, kind, message) for kind, message in _messages(records).items()}
    finally:
        router.close(linger=0)
        dealer.close(linger=0)
        context.term()


def _cost_us(router: zmq.Socket[bytes], dealer: zmq.Socket[bytes], name: bytes, kind: str, message: Message) -> float:
    records: Sequence[object] = getattr(message, {"submits": "requests", "batches": "items", "results": "results",
                                                  "replies": "replies", "chunks": "chunks"}[kind])  # fmt: skip
    frames = [PAYLOAD] * len(records)
    took_ns = 0
    for _ in range(ROUNDS):
        if kind in ("batches", "replies"):
            start_ns = time.thread_time_ns()
            router.send_multipart([name, *encode(message, frames)], copy=False)
            took_ns += time.thread_time_ns() - start_ns
            dealer.recv_multipart()
        else:
            dealer.send_multipart(encode(message, frames))
            router.poll()
            start_ns = time.thread_time_ns()
            decode([frame.buffer for frame in router.recv_multipart(copy=False)[1:]])
            took_ns += time.thread_time_ns() - start_ns
    return took_ns / ROUNDS / 1000

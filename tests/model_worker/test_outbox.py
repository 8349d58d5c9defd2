"""What leaves in one turn: one message per front, however many answers, and several only when one cannot hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from model_worker.outbox import RECORDS_PER_MESSAGE_MAX, Outbox
from shared.errors import Code
from shared.messages import Chunk, ChunkHeader, FrontPulse, Reply, ReplyHeader, RequestId
from shared.sockets import bind_router, connect_dealer
from shared.wire import decode, encode, split_frames


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes], bytes]]:
    """The server's socket, a front that it knows, and that front's routing id."""
    with zmq.Context() as context:
        router = bind_router(context, f"ipc://{tmp_path}/s")
        dealer = connect_dealer(context, f"ipc://{tmp_path}/s")
        dealer.send_multipart(encode(FrontPulse(0)))
        front = router.recv_multipart()[0]
        yield router, dealer, front
        dealer.close(0)
        router.close(0)


def number(value: int) -> RequestId:
    return RequestId(value.to_bytes(16, "big"))


def test_all_answers_of_a_turn_are_one_message_behind_the_chunks(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes], bytes],
) -> None:
    router, dealer, front = sockets
    outbox = Outbox(router, router)
    outbox.reply(front, ReplyHeader(number(0), Code.OK, 1), [b"zero"])
    outbox.chunk(front, ChunkHeader(number(0), 0, 0, 1), [b"piece"])
    outbox.reply(front, ReplyHeader(number(1), Code.OVERLOADED, 0), [])
    outbox.reply(front, ReplyHeader(number(2), Code.OK, 2), [b"two", b"more"])
    assert outbox.flush() == []
    first, _ = decode(dealer.recv_multipart())
    assert isinstance(first, Chunk)
    second, frames = decode(dealer.recv_multipart())
    assert isinstance(second, Reply)
    assert [(reply.id, value) for reply, value in split_frames(second.replies, frames)] == [
        (number(0), [b"zero"]),
        (number(1), []),
        (number(2), [b"two", b"more"]),
    ]
    assert outbox.flush() == []
    assert dealer.poll(0) == 0


def test_more_answers_than_a_message_holds_are_several_and_each_keeps_its_frames(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes], bytes],
) -> None:
    router, dealer, front = sockets
    outbox = Outbox(router, router)
    count = RECORDS_PER_MESSAGE_MAX * 2 + 1
    for value in range(count):
        outbox.reply(front, ReplyHeader(number(value), Code.OK, 1), [b"%d" % value])
    assert outbox.flush() == []
    received = []
    for _ in range(3):
        message, frames = decode(dealer.recv_multipart())
        assert isinstance(message, Reply)
        received += [(reply.id, bytes(value[0])) for reply, value in split_frames(message.replies, frames)]
    assert received == [(number(value), b"%d" % value) for value in range(count)]


def test_a_front_that_is_gone_is_named(sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes], bytes]) -> None:
    router, _, front = sockets
    outbox = Outbox(router, router)
    outbox.reply(b"\x01gone", ReplyHeader(number(0), Code.OK, 0), [])
    outbox.reply(front, ReplyHeader(number(1), Code.OK, 0), [])
    assert outbox.flush() == [b"\x01gone"]

"""Real sockets with our options: what arrives, what is refused, and what never happens in silence."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import zmq

from shared import sockets
from shared.errors import ConfigurationError
from shared.messages import Cancel, Chunk, ChunkHeader, RequestId
from shared.sockets import Buffer, bind_router, connect_dealer, drain, fresh_routing_id, receive, send
from shared.wire import decode, encode

LARGE = sockets.ZERO_COPY_BYTES_MIN
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class Hub:
    """Opens sockets at one endpoint and keeps them until the end of the test."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.context: Context = zmq.Context()
        self._opened: list[Socket] = []

    def router(self) -> Socket:
        self._opened.append(bind_router(self.context, self.endpoint))
        return self._opened[-1]

    def dealer(self, routing_id: bytes | None = None, *, hold_unsent: bool = True) -> Socket:
        self._opened.append(connect_dealer(self.context, self.endpoint, routing_id, hold_unsent=hold_unsent))
        return self._opened[-1]

    def connected(self) -> tuple[Socket, Socket, bytes]:
        """A router, a dealer, and the routing id under which the router knows it."""
        router, dealer = self.router(), self.dealer()
        assert send(dealer, [b"hello"])
        return router, dealer, bytes(next_message(router)[0])

    def close(self) -> None:
        for socket in self._opened:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    opened = Hub(f"ipc://{tmp_path}/a.sock")
    yield opened
    opened.close()


def next_message(socket: Socket) -> list[Buffer]:
    assert socket.poll(10_000), "no message within 10 s"
    parts = receive(socket)
    assert parts is not None
    return parts


def wait_for(condition: Callable[[], bool], claim: str) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, f"not within 10 s: {claim}"
        time.sleep(0.01)


def test_messages_of_all_sizes_arrive_in_both_directions(hub: Hub) -> None:
    router, dealer, routing_id = hub.connected()
    frames: list[Buffer] = [
        b"",
        b"small",
        bytes(LARGE),
        bytearray(LARGE + 1),
        memoryview(bytes(3 * LARGE)).cast("B", [3, LARGE]),
    ]
    message = Chunk((ChunkHeader(RequestId(bytes(16)), 1, 0, len(frames)),))
    assert send(dealer, encode(message, frames))
    _, *parts = next_message(router)
    received, received_frames = decode(parts)
    assert received == message
    assert [bytes(frame) for frame in received_frames] == [bytes(frame) for frame in frames]
    # Relayed as they are, without being copied into Python.
    assert send(router, [routing_id, *encode(received, received_frames)])
    assert [bytes(frame) for frame in decode(next_message(dealer))[1]] == [bytes(frame) for frame in frames]


def test_a_message_of_which_a_part_cannot_be_made_leaves_no_half_behind(hub: Hub) -> None:
    router, dealer, _ = hub.connected()
    with pytest.raises(TypeError):
        send(dealer, [b"small", cast(Buffer, 7)])
    send(dealer, [b"the next one"])
    assert [bytes(part) for part in next_message(router)[1:]] == [b"the next one"]


def test_received_frames_outlive_their_socket(hub: Hub) -> None:
    router, dealer, _ = hub.connected()
    content = os.urandom(2 * LARGE)
    send(dealer, [content])
    view = memoryview(next_message(router)[1])
    dealer.close()
    router.close()
    assert view == content


def test_nothing_to_receive_is_none_at_once(hub: Hub) -> None:
    assert receive(hub.router()) is None


def test_drain_stops_at_its_limit_and_at_the_end(hub: Hub) -> None:
    router, dealer, _ = hub.connected()
    for number in range(5):
        send(dealer, [bytes([number])])
    send(dealer, [b"last"])
    seen: list[bytes] = []

    def all_but_two() -> bool:
        seen.extend(bytes(parts[1]) for parts in drain(router, 4 - len(seen)))
        return len(seen) == 4

    wait_for(all_but_two, "four messages")
    assert seen == [b"\x00", b"\x01", b"\x02", b"\x03"]
    assert bytes(next_message(router)[1]) == b"\x04"
    assert bytes(next_message(router)[1]) == b"last"
    assert list(drain(router, 10)) == []


def test_a_message_to_a_peer_that_is_not_there_is_refused(hub: Hub) -> None:
    router, dealer, routing_id = hub.connected()
    assert not send(router, [fresh_routing_id(), *encode(Cancel(()))])
    assert send(router, [routing_id, *encode(Cancel(()))])
    dealer.close()
    wait_for(lambda: not send(router, [routing_id, *encode(Cancel(()))]), "the router knows that the peer has gone")


def test_nothing_is_dropped_however_far_a_peer_is_behind(hub: Hub) -> None:
    router, dealer, routing_id = hub.connected()
    count = 5000  # the default high-water mark is 1000 on each side
    assert all(send(dealer, [number.to_bytes(2, "big")]) for number in range(count))
    assert all(send(router, [routing_id, number.to_bytes(2, "big")]) for number in range(count))
    for socket in (router, dealer):
        got = [int.from_bytes(bytes(next_message(socket)[-1]), "big") for _ in range(count)]
        assert got == list(range(count))


def test_what_is_sent_before_anybody_listens_waits(hub: Hub) -> None:
    dealer = hub.dealer()
    assert send(dealer, [b"early"])
    assert bytes(next_message(hub.router())[1]) == b"early"


def test_a_sender_that_keeps_its_requests_is_told_that_nobody_listens(hub: Hub) -> None:
    dealer = hub.dealer(hold_unsent=False)
    assert not send(dealer, [b"early"])
    router = hub.router()
    wait_for(lambda: send(dealer, [b"now"]), "the dealer is connected")
    assert bytes(next_message(router)[1]) == b"now"
    router.close()
    wait_for(lambda: not send(dealer, [b"to nobody"]), "the dealer notices that the router has gone")
    second = hub.router()
    wait_for(lambda: send(dealer, [b"again"]), "the dealer has connected again")
    assert bytes(next_message(second)[1]) == b"again", "nothing meant for the first router reaches the second"


def test_a_frame_larger_than_allowed_ends_the_connection(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "FRAME_BYTES_MAX", 1000)
    router = hub.router()
    good, bad = (hub.dealer() for _ in range(2))
    send(bad, [bytes(1001)])
    send(good, [b"fine"])
    assert bytes(next_message(router)[1]) == b"fine"

    def heard_again() -> bool:
        send(bad, [b"small"])
        parts = receive(router)
        return parts is not None and bytes(parts[1]) == b"small"

    wait_for(heard_again, "the sender has connected again; its large frame is lost")


def test_routing_ids_are_fresh_and_legal() -> None:
    ids = {fresh_routing_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {16}
    assert not [one for one in ids if one[0] == 0]


def test_the_routing_id_is_the_one_asked_for(hub: Hub) -> None:
    router = hub.router()
    dealer = hub.dealer(b"incarnation-7")
    send(dealer, [b"hello"])
    assert bytes(next_message(router)[0]) == b"incarnation-7"


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "inproc://x", "/tmp/x"])
def test_only_local_sockets_are_opened(hub: Hub, endpoint: str) -> None:
    for opening in (bind_router, connect_dealer):
        with pytest.raises(ConfigurationError, match="is not ipc://"):
            opening(hub.context, endpoint)


def test_an_endpoint_that_cannot_be_bound_is_named(hub: Hub) -> None:
    with pytest.raises(ConfigurationError, match="cannot listen at ipc:///nowhere/a: No such file"):
        bind_router(hub.context, "ipc:///nowhere/a")


def test_closing_does_not_wait_for_a_peer_that_never_came(hub: Hub) -> None:
    dealer = hub.dealer()
    send(dealer, [b"lost"])
    assert dealer.getsockopt(zmq.LINGER) == sockets.LINGER_MS


def use_inherited(hub: Hub, answer: multiprocessing.SimpleQueue[str]) -> None:
    try:
        hub.dealer()
    except RuntimeError as error:
        answer.put(str(error))
    else:
        answer.put("used")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_context_inherited_by_fork_is_refused_not_used(hub: Hub) -> None:
    """A user's code may fork; our sockets must then fail with words, not hang."""
    hub.router()
    forking = multiprocessing.get_context("fork")
    answer = cast("multiprocessing.SimpleQueue[str]", forking.SimpleQueue())
    child = forking.Process(target=use_inherited, args=(hub, answer))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    text = answer.get()
    assert f"first used by process {os.getpid()}" in text
    assert f"make a new one in process {child.pid}" in text

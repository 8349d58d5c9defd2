"""Strangers on the sockets of a real model server: whatever they send is counted, kills nothing and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.messages import KINDS, Drain, Message, Phase, SlotName, State, Stop
from shared.sockets import FRONT_SOCKET, MODEL_SOCKET
from shared.wire import encode
from tests.topology import Service, wait_for
from tests.wire_records import messages

MODEL = {"name": "m", "model": "tests.obedient_model:Obedient", "device": "cpu", "options": {}}
MESSAGES = 3000
GROWTH_BYTES_MAX = 24 * 2**20
HUGE_HEADERS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff" + bytes(64),
    b"\x91" * 100_000,
    b"\x81\xa1k" * 50_000,
    b"\x92\xdd\x7f\xff\xff\xff" + b"\x91" * 1000,
]


class Payload:
    """What a pickle of it would do to a reader that unpickles: leave a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (str(self.file),))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service([MODEL]) as started:
        yield started.wait_ready()


@contextlib.contextmanager
def stranger(service: Service, name: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
        opened.linger = 5000
        opened.connect(f"ipc://{service.directory / 'run' / name}")
        yield opened


def check(service: Service, before: tuple[int, int]) -> None:
    """The server and its model process are those from before, no larger than they may be, and answer."""
    assert service.server is not None
    assert service.server.poll() is None
    assert service.ask("m", {"do": "square", "number": 12}).json() == 144
    assert service.slots()["m/0"]["incarnation"] == 1
    assert sizes(service)[0] - before[0] < GROWTH_BYTES_MAX
    assert sizes(service)[1] - before[1] < 10
    assert "Traceback" not in service.log("server.log")


def sizes(service: Service) -> tuple[int, int]:
    assert service.server is not None
    process = psutil.Process(service.server.pid)
    return process.memory_info().rss, process.num_fds()


def damaged(parts: list[bytes], chance: random.Random) -> list[bytes]:
    """The same with bits flipped, a piece cut off, or frames lost, doubled, or in another order."""
    parts = list(parts)
    at = chance.randrange(len(parts))
    match chance.randrange(5):
        case 0:
            parts[at] = parts[at][: chance.randrange(len(parts[at]) + 1)]
        case 1:
            del parts[at]
        case 2:
            parts.insert(at, parts[at])
        case 3:
            chance.shuffle(parts)
        case _:
            broken = bytearray(parts[at] or b"\0")
            for _ in range(chance.randint(1, 8)):
                broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
            parts[at] = bytes(broken)
    return parts


@pytest.mark.parametrize("name", [FRONT_SOCKET, MODEL_SOCKET])
def test_damaged_messages_of_a_stranger_are_counted_and_cost_nothing(service: Service, name: str) -> None:
    before, malformed = sizes(service), service.status()["malformed"]
    chance = random.Random(name)
    sent: list[list[bytes]] = []

    @given(messages())
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def collect(message: tuple[Message, list[bytes]]) -> None:
        sent.append([bytes(part) for part in encode(*message)])

    collect()
    with stranger(service, name) as sender:
        for _ in range(MESSAGES // 100):
            for _ in range(100):
                # An empty message is none to ZeroMQ.
                sender.send_multipart(damaged(chance.choice(sent), chance) or [b""])
            assert service.probe("/livez") == 200
        # Not all: some are still messages, and a stranger may say a few things.
        wait_for(lambda: service.status()["malformed"] >= malformed + MESSAGES // 4, "it is counted")
    check(service, before)


@pytest.mark.parametrize("name", [FRONT_SOCKET, MODEL_SOCKET])
def test_huge_deep_and_pickled_messages_are_counted_one_by_one(service: Service, name: str, tmp_path: Path) -> None:
    before, malformed = sizes(service), service.status()["malformed"]
    trap = tmp_path / "unpickled"
    bodies = [*HUGE_HEADERS, *(pickle.dumps(Payload(trap), protocol) for protocol in range(6))]
    with stranger(service, name) as sender:
        for number in KINDS.values():
            for body in bodies:
                sender.send_multipart([bytes([1, number]), body])
        sender.send_multipart([b"\x01\x02"] + [b""] * 10_000)
        sender.send_multipart([b"x" * (8 * 2**20)])
        count = len(KINDS) * len(bodies) + 2
        wait_for(lambda: service.status()["malformed"] >= malformed + count, "each one is counted")
    assert not trap.exists()
    check(service, before)


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_frames_end_nothing(service: Service, parts: list[bytes]) -> None:
    with stranger(service, MODEL_SOCKET) as sender:
        sender.send_multipart(parts)
    assert service.server is not None
    assert service.server.poll() is None


def test_bytes_that_are_no_zeromq_end_their_own_connection_alone(service: Service) -> None:
    before = sizes(service)
    for name in (FRONT_SOCKET, MODEL_SOCKET):
        for text in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f" + b"\xff" * 64, b""):
            with socket.socket(socket.AF_UNIX) as opened:
                opened.connect(str(service.directory / "run" / name))
                with contextlib.suppress(BrokenPipeError):
                    opened.sendall(text)
    check(service, before)


def test_an_honest_submit_of_a_stranger_is_no_privilege(service: Service) -> None:
    """Whoever can open the socket can use the models, as a front can; it can do nothing else."""
    before, malformed = sizes(service), service.status()["malformed"]
    orders: list[Message] = [Stop(), Drain(1), State(SlotName("m/0"), 1, Phase.READY)]
    for name in (FRONT_SOCKET, MODEL_SOCKET):
        with stranger(service, name) as sender:
            for order in orders:
                sender.send_multipart([bytes(part) for part in encode(order)])
    wait_for(lambda: service.status()["malformed"] >= malformed + 2 * len(orders), "none is taken")
    assert service.probe("/readyz") == 200
    check(service, before)

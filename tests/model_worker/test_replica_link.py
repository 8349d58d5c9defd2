"""The line to the broker by itself: any thread may send, and no message that has arrived is overlooked meanwhile."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest
import zmq

from model_worker.replica import link as link_module
from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.forward_stage import Progress
from model_worker.replica.jobs import Job
from model_worker.replica.link import BrokerLink
from model_worker.specs import ReplicaSpec, RuntimeSpec
from shared.errors import Code
from shared.messages import Batch, BatchItem, ItemResult, ReplicaHello, ReplicaPulse, RequestId, Result, SlotName, Stop
from shared.sockets import bind_router, drain, send
from shared.wire import decode, encode
from tests.topology import wait_for

WITHIN_S = 20
HOUR_S = 3600.0


class Staying(BrokerLink):
    """Notes how the process would end, and stays."""

    left: ReplicaExit | None = None

    def leave(self, code: ReplicaExit, reason: str, error: BaseException | None = None) -> NoReturn:
        self.left = code
        threading.Event().wait()
        raise AssertionError("unreachable")


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not pytest's tmp_path: a socket's path has room for 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="hw-") as path:
        yield Path(path)


class Answering:
    """In the place of the stages: a thread that answers each batch, at the very moment at which others arrive."""

    def __init__(self, link: BrokerLink) -> None:
        self._link = link
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._jobs.put(job)

    def end(self) -> None:
        raise AssertionError("nobody drains")

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            self._link.result(job, ItemResult(job.id, job.attempt, Code.OK, 0), ())
            self._link.flush()


def test_no_arrival_is_overlooked_however_sends_and_arrivals_cross(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's descriptor tells of an arrival once, and to whoever uses the socket next, be it to send. No pulse
    comes to the rescue here."""
    monkeypatch.setattr(link_module, "PULSE_S", HOUR_S)
    endpoint = f"ipc://{directory}/model.sock"
    context: zmq.Context[Any] = zmq.Context()
    router = bind_router(context, endpoint)
    runtime = RuntimeSpec(name="m", source="", task="")
    spec = ReplicaSpec(
        slot=SlotName("m/0"),
        incarnation=1,
        endpoint=endpoint,
        torch_device="cpu",
        environment={},
        cores=(),
        threads=1,
        runtime=runtime,
        max_batch_size=1,
        max_batch_cost=0,
    )
    link = Staying(spec, Progress())
    link.serve(Answering(link))  # type: ignore[arg-type]
    link.start()
    peer = b""
    sent = answered = 0
    count, ahead_max = 3000, 2
    while answered < count:
        assert router.poll(int(WITHIN_S * 1000)), f"{sent} were sent and {answered} answered"
        for sender, *parts in drain(router, 1000):
            peer = bytes(sender)
            message, _ = decode(parts)
            assert isinstance(message, (ReplicaHello, Result, ReplicaPulse))
            answered += len(message.results) if isinstance(message, Result) else 0
        while sent < min(count, answered + ahead_max):
            item = BatchItem(RequestId(sent.to_bytes(16, "big")), 1, "predict", 60_000, False, 0)
            assert send(router, [peer, *encode(Batch(sent, False, (item,)))])
            sent += 1
    assert send(router, [peer, *encode(Stop())])
    wait_for(lambda: link.left is ReplicaExit.STOPPED, "the end of the thread", WITHIN_S)
    router.close(linger=0)
    context.term()

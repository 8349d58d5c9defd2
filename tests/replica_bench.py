"""One real model process, and the test in the broker's place: a real ROUTER, a real spawn, real messages.

Owns starting, talking and ending. What arrives is kept in order, so that a test can wait for one thing and then look
at everything that came before it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from model_worker.launchers import Child, SpawnLauncher
from model_worker.replica.process import run
from model_worker.specs import ReplicaSpec, RuntimeSpec
from shared import values
from shared.messages import (
    Batch,
    BatchItem,
    ChunkHeader,
    ItemResult,
    Message,
    Phase,
    ReplicaChunk,
    ReplicaPulse,
    RequestId,
    Result,
    SlotName,
    State,
    ToReplicaMessage,
)
from shared.sockets import Buffer, bind_router, drain, send
from shared.wire import decode, encode, split_frames

WITHIN_S = 30.0
M = TypeVar("M")


class Replica:
    """See the module's text. `journal` and `make` (a file that a model waits for) live in `directory`."""

    def __init__(
        self, model: str, *, max_batch_size: int = 32, max_batch_cost: int = 0, threads: int = 1, **options: object
    ) -> None:
        # Not pytest's tmp_path: a socket's path has room for 107 bytes only.
        self._temporary = tempfile.TemporaryDirectory(prefix="hw-")
        self.directory = Path(self._temporary.name)
        self.journal_file = self.directory / "journal"
        endpoint = f"ipc://{self.directory}/model.sock"
        self._context = zmq.Context()
        self._router = bind_router(self._context, endpoint)
        self._peer = b""
        self._numbers = itertools.count(1)
        self.messages: list[Message] = []
        self.results: dict[RequestId, ItemResult] = {}
        self.values: dict[RequestId, Any] = {}
        self.chunks: list[tuple[ChunkHeader, Any]] = []
        self.spec = ReplicaSpec(
            slot=SlotName("m/0"),
            incarnation=3,
            endpoint=endpoint,
            torch_device="cpu",
            environment={},
            cores=(),
            threads=threads,
            runtime=RuntimeSpec(
                name="m",
                source=f"tests.stub_models:{model}" if ":" not in model else model,
                task="",
                options={"journal": str(self.journal_file), **options},
            ),
            max_batch_size=max_batch_size,
            max_batch_cost=max_batch_cost,
        )
        self.child: Child = SpawnLauncher(run, f"bench-{os.getpid()}").start(self.spec)

    def close(self) -> None:
        self.child.reap()
        self._router.close(linger=0)
        self._context.term()
        self._temporary.cleanup()

    def file(self, name: str) -> str:
        """The path of a file that does not exist yet, for a model to wait for."""
        return str(self.directory / name)

    # --- talking ------------------------------------------------------------------------------------------------

    def send(self, message: ToReplicaMessage, frames: Sequence[Buffer] = ()) -> None:
        assert send(self._router, [self._peer, *encode(message, frames)])

    def send_raw(self, *parts: bytes) -> None:
        assert send(self._router, [self._peer, *parts])

    def submit(
        self,
        *inputs: object,
        parameters: dict[str, object] | None = None,
        alone: bool = False,
        stream: bool = False,
        operation: str = "predict",
        remaining_ms: int = 60_000,
        payload: list[Buffer] | None = None,
    ) -> list[RequestId]:
        """One batch with these inputs."""
        items = []
        frames: list[Buffer] = []
        for entry in inputs:
            own = values.pack([entry, parameters or {}]) if payload is None else payload
            request_id = RequestId(next(self._numbers).to_bytes(16, "big"))
            items.append(BatchItem(request_id, 1, operation, remaining_ms, stream, len(own)))
            frames.extend(own)
        self.send(Batch(next(self._numbers), alone, tuple(items)), frames)
        return [item.id for item in items]

    def ask(self, *inputs: object, **how: Any) -> list[ItemResult]:
        """One batch with these inputs, and how they ended."""
        return self.wait_results(self.submit(*inputs, **how))

    def values_of(self, *inputs: object, **how: Any) -> list[Any]:
        """One batch with these inputs, and the values they ended with."""
        ids = self.submit(*inputs, **how)
        assert [result.code for result in self.wait_results(ids)] == ["ok"] * len(ids)
        return [self.values[request_id] for request_id in ids]

    # --- waiting ------------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], M | None], what: str) -> M:
        """Receives until the condition is true; returns its value."""
        deadline_s = time.monotonic() + WITHIN_S
        while not (value := condition()):
            assert time.monotonic() < deadline_s, f"not within {WITHIN_S} s: {what}; got {self.messages[-5:]}"
            self._router.poll(20)
            self.receive()
        return value

    def wait_results(self, ids: Sequence[RequestId]) -> list[ItemResult]:
        self.wait_until(lambda: all(request_id in self.results for request_id in ids), "all results")
        return [self.results[request_id] for request_id in ids]

    def wait_phase(self, phase: Phase) -> State:
        return self.wait_until(lambda: next((state for state in self.states() if state.phase is phase), None), phase)

    def wait_pulse(self, matches: Callable[[ReplicaPulse], bool]) -> ReplicaPulse:
        """The first pulse from now on that matches."""
        seen = len(self.messages)

        def found() -> ReplicaPulse | None:
            pulses = (message for message in self.messages[seen:] if isinstance(message, ReplicaPulse))
            return next((pulse for pulse in pulses if matches(pulse)), None)

        return self.wait_until(found, "a pulse")

    def wait_exit(self) -> int:
        """The exit code, once the process has ended by itself. Its last words may arrive a moment later."""
        assert select.select([self.child.pidfd], [], [], WITHIN_S)[0], "the process still runs"
        exit_code = self.child.exit_code()
        assert exit_code is not None
        return exit_code

    def receive(self) -> None:
        for peer, *parts in drain(self._router, 10_000):
            self._peer = bytes(peer)
            message, frames = decode(parts)
            self.messages.append(message)
            match message:
                case Result():
                    for result, own in split_frames(message.results, frames):
                        assert result.id not in self.results, "answered twice"
                        self.results[result.id] = result
                        self.values[result.id] = values.unpack(own) if own else None
                case ReplicaChunk():
                    for chunk, own in split_frames(message.chunks, frames):
                        assert chunk.id not in self.results, "a chunk came after the end of its stream"
                        self.chunks.append((chunk, values.unpack(own)))

    # --- looking back -------------------------------------------------------------------------------------------

    def states(self) -> list[State]:
        return [message for message in self.messages if isinstance(message, State)]

    def journal(self, event: str) -> list[dict[str, Any]]:
        if not self.journal_file.exists():
            return []
        lines = [json.loads(line) for line in self.journal_file.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def forwards(self) -> list[list[str]]:
        """The items of each forward, in order."""
        return [line["items"] for line in self.journal("forwarded")]


@contextlib.contextmanager
def replica(model: str, *, until: Phase | None = Phase.READY, **how: Any) -> Iterator[Replica]:
    """A model process that has come as far as `until`; it is gone after the block."""
    bench = Replica(model, **how)
    try:
        if until is not None:
            bench.wait_phase(until)
        yield bench
    finally:
        bench.close()

"""The model server: one single-threaded loop that turns messages, exits and signals into events for the broker core,
and the core's effects into messages, spawns and kills.

Owns the two ROUTER sockets, the payloads of requests that wait, and the loop. Refuses to decide anything: every
decision is in `broker/`. Nothing here blocks except the poll itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

import zmq

from model_worker.broker import effects as do
from model_worker.broker import events as happened
from model_worker.broker.events import FrontId
from model_worker.broker.machine import Broker
from model_worker.broker.settings import BrokerSettings
from model_worker.guardian import Guardian
from model_worker.keeper import ProcessKeeper
from model_worker.launchers import Launcher
from model_worker.outbox import Outbox
from model_worker.specs import ReplicaSpec
from shared import messages as wire_messages
from shared.errors import Code, ProtocolError
from shared.logs import RateLimiter, log_event
from shared.messages import (
    BatchItem,
    ChunkHeader,
    Message,
    ModelState,
    ReplyHeader,
    RequestId,
    SlotName,
    WIRE_VERSION,
)
from shared.sockets import Buffer, RunDirectory, bind_router, drain
from shared.version import VERSION
from shared.wire import decode, split_frames

logger = logging.getLogger("model_worker")

PULSE_S = 1.0
# A front that has not been heard for this long gets no more pulses, so that what piles up for a stopped one is
# bounded; its next message makes it known again.
FRONT_FORGOTTEN_S = 10.0
# Messages taken from one socket before the other one, exits and timers get their turn.
MESSAGES_PER_TURN_MAX = 1000

SpecMaker = Callable[[SlotName, int], ReplicaSpec]


class ModelServer:
    """Runs until told to stop, or until no model can ever load."""

    def __init__(
        self,
        settings: BrokerSettings,
        make_spec: SpecMaker,
        launcher: Launcher,
        guardian: Guardian,
        run_directory: RunDirectory,
        *,
        epoch: str,
        grace_s: float,
    ) -> None:
        self._make_spec = make_spec
        self._grace_s = grace_s
        self._epoch = epoch
        self._guardian = guardian
        self._context = zmq.Context(io_threads=1)
        self._front_socket = bind_router(self._context, run_directory.front_endpoint)
        self._replica_socket = bind_router(self._context, run_directory.model_endpoint)
        self._outbox = Outbox(self._front_socket, self._replica_socket)
        self._wake_read, self._wake_write = socket.socketpair()
        self._poller = zmq.Poller()
        for readable in (self._front_socket, self._replica_socket, self._wake_read.fileno(), guardian.pidfd):
            self._poller.register(readable, zmq.POLLIN)
        self._keeper = ProcessKeeper(launcher, self._watch, self._poller.unregister)
        self._started_s = time.monotonic()
        self._broker = Broker(settings, self._started_s)
        self._signals: list[int] = []
        self._fronts_heard_s: dict[FrontId, float] = {}
        self._routes: dict[tuple[str, int], bytes] = {}
        self._replicas: dict[bytes, tuple[SlotName, int]] = {}
        self._payloads: dict[RequestId, list[Buffer]] = {}
        # Passed on untouched from the front's header to the replica's: the core has no use for them.
        self._traces: dict[RequestId, tuple[str, str]] = {}
        self._relay_frames: Sequence[Buffer] = ()
        self._next_pulse_s = 0.0
        self._announced: tuple[bool, tuple[ModelState, ...]] = (False, ())
        self._malformed = 0
        self._malformed_log = RateLimiter(logger, "warning", "message_malformed")
        self._stop: do.StopServer | None = None
        self._perform: dict[type, Callable[[do.Effect, float], None]] = {
            do.SendReply: self._send_reply,
            do.RelayChunk: self._relay_chunk,
            do.ReleasePayload: self._release_payload,
            do.SendBatch: self._send_batch,
            do.SendCancel: self._send_cancel,
            do.SendDrain: self._send_drain,
            do.SendStop: self._send_stop,
            do.SpawnReplica: self._spawn_replica,
            do.KillReplica: self._kill_replica,
            do.DigestPoison: self._digest_poison,
            do.Log: self._log,
            do.StopServer: self._stop_server,
        }

    def run(self) -> do.StopServer:
        """The loop. Call it on the main thread; returns why it ended."""
        restore = self._take_signals()
        try:
            self._carry_out(self._broker.start(time.monotonic()), time.monotonic())
            while self._stop is None:
                self._turn()
            return self._stop
        finally:
            self._keeper.kill_all()
            self._guardian.stop()
            restore()
            for opened in (self._front_socket, self._replica_socket):
                opened.close(linger=1000)
            self._context.term()
            self._wake_read.close()
            self._wake_write.close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._timeout_ms()))
        now_s = time.monotonic()
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(4096)
        self._drain(self._front_socket, self._front_message, now_s)
        self._drain(self._replica_socket, self._replica_message, now_s)
        self._keeper.notice_exits(ready, now_s)
        for ended in self._keeper.due(now_s):
            self._forget_route(ended.slot, ended.incarnation)
            self._tell(happened.ReplicaExited(ended.slot, ended.incarnation, ended.exit_code), now_s)
        if self._guardian.pidfd in ready:
            self._replace_guardian()
        while self._signals:
            self._handle_signal(self._signals.pop(0), now_s)
        wake_at_s = self._broker.wake_at_s
        if wake_at_s is not None and wake_at_s <= now_s:
            self._tell(happened.TimePassed(), now_s)
        for front in self._outbox.flush():
            self._front_left(FrontId(front), now_s)
        self._pulse(now_s)

    def _timeout_ms(self) -> int:
        times = [self._next_pulse_s, self._broker.wake_at_s, self._keeper.wake_at_s]
        wake_at_s = min(moment for moment in times if moment is not None)
        # Rounded up: waking a fraction of a millisecond early would spin.
        return max(0, int((wake_at_s - time.monotonic()) * 1000) + 1)

    def _tell(self, event: happened.Event, now_s: float) -> None:
        self._carry_out(self._broker.handle(event, now_s), now_s)

    def _carry_out(self, effects: Iterable[do.Effect], now_s: float) -> None:
        for effect in effects:
            self._perform[type(effect)](effect, now_s)

    # --- what fronts say -----------------------------------------------------------------------------------------

    def _drain(
        self, source: zmq.Socket[bytes], handle: Callable[[bytes, Message, list[Buffer], float], None], now_s: float
    ) -> None:
        for parts in drain(source, MESSAGES_PER_TURN_MAX):
            sender = bytes(parts[0])
            try:
                message, frames = decode(parts[1:])
                handle(sender, message, frames, now_s)
            except ProtocolError as error:
                self._malformed += 1
                self._malformed_log.log(sender=sender.hex(), reason=str(error))

    def _front_message(self, sender: bytes, message: Message, frames: list[Buffer], now_s: float) -> None:
        if isinstance(message, wire_messages.Inspect):
            # Whoever only looks is no front: it is answered, and not remembered.
            self._outbox.to_front(sender, self._snapshot(message.token, now_s))
            return
        front = FrontId(sender)
        if front not in self._fronts_heard_s or isinstance(message, wire_messages.FrontHello):
            self._tell(happened.FrontJoined(front), now_s)
            models = self._broker.model_states()
            self._outbox.to_front(sender, wire_messages.Welcome(self._epoch, VERSION, models))
        self._fronts_heard_s[front] = now_s
        match message:
            case wire_messages.Submit():
                for header, payload in split_frames(message.requests, frames):
                    self._request_arrived(front, header, payload, now_s)
            case wire_messages.Cancel():
                for request_id in message.ids:
                    self._tell(happened.RequestCancelled(front, request_id), now_s)
            case wire_messages.FrontHello() | wire_messages.FrontPulse():
                self._tell(happened.FrontPulsed(front), now_s)
            case _:
                raise ProtocolError(f"a front sent {type(message).__name__}, which is not a front's message")

    def _request_arrived(
        self, front: FrontId, header: wire_messages.RequestHeader, payload: list[Buffer], now_s: float
    ) -> None:
        digest = _digest(payload) if self._broker.refused_digests(header.model) else b""
        if header.id not in self._payloads:
            self._payloads[header.id] = payload
            self._traces[header.id] = (header.request_id, header.traceparent)
        self._tell(
            happened.RequestArrived(
                front=front,
                id=header.id,
                model=header.model,
                operation=header.operation,
                batch_key=header.batch_key,
                cost_hint=header.cost_hint,
                body_bytes=sum(_size_bytes(frame) for frame in payload),
                deadline_s=now_s + header.remaining_ms / 1000,
                priority=header.priority,
                stream=header.stream,
                retryable=header.retryable,
                digest=digest,
            ),
            now_s,
        )

    def _front_left(self, front: FrontId, now_s: float) -> None:
        if self._fronts_heard_s.pop(front, None) is not None:
            self._tell(happened.FrontLeft(front), now_s)

    # --- what replicas say ---------------------------------------------------------------------------------------

    def _replica_message(self, sender: bytes, message: Message, frames: list[Buffer], now_s: float) -> None:
        if isinstance(message, wire_messages.ReplicaHello):
            self._replica_connected(sender, message, now_s)
            return
        known = self._replicas.get(sender)
        if known is None:
            raise ProtocolError(f"{type(message).__name__} from a process that never said HELLO")
        slot, incarnation = known
        match message:
            case wire_messages.Result():
                for result, value in split_frames(message.results, frames):
                    self._item_finished(slot, incarnation, result, value, now_s)
            case wire_messages.ReplicaChunk():
                for chunk, value in split_frames(message.chunks, frames):
                    self._relay_frames = value
                    self._relay_header = chunk
                    self._tell(happened.ChunkArrived(slot, incarnation, chunk.id, chunk.attempt), now_s)
                self._relay_frames = ()
            case wire_messages.ReplicaPulse():
                running_s = message.running_ms / 1000
                self._tell(
                    happened.ReplicaPulsed(
                        slot, incarnation, message.progress_count, running_s, message.memory_bytes
                    ),
                    now_s,
                )
            case wire_messages.State():
                self._tell(
                    happened.ReplicaPhaseChanged(
                        slot=slot,
                        incarnation=incarnation,
                        phase=message.phase,
                        progress=message.progress,
                        detail=message.detail,
                        permanent=message.permanent,
                        mixes_parameters=message.mixes_parameters,
                        max_batch_cost=message.max_batch_cost,
                        max_batch_size=message.max_batch_size,
                        choices=message.choices,
                    ),
                    now_s,
                )
            case _:
                raise ProtocolError(f"a replica sent {type(message).__name__}, which is not a replica's message")

    def _replica_connected(self, sender: bytes, hello: wire_messages.ReplicaHello, now_s: float) -> None:
        slot = SlotName(hello.slot)
        expected_pid = self._keeper.pid(slot, hello.incarnation)
        if expected_pid != hello.pid:
            raise ProtocolError(f"HELLO for {slot}#{hello.incarnation} from pid {hello.pid}, which does not hold it")
        self._replicas[sender] = (slot, hello.incarnation)
        self._routes[slot, hello.incarnation] = sender
        self._tell(happened.ReplicaConnected(slot, hello.incarnation), now_s)

    def _item_finished(
        self, slot: SlotName, incarnation: int, result: wire_messages.ItemResult, value: list[Buffer], now_s: float
    ) -> None:
        self._relay_frames = value
        self._tell(
            happened.ItemFinished(
                slot=slot,
                incarnation=incarnation,
                id=result.id,
                attempt=result.attempt,
                code=result.code,
                cost=result.cost,
                prepare_ms=result.prepare_ms,
                forward_ms=result.forward_ms,
                finish_ms=result.finish_ms,
                batch_size=result.batch_size,
                message=result.message,
                detail=result.detail,
            ),
            now_s,
        )
        self._relay_frames = ()

    def _forget_route(self, slot: SlotName, incarnation: int) -> None:
        sender = self._routes.pop((slot, incarnation), None)
        if sender is not None:
            del self._replicas[sender]

    # --- what the core orders ------------------------------------------------------------------------------------

    def _send_reply(self, reply: do.SendReply, now_s: float) -> None:
        frames = self._relay_frames if reply.relay else ()
        header = ReplyHeader(
            id=reply.id,
            code=reply.code,
            frame_count=len(frames),
            attempt=reply.attempt,
            slot=reply.slot,
            incarnation=reply.incarnation,
            cost=reply.cost,
            timings=reply.timings,
            message=reply.message,
            detail=reply.detail,
            retry_after_ms=int(reply.retry_after_s * 1000),
        )
        self._outbox.reply(reply.front, header, frames)
        self._forget_payload(reply.id)

    def _relay_chunk(self, effect: do.RelayChunk, now_s: float) -> None:
        self._outbox.chunk(effect.front, self._relay_header, self._relay_frames)

    def _release_payload(self, effect: do.ReleasePayload, now_s: float) -> None:
        self._forget_payload(effect.id)

    def _forget_payload(self, request_id: RequestId) -> None:
        self._payloads.pop(request_id, None)
        self._traces.pop(request_id, None)

    def _send_batch(self, effect: do.SendBatch, now_s: float) -> None:
        items = []
        frames: list[Buffer] = []
        for entry in effect.entries:
            payload = self._payloads[entry.id]
            request_id, traceparent = self._traces[entry.id]
            frames.extend(payload)
            items.append(
                BatchItem(
                    id=entry.id,
                    attempt=entry.attempt,
                    operation=entry.operation,
                    remaining_ms=max(0, int((entry.deadline_s - now_s) * 1000)),
                    stream=entry.stream,
                    frame_count=len(payload),
                    request_id=request_id,
                    traceparent=traceparent,
                )
            )
        batch = wire_messages.Batch(effect.batch, effect.alone, tuple(items))
        self._to_replica(effect.slot, effect.incarnation, batch, frames)

    def _send_cancel(self, effect: do.SendCancel, now_s: float) -> None:
        self._to_replica(effect.slot, effect.incarnation, wire_messages.ReplicaCancel(effect.ids))

    def _send_drain(self, effect: do.SendDrain, now_s: float) -> None:
        grace_ms = int(effect.grace_s * 1000)
        self._to_replica(effect.slot, effect.incarnation, wire_messages.Drain(grace_ms))

    def _send_stop(self, effect: do.SendStop, now_s: float) -> None:
        if (effect.slot, effect.incarnation) in self._routes:
            self._to_replica(effect.slot, effect.incarnation, wire_messages.Stop())
        else:
            # It has not said HELLO: it is still importing, and nothing is lost by ending it.
            self._keeper.kill(effect.slot, effect.incarnation, "stopped before it connected", False, now_s)

    def _to_replica(
        self, slot: SlotName, incarnation: int, message: Message, frames: Sequence[Buffer] = ()
    ) -> None:
        route = self._routes.get((slot, incarnation))
        if route is None or not self._outbox.to_replica(route, message, frames):
            # Its exit is about to be seen, and settles everything that it was given.
            log_event(
                logger, "debug", "replica_unreachable", slot=slot, incarnation=incarnation, kind=type(message).__name__
            )

    def _spawn_replica(self, effect: do.SpawnReplica, now_s: float) -> None:
        try:
            pid = self._keeper.start(self._make_spec(effect.slot, effect.incarnation))
        except OSError as error:
            self._tell(happened.SpawnFailed(effect.slot, effect.incarnation, str(error)), now_s)
        else:
            self._tell(happened.ReplicaSpawned(effect.slot, effect.incarnation, pid), now_s)

    def _kill_replica(self, effect: do.KillReplica, now_s: float) -> None:
        self._keeper.kill(effect.slot, effect.incarnation, effect.reason, effect.dump_stacks, now_s)

    def _digest_poison(self, effect: do.DigestPoison, now_s: float) -> None:
        digest = _digest(self._payloads[effect.id])
        self._tell(happened.PoisonDigested(effect.model, digest), now_s)

    def _log(self, effect: do.Log, now_s: float) -> None:
        log_event(logger, effect.level, effect.event, **effect.fields)

    def _stop_server(self, effect: do.StopServer, now_s: float) -> None:
        self._stop = effect

    # --- pulses, signals, watching -------------------------------------------------------------------------------

    def _pulse(self, now_s: float) -> None:
        announced = (self._broker.draining, self._broker.model_states())
        due = now_s >= self._next_pulse_s
        if not due and _readiness(announced) == _readiness(self._announced):
            return
        self._announced = announced
        pulse = wire_messages.ServerPulse(self._epoch, *announced)
        for front, heard_s in list(self._fronts_heard_s.items()):
            if now_s - heard_s > FRONT_FORGOTTEN_S or not self._outbox.to_front(front, pulse):
                self._front_left(front, now_s)
        if due:
            self._next_pulse_s = now_s + PULSE_S

    def _snapshot(self, token: int, now_s: float) -> wire_messages.Snapshot:
        return wire_messages.Snapshot(
            token=token,
            epoch=self._epoch,
            pid=os.getpid(),
            version=VERSION,
            uptime_s=now_s - self._started_s,
            draining=self._broker.draining,
            models=self._broker.model_states(),
            slots=self._broker.slot_states(now_s),
            counters=self._broker.counters(),
            fronts=len(self._fronts_heard_s),
            malformed=self._malformed,
        )

    def _take_signals(self) -> Callable[[], None]:
        """Signal handlers only note the number; the byte on the wake-up socket ends the poll."""
        self._wake_write.setblocking(False)
        previous_fd = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        previous = {number: signal.signal(number, self._note_signal) for number in (signal.SIGTERM, signal.SIGINT)}

        def restore() -> None:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)

        return restore

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _handle_signal(self, number: int, now_s: float) -> None:
        name = signal.Signals(number).name
        if self._broker.draining:
            log_event(logger, "warning", "stopped_at_once", signal=name, reason="second signal while draining")
            self._stop = do.StopServer(128 + number, f"second {name}")
            return
        log_event(logger, "info", "drain_started", signal=name, grace_s=self._grace_s)
        self._tell(happened.DrainRequested(self._grace_s), now_s)

    def _replace_guardian(self) -> None:
        log_event(logger, "error", "guardian_died", remedy="started again")
        self._poller.unregister(self._guardian.pidfd)
        self._guardian.start()
        self._watch(self._guardian.pidfd)

    def _watch(self, file_descriptor: int) -> None:
        self._poller.register(file_descriptor, zmq.POLLIN)


def fresh_epoch() -> str:
    """Names one life of a model server; fronts send everything again to a new one."""
    return secrets.token_hex(8)


def _readiness(announced: tuple[bool, tuple[ModelState, ...]]) -> object:
    draining, models = announced
    return draining, [(model.name, model.state, model.reason, model.replicas_ready) for model in models]


def _digest(payload: Sequence[Buffer]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for frame in payload:
        digest.update(frame)
    return digest.digest()


def _size_bytes(frame: Buffer) -> int:
    return len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes

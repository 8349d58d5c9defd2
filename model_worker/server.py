"""The model server: one single-threaded loop that turns messages, exits and signals into events for the broker core,
and has the core's effects carried out.

Owns the two ROUTER sockets, the poller and the loop. Refuses to decide anything: every decision is in `broker/`.
Nothing here blocks except the poll itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import zmq

from model_worker import intake
from model_worker.broker import effects as do
from model_worker.broker import events as happened
from model_worker.broker.events import FrontId
from model_worker.broker.machine import Broker
from model_worker.broker.planning import Planner
from model_worker.broker.settings import BrokerSettings
from model_worker.guardian import Guardian
from model_worker.keeper import ProcessKeeper
from model_worker.launchers import Launcher
from model_worker.orders import Orders, SpecMaker
from model_worker.outbox import Outbox
from model_worker.payloads import Payloads
from model_worker.troubles import Troubles
from shared import messages as say
from shared.errors import ConfigurationError, ProtocolError
from shared.logs import RateLimiter, log_event
from shared.messages import ModelState, SlotName
from shared.sockets import Buffer, RunDirectory, bind_again, bind_router, drain, has_message
from shared.version import VERSION
from shared.wire import decode, split_frames

logger = logging.getLogger("model_worker")

PULSE_S = 1.0
# How often, at most, the states of all models are compared with what fronts were told; with a hundred models that is
# work for each turn of a busy loop. A change after a quiet time is told at once.
COMPARE_S = 0.02
# A front that has not been heard for this long gets no more pulses, so that what piles up for a stopped one is
# bounded; its next message makes it known again.
FRONT_FORGOTTEN_S = 10.0
# Messages taken from one socket before the other one, exits and timers get their turn.
MESSAGES_PER_TURN_MAX = 1000
# How long last replies may take to leave when the server ends.
LINGER_MS = 1000

_Handler = Callable[[bytes, say.Message, list[Buffer], float], None]
"""What one message of a peer means: its routing id, the message, its frames, and the time of the turn."""
_Source = tuple[int, zmq.Socket[bytes], _Handler]
"""A socket with its file descriptor, and what to do with what comes from it."""


class ModelServer:
    """Runs until told to stop, or until no model can ever load."""

    def __init__(
        self,
        settings: BrokerSettings,
        planner: Planner,
        make_spec: SpecMaker,
        launcher: Launcher,
        guardian: Guardian,
        run_directory: RunDirectory,
        *,
        epoch: str,
        grace_s: float,
        devices: Callable[[], tuple[say.DeviceState, ...]],
    ) -> None:
        self._grace_s = grace_s
        self._epoch = epoch
        self._devices = devices
        self._run_directory = run_directory
        self._guardian = guardian
        self._context = zmq.Context(io_threads=1)
        self._front_socket = bind_router(self._context, run_directory.front_endpoint)
        self._replica_socket = bind_router(self._context, run_directory.model_endpoint)
        self._wake_read, self._wake_write = socket.socketpair()
        self._poller = select.epoll()
        self._sources: tuple[_Source, ...] = (
            (int(self._front_socket.FD), self._front_socket, self._front_message),
            (int(self._replica_socket.FD), self._replica_socket, self._replica_message),
        )
        for readable in (*(source[0] for source in self._sources), self._wake_read.fileno(), guardian.pidfd):
            self._watch(readable)
        # File descriptors of the sockets that hold a message at the end of a turn; they themselves need not tell.
        self._unread: set[int] = set()
        self._started_s = time.monotonic()
        self._broker = Broker(settings, self._started_s, planner)
        self._payloads = Payloads()
        self._troubles = Troubles()
        self._outbox = Outbox(self._front_socket, self._replica_socket)
        self._keeper = ProcessKeeper(
            launcher, self._watch, self._poller.unregister, is_heard_out=self._outbox.is_heard_out
        )
        self._orders = Orders(self._outbox, self._keeper, self._payloads, self._troubles, make_spec, self._tell)
        self._signals: list[int] = []
        self._fronts_heard_s: dict[FrontId, float] = {}
        # Those among them that are workers of the HTTP front, by their HELLO.
        self._front_workers: set[FrontId] = set()
        self._next_pulse_s = 0.0
        self._next_comparison_s = 0.0
        # Whether a turn has ended without the comparison, so that it must not wait for the next message.
        self._comparison_due = False
        self._announced: tuple[bool, tuple[ModelState, ...]] = (False, ())
        self._malformed = 0
        self._malformed_log = RateLimiter(logger, "warning", "message_malformed")
        self._unreachable_log = RateLimiter(logger, "error", "run_directory_lost")

    def run(self) -> do.StopServer:
        """The loop. Call it on the main thread; returns why it ended."""
        restore = self._take_signals()
        try:
            now_s = time.monotonic()
            self._orders.carry_out(self._broker.start(now_s), now_s)
            while self._orders.stop is None:
                self._turn()
            self._outbox.flush()
            self._say_last_word(self._orders.stop)
            return self._orders.stop
        finally:
            self._keeper.kill_all()
            self._guardian.stop()
            restore()
            for opened in (self._front_socket, self._replica_socket):
                opened.close(linger=LINGER_MS)
            self._context.term()
            self._poller.close()
            self._wake_read.close()
            self._wake_write.close()

    def _turn(self) -> None:
        ready = self._unread.union([readable for readable, _ in self._poller.poll(self._timeout_s())])
        now_s = time.monotonic()
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(4096)
        # Noticed before the sockets are drained, believed some turns later: a process's last words count.
        self._keeper.notice_exits(ready, now_s)
        for file_descriptor, source, handle in self._sources:
            if file_descriptor in ready:
                self._drain(source, handle, now_s)
        for ended in self._keeper.due(now_s):
            self._outbox.disconnect((ended.slot, ended.incarnation))
            self._tell(happened.ReplicaExited(ended.slot, ended.incarnation, ended.exit_code), now_s)
        if self._guardian.pidfd in ready:
            self._replace_guardian()
        while self._signals:
            self._handle_signal(self._signals.pop(0), now_s)
        # Also gives replicas what arrived in this turn, all of it together.
        self._orders.carry_out(self._broker.handle(happened.TimePassed(), now_s), now_s)
        for front in self._outbox.flush():
            self._front_left(FrontId(front), now_s)
        self._pulse(now_s)
        self._unread = {file_descriptor for file_descriptor, source, _ in self._sources if has_message(source)}

    def _timeout_s(self) -> float:
        if self._unread:
            return 0.0
        comparison_s = self._next_comparison_s if self._comparison_due else None
        times = [self._next_pulse_s, comparison_s, self._broker.wake_at_s, self._keeper.wake_at_s]
        # `epoll` rounds up to whole milliseconds: waking a fraction of one early would spin.
        return max(0.0, min([moment for moment in times if moment is not None]) - time.monotonic())

    def _tell(self, event: happened.Event, now_s: float) -> None:
        """Gives the core one event of this turn; the turn ends with `TimePassed`."""
        self._orders.carry_out(self._broker.handle(event, now_s, more_follow=True), now_s)

    def _watch(self, file_descriptor: int) -> None:
        self._poller.register(file_descriptor, select.EPOLLIN)

    # --- messages ------------------------------------------------------------------------------------------------

    def _drain(self, source: zmq.Socket[bytes], handle: _Handler, now_s: float) -> None:
        for parts in drain(source, MESSAGES_PER_TURN_MAX):
            sender = bytes(parts[0])
            try:
                message, frames = decode(parts[1:])
                handle(sender, message, frames, now_s)
            except ProtocolError as error:
                self._malformed += 1
                self._malformed_log.log(sender=sender.hex(), reason=str(error))

    def _front_message(self, sender: bytes, message: say.Message, frames: list[Buffer], now_s: float) -> None:
        front = FrontId(sender)
        if isinstance(message, (say.Inspect, say.Manage)):
            # Whoever only looks, or gives orders, is no front: it is answered, and not remembered.
            if isinstance(message, say.Inspect):
                self._outbox.to_front(sender, self._snapshot(message.token, now_s))
            else:
                self._tell(intake.manage_requested(front, message), now_s)
            return
        if isinstance(message, say.FrontPulse) and message.leaving:
            self._front_left(front, now_s, "said goodbye")
            return
        if front not in self._fronts_heard_s or isinstance(message, say.FrontHello):
            self._tell(happened.FrontJoined(front), now_s)
            self._outbox.to_front(sender, say.Welcome(self._epoch, VERSION, self._broker.model_states()))
        self._fronts_heard_s[front] = now_s
        if isinstance(message, say.FrontHello) and message.is_worker:
            self._front_workers.add(front)
        match message:
            case say.Submit():
                for header, payload_frames in split_frames(message.requests, frames):
                    payload = self._payloads.keep(header, payload_frames)
                    digest = payload.digest() if self._broker.refused_digests(header.model) else b""
                    self._tell(intake.request_arrived(front, header, payload, digest, now_s), now_s)
            case _:
                for event in intake.from_front(front, message):
                    self._tell(event, now_s)

    def _front_left(self, front: FrontId, now_s: float, reason: str = "unreachable") -> None:
        self._front_workers.discard(front)
        if self._fronts_heard_s.pop(front, None) is not None:
            self._tell(happened.FrontLeft(front, reason), now_s)

    def _replica_message(self, sender: bytes, message: say.Message, frames: list[Buffer], now_s: float) -> None:
        if isinstance(message, say.ReplicaHello):
            self._replica_connected(sender, message, now_s)
            return
        replica = self._outbox.replica(sender)
        if replica is None:
            raise ProtocolError(f"{type(message).__name__} from a process that never said HELLO, or has ended")
        match message:
            case say.Result():
                for result, value in split_frames(message.results, frames):
                    self._orders.relaying(value)
                    self._tell(intake.item_finished(replica, result), now_s)
            case say.ReplicaChunk():
                for chunk, value in split_frames(message.chunks, frames):
                    self._orders.relaying(value, chunk)
                    self._tell(intake.chunk_arrived(replica, chunk), now_s)
            case _:
                self._tell(intake.from_replica(replica, message), now_s)
        self._orders.relaying(())

    def _replica_connected(self, sender: bytes, hello: say.ReplicaHello, now_s: float) -> None:
        slot = SlotName(hello.slot)
        if self._keeper.pid(slot, hello.incarnation) != hello.pid:
            raise ProtocolError(f"HELLO for {slot}#{hello.incarnation} from pid {hello.pid}, which does not hold it")
        self._outbox.connect((slot, hello.incarnation), sender)
        self._tell(happened.ReplicaConnected(slot, hello.incarnation), now_s)

    # --- pulses, signals, the guardian ---------------------------------------------------------------------------

    def _pulse(self, now_s: float) -> None:
        due = now_s >= self._next_pulse_s
        self._comparison_due = not due and now_s < self._next_comparison_s
        if self._comparison_due:
            return
        self._next_comparison_s = now_s + COMPARE_S
        announced = (self._broker.draining, self._broker.model_states())
        if not due and _readiness(*announced) == _readiness(*self._announced):
            return
        self._announced = announced
        pulse = say.ServerPulse(self._epoch, *announced)
        for front, heard_s in list(self._fronts_heard_s.items()):
            if now_s - heard_s > FRONT_FORGOTTEN_S or not self._outbox.to_front(front, pulse):
                self._front_left(front, now_s)
        if due:
            self._next_pulse_s = now_s + PULSE_S
            self._keep_reachable()

    def _say_last_word(self, stop: do.StopServer) -> None:
        """Behind the last replies: whoever would hold requests for the next server is told that none is to come."""
        if stop.hopeless:
            pulse = say.ServerPulse(self._epoch, self._broker.draining, self._broker.model_states(), hopeless=True)
            for front in self._fronts_heard_s:
                self._outbox.to_front(front, pulse)

    def _keep_reachable(self) -> None:
        """Comes back where it can be found, after the run directory was deleted (a log-out deletes those of its user).

        Whoever is connected stays so and would notice nothing, but no new front worker or model process could connect.
        """
        if self._run_directory.is_intact:
            return
        try:
            self._run_directory.restore()
            bind_again(self._front_socket, self._run_directory.front_endpoint)
            bind_again(self._replica_socket, self._run_directory.model_endpoint)
        except ConfigurationError as error:
            self._unreachable_log.log(reason=str(error))
        else:
            log_event(logger, "warning", "run_directory_restored", run_dir=str(self._run_directory.path))

    def _snapshot(self, token: int, now_s: float) -> say.Snapshot:
        return say.Snapshot(
            token=token,
            epoch=self._epoch,
            pid=os.getpid(),
            version=VERSION,
            uptime_s=now_s - self._started_s,
            draining=self._broker.draining,
            models=self._broker.model_states(),
            slots=self._broker.slot_states(now_s),
            counters=self._broker.counters(),
            fronts=len(self._front_workers),
            malformed=self._malformed,
            clients=len(self._fronts_heard_s) - len(self._front_workers),
            devices=self._devices(),
            troubles=self._troubles.recent(now_s),
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
        if self._broker.is_ending:
            log_event(logger, "warning", "drain_cut_short", signal=name)
            self._orders.stop = do.StopServer(128 + number, f"{name} while draining")
            return
        log_event(logger, "info", "signal_received", signal=name)
        self._tell(happened.DrainRequested(self._grace_s), now_s)

    def _replace_guardian(self) -> None:
        log_event(logger, "error", "guardian_died", remedy="started again")
        self._poller.unregister(self._guardian.pidfd)
        self._guardian.start()
        self._watch(self._guardian.pidfd)


def fresh_epoch() -> str:
    """Names one life of a model server; fronts send everything again to a new one."""
    return secrets.token_hex(8)


def _readiness(draining: bool, models: tuple[ModelState, ...]) -> object:
    """The part of a pulse that fronts should not wait a second for."""
    return draining, [(model.name, model.state, model.reason, model.replicas_ready) for model in models]

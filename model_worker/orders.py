"""What the broker core orders, carried out: messages, spawns, kills, log lines.

Owns the hands of the model server. Decides nothing; what comes of an order (a pid, a failed spawn, a digest) goes back
to the core as an event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from model_worker.broker import effects as do
from model_worker.broker import events as happened
from model_worker.keeper import ProcessKeeper
from model_worker.outbox import Outbox, Replica
from model_worker.payloads import Payloads
from model_worker.specs import ReplicaSpec
from model_worker.troubles import Troubles
from shared import messages as say
from shared.errors import Code, ConfigurationError
from shared.logs import log_event
from shared.messages import SlotName
from shared.sockets import Buffer

logger = logging.getLogger("model_worker")

SpecMaker = Callable[[SlotName, int], ReplicaSpec]


class Orders:
    """Carries out effects in the order given. One instance per model server, on its main thread."""

    def __init__(
        self,
        outbox: Outbox,
        keeper: ProcessKeeper,
        payloads: Payloads,
        troubles: Troubles,
        make_spec: SpecMaker,
        tell: Callable[[happened.Event, float], None],
    ) -> None:
        """`tell` gives the core an event that an order has caused."""
        self._outbox = outbox
        self._keeper = keeper
        self._payloads = payloads
        self._troubles = troubles
        self._make_spec = make_spec
        self._tell = tell
        # The value of the item, or the piece of the stream, that is being handled: an order to relay means this one.
        self._value: Sequence[Buffer] = ()
        self._chunk: say.ChunkHeader | None = None
        self.stop: do.StopServer | None = None
        """Set once the core has ordered the end."""

    def relaying(self, value: Sequence[Buffer], chunk: say.ChunkHeader | None = None) -> None:
        """Names the frames that the next orders may relay."""
        self._value = value
        self._chunk = chunk

    def carry_out(self, effects: Iterable[do.Effect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case do.SendReply():
                    self._send_reply(effect)
                    if effect.code is not Code.OK:
                        self._troubles.request_failed(effect.code, effect.slot, effect.message, now_s)
                case do.SendBatch():
                    self._send_batch(effect, now_s)
                case do.RelayChunk():
                    assert self._chunk is not None
                    self._outbox.chunk(effect.front, self._chunk, self._value)
                case do.ReleasePayload():
                    self._payloads.forget(effect.id)
                case do.SendCancel():
                    self._send((effect.slot, effect.incarnation), say.ReplicaCancel(effect.ids))
                case do.SendDrain():
                    self._send((effect.slot, effect.incarnation), say.Drain(int(effect.grace_s * 1000)))
                case do.SendStop():
                    self._send_stop((effect.slot, effect.incarnation), now_s)
                case do.SpawnReplica():
                    self._spawn(effect, now_s)
                case do.KillReplica():
                    self._troubles.logged("replica_killed", {"slot": effect.slot, "reason": effect.reason}, now_s)
                    self._keeper.kill(effect.slot, effect.incarnation, effect.reason, effect.dump_stacks, now_s)
                case do.DigestPoison():
                    digest = self._payloads.get(effect.id).digest()
                    self._tell(happened.PoisonDigested(effect.model, digest), now_s)
                case do.SendManaged():
                    # Whoever asked may be gone: what was ordered is done all the same, and stands in the log.
                    self._outbox.to_front(effect.front, say.Managed(effect.token, effect.outcome, effect.text))
                case do.Log():
                    log_event(logger, effect.level, effect.event, **effect.fields)
                    if effect.level in ("warning", "error"):
                        self._troubles.logged(effect.event, effect.fields, now_s)
                case do.StopServer():
                    self.stop = effect

    def _send_reply(self, reply: do.SendReply) -> None:
        frames = self._value if reply.relay else ()
        header = say.ReplyHeader(
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
        self._payloads.forget(reply.id)

    def _send_batch(self, effect: do.SendBatch, now_s: float) -> None:
        items = []
        frames: list[Buffer] = []
        for entry in effect.entries:
            payload = self._payloads.get(entry.id)
            frames.extend(payload.frames)
            items.append(
                say.BatchItem(
                    id=entry.id,
                    attempt=entry.attempt,
                    operation=entry.operation,
                    remaining_ms=max(0, int((entry.deadline_s - now_s) * 1000)),
                    stream=entry.stream,
                    frame_count=len(payload.frames),
                    request_id=payload.request_id,
                    traceparent=payload.traceparent,
                )
            )
        self._send((effect.slot, effect.incarnation), say.Batch(effect.batch, effect.alone, tuple(items)), frames)

    def _send_stop(self, replica: Replica, now_s: float) -> None:
        if self._outbox.is_connected(replica):
            self._send(replica, say.Stop())
        else:
            # It has not said HELLO: it is still importing, and nothing is lost by ending it.
            self._keeper.kill(*replica, reason="stopped before it connected", dump_stacks=False, now_s=now_s)

    def _send(self, replica: Replica, message: say.Message, frames: Sequence[Buffer] = ()) -> None:
        if not self._outbox.to_replica(replica, message, frames):
            # Its exit is about to be seen, and settles everything that it was given.
            slot, incarnation = replica
            kind = type(message).__name__
            log_event(logger, "debug", "replica_unreachable", slot=slot, incarnation=incarnation, kind=kind)

    def _spawn(self, effect: do.SpawnReplica, now_s: float) -> None:
        try:
            pid = self._keeper.start(self._make_spec(effect.slot, effect.incarnation))
        except (OSError, ConfigurationError) as error:
            self._tell(happened.SpawnFailed(effect.slot, effect.incarnation, str(error)), now_s)
        else:
            self._tell(happened.ReplicaSpawned(effect.slot, effect.incarnation, pid), now_s)

"""What must hold in every world, judged from outside: by the facts delivered and the orders given, never by the core's
own records.

A violation raises `Violation` with the name of the promise that was broken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model_worker.broker.effects import (
    KillReplica,
    RelayChunk,
    ReleasePayload,
    SendBatch,
    SendReply,
    SpawnReplica,
    StopServer,
)
from model_worker.broker.events import (
    ChunkArrived,
    Event,
    FrontId,
    FrontJoined,
    FrontLeft,
    FrontPulsed,
    ItemFinished,
    ReplicaExited,
    ReplicaPhaseChanged,
    ReplicaPulsed,
    RequestArrived,
    RequestCancelled,
    SpawnFailed,
)
from model_worker.broker.settings import BrokerSettings
from shared.errors import Code
from shared.messages import Phase, RequestId, SlotName

LATE_REPLY_S = 0.25
LATE_KILL_S = 1.0
# Refusals on arrival, which end a request that never was in the queue, may also be the end of an admitted one.
REFUSALS = frozenset({Code.OVERLOADED, Code.UNKNOWN_MODEL, Code.TOO_LARGE})


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Life:
    """What is known of one request from outside."""

    arrived: RequestArrived
    arrived_s: float
    cancelled: bool = False
    sent: int = 0
    deaths: int = 0
    chunked: bool = False
    must_not_run: bool = False
    """It ran in a process that died, and a second run was ruled out."""


@dataclass
class Place:
    """What is known of one process from outside."""

    incarnation: int
    ready: bool = False
    doomed: bool = False
    """Killed, stopped, or it told that it cannot go on."""
    born_s: float = 0.0
    heard_s: float = 0.0
    progressed_s: float = 0.0
    """When its work last moved, as far as it told."""
    progress_count: int = 0
    batches: list[tuple[bool, dict[RequestId, int]]] = field(default_factory=list)
    """Alone or not, and the items not reported yet with their attempts; the first batch is the one that runs."""
    concurrency: int = 0
    """Above 0: it batches continuously, so that all it holds is one batch, of at most so many."""


class Checker:
    def __init__(self, settings: BrokerSettings) -> None:
        self.settings = settings
        # Requests that have not ended, and the ids of all that have.
        self.lives: dict[RequestId, Life] = {}
        self.ended: set[RequestId] = set()
        self.places: dict[SlotName, Place] = {}
        self.incarnations: dict[SlotName, int] = {}
        self.fronts_heard_s: dict[FrontId, float] = {}
        self.gone_fronts: set[FrontId] = set()
        models = {model.name: model for model in settings.models}
        self.models = {slot.name: models[slot.model] for slot in settings.slots}
        self.stopped: StopServer | None = None
        self.relays = 0
        # The end of the loop's latest stall: nothing before counts as silence, and nothing could be done then.
        self.listening_since_s = 0.0
        # The fact that the orders seen now follow from, and when its front was heard before.
        self.cause: Event | None = None
        self._heard_before: dict[FrontId, float] = {}

    # --- facts ---------------------------------------------------------------------------------------------------

    def saw_event(self, event: Event, now_s: float) -> None:
        """Called just before the broker gets it."""
        if self.cause is None:
            self._heard_before.clear()
        self.cause = event
        if isinstance(event, (FrontJoined, FrontPulsed, RequestArrived, RequestCancelled)):
            self._heard_before[event.front] = self.fronts_heard_s.get(event.front, now_s)
            self.fronts_heard_s[event.front] = now_s
            self.gone_fronts.discard(event.front)
        match event:
            case RequestArrived():
                if event.id not in self.lives and event.id not in self.ended:
                    self.lives[event.id] = Life(event, now_s)
            case RequestCancelled():
                life = self.lives.get(event.id)
                if life is not None and life.arrived.front == event.front:
                    life.cancelled = True
            case FrontLeft():
                self.gone_fronts.add(event.front)
            case ReplicaPhaseChanged() | ReplicaPulsed() | ChunkArrived() | ItemFinished():
                self._heard(event, now_s)
            case ReplicaExited():
                self._exited(event)
            case SpawnFailed():
                self.places.pop(event.slot, None)

    def _heard(self, event: ReplicaPhaseChanged | ReplicaPulsed | ChunkArrived | ItemFinished, now_s: float) -> None:
        place = self.places.get(event.slot)
        if place is None or place.incarnation != event.incarnation:
            return
        place.heard_s = now_s
        if isinstance(event, ReplicaPhaseChanged):
            place.ready = place.ready or event.phase is Phase.READY
            place.concurrency = max(place.concurrency, event.concurrency)
            place.doomed = place.doomed or event.phase is Phase.FAILED
        elif isinstance(event, ReplicaPulsed):
            if event.progress_count != place.progress_count:
                place.progress_count, place.progressed_s = event.progress_count, now_s
        else:
            place.progressed_s = now_s
        if isinstance(event, ItemFinished):
            for _, items in place.batches:
                if items.get(event.id) == event.attempt:
                    place.doomed = place.doomed or event.code is Code.REPLICA_FAULT
                    if event.code is Code.REPLICA_FAULT and event.id in self.lives:
                        self.lives[event.id].deaths += 1
                    del items[event.id]
                    break
            place.batches = [batch for batch in place.batches if batch[1]]

    def _exited(self, event: ReplicaExited) -> None:
        place = self.places.get(event.slot)
        if place is None or place.incarnation != event.incarnation:
            return
        del self.places[event.slot]
        for position, (_, items) in enumerate(place.batches):
            for request_id in items:
                life = self.lives.get(request_id)
                if life is not None:
                    life.deaths += 1
                    life.must_not_run = life.chunked or (position == 0 and not life.arrived.retryable)

    # --- orders --------------------------------------------------------------------------------------------------

    def saw_reply(self, reply: SendReply, now_s: float) -> None:
        life = self._alive(reply.id, "answered")
        # A deadline that has passed comes before the fact that is being handled, be it the cancellation itself.
        in_time = isinstance(self.cause, (RequestCancelled, FrontLeft)) and life.arrived.deadline_s <= now_s
        if life.cancelled and not in_time:
            raise Violation(f"{reply.id.hex()} was answered after its cancellation")
        if reply.front != life.arrived.front or (reply.front in self.gone_fronts and not in_time):
            raise Violation(f"{reply.id.hex()} was answered to a front that does not wait for it")
        due_s = max(life.arrived.deadline_s, life.arrived_s, self.listening_since_s)
        if now_s > due_s + LATE_REPLY_S:
            raise Violation(f"{reply.id.hex()} was answered {now_s - due_s:.3f} s late")
        if reply.relay:
            event = self.cause
            if not (isinstance(event, ItemFinished) and event.id == reply.id and event.code is Code.OK):
                raise Violation(f"{reply.id.hex()} was given another item's value")
            if event.attempt != life.sent:
                raise Violation(f"{reply.id.hex()} was given the value of another attempt")
            self._place(event.slot, event.incarnation, "was believed")
            self.relays += 1
        if reply.code is Code.OK and not reply.relay:
            raise Violation(f"{reply.id.hex()} was answered ok without a value")
        if reply.code is Code.REPLICA_FAULT:
            raise Violation(f"{reply.id.hex()}: a front was told of a replica's fault")
        if reply.code is Code.POISON_INPUT and life.sent and life.deaths < 2:
            raise Violation(f"{reply.id.hex()} was blamed after {life.deaths} deaths")
        if reply.code in REFUSALS and life.sent:
            raise Violation(f"{reply.id.hex()} was refused with {reply.code} after it had been sent")
        self._end(reply.id)

    def saw_release(self, release: ReleasePayload, now_s: float) -> None:
        life = self._alive(release.id, "released")
        front = life.arrived.front
        heard_s = self._heard_before.get(front, self.fronts_heard_s[front])
        is_silent = now_s >= heard_s + self.settings.front_silence_s
        if not life.cancelled and not is_silent and front not in self.gone_fronts:
            raise Violation(f"{release.id.hex()} was dropped while its front waits")
        self._end(release.id)

    def _end(self, request_id: RequestId) -> None:
        del self.lives[request_id]
        self.ended.add(request_id)

    def saw_batch(self, batch: SendBatch, now_s: float) -> None:
        place = self._place(batch.slot, batch.incarnation, "was sent a batch")
        if not place.ready or place.doomed:
            raise Violation(f"{batch.slot}#{batch.incarnation} was given work that it cannot do")
        if now_s >= max(place.heard_s, self.listening_since_s) + self.settings.replica_silence_s:
            raise Violation(f"{batch.slot}#{batch.incarnation} was given work, and is silent")
        if len(place.batches) >= 2 and not place.concurrency:
            raise Violation(f"{batch.slot}#{batch.incarnation} was given a third batch")
        if place.batches and (batch.alone or place.batches[0][0]):
            raise Violation(f"{batch.slot}#{batch.incarnation} holds company for a request that must run alone")
        model = self.models[batch.slot]
        held = sum(len(items) for _, items in place.batches)
        if not place.concurrency and len(batch.entries) > model.max_batch_size:
            raise Violation(f"{batch.slot}: {len(batch.entries)} items in a batch of at most {model.max_batch_size}")
        if place.concurrency and held + len(batch.entries) > place.concurrency:
            raise Violation(f"{batch.slot} holds {held + len(batch.entries)} items, and takes {place.concurrency}")
        for entry in batch.entries:
            life = self._alive(entry.id, "sent to a process")
            life.sent += 1
            if life.arrived.model != model.name:
                raise Violation(f"{entry.id.hex()} was sent to {batch.slot}")
            if entry.attempt != life.sent:
                raise Violation(f"{entry.id.hex()} was sent {life.sent} times with attempt {entry.attempt}")
            if life.must_not_run:
                raise Violation(f"{entry.id.hex()} must not run twice, and was sent again")
            if life.deaths and not (batch.alone and len(batch.entries) == 1):
                raise Violation(f"{entry.id.hex()} witnessed a death and has company")
            if life.deaths >= 2:
                raise Violation(f"{entry.id.hex()} was sent again after {life.deaths} deaths")
        if not place.batches:
            place.progressed_s = now_s
        items = {entry.id: entry.attempt for entry in batch.entries}
        if place.concurrency and place.batches:
            place.batches[0][1].update(items)
        else:
            place.batches.append((batch.alone, items))

    def saw_chunk(self, chunk: RelayChunk) -> None:
        life = self._alive(chunk.id, "sent a chunk")
        if not (isinstance(self.cause, ChunkArrived) and self.cause.id == chunk.id):
            raise Violation(f"{chunk.id.hex()} was given another item's chunk")
        if self.cause.attempt != life.sent:
            raise Violation(f"{chunk.id.hex()} was given a chunk of another attempt")
        self._place(self.cause.slot, self.cause.incarnation, "was believed")
        life.chunked = True

    def saw_spawn(self, spawn: SpawnReplica, now_s: float) -> None:
        if spawn.slot in self.places:
            raise Violation(f"{spawn.slot} was filled while it was taken")
        if spawn.incarnation != self.incarnations.get(spawn.slot, 0) + 1:
            raise Violation(f"{spawn.slot}: incarnation {spawn.incarnation} follows {self.incarnations[spawn.slot]}")
        self.incarnations[spawn.slot] = spawn.incarnation
        self.places[spawn.slot] = Place(spawn.incarnation, born_s=now_s, heard_s=now_s)
        loads = sum(not place.ready for place in self.places.values())
        if loads > self.settings.parallel_loads:
            raise Violation(f"{loads} loads at once, {self.settings.parallel_loads} are allowed")

    def saw_kill(self, kill: KillReplica) -> None:
        if isinstance(self.cause, ReplicaExited) and (self.cause.slot, self.cause.incarnation) == (
            kill.slot,
            kill.incarnation,
        ):
            return  # its time was up in the very turn in which it was gone
        self._place(kill.slot, kill.incarnation, "was killed").doomed = True

    def saw_stop(self, slot: SlotName, incarnation: int) -> None:
        self._place(slot, incarnation, "was told to stop").doomed = True

    def saw_server_stop(self, stop: StopServer) -> None:
        if self.stopped is not None:
            raise Violation("the server was stopped twice")
        if self.places:
            raise Violation(f"the server was stopped while {sorted(self.places)} still had processes")
        self.stopped = stop

    # --- judging -------------------------------------------------------------------------------------------------

    def judge_turn(self, now_s: float) -> None:
        """After each call of the broker: nobody rests while there is work, and no deadline has passed unnoticed."""
        assigned = {item for place in self.places.values() for _, items in place.batches for item in items}
        waiting = {life.arrived.model for life in self.lives.values() if life.arrived.id not in assigned}
        # The order is strict, so one that waits for a process of its own may hold up those behind it.
        to_be_alone = {life.arrived.model for life in self.lives.values() if life.deaths}
        for life in self.lives.values():
            if now_s > life.arrived.deadline_s + LATE_REPLY_S:
                raise Violation(f"{life.arrived.id.hex()} has no answer {now_s - life.arrived.deadline_s:.3f} s late")
        for slot, place in self.places.items():
            if not place.doomed:
                self._judge_patience(slot, place, now_s)
            heard = now_s < place.heard_s + self.settings.replica_silence_s
            model = self.models[slot]
            if not (place.ready and heard and model.name in waiting) or place.doomed:
                continue
            if not place.batches and (place.concurrency or model.max_wait_s == 0.0):
                raise Violation(f"{slot} rests while a request waits for {model.name}")
            if place.batches and model.name not in to_be_alone:
                [(alone, items), *_] = place.batches
                if not alone and len(items) < place.concurrency:
                    raise Violation(f"{slot} has room while a request waits for {model.name}")

    def _judge_patience(self, slot: SlotName, place: Place, now_s: float) -> None:
        """Whether a process that loads, hangs or is silent is still endured too long."""
        model = self.models[slot]
        since_s = max(self.listening_since_s, place.progressed_s)
        hang_s = model.batch_timeout_s + self.settings.pulse_tolerance_s
        if place.batches and now_s > since_s + hang_s + LATE_KILL_S:
            raise Violation(f"{slot} hangs for {now_s - since_s:.3f} s")
        since_s = max(self.listening_since_s, place.heard_s)
        silence_s = self.settings.replica_silence_kill_s
        if place.ready and not place.batches and now_s > since_s + silence_s + LATE_KILL_S:
            raise Violation(f"{slot} is silent for {now_s - since_s:.3f} s")
        if not place.ready and now_s > max(self.listening_since_s, place.born_s) + model.load_timeout_s + LATE_KILL_S:
            raise Violation(f"{slot} loads for {now_s - place.born_s:.3f} s")

    def judge_end(self, payloads: int, kills: dict[RequestId, int]) -> None:
        """After the server has stopped."""
        if self.lives:
            raise Violation(f"{[request_id.hex() for request_id in self.lives]} were never answered")
        if payloads:
            raise Violation(f"{payloads} payloads are kept for nobody")
        for request_id, count in kills.items():
            if count > 2:
                raise Violation(f"{request_id.hex()} ended {count} processes")

    def _alive(self, request_id: RequestId, what: str) -> Life:
        if request_id in self.ended:
            raise Violation(f"{request_id.hex()} was {what} after its end")
        if request_id not in self.lives:
            raise Violation(f"{request_id.hex()} was {what}, but nobody sent it")
        return self.lives[request_id]

    def _place(self, slot: SlotName, incarnation: int, what: str) -> Place:
        place = self.places.get(slot)
        if place is None or place.incarnation != incarnation:
            raise Violation(f"{slot}#{incarnation} {what}, but it does not hold the slot")
        return place

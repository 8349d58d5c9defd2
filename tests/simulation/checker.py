"""What must hold of every order, judged from outside: by the facts delivered and the orders given, never by the core's
own records. What must hold between turns, and at the end, is in `judge.py`.

A violation raises `Violation` with the promise that was broken.
"""

from __future__ import annotations

from collections import Counter

from model_worker.broker.effects import (
    KillReplica,
    RelayChunk,
    ReleasePayload,
    SendBatch,
    SendCancel,
    SendReply,
    SpawnReplica,
    StopServer,
)
from model_worker.broker.events import (
    ChunkArrived,
    FrontLeft,
    ItemFinished,
    RequestArrived,
    RequestCancelled,
)
from model_worker.broker.settings import BrokerSettings
from shared.errors import Code
from shared.messages import RequestId, SlotName
from tests.simulation.administration import Administered
from tests.simulation.outside import Life, Place
from tests.simulation.promises import Promise, Violation

LATE_REPLY_S = 0.25
PROCESSES_PER_POISON_MAX = 2
# What is said of a request on arrival; it cannot be the end of one that was sent to a process.
REFUSALS = frozenset({Code.OVERLOADED, Code.UNKNOWN_MODEL, Code.TOO_LARGE})


class Checker(Administered):
    """Sees every fact and every order."""

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        self.stopped: StopServer | None = None
        self.relays = 0
        # By model and code: requests that were refused on arrival, and those that ended later.
        self.refused: Counter[tuple[str, str]] = Counter()
        self.finished: Counter[tuple[str, str]] = Counter()
        # Items that ended while a process held them, which it has not been told yet.
        self.owed_cancels: set[tuple[SlotName, int, RequestId]] = set()
        self.kills: Counter[RequestId] = Counter()
        # When, at last, as many processes loaded as may.
        self.no_room_s = 0.0

    # --- answers -------------------------------------------------------------------------------------------------

    def saw_reply(self, reply: SendReply, now_s: float) -> None:
        name = reply.id.hex()
        life = self._alive(reply.id, "answered")
        # What a timer says, of a deadline or of a hang, comes before the fact that is being handled, be it the
        # cancellation itself.
        place = self.places.get((SlotName(reply.slot), reply.incarnation))
        is_time_up = life.arrived.deadline_s <= now_s or (
            place is not None and place.killed and place.doomed_s == now_s
        )
        in_time = isinstance(self.cause, (RequestCancelled, FrontLeft)) and is_time_up
        if life.cancelled and not in_time:
            raise Violation(Promise.NOBODY_WAITS, f"{name} was answered after its cancellation")
        if reply.front != life.arrived.front or (reply.front in self.gone_fronts and not in_time):
            raise Violation(Promise.NOBODY_WAITS, f"{name} was answered to a front that does not wait for it")
        due_s = max(life.arrived.deadline_s, life.arrived_s, self.listening_since_s)
        if now_s > due_s + LATE_REPLY_S:
            raise Violation(Promise.IN_TIME, f"{name} was answered {now_s - due_s:.3f} s late")
        if reply.relay:
            self._judge_value(reply, life)
        elif reply.code is Code.OK:
            raise Violation(Promise.OWN_VALUE, f"{name} was answered ok without a value")
        if not self._is_its_process_speaking(reply):
            self._judge_code(reply, life, now_s)
        (self.refused if self._is_at_the_door(reply.id) else self.finished)[life.arrived.model, reply.code.value] += 1
        self._end(reply.id, tells_process=not self._is_its_process_speaking(reply))

    def _judge_value(self, reply: SendReply, life: Life) -> None:
        name, event = reply.id.hex(), self.cause
        if not (isinstance(event, ItemFinished) and event.id == reply.id and event.code is Code.OK):
            raise Violation(Promise.OWN_VALUE, f"{name} was given another item's value")
        if event.attempt != life.sent:
            raise Violation(Promise.OWN_VALUE, f"{name} was given the value of another attempt")
        self._place(event.slot, event.incarnation, "was believed")
        self.ever_slots[event.slot].deaths = 0
        self.relays += 1

    def _judge_code(self, reply: SendReply, life: Life, now_s: float) -> None:
        name = reply.id.hex()
        if reply.code is Code.POISON_INPUT:
            until_s = self.bans.get((life.arrived.model, life.arrived.digest), -1.0)
            if life.deaths < PROCESSES_PER_POISON_MAX and (life.sent or until_s < now_s):
                raise Violation(Promise.BLAME, f"{name} was blamed after {life.deaths} deaths")
        if reply.code in REFUSALS and life.sent:
            raise Violation(Promise.BLAME, f"{name} was refused with {reply.code} after it had been sent")
        if reply.code is Code.DRAINING and self.grace_ends_s is None and not self.is_shut:
            raise Violation(Promise.DRAINING, f"{name} was told of an end that nobody asked for")
        if reply.code is Code.MODEL_LOADING and self._is_at_the_door(reply.id) and not life.to_shut_door:
            raise Violation(Promise.REST, f"{name} was turned away from a model that nobody has unloaded")

    def _is_at_the_door(self, request_id: RequestId) -> bool:
        """Whether what becomes of the request follows from its arrival."""
        return isinstance(self.cause, RequestArrived) and self.cause.id == request_id

    def _is_its_process_speaking(self, reply: SendReply) -> bool:
        """Whether the reply passes on what the process that ran the item has said."""
        if reply.code is Code.REPLICA_FAULT:
            raise Violation(Promise.BLAME, f"{reply.id.hex()}: a front was told of a replica's fault")
        event = self.cause
        return isinstance(event, ItemFinished) and event.id == reply.id and event.code is reply.code

    def saw_release(self, release: ReleasePayload, now_s: float) -> None:
        life = self._alive(release.id, "released")
        front = life.arrived.front
        heard_s = self.heard_before.get(front, self.fronts_heard_s[front])
        is_silent = now_s >= heard_s + self.settings.front_silence_s
        if not life.cancelled and not is_silent and front not in self.gone_fronts:
            raise Violation(Promise.ONE_ANSWER, f"{release.id.hex()} was dropped while its front waits")
        self.finished[life.arrived.model, Code.CANCELLED.value] += 1
        self._end(release.id, tells_process=True)

    def _end(self, request_id: RequestId, *, tells_process: bool) -> None:
        life = self.lives.pop(request_id)
        self.waiting[life.arrived.model].pop(request_id, None)
        self.ended.add(request_id)
        if life.arrived.model in self.stations and not self._is_at_the_door(request_id):
            self.stations[life.arrived.model].used_s = self.now_s
        if tells_process and life.place is not None:
            self.owed_cancels.add((*life.place, request_id))

    def saw_chunk(self, chunk: RelayChunk) -> None:
        name = chunk.id.hex()
        life = self._alive(chunk.id, "sent a chunk")
        if not (isinstance(self.cause, ChunkArrived) and self.cause.id == chunk.id):
            raise Violation(Promise.OWN_VALUE, f"{name} was given another item's chunk")
        if self.cause.attempt != life.sent:
            raise Violation(Promise.OWN_VALUE, f"{name} was given a chunk of another attempt")
        self._place(self.cause.slot, self.cause.incarnation, "was believed")
        life.chunked = True

    # --- work ----------------------------------------------------------------------------------------------------

    def saw_batch(self, batch: SendBatch, now_s: float) -> None:
        name = f"{batch.slot}#{batch.incarnation}"
        place = self._place(batch.slot, batch.incarnation, "was sent a batch")
        if not place.is_ready:
            raise Violation(Promise.FITNESS, f"{name} was given work that it cannot do")
        if now_s >= max(place.heard_s, self.listening_since_s) + self.settings.replica_silence_s:
            raise Violation(Promise.FITNESS, f"{name} was given work, and is silent")
        self._judge_credit(batch, place)
        self._judge_order(batch, place)
        for entry in batch.entries:
            life = self._alive(entry.id, "sent to a process")
            life.sent += 1
            self._judge_entry(batch, life, entry.attempt)
            life.place = (batch.slot, batch.incarnation)
            self.waiting[life.arrived.model].pop(entry.id, None)
        if not place.batches:
            place.progressed_s = now_s
        items = {entry.id: entry.attempt for entry in batch.entries}
        if place.concurrency and place.batches:
            place.batches[0][1].update(items)
        else:
            place.batches.append((batch.alone, items))

    def _judge_credit(self, batch: SendBatch, place: Place) -> None:
        name, model = f"{batch.slot}#{batch.incarnation}", self.model_of(batch.slot)
        if place.batches and (batch.alone or place.batches[0][0]):
            raise Violation(Promise.ALONE, f"{name} holds company for a request that must run alone")
        if place.concurrency:
            held = place.held + len(batch.entries)
            if held > place.concurrency:
                raise Violation(Promise.CREDIT, f"{name} holds {held} items, and takes {place.concurrency}")
            return
        if len(place.batches) >= 2:
            raise Violation(Promise.CREDIT, f"{name} was given a third batch")
        if len(batch.entries) > model.max_batch_size:
            raise Violation(
                Promise.CREDIT, f"{name}: {len(batch.entries)} items in a batch of at most {model.max_batch_size}"
            )

    def _judge_order(self, batch: SendBatch, place: Place) -> None:
        waiting = self.waiting[self.model_of(batch.slot).name].values()
        if place.concurrency and not batch.alone:
            # Those that must be alone wait until a process is empty, while the others go on.
            waiting = [life for life in waiting if not life.deaths]  # type: ignore[assignment]
        first = min(waiting, key=lambda life: life.urgency, default=None)
        if first is not None and all(entry.id != first.arrived.id for entry in batch.entries):
            raise Violation(Promise.ORDER, f"{first.arrived.id.hex()} was passed over by a batch for {batch.slot}")

    def _judge_entry(self, batch: SendBatch, life: Life, attempt: int) -> None:
        name = life.arrived.id.hex()
        if life.arrived.model != self.model_of(batch.slot).name:
            raise Violation(Promise.OWN_VALUE, f"{name} was sent to {batch.slot}")
        if attempt != life.sent:
            raise Violation(Promise.FENCE, f"{name} was sent {life.sent} times with attempt {attempt}")
        if life.must_not_run:
            raise Violation(Promise.ONE_RETRY, f"{name} must not run twice, and was sent again")
        if life.deaths and not (batch.alone and len(batch.entries) == 1):
            raise Violation(Promise.ALONE, f"{name} witnessed a death and has company")
        if life.sent > 2 or life.deaths >= PROCESSES_PER_POISON_MAX:
            raise Violation(Promise.ONE_RETRY, f"{name} was sent {life.sent} times, after {life.deaths} deaths")

    def saw_cancel(self, cancel: SendCancel) -> None:
        self._place(cancel.slot, cancel.incarnation, "was told of cancelled items")
        for request_id in cancel.ids:
            if request_id in self.lives:
                raise Violation(Promise.ONE_ANSWER, f"{request_id.hex()} was taken from {cancel.slot}, and is alive")
            self.owed_cancels.discard((cancel.slot, cancel.incarnation, request_id))

    # --- processes -----------------------------------------------------------------------------------------------

    def saw_spawn(self, spawn: SpawnReplica, now_s: float) -> None:
        slot = self.slots.get(spawn.slot)
        if slot is None:
            raise Violation(Promise.SLOT_TABLE, f"{spawn.slot} was filled, and is not planned")
        order, others = self.station_of(spawn.slot).order, self.places_of(spawn.slot)
        is_renewed = order is not None and order.action == "reload"
        if len(others) > 1 or not (is_renewed or all(other.draining for other in others)):
            raise Violation(Promise.SLOT_TABLE, f"{spawn.slot} was filled while it was taken")
        if self.station_of(spawn.slot).is_closed and not self.waiting[self.model_of(spawn.slot).name]:
            raise Violation(Promise.REST, f"{spawn.slot} was filled, and its model is unloaded")
        if spawn.incarnation != slot.incarnations + 1:
            raise Violation(Promise.FENCE, f"{spawn.slot}: incarnation {spawn.incarnation} follows {slot.incarnations}")
        slot.incarnations = spawn.incarnation
        self.places[spawn.slot, spawn.incarnation] = Place(spawn.incarnation, born_s=now_s, heard_s=now_s)
        loads = sum(not place.was_ready for place in self.places.values())
        if loads > self.settings.parallel_loads:
            raise Violation(Promise.LOADS, f"{loads} loads at once, {self.settings.parallel_loads} are allowed")

    def saw_kill(self, kill: KillReplica, now_s: float) -> None:
        if self.has_just_gone(kill.slot, kill.incarnation):
            return  # its time was up in the very turn in which it was gone
        place = self._place(kill.slot, kill.incarnation, "was killed")
        place.doom(now_s)
        place.killed = True

    def saw_server_stop(self, stop: StopServer) -> None:
        if self.stopped is not None:
            raise Violation(Promise.DRAINING, "the server was stopped twice")
        if self.places:
            raise Violation(Promise.DRAINING, f"the server was stopped over the processes of {sorted(self.places)}")
        self.stopped = stop

    def saw_death(self, culprits: list[RequestId]) -> None:
        """A process ended, and these items are what ends processes."""
        for request_id in culprits:
            self.kills[request_id] += 1
            if self.kills[request_id] > PROCESSES_PER_POISON_MAX:
                raise Violation(Promise.POISON, f"{request_id.hex()} ended {self.kills[request_id]} processes")

    # --- small change --------------------------------------------------------------------------------------------

    def _alive(self, request_id: RequestId, what: str) -> Life:
        if request_id in self.ended:
            raise Violation(Promise.ONE_ANSWER, f"{request_id.hex()} was {what} after its end")
        if request_id not in self.lives:
            raise Violation(Promise.ONE_ANSWER, f"{request_id.hex()} was {what}, but nobody sent it")
        return self.lives[request_id]

"""The broker core: facts in, orders out.

Owns every decision about requests and model processes. Performs nothing and knows no clock, socket or process: the
shell hands in events with the time, and carries out the effects in the order given.

Theory of operation
===================

A request is QUEUED in its model's backlog until a replica has credit (late binding), then RUNNING in a replica, or
PREFETCHED behind the batch that runs there, until it has ENDED. It ends exactly once: with one `SendReply`, or with
`ReleasePayload` when nobody waits for it any more. `ledger` keeps that promise, whatever happens here.

A replica is one incarnation of a slot: LOADING until it says READY, and GONE when its exit was seen; in between it may
be FAILING, STOPPING or KILLED, which all mean "no more work, exit awaited". `slots` keeps these. What a process held
when it ended is decided here, because it is about requests.

Every state's transitions are a table in `records`. Three rules tie requests and replicas together:

1. Credit. A replica whose model batches continuously holds at most as many requests as it said; each is sent as it
   arrives, to the replica with the most room, and joins those that run there. Any other holds at most one running and
   one prefetched batch. An idle one gets work at once, or after
   `max_wait_s` where that is configured. A busy one gets its prefetched batch only when that batch is full and no
   replica is idle: sending a smaller one early would only keep it from growing. Credit comes back when the replica has
   reported the last item, also of items that ended before.

2. Fences. What a replica says counts only if its incarnation holds the slot, the item is in one of its batches, and
   the attempt is the present one. All else is counted in `fenced` and dropped.

3. Suspicion. Requests that were in a process when it died or hung run next time alone, so that the second death has
   one suspect. `suspicion` tells the whole of it.

Time. `handle` first lets every timer ring that is due, then takes the event, then settles: what follows from both is
ordered once. A deadline that is reached is therefore over, even if the result is the very event being handled. Silence,
hangs and missing exits are judged by what was *not* heard, which means nothing if the loop did not listen. A call that
comes `LATE_S` after `wake_at_s` counts as such: the time since the call before is added to all that peers are granted.

The end. `ending` drains the server when it is asked to, and stops it when no model can ever be loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from model_worker.broker import views
from model_worker.broker.admission import LOADING_RETRY_AFTER_S, failed, refuse_at_door
from model_worker.broker.dispatch import Dispatcher
from model_worker.broker.effects import Effect, Log, RelayChunk
from model_worker.broker.ending import Ending
from model_worker.broker.events import (
    ChunkArrived,
    DrainRequested,
    Event,
    FrontId,
    FrontJoined,
    FrontLeft,
    FrontPulsed,
    ItemFinished,
    PoisonDigested,
    ReplicaConnected,
    ReplicaExited,
    ReplicaPhaseChanged,
    ReplicaPulsed,
    ReplicaSpawned,
    RequestArrived,
    RequestCancelled,
    SpawnFailed,
    TimePassed,
)
from model_worker.broker.invariants import validate
from model_worker.broker.ledger import Ledger
from model_worker.broker.models import Model
from model_worker.broker.records import Ban, Drain, Front, Replica, ReplicaState, Request, RequestState, Slot
from model_worker.broker.settings import BrokerSettings
from model_worker.broker.slots import SlotKeeper, end_of
from model_worker.broker.suspicion import Suspicion
from model_worker.broker.timers import Timers
from model_worker.broker.words import duration
from shared.errors import Code
from shared.messages import ModelCounters, ModelState, Phase, SlotName, SlotState

# A loop that is later than this did not listen meanwhile. Well above what a busy turn takes, and below every silence
# limit that anyone would configure.
LATE_S = 1.0


class Broker:
    """One model server's decisions. Not thread-safe; never blocks; raises only on its own bugs."""

    def __init__(self, settings: BrokerSettings, now_s: float) -> None:
        self.settings = settings
        # The parts. They share the list of effects, which `handle` empties, and the timers.
        self._effects: list[Effect] = []
        self.timers: Timers[object] = Timers()
        slots = [Slot(planned.name, planned.model, planned.device) for planned in settings.slots]
        self.models: dict[str, Model] = {
            model.name: Model(model, tuple(slot for slot in slots if slot.model == model.name))
            for model in settings.models
        }
        self.keeper = SlotKeeper(settings, slots, self.models, self.timers, self._effects)
        self.ledger = Ledger(self.models, self.timers, self._effects)
        self.suspicion = Suspicion(self.models, self.ledger, self.timers, self._effects)
        self.dispatcher = Dispatcher(self.keeper, self.ledger, self.timers, self._effects)
        self.ending = Ending(self.models, self.keeper, self.ledger, self.timers, self._effects)
        # Fronts that were heard within `front_silence_s`.
        self.fronts: dict[FrontId, Front] = {}
        # Messages dropped because they came from a dead incarnation or were about an ended attempt.
        self.fenced = 0
        # The time of the latest call.
        self._now_s = now_s
        # Models whose queue or credit changed this turn, in the order they did.
        self._stirred: dict[str, Model] = {}
        self._handlers: dict[type[Event], Callable[..., None]] = {
            FrontJoined: self._front_heard,
            FrontPulsed: self._front_heard,
            FrontLeft: self._front_left,
            RequestArrived: self._request_arrived,
            RequestCancelled: self._request_cancelled,
            ReplicaSpawned: self._replica_spawned,
            SpawnFailed: self._spawn_failed,
            ReplicaConnected: self._replica_connected,
            ReplicaPhaseChanged: self._replica_phase_changed,
            ReplicaPulsed: self._replica_pulsed,
            ItemFinished: self._item_finished,
            ChunkArrived: self._chunk_arrived,
            ReplicaExited: self._replica_exited,
            PoisonDigested: self._poison_digested,
            DrainRequested: self._drain_requested,
            TimePassed: self._time_passed,
        }
        # Whose timer it is says what its ring means.
        self._alarms: dict[type, Callable[..., None]] = {
            Request: self._deadline_reached,
            Slot: self._slot_due,
            Front: self._front_due,
            Model: self._wait_over,
            Ban: self._ban_over,
            Drain: self._grace_over,
        }

    # --- the shell's side ----------------------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Effect]:
        """The first spawns."""
        self._settle(now_s)
        return self._take_effects()

    def handle(self, event: Event, now_s: float, *, more_follow: bool = False) -> list[Effect]:
        """Takes one fact and returns what to do about it, in order.

        `now_s` must never go back. With `more_follow` nothing is given to replicas yet: the caller promises another
        event of the same turn, so that requests which arrive together can go together.
        """
        self._forgive_lateness(now_s)
        while (subject := self.timers.pop_due(now_s)) is not None:
            self._alarms[type(subject)](subject, now_s)
        self._handlers[type(event)](event, now_s)
        if not more_follow:
            self._settle(now_s)
        return self._take_effects()

    @property
    def wake_at_s(self) -> float | None:
        """When to send `TimePassed`, unless something else happens before; None: not before something does."""
        return None if self.ending.stopped else self.timers.next_s

    @property
    def draining(self) -> bool:
        return self.ending.drain is not None

    def refused_digests(self, model: str) -> bool:
        """Whether requests of this model need their `digest`."""
        return model in self.models and bool(self.models[model].bans)

    def model_states(self) -> tuple[ModelState, ...]:
        return tuple(map(views.model_state, self.models.values()))

    def slot_states(self, now_s: float) -> tuple[SlotState, ...]:
        return tuple(views.slot_state(slot, now_s) for slot in self.keeper.slots.values())

    def counters(self) -> tuple[ModelCounters, ...]:
        return tuple(model.tally.totals(model.name) for model in self.models.values())

    def validate(self, now_s: float) -> None:
        """Raises AssertionError if anything is not as it always should be after a turn. Costs O(everything)."""
        validate(self, now_s)

    # --- fronts and their requests -------------------------------------------------------------------------------

    def _front_heard(self, event: FrontJoined | FrontPulsed, now_s: float) -> None:
        self._hear_front(event.front, now_s)

    def _hear_front(self, front_id: FrontId, now_s: float) -> Front:
        front = self.fronts.get(front_id)
        if front is None:
            front = self.fronts[front_id] = Front(front_id, now_s)
            self.timers.set(front, now_s + self.settings.front_silence_s)
        front.heard_s = now_s
        return front

    def _front_left(self, event: FrontLeft, now_s: float) -> None:
        front = self.fronts.get(event.front)
        if front is not None:
            self._forget_front(front, event.reason)

    def _front_due(self, front: Front, now_s: float) -> None:
        silent_at_s = front.heard_s + self.settings.front_silence_s
        if silent_at_s <= now_s:
            self._forget_front(front, f"not heard for {self.settings.front_silence_s:g} s")
        else:
            self.timers.set(front, silent_at_s)

    def _forget_front(self, front: Front, reason: str) -> None:
        fields = {"front": front.id.hex(), "reason": reason, "cancelled": len(front.requests)}
        self._log("warning" if front.requests else "info", "front_left", fields)
        self._release(list(front.requests.values()))
        self.timers.clear(front)
        del self.fronts[front.id]

    def _request_arrived(self, event: RequestArrived, now_s: float) -> None:
        front = self._hear_front(event.front, now_s)
        if event.id in self.ledger.requests:
            # Answering would give the first one two answers.
            self._log("debug", "request_duplicated", {"request_id": event.request_id, "model": event.model})
            return
        urgency_s = now_s + event.priority * self.settings.ageing_s_per_priority
        refusal = refuse_at_door(self.models, event, urgency_s, now_s, draining=self.draining)
        if refusal is not None:
            self.ledger.refuse(event, refusal)
            return
        self.ledger.admit(event, front, urgency_s, now_s)
        self._stir(event.model)

    def _request_cancelled(self, event: RequestCancelled, now_s: float) -> None:
        if event.front in self.fronts:
            self._hear_front(event.front, now_s)
        request = self.ledger.requests.get(event.id)
        if request is not None and request.front.id == event.front:
            self._release([request])

    def _release(self, requests: list[Request]) -> None:
        self.ledger.release(requests)
        for request in requests:
            self._stir(request.model)

    def _deadline_reached(self, request: Request, now_s: float) -> None:
        model = self.models[request.model]
        waited = f"within {duration(now_s - request.arrived_s)}"
        if request.state is RequestState.QUEUED and not model.is_loaded:
            message = f"model {model.name!r} did not become ready {waited}: {views.model_state(model).reason}"
            self.ledger.answer(request, Code.MODEL_LOADING, message, LOADING_RETRY_AFTER_S)
        else:
            was = "was running" if request.state is RequestState.RUNNING else "was still queued"
            message = f"not done {waited}, the time it was given: the request {was} at model {model.name!r}"
            self.ledger.answer(request, Code.DEADLINE_EXCEEDED, message)
        self._stir(request.model)

    # --- replicas ------------------------------------------------------------------------------------------------

    def _replica_spawned(self, event: ReplicaSpawned, now_s: float) -> None:
        replica = self._current(event.slot, event.incarnation)
        if replica is not None:
            replica.pid = event.pid

    def _spawn_failed(self, event: SpawnFailed, now_s: float) -> None:
        replica = self._current(event.slot, event.incarnation)
        if replica is not None:
            self.keeper.spawn_failed(self.keeper.slots[event.slot], event.reason, now_s)
            self._stir(replica.model)

    def _replica_connected(self, event: ReplicaConnected, now_s: float) -> None:
        self._hear_replica(event.slot, event.incarnation, now_s)

    def _replica_phase_changed(self, event: ReplicaPhaseChanged, now_s: float) -> None:
        replica = self._hear_replica(event.slot, event.incarnation, now_s)
        if replica is None:
            return
        self.keeper.changed_phase(replica, event, now_s)
        model = self.models[replica.model]
        if replica.state is ReplicaState.READY and event.phase is Phase.READY:
            model.mixes_parameters = event.mixes_parameters
            model.backlog.set_mixes_parameters(event.mixes_parameters)
            model.concurrency = event.concurrency
        self._stir(model.name)

    def _replica_pulsed(self, event: ReplicaPulsed, now_s: float) -> None:
        replica = self._hear_replica(event.slot, event.incarnation, now_s)
        if replica is not None:
            self.keeper.pulsed(replica, event, now_s)

    def _item_finished(self, event: ItemFinished, now_s: float) -> None:
        replica = self._hear_replica(event.slot, event.incarnation, now_s)
        if replica is None:
            return
        batch = replica.batch_of(event.id, event.attempt)
        if batch is None:
            self.fenced += 1
            return
        replica.progressed_s = now_s
        request = batch.open.pop(event.id)
        if event.code is Code.REPLICA_FAULT and replica.state is ReplicaState.READY:
            # Whatever it were given now would die with it.
            self.keeper.fail(replica, event.message or "the process is no longer usable", now_s)
        if request.batch is not batch:
            self.fenced += 1  # it ended before; the report only returns credit
        elif event.code is Code.REPLICA_FAULT:
            self.suspicion.shared_a_fault(request, event)
        else:
            self._item_reported(request, replica, event, now_s)
        self.dispatcher.return_credit(self.models[replica.model], replica, batch, now_s)
        self._stir(replica.model)

    def _item_reported(self, request: Request, replica: Replica, event: ItemFinished, now_s: float) -> None:
        self.keeper.slots[replica.slot].requests += 1
        if event.code is Code.OK:
            self.keeper.succeeded(replica)
            model = self.models[request.model]
            model.pace.observe_item(request.body_bytes, event.cost)
            if replica.concurrency:
                model.observe_continuous(now_s - request.started_s, event.batch_size)
        self.ledger.relay(request, event)

    def _chunk_arrived(self, event: ChunkArrived, now_s: float) -> None:
        replica = self._hear_replica(event.slot, event.incarnation, now_s)
        if replica is None:
            return
        batch = replica.batch_of(event.id, event.attempt)
        if batch is None or batch.open[event.id].batch is not batch:
            self.fenced += 1
            return
        replica.progressed_s = now_s
        request = batch.open[event.id]
        request.chunked = True
        self._effects.append(RelayChunk(request.front.id, request.id))

    def _slot_due(self, slot: Slot, now_s: float) -> None:
        replica = slot.replica
        if replica is not None:
            if self.keeper.is_hung(replica, now_s):
                self._end_hung(replica)
            else:
                self.keeper.check(replica, now_s)
        self.keeper.arm(slot, now_s)

    def _end_hung(self, replica: Replica) -> None:
        reason = f"hung: no progress for {self.models[replica.model].settings.batch_timeout_s:g} s"
        self.keeper.kill(replica, "hung", reason, dump_stacks=True)
        self.suspicion.hung(replica, reason)

    def _replica_exited(self, event: ReplicaExited, now_s: float) -> None:
        replica = self._current(event.slot, event.incarnation)
        if replica is None:
            return
        reason = end_of(replica, event.exit_code)
        witnesses = replica.live_requests()
        self.keeper.exited(self.keeper.slots[event.slot], event.exit_code, now_s)
        for request in witnesses:
            self.suspicion.witnessed_death(request, replica, reason)
        self._stir(replica.model)

    def _poison_digested(self, event: PoisonDigested, now_s: float) -> None:
        self.suspicion.ban(self.models[event.model], event.digest, now_s + self.settings.poison_ban_s)

    def _ban_over(self, ban: Ban, now_s: float) -> None:
        self.suspicion.lift_ban(ban)

    # --- time and the end ----------------------------------------------------------------------------------------

    def _time_passed(self, event: TimePassed, now_s: float) -> None:
        """The timers have rung already."""

    def _wait_over(self, model: Model, now_s: float) -> None:
        self._stir(model.name)

    def _grace_over(self, drain: Drain, now_s: float) -> None:
        """Settling looks at the grace."""

    def _forgive_lateness(self, now_s: float) -> None:
        due_s = self.timers.next_s
        if due_s is not None and now_s > due_s + LATE_S:
            deaf_s = now_s - self._now_s
            self._log("warning", "loop_late", {"late_s": round(now_s - due_s, 3)})
            for replica in self.keeper.replicas():
                replica.heard_s += deaf_s
                replica.progressed_s += deaf_s
                replica.due_s += deaf_s
            for front in self.fronts.values():
                front.heard_s += deaf_s
        self._now_s = now_s

    def _drain_requested(self, event: DrainRequested, now_s: float) -> None:
        self.ending.ask(event.grace_s, now_s)
        for model in self.models:
            self._stir(model)  # batches that were held back for company go now

    # --- settling ------------------------------------------------------------------------------------------------

    def _settle(self, now_s: float) -> None:
        """Orders what follows from this turn's changes."""
        if self.ending.stopped:
            self._stirred.clear()
            return
        for model in self._stirred.values():
            if model.is_failed:
                self._fail_queued(model, now_s)
        self.ending.go_on(now_s)
        self.ledger.send_cancels()
        for model in self._stirred.values():
            self.dispatcher.dispatch(model, now_s, may_hold=not self.draining)
        self._stirred.clear()
        self.keeper.spawn(now_s, self.ending.wants)
        self.ending.finish()

    def _fail_queued(self, model: Model, now_s: float) -> None:
        refusal = failed(model, now_s)
        for request in list(model.backlog):
            self.ledger.answer(request, refusal.code, refusal.message, refusal.retry_after_s)

    # --- small change --------------------------------------------------------------------------------------------

    def _current(self, slot: SlotName, incarnation: int) -> Replica | None:
        replica = self.keeper.current(slot, incarnation)
        if replica is None:
            self.fenced += 1
        return replica

    def _hear_replica(self, slot: SlotName, incarnation: int, now_s: float) -> Replica | None:
        replica = self._current(slot, incarnation)
        if replica is not None:
            if replica.silent:
                self._stir(replica.model)
            self.keeper.heard(replica, now_s)
        return replica

    def _stir(self, model: str) -> None:
        self._stirred[model] = self.models[model]

    def _log(self, level: Literal["debug", "info", "warning", "error"], event: str, fields: dict[str, object]) -> None:
        self._effects.append(Log(level, event, fields))

    def _take_effects(self) -> list[Effect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects

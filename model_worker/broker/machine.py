"""The broker core: facts in, orders out.

Owns every decision about requests and model processes. Performs nothing and knows no clock, socket or process: the
shell hands in events with the time, and carries out the effects in the order given.

Theory of operation
===================

A request is QUEUED in its model's backlog until a replica has credit (late binding), then RUNNING in a replica, or
PREFETCHED behind the batch that runs there, until it has ENDED. It ends exactly once: with one `SendReply`, or with
`ReleasePayload` when nobody waits for it any more. `ledger` keeps that promise, whatever happens here.

A replica is one incarnation of a slot: LOADING until it says READY, and GONE when its exit was seen; in between it may
be DRAINING, which means "no more work, but it finishes what it holds", or FAILING, STOPPING or KILLED, which all mean
"no more work, exit awaited". `processes` keeps these, and `slots` which of them fills which slot. What a process held
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

Management. A model is SERVING, or an operator had it unloaded, or it is IDLE because nobody asked for it (`disuse`).
What an operator orders and what takes its time is an errand: `managing` lets it begin and answers it once, and in each
turn it looks at the records and orders what is missing (`errands`).

The end. `ending` drains the server when it is asked to, and stops it when no model can ever be loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from model_worker.broker import views
from model_worker.broker.admission import LOADING_RETRY_AFTER_S, failed, refuse_at_door
from model_worker.broker.dispatch import Dispatcher
from model_worker.broker.disuse import DisuseWatch
from model_worker.broker.effects import Effect, Log
from model_worker.broker.ending import Ending
from model_worker.broker.events import (
    ChunkArrived,
    DrainRequested,
    Event,
    FrontJoined,
    FrontLeft,
    FrontPulsed,
    ItemFinished,
    ManageRequested,
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
from model_worker.broker.fronts import Fronts
from model_worker.broker.invariants import validate
from model_worker.broker.ledger import Ledger
from model_worker.broker.managing import Managing
from model_worker.broker.models import Model
from model_worker.broker.planning import FixedTable, Planner
from model_worker.broker.processes import Processes
from model_worker.broker.records import (
    Ban,
    Disuse,
    Drain,
    Front,
    Replica,
    Request,
    RequestState,
    Slot,
)
from model_worker.broker.reports import Reports
from model_worker.broker.settings import BrokerSettings
from model_worker.broker.slots import SlotKeeper
from model_worker.broker.suspicion import Suspicion
from model_worker.broker.timers import Timers
from model_worker.broker.words import duration
from shared.errors import Code
from shared.messages import ModelCounters, ModelState, SlotState

# A loop that is later than this did not listen meanwhile. Well above what a busy turn takes, and below every silence
# limit that anyone would configure.
LATE_S = 1.0


class Broker:
    """One model server's decisions. Not thread-safe; never blocks; raises only on its own bugs."""

    def __init__(self, settings: BrokerSettings, now_s: float, planner: Planner | None = None) -> None:
        """Without a `planner`, the table of slots cannot grow, and everything fits."""
        self.settings = settings
        # The parts. They share the list of effects, which `handle` empties, and the timers.
        self._effects: list[Effect] = []
        self.timers: Timers[object] = Timers()
        slots = [Slot(planned.name, planned.model, planned.device) for planned in settings.slots]
        self.models: dict[str, Model] = {
            model.name: Model(model, tuple(slot for slot in slots if slot.model == model.name))
            for model in settings.models
        }
        self.processes = Processes(settings, self.models, self.timers, self._effects)
        self.keeper = SlotKeeper(settings, slots, self.models, self.processes, self.timers, self._effects)
        self.ledger = Ledger(self.models, self.timers, self._effects)
        self.fronts = Fronts(settings, self.timers, self._effects, self._release)
        self.suspicion = Suspicion(self.models, self.ledger, self.timers, self._effects)
        self.dispatcher = Dispatcher(self.keeper, self.processes, self.ledger, self.timers, self._effects)
        self.disuse = DisuseWatch(self.models, self.keeper, self.processes, self.timers, self._effects)
        self.managing = Managing(
            self.models,
            self.keeper,
            self.processes,
            self.ledger,
            planner or FixedTable(),
            self._effects,
            self._stir,
        )
        self.ending = Ending(self.models, self.keeper, self.ledger, self.timers, self._effects)
        self.reports = reports = Reports(
            self.models,
            self.keeper,
            self.processes,
            self.ledger,
            self.dispatcher,
            self.suspicion,
            self._effects,
            self._stir,
        )
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
            ReplicaSpawned: reports.replica_spawned,
            SpawnFailed: reports.spawn_failed,
            ReplicaConnected: reports.replica_connected,
            ReplicaPhaseChanged: reports.replica_phase_changed,
            ReplicaPulsed: reports.replica_pulsed,
            ItemFinished: reports.item_finished,
            ChunkArrived: reports.chunk_arrived,
            ReplicaExited: reports.replica_exited,
            PoisonDigested: self._poison_digested,
            DrainRequested: self._drain_requested,
            ManageRequested: self._manage_requested,
            TimePassed: self._time_passed,
        }
        # Whose timer it is says what its ring means.
        self._alarms: dict[type, Callable[..., None]] = {
            Request: self._deadline_reached,
            Replica: reports.replica_due,
            Slot: self._slot_due,
            Front: self.fronts.due,
            Model: self._wait_over,
            Disuse: self._disuse_due,
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
    def fenced(self) -> int:
        """Messages dropped because they came from a dead incarnation or were about an ended attempt."""
        return self.reports.fenced

    @property
    def draining(self) -> bool:
        """Whether nobody is let in."""
        return bool(self.closed)

    @property
    def closed(self) -> str:
        """Why nobody is let in; empty if the door is open."""
        if self.is_ending:
            return "the model server is stopping"
        return "the model server was drained by an operator, until it is resumed" if self.managing.is_closed else ""

    @property
    def is_ending(self) -> bool:
        """Whether it was asked to drain and stop."""
        return self.ending.drain is not None

    def refused_digests(self, model: str) -> bool:
        """Whether requests of this model need their `digest`."""
        return model in self.models and bool(self.models[model].bans)

    def model_states(self) -> tuple[ModelState, ...]:
        return tuple(map(views.model_state, self.models.values()))

    def slot_states(self, now_s: float) -> tuple[SlotState, ...]:
        return tuple(
            views.slot_state(slot, self.models[slot.model].standing, now_s) for slot in self.keeper.slots.values()
        )

    def counters(self) -> tuple[ModelCounters, ...]:
        return tuple(model.tally.totals(model.name) for model in self.models.values())

    def validate(self, now_s: float) -> None:
        """Raises AssertionError if anything is not as it always should be after a turn. Costs O(everything)."""
        validate(self, now_s)

    # --- fronts and their requests -------------------------------------------------------------------------------

    def _front_heard(self, event: FrontJoined | FrontPulsed, now_s: float) -> None:
        self.fronts.heard(event.front, now_s)

    def _front_left(self, event: FrontLeft, now_s: float) -> None:
        self.fronts.left(event.front, event.reason)

    def _request_arrived(self, event: RequestArrived, now_s: float) -> None:
        front = self.fronts.heard(event.front, now_s)
        if event.id in self.ledger.requests:
            # Answering would give the first one two answers.
            fields: dict[str, object] = {"request_id": event.request_id, "model": event.model}
            self._effects.append(Log("debug", "request_duplicated", fields))
            return
        urgency_s = now_s + event.priority * self.settings.ageing_s_per_priority
        refusal = refuse_at_door(self.models, event, urgency_s, now_s, closed=self.closed)
        if refusal is not None:
            self.ledger.refuse(event, refusal)
            return
        self.ledger.admit(event, front, urgency_s, now_s)
        self.disuse.wake(self.models[event.model], now_s)
        self._stir(event.model)

    def _request_cancelled(self, event: RequestCancelled, now_s: float) -> None:
        if event.front in self.fronts.known:
            self.fronts.heard(event.front, now_s)
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

    # --- time, management and the end ----------------------------------------------------------------------------

    def _poison_digested(self, event: PoisonDigested, now_s: float) -> None:
        self.suspicion.ban(self.models[event.model], event.digest, now_s + self.settings.poison_ban_s)

    def _ban_over(self, ban: Ban, now_s: float) -> None:
        self.suspicion.lift_ban(ban)

    def _time_passed(self, event: TimePassed, now_s: float) -> None:
        """The timers have rung already."""

    def _slot_due(self, slot: Slot, now_s: float) -> None:
        """Settling fills it."""
        self.keeper.arm_vacant(slot, now_s)

    def _wait_over(self, model: Model, now_s: float) -> None:
        self._stir(model.name)

    def _disuse_due(self, disuse: Disuse, now_s: float) -> None:
        # What has happened to the model in this turn counts as use, and settling sets the timer again.
        if not self.is_ending and disuse.model not in self._stirred:
            self.disuse.due(disuse, now_s, self.managing.running)

    def _grace_over(self, drain: Drain, now_s: float) -> None:
        """Settling looks at the grace."""

    def _forgive_lateness(self, now_s: float) -> None:
        due_s = self.timers.next_s
        if due_s is not None and now_s > due_s + LATE_S:
            deaf_s = now_s - self._now_s
            self._effects.append(Log("warning", "loop_late", {"late_s": round(now_s - due_s, 3)}))
            for replica in self.keeper.replicas():
                replica.heard_s += deaf_s
                replica.progressed_s += deaf_s
                replica.due_s += deaf_s
            for front in self.fronts.known.values():
                front.heard_s += deaf_s
        self._now_s = now_s

    def _drain_requested(self, event: DrainRequested, now_s: float) -> None:
        self.managing.abandon("the model server was told to stop before this was done", now_s)
        self.ending.ask(event.grace_s, now_s)
        for model in self.models:
            self._stir(model)  # batches that were held back for company go now

    def _manage_requested(self, event: ManageRequested, now_s: float) -> None:
        self.managing.ask(event, now_s, is_ending=self.is_ending or self.ending.stopped)

    # --- settling ------------------------------------------------------------------------------------------------

    def _settle(self, now_s: float) -> None:
        """Orders what follows from this turn's changes."""
        if self.ending.stopped:
            self._stirred.clear()
            return
        self.managing.go_on(now_s)
        for model in self._stirred.values():
            if model.is_failed:
                self._fail_queued(model, now_s)
        self.ending.go_on(now_s)
        self.processes.stop_drained(now_s)
        self.ledger.send_cancels()
        for model in self._stirred.values():
            self.dispatcher.dispatch(model, now_s, may_hold=not self.draining)
            self.disuse.used(model, now_s)
        self._stirred.clear()
        self.keeper.spawn(now_s, self.ending.wants)
        self.ending.finish()
        if self.ending.stopped:
            self.managing.abandon("the model server ends: no model can be loaded", now_s)

    def _fail_queued(self, model: Model, now_s: float) -> None:
        refusal = failed(model, now_s)
        for request in list(model.backlog):
            self.ledger.answer(request, refusal.code, refusal.message, refusal.retry_after_s)

    # --- small change --------------------------------------------------------------------------------------------

    def _stir(self, model: str) -> None:
        self._stirred[model] = self.models[model]

    def _take_effects(self) -> list[Effect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects

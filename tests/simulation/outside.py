"""What can be known of a model server from outside: the facts it was told and what follows from them.

Owns the outside record of every request, slot and front. Judges nothing; never looks at the core's own records.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

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
    ReplicaExited,
    ReplicaPhaseChanged,
    ReplicaPulsed,
    RequestArrived,
    RequestCancelled,
    SpawnFailed,
)
from model_worker.broker.settings import BrokerSettings, ModelSettings
from shared.errors import Code
from shared.messages import Phase, RequestId, SlotName


@dataclass
class Life:
    """One request."""

    arrived: RequestArrived
    arrived_s: float
    urgency: tuple[float, int]
    """Lower goes first: arrival plus priority times ageing, then order of arrival."""
    to_shut_door: bool
    """Nobody was to be let in when it came."""
    banned: bool
    """Its payload was banned when it came."""
    cancelled: bool = False
    sent: int = 0
    deaths: int = 0
    chunked: bool = False
    must_not_run: bool = False
    """It ran in a process that died, and a second run was ruled out."""
    place: PlaceKey | None = None
    """Where it is; None while it waits."""


@dataclass
class Place:
    """One process."""

    incarnation: int
    born_s: float
    heard_s: float
    phase: Phase = Phase.STARTING
    was_ready: bool = False
    doomed: bool = False
    """Killed, stopped, or it told that it cannot go on."""
    doomed_s: float = 0.0
    killed: bool = False
    draining: bool = False
    """It was told to drain: it gets nothing new, and finishes what it holds."""
    is_lost: bool = False
    """It told that no other try can help."""
    progressed_s: float = 0.0
    """When its work last moved, as far as it told."""
    progress_count: int = 0
    batches: list[tuple[bool, dict[RequestId, int]]] = field(default_factory=list)
    """Alone or not, and the items not reported yet with their attempts; the first batch is the one that runs."""
    concurrency: int = 0
    """Above 0: it batches continuously, so that all it holds is one batch, of at most so many."""

    def doom(self, now_s: float) -> None:
        if not self.doomed:
            self.doomed, self.doomed_s = True, now_s

    @property
    def is_ready(self) -> bool:
        return self.phase is Phase.READY and self.was_ready and not self.doomed and not self.draining

    @property
    def has_room(self) -> bool:
        """Whether others could join what it runs."""
        return bool(self.batches) and not self.batches[0][0] and self.held < self.concurrency

    @property
    def held(self) -> int:
        return sum(len(items) for _, items in self.batches)


@dataclass
class SlotHistory:
    """What the back-off of a slot goes by."""

    incarnations: int = 0
    ever_ready: bool = False
    failed_loads: int = 0
    deaths: int = 0
    """Since its last good answer."""
    concurrency_max: int = 0
    """The most that any of its processes said to run at once."""
    fillable_s: float = 0.0
    """While it is vacant: when it is to be filled at the latest; infinite if never."""


PlaceKey = tuple[SlotName, int]
"""A slot and the incarnation of one of its processes."""


class Outside:
    """Facts; `Checker` adds the orders."""

    def __init__(self, settings: BrokerSettings) -> None:
        self.settings = settings
        # Requests that have not ended, and the ids of all that have.
        self.lives: dict[RequestId, Life] = {}
        self.ended: set[RequestId] = set()
        # Those that are in no process, by model.
        self.waiting: defaultdict[str, dict[RequestId, Life]] = defaultdict(dict)
        self.places: dict[PlaceKey, Place] = {}
        # Those of the table, and all that ever were in it.
        self.slots = {slot.name: SlotHistory() for slot in settings.slots}
        self.ever_slots = dict(self.slots)
        self.fronts_heard_s: dict[FrontId, float] = {}
        self.gone_fronts: set[FrontId] = set()
        self.models = {model.name: model for model in settings.models}
        # Until when payloads are refused, by model and digest.
        self.bans: dict[tuple[str, bytes], float] = {}
        # The latest moment for what is still open when the server was asked to drain.
        self.grace_ends_s: float | None = None
        # The end of the loop's latest stall: nothing before counts as silence, and nothing could be done then.
        self.listening_since_s = 0.0
        # The fact that the orders seen now follow from, and when its front was heard before.
        self.cause: Event | None = None
        self.heard_before: dict[FrontId, float] = {}
        self.now_s = 0.0
        self._arrivals = 0

    def saw_event(self, event: Event, now_s: float) -> None:
        """Called just before the broker gets it."""
        if self.cause is None:
            self.heard_before.clear()
        self.cause, self.now_s = event, now_s
        if isinstance(event, (FrontJoined, FrontPulsed, RequestArrived)) or (
            # A cancel makes nobody known.
            isinstance(event, RequestCancelled) and event.front in self.fronts_heard_s
        ):
            self.heard_before[event.front] = self.fronts_heard_s.get(event.front, now_s)
            self.fronts_heard_s[event.front] = now_s
            self.gone_fronts.discard(event.front)
        match event:
            case RequestArrived():
                if event.id not in self.lives and event.id not in self.ended:
                    self._arrived(event, now_s)
            case RequestCancelled():
                life = self.lives.get(event.id)
                if life is not None and life.arrived.front == event.front:
                    life.cancelled = True
            case FrontLeft():
                self.gone_fronts.add(event.front)
            case ReplicaPhaseChanged() | ReplicaPulsed() | ChunkArrived() | ItemFinished():
                self._heard(event, now_s)
            case ReplicaExited():
                self._exited(event, now_s)
            case SpawnFailed():
                place = self.places.pop((event.slot, event.incarnation), None)
                if place is not None:
                    self._vacated(event.slot, place, now_s)
            case PoisonDigested():
                self.bans[event.model, event.digest] = now_s + self.settings.poison_ban_s
            case DrainRequested():
                ends_s = now_s + event.grace_s
                self.grace_ends_s = min(ends_s, self.grace_ends_s if self.grace_ends_s is not None else ends_s)

    def _arrived(self, event: RequestArrived, now_s: float) -> None:
        self._arrivals += 1
        life = Life(
            event,
            now_s,
            urgency=(now_s + event.priority * self.settings.ageing_s_per_priority, self._arrivals),
            to_shut_door=self.grace_ends_s is not None or self.is_shut_for(event.model),
            banned=bool(event.digest) and self.bans.get((event.model, event.digest), 0.0) > now_s,
        )
        self.lives[event.id] = self.waiting[event.model][event.id] = life

    def is_shut_for(self, model: str) -> bool:
        """Whether an operator keeps requests for this model out."""
        return False

    def model_of(self, slot: str) -> ModelSettings:
        return self.models[slot.rpartition("/")[0]]

    def places_of(self, slot: str) -> list[Place]:
        return [place for (name, _), place in self.places.items() if name == slot]

    def _heard(self, event: ReplicaPhaseChanged | ReplicaPulsed | ChunkArrived | ItemFinished, now_s: float) -> None:
        place = self.places.get((event.slot, event.incarnation))
        if place is None:
            return
        place.heard_s = now_s
        match event:
            case ReplicaPhaseChanged():
                if not place.doomed:
                    self._told_phase(place, event, now_s)
            case ReplicaPulsed():
                if event.progress_count != place.progress_count:
                    place.progress_count, place.progressed_s = event.progress_count, now_s
            case ChunkArrived():
                place.progressed_s = now_s
            case ItemFinished():
                place.progressed_s = now_s
                self._reported(place, event, now_s)

    def _told_phase(self, place: Place, event: ReplicaPhaseChanged, now_s: float) -> None:
        place.phase = event.phase
        if event.phase is Phase.FAILED:
            place.doom(now_s)
            place.is_lost = event.permanent
        elif event.phase is not Phase.READY:
            if place.was_ready and not place.draining:  # nobody is un-loaded: whoever says so is as good as gone
                place.doom(now_s)
        elif not place.was_ready:
            slot = self.ever_slots[event.slot]
            place.was_ready = slot.ever_ready = True
            place.concurrency = event.concurrency
            slot.concurrency_max = max(slot.concurrency_max, event.concurrency)

    def _reported(self, place: Place, event: ItemFinished, now_s: float) -> None:
        for _, items in place.batches:
            if items.get(event.id) == event.attempt:
                del items[event.id]
                break
        else:
            return
        place.batches = [batch for batch in place.batches if batch[1]]
        life = self.lives.get(event.id)
        if life is not None:
            self._to_wait(event.id, life)
        if event.code is Code.REPLICA_FAULT:
            place.doom(now_s)
            if life is not None:
                life.deaths += 1

    def _exited(self, event: ReplicaExited, now_s: float) -> None:
        place = self.places.pop((event.slot, event.incarnation), None)
        if place is None:
            return
        for position, (_, items) in enumerate(place.batches):
            for request_id in items:
                life = self.lives.get(request_id)
                if life is not None:
                    life.deaths += 1
                    life.must_not_run = life.chunked or (position == 0 and not life.arrived.retryable)
                    self._to_wait(request_id, life)
        self._vacated(event.slot, place, now_s)

    def _to_wait(self, request_id: RequestId, life: Life) -> None:
        life.place = None
        self.waiting[life.arrived.model][request_id] = life

    def _vacated(self, name: SlotName, place: Place, now_s: float) -> None:
        slot, settings = self.ever_slots[name], self.settings
        failures = slot.deaths = slot.deaths + 1
        if not slot.ever_ready:
            failures = slot.failed_loads = slot.failed_loads + 1
        delays_s = settings.respawn_delays_s
        delay_s = delays_s[min(failures, len(delays_s)) - 1]
        if place.is_lost or (not slot.ever_ready and failures >= settings.load_attempts_max):
            delay_s = math.inf
        elif slot.ever_ready and slot.deaths >= settings.breaker_deaths_max:
            delay_s = settings.breaker_window_s
        slot.fillable_s = now_s + delay_s

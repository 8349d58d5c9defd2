"""What operators order, and what a model server may do to models on its own account, judged from outside.

Owns the outside record of what became of each model at the hands of operators and for want of requests, and of the
table of slots as it grows and shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from model_worker.broker.effects import SendDrain, SendManaged
from model_worker.broker.events import (
    ChunkArrived,
    DrainRequested,
    Event,
    ItemFinished,
    ManageRequested,
    ReplicaExited,
    ReplicaPhaseChanged,
    ReplicaPulsed,
    RequestArrived,
    SpawnFailed,
)
from model_worker.broker.settings import BrokerSettings, SlotSettings
from shared.messages import SlotName
from tests.simulation.outside import Outside, Place, SlotHistory
from tests.simulation.promises import Promise, Violation


@dataclass
class Station:
    """One model."""

    used_s: float = 0.0
    """When a request of it was let in or ended the latest time, or a process of it came or went."""
    touched_s: float = 0.0
    """The same, or when an operator was answered about it."""
    order: ManageRequested | None = None
    """What was ordered for it, and is not answered yet."""
    incarnations: dict[SlotName, int] = field(default_factory=dict)
    """Those of its slots when that was ordered."""
    removed: dict[SlotName, SlotHistory] = field(default_factory=dict)
    """Those that are to go with it."""
    leaving: set[SlotName] = field(default_factory=set)
    """Slots that are to go, and may have a process still."""
    is_closed: bool = False
    """It was unloaded by an operator: nobody is to be let in."""
    is_at_rest: bool = False
    """Its processes were ended, because of that or because nobody asked for it."""


class Administered(Outside):
    """Facts and orders that are about models as a whole."""

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        self.stations = {model.name: Station() for model in settings.models}
        # An operator had the server drained: nobody is to be let in.
        self.is_shut = False
        self.orders: dict[int, ManageRequested] = {}
        # What the planner said the latest time it was asked whether one more process fits.
        self.is_crowded = False
        self._drain: ManageRequested | None = None
        # Models whose processes came or went with the events that are being handled.
        self._moved: list[Station] = []

    # --- facts ---------------------------------------------------------------------------------------------------

    def saw_event(self, event: Event, now_s: float) -> None:
        match event:
            case SpawnFailed() | ReplicaExited() | ReplicaPhaseChanged():
                if (event.slot, event.incarnation) in self.places:
                    self._moved.append(self.station_of(event.slot))
            case ItemFinished():
                self.station_of(event.slot).touched_s = now_s
        if isinstance(event, ReplicaPulsed | ChunkArrived | ItemFinished):
            place = self.places.get((event.slot, event.incarnation))
            if place is not None and now_s >= place.heard_s + self.settings.replica_silence_s:
                self.station_of(event.slot).touched_s = now_s
        super().saw_event(event, now_s)
        if isinstance(event, ManageRequested):
            self._ordered(event)

    def event_is_over(self) -> None:
        """All that the event has led to was seen: whether a request was let in, above all. A timer that was due in the
        same moment came first."""
        for station in self._moved:
            station.used_s = self.now_s
        self._moved.clear()
        if isinstance(self.cause, RequestArrived) and self.cause.id in self.lives:
            station = self.stations[self.cause.model]
            station.used_s = self.now_s
            if station.is_at_rest:
                station.is_at_rest = False
                self._to_be_filled(self.cause.model)

    def is_shut_for(self, model: str) -> bool:
        return self.is_shut or (model in self.stations and self.stations[model].is_closed)

    def station_of(self, slot: str) -> Station:
        return self.stations[self.model_of(slot).name]

    def _ordered(self, order: ManageRequested) -> None:
        """As if it was accepted; the answer that refuses it comes at once, and takes this back."""
        self.orders[order.token] = order
        if order.action == "drain" and self._drain is None:
            self.is_shut, self._drain = True, order
            for station in self.stations.values():
                station.touched_s = self.now_s
        elif order.action == "resume":
            self.is_shut = False
        elif order.model in self.stations and self.stations[order.model].order is None:
            self._ordered_for(self.stations[order.model], order)

    def _ordered_for(self, station: Station, order: ManageRequested) -> None:
        names = self.slots_of(order.model)
        station.order = order
        station.incarnations = {name: self.slots[name].incarnations for name in names}
        station.removed = {}
        if order.action == "scale":
            gone = [name for name in names if number_of(name) >= order.replicas]
            station.removed = {name: self.slots.pop(name) for name in gone}
            station.leaving.update(gone)
        elif order.action == "unload":
            station.is_closed = True
        elif order.action == "load":
            station.is_closed = station.is_at_rest = False

    def slots_of(self, model: str) -> list[SlotName]:
        return sorted((name for name in self.slots if self.model_of(name).name == model), key=number_of)

    def saw_growth(self, added: Iterable[SlotSettings]) -> None:
        """The planner has named slots that are part of the table from now on."""
        for slot in added:
            history = self.ever_slots.setdefault(slot.name, SlotHistory())
            history.ever_ready, history.failed_loads, history.deaths = False, 0, 0
            history.fillable_s = self.now_s
            self.slots[slot.name] = history
            self.station_of(slot.name).leaving.discard(slot.name)

    def _to_be_filled(self, model: str) -> None:
        for name in self.slots_of(model):
            self.slots[name].fillable_s = max(self.slots[name].fillable_s, self.now_s)

    # --- answers to operators ------------------------------------------------------------------------------------

    def saw_managed(self, answer: SendManaged, shown: list[SlotName]) -> None:
        """`shown` are the names of all slots as the core shows them."""
        order = self.orders.pop(answer.token, None)
        if order is None or order.front != answer.front:
            raise Violation(Promise.MANAGED, f"order {answer.token} was answered twice, or was nobody's")
        if order is self._drain:
            self._drain = None
            if answer.outcome == "done" and self.lives:
                raise Violation(Promise.MANAGED, f"said to be drained, and {len(self.lives)} requests are in progress")
        station = self.stations.get(order.model)
        if station is None or station.order is not order:
            return
        station.order = None
        station.touched_s = self.now_s
        if answer.outcome == "refused":
            self._undo(station, order)
        elif answer.outcome == "done":
            self._judge_done(station, order)
        if order.action == "scale":
            self._judge_table(station, order, answer, shown)
        self._to_be_filled(order.model)

    def _undo(self, station: Station, order: ManageRequested) -> None:
        self.slots.update(station.removed)
        station.leaving.difference_update(station.removed)
        if order.action == "unload":
            station.is_closed = False

    def _judge_done(self, station: Station, order: ManageRequested) -> None:
        names = self.slots_of(order.model)
        places = {name: self.places_of(name) for name in names}
        match order.action:
            case "unload":
                station.is_at_rest = True
                if any(places.values()):
                    raise Violation(Promise.MANAGED, f"{order.model} is said to be unloaded, and has processes")
            case "load":
                if not all(any(place.was_ready for place in places[name]) for name in names):
                    raise Violation(Promise.MANAGED, f"{order.model} is said to be loaded, and is not")
            case "reload":
                old = [name for name in names if self.slots[name].incarnations <= station.incarnations.get(name, 0)]
                if old:
                    raise Violation(Promise.MANAGED, f"{old} are said to be loaded afresh, and are as they were")

    def _judge_table(
        self, station: Station, order: ManageRequested, answer: SendManaged, shown: list[SlotName]
    ) -> None:
        here = [name for name in shown if self.model_of(name).name == order.model]
        if answer.outcome == "done" and here != [f"{order.model}/{number}" for number in range(order.replicas)]:
            raise Violation(Promise.SLOT_TABLE, f"{order.model} is said to have {order.replicas} slots, and has {here}")
        if answer.outcome == "done":
            station.leaving.clear()
        elif answer.outcome == "failed" and not isinstance(self.cause, DrainRequested):
            # The first of the new slots that could not be filled has gone again, with those behind it.
            names = self.slots_of(order.model)
            gone = [name for name in names if name not in here]
            if not gone or gone[0] in station.incarnations or here != names[: len(here)]:
                raise Violation(Promise.SLOT_TABLE, f"{order.model} could not be scaled, and has {here} of {names}")
            for name in gone:
                del self.slots[name]

    # --- ends of processes ---------------------------------------------------------------------------------------

    def saw_drain(self, drain: SendDrain) -> None:
        place = self._place(drain.slot, drain.incarnation, "was told to drain")
        self._judge_farewell(drain.slot, place)
        place.draining = True

    def saw_stop(self, slot: SlotName, incarnation: int, now_s: float) -> None:
        if self.has_just_gone(slot, incarnation):
            station = self.station_of(slot)
            if station.order is None and self._is_unasked(slot, station):
                # A timer that was due in the moment of its end came first.
                station.is_at_rest = True
            return
        place = self._place(slot, incarnation, "was told to stop")
        held = [request_id.hex() for _, items in place.batches for request_id in items if request_id in self.lives]
        if held:
            raise Violation(Promise.HANDOVER, f"{slot} was told to stop, and holds {held[:3]}")
        if self.grace_ends_s is None and not place.draining:
            self._judge_farewell(slot, place)
        place.doom(now_s)

    def _judge_farewell(self, slot: SlotName, place: Place) -> None:
        """Whether a process that could go on had to go."""
        station = self.station_of(slot)
        if self.cause is station.order and self._is_unasked(slot, station):
            # A timer that was due in the moment of the order came first.
            station.is_at_rest = True
            return
        match station.order.action if station.order is not None else "":
            case "reload":
                others = [other for other in self.places_of(slot) if other is not place]
                if place.is_ready and not self.is_crowded and not any(other.is_ready for other in others):
                    raise Violation(Promise.HANDOVER, f"{slot} is to go, and nobody is there in its place")
            case "scale":
                if slot in station.incarnations and slot not in station.leaving:
                    raise Violation(Promise.SLOT_TABLE, f"{slot} is to go, and was to stay")
            case "unload":
                pass
            case _:
                self._judge_rest(slot, station)

    def _judge_rest(self, slot: SlotName, station: Station) -> None:
        if not self._is_unasked(slot, station):
            model = self.model_of(slot).name
            waiting = sum(life.arrived.model == model for life in self.lives.values())
            raise Violation(Promise.REST, f"{slot} was told to stop, and {waiting} requests wait for {model}")
        station.is_at_rest = True

    def _is_unasked(self, slot: str, station: Station) -> bool:
        """Whether nobody has asked for the model long enough. Who asks in this very moment comes too late."""
        model = self.model_of(slot)
        asking = self.cause.id if isinstance(self.cause, RequestArrived) else None
        if any(life.arrived.model == model.name and life.arrived.id != asking for life in self.lives.values()):
            return False
        return bool(model.idle_unload_s) and self.now_s >= station.used_s + model.idle_unload_s

    def has_just_gone(self, slot: SlotName, incarnation: int) -> bool:
        """Whether its exit is the event that is being handled: a timer that was due in the same moment came first."""
        event = self.cause
        return isinstance(event, ReplicaExited) and (event.slot, event.incarnation) == (slot, incarnation)

    def _place(self, slot: SlotName, incarnation: int, what: str) -> Place:
        place = self.places.get((slot, incarnation))
        if place is None:
            raise Violation(Promise.FENCE, f"{slot}#{incarnation} {what}, but it does not hold the slot")
        return place


def number_of(slot: str) -> int:
    return int(slot.rpartition("/")[2])

"""What must hold between any two turns of the model server, and when it has stopped.

Judged from outside, but for what only the core can know: that it keeps nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from model_worker.broker.machine import Broker
from model_worker.broker.settings import ModelSettings
from shared.messages import RequestId, SlotName
from tests.simulation.administration import number_of
from tests.simulation.checker import LATE_REPLY_S, Checker
from tests.simulation.outside import Place
from tests.simulation.promises import Promise, Violation

LATE_KILL_S = 1.0
LATE_BATCH_S = 0.25
# A spawn that fails at once is looked at again in the next turn, which comes within a second.
LATE_SPAWN_S = 1.25
LATE_REST_S = 1.25


def judge_turn(checker: Checker, payloads: Collection[RequestId], now_s: float) -> None:
    """After the broker has settled."""
    _judge_requests(checker, now_s)
    _judge_bounds(checker)
    for model in checker.settings.models:
        _judge_room(checker, model, now_s)
    for (slot, _), place in checker.places.items():
        if place.doomed:
            _judge_ending(checker, slot, place, now_s)
        else:
            _judge_patience(checker, slot, place, now_s)
        if place.is_ready and now_s < place.heard_s + checker.settings.replica_silence_s:
            _judge_rest(checker, slot, place, now_s)
    _judge_cancels(checker)
    if checker.grace_ends_s is None and checker.stopped is None:
        _judge_vacancies(checker, now_s)
        _judge_disuse(checker, now_s)
    if payloads != checker.lives.keys():
        raise Violation(Promise.NOTHING_KEPT, f"{len(payloads)} payloads are kept for {len(checker.lives)} requests")


def _judge_requests(checker: Checker, now_s: float) -> None:
    grace_ends_s = checker.grace_ends_s
    gave_up_s = None if grace_ends_s is None else max(grace_ends_s, checker.listening_since_s) + LATE_REPLY_S
    for life in checker.lives.values():
        name = life.arrived.id.hex()
        if now_s > life.arrived.deadline_s + LATE_REPLY_S:
            raise Violation(Promise.IN_TIME, f"{name} has no answer {now_s - life.arrived.deadline_s:.3f} s late")
        if life.cancelled:
            raise Violation(Promise.NOBODY_WAITS, f"{name} was cancelled, and is kept")
        if life.to_shut_door:
            raise Violation(Promise.DRAINING, f"{name} was let in through a shut door")
        if life.banned:
            raise Violation(Promise.POISON, f"{name} was let in, and its payload is banned")
        if gave_up_s is not None and now_s > gave_up_s:
            raise Violation(Promise.DRAINING, f"{name} has no answer, and the grace is over")


def _judge_bounds(checker: Checker) -> None:
    """What was never sent to a process waits for its first turn; only that is bounded at the door."""
    for model in checker.settings.models:
        fresh = [life for life in checker.waiting[model.name].values() if life.sent == 0]
        # What idle replicas can take does not wait, unless it waits for company or the replica is lost meanwhile.
        slots = [slot for name, slot in checker.ever_slots.items() if checker.model_of(name) is model]
        room = sum(max(model.max_batch_size, slot.concurrency_max) for slot in slots)
        count_max = model.queue_size_max + room
        if len(fresh) > count_max:
            raise Violation(Promise.BOUNDS, f"{len(fresh)} requests wait for {model.name}, {count_max} may")
        waiting_bytes = sum(life.arrived.body_bytes for life in fresh)
        if waiting_bytes > model.queue_bytes_max:
            raise Violation(Promise.BOUNDS, f"{waiting_bytes} bytes wait for {model.name}")


def _judge_rest(checker: Checker, slot: SlotName, place: Place, now_s: float) -> None:
    """Whether a process that does nothing has reason to."""
    model = checker.model_of(slot)
    waiting = checker.waiting[model.name].values()
    if waiting and not place.batches:
        head = min(waiting, key=lambda life: life.urgency)
        held_until_s = head.arrived_s + model.max_wait_s + LATE_BATCH_S
        is_open = checker.grace_ends_s is None and not checker.is_shut
        may_hold = model.max_wait_s > 0.0 and not place.concurrency and is_open
        if not may_hold or now_s > max(held_until_s, checker.listening_since_s):
            raise Violation(Promise.CONSERVATION, f"{slot} rests while a request waits for {model.name}")


def _judge_room(checker: Checker, model: ModelSettings, now_s: float) -> None:
    """Room may be left for those that must be alone, and no more of it than they need, or than half of all there is."""
    waiting = checker.waiting[model.name].values()
    suspects = sum(life.deaths > 0 for life in waiting)
    if suspects == len(waiting):
        return
    places = [place for (slot, _), place in checker.places.items() if checker.model_of(slot) is model]
    ready = [place for place in places if place.is_ready and place.concurrency]
    silence_s = checker.settings.replica_silence_s
    roomy = sum(place.has_room and now_s < place.heard_s + silence_s for place in ready)
    if roomy > min(suspects, max(1, len(ready) // 2)):
        raise Violation(Promise.CONSERVATION, f"{roomy} processes of {model.name} have room for {suspects} suspects")


def _judge_patience(checker: Checker, slot: SlotName, place: Place, now_s: float) -> None:
    """Whether a process that loads, hangs or is silent is still endured too long."""
    model, settings = checker.model_of(slot), checker.settings
    hangs_s = now_s - max(checker.listening_since_s, place.progressed_s)
    if place.batches and hangs_s > model.batch_timeout_s + settings.pulse_tolerance_s + LATE_KILL_S:
        raise Violation(Promise.PATIENCE, f"{slot} hangs for {hangs_s:.3f} s")
    silent_s = now_s - max(checker.listening_since_s, place.heard_s)
    if place.was_ready and not place.batches and silent_s > settings.replica_silence_kill_s + LATE_KILL_S:
        raise Violation(Promise.PATIENCE, f"{slot} is silent for {silent_s:.3f} s")
    loads_s = now_s - max(checker.listening_since_s, place.born_s)
    if not place.was_ready and loads_s > model.load_timeout_s + LATE_KILL_S:
        raise Violation(Promise.PATIENCE, f"{slot} loads for {loads_s:.3f} s")
    if place.draining and not any(id in checker.lives for _, items in place.batches for id in items):
        raise Violation(Promise.PATIENCE, f"{slot} has drained, and was not told to stop")


def _judge_ending(checker: Checker, slot: SlotName, place: Place, now_s: float) -> None:
    """Whether a process that is to end by itself, and does not, is ended."""
    stays_s = now_s - max(checker.listening_since_s, place.doomed_s)
    # Told that it fails, it may be told to stop in its last moment, and has its time once more.
    if not place.killed and stays_s > 2 * checker.settings.stop_timeout_s + LATE_KILL_S:
        raise Violation(Promise.PATIENCE, f"{slot} cannot go on, and stays for {stays_s:.3f} s")


def _judge_cancels(checker: Checker) -> None:
    for slot, incarnation, request_id in checker.owed_cancels:
        place = checker.places.get((slot, incarnation))
        if place is None or place.doomed:
            continue  # there is nobody to tell
        if any(request_id in items for _, items in place.batches):
            raise Violation(Promise.CANCELS_TOLD, f"{slot} was not told that nobody waits for {request_id.hex()}")
    checker.owed_cancels.clear()


def _judge_vacancies(checker: Checker, now_s: float) -> None:
    loads = sum(not place.was_ready for place in checker.places.values())
    if loads >= checker.settings.parallel_loads:
        checker.no_room_s = now_s
        return
    for name, slot in checker.slots.items():
        station = checker.station_of(name)
        if station.order is not None or station.is_at_rest or station.is_closed:
            continue
        due_s = max(slot.fillable_s, checker.listening_since_s, checker.no_room_s)
        if not checker.places_of(name) and now_s > due_s + LATE_SPAWN_S:
            raise Violation(Promise.REFILL, f"{name} is vacant {now_s - due_s:.3f} s after its back-off")


def _judge_disuse(checker: Checker, now_s: float) -> None:
    """Whether a model stays although nobody has asked for it for long enough."""
    for model in checker.settings.models:
        station = checker.stations[model.name]
        due_s = max(station.used_s, station.touched_s, checker.listening_since_s) + model.idle_unload_s + LATE_REST_S
        if not model.idle_unload_s or station.order is not None or station.is_closed or now_s < due_s:
            continue
        places = {name: checker.places_of(name) for name in checker.slots_of(model.name)}
        heard_s = now_s - checker.settings.replica_silence_s
        if all(
            len(places[name]) == 1 and places[name][0].is_ready and places[name][0].heard_s > heard_s for name in places
        ) and not any(place.batches for name in places for place in places[name]):
            raise Violation(Promise.REST, f"{model.name} is kept for nobody since {station.used_s:.3f} s")


# --- the end -----------------------------------------------------------------------------------------------------


def judge_end(checker: Checker, broker: Broker, payloads: Collection[RequestId]) -> None:
    """After the server has stopped."""
    if checker.lives:
        raise Violation(Promise.ONE_ANSWER, f"{[life.hex() for life in checker.lives]} were never answered")
    if checker.orders:
        raise Violation(Promise.MANAGED, f"{len(checker.orders)} orders were never answered")
    if payloads:
        raise Violation(Promise.NOTHING_KEPT, f"{len(payloads)} payloads are kept for nobody")
    _judge_counters(checker, broker)
    _judge_remains(broker)


def _judge_counters(checker: Checker, broker: Broker) -> None:
    for totals in broker.counters():
        seen = {code: count for (model, code), count in checker.finished.items() if model == totals.model}
        if totals.ended != seen:
            raise Violation(Promise.COUNTERS, f"{totals.model} counts {totals.ended}, and what ended was {seen}")
        seen = {code: count for (model, code), count in checker.refused.items() if model == totals.model}
        if totals.rejected != seen:
            raise Violation(Promise.COUNTERS, f"{totals.model} counts {totals.rejected}, and refused were {seen}")
        if totals.admitted != sum(totals.ended.values()):
            raise Violation(Promise.COUNTERS, f"{totals.model} counts {totals.admitted} admitted requests")


def _judge_remains(broker: Broker) -> None:
    """The one look into the core: whether anything is left of what has ended."""
    remains: list[object] = [*broker.ledger.requests, *broker.keeper.replicas()]
    for front in broker.fronts.known.values():
        remains += front.requests
    for model in broker.models.values():
        remains += [*model.backlog, *model.idle, *model.prefetchable, *model.joinable, *model.ready]
        if model.waiting_count or model.waiting_bytes:
            remains.append(f"{model.waiting_count} requests, {model.waiting_bytes} bytes said to wait")
    bans = sum(len(model.bans) for model in broker.models.values())
    timed = len(broker.fronts.known) + len(broker.keeper.slots) + 2 * len(broker.models) + bans + 1
    if len(broker.timers) > timed:
        remains.append(f"{len(broker.timers)} timers for {timed} subjects at most")
    if remains:
        raise Violation(Promise.NOTHING_KEPT, f"the core keeps {remains[:5]}")


def judge_slot_table(checker: Checker, broker: Broker, now_s: float) -> None:
    """Slots as they are shown are those of the plan, as operators have changed it, in its order."""
    shown = [(slot.slot, slot.model, slot.device) for slot in broker.slot_states(now_s)]
    planned = []
    for model in checker.settings.models:
        station = checker.stations[model.name]
        leaving = [name for name in station.leaving if checker.places_of(name)]
        names = sorted([*checker.slots_of(model.name), *leaving], key=number_of)
        if station.order is not None and station.order.action == "scale":
            # New ones that could not be filled are on their way out; what is left is judged with the answer.
            names = [name for name in names if name in station.incarnations or any(row[0] == name for row in shown)]
        planned += [(name, model.name, "cpu") for name in names]
    if shown != planned:
        raise Violation(Promise.SLOT_TABLE, f"the slots are {shown}, and were planned as {planned}")

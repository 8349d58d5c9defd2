"""What is always true of the broker after a turn, checked from the records themselves.

Owns the list; the tests check it after every event. Raises AssertionError that names what is wrong. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import TYPE_CHECKING

from model_worker.broker.models import Model
from model_worker.broker.records import (
    AT_REST,
    WAITING,
    WORKING,
    Credit,
    Replica,
    ReplicaState,
    Request,
    RequestState,
    Slot,
)

if TYPE_CHECKING:
    from model_worker.broker.machine import Broker

# A request is sent once, and once more after a death.
ATTEMPTS_MAX = 2


def validate(broker: Broker, now_s: float) -> None:
    """Everything below, for every record."""
    for request in broker.ledger.requests.values():
        _validate_request(broker, request, now_s)
    for slot in broker.keeper.slots.values():
        _validate_slot(broker, slot)
        for replica in slot.replicas():
            _validate_replica(broker, slot, replica, now_s)
    for model in broker.models.values():
        _validate_model(broker, model)
        if not broker.ending.stopped:
            _validate_work_conservation(broker, model, now_s)
    _validate_fronts(broker, now_s)
    _validate_loads(broker, now_s)
    broker.timers.validate()


def _validate_request(broker: Broker, request: Request, now_s: float) -> None:
    name = f"request {request.id.hex()}"
    assert request.state is not RequestState.ENDED, f"{name} has ended and is still kept"
    assert request.deadline_s > now_s, f"{name} outlived its deadline"
    assert broker.timers.at_s(request) == request.deadline_s, f"{name} has no deadline timer"
    assert request.attempt <= ATTEMPTS_MAX, f"{name} was sent {request.attempt} times"
    assert request.alone == (request.deaths > 0), f"{name} witnessed {request.deaths} deaths, alone={request.alone}"
    assert request.deaths <= 1, f"{name} lives after {request.deaths} deaths"
    if request.state is RequestState.QUEUED:
        assert request.replica is None, f"{name} is queued and assigned"
        assert request.batch is None, f"{name} is queued and in a batch"
        return
    replica, batch = request.replica, request.batch
    assert replica is not None, f"{name} is {request.state} nowhere"
    assert batch is not None, f"{name} is {request.state} in no batch"
    assert batch.open.get(request.id) is request, f"{name} is not open in its batch"
    assert broker.keeper.current(replica.slot, replica.incarnation) is replica, f"{name} is held by a dead replica"
    where = replica.running if request.state is RequestState.RUNNING else replica.prefetched
    assert batch is where, f"{name} is {request.state}, but its batch is not"


def _validate_slot(broker: Broker, slot: Slot) -> None:
    model = broker.models[slot.model]
    for replica in slot.replicas():
        assert replica.slot == slot.name, f"{slot.name} holds a replica of {replica.slot}"
        assert replica.incarnation <= slot.incarnation, f"{slot.name} holds incarnation {replica.incarnation}"
        assert replica.state is not ReplicaState.GONE, f"{slot.name} holds a replica that is gone"
    incarnations = [replica.incarnation for replica in slot.replicas()]
    assert len(set(incarnations)) == len(incarnations) <= 2, f"{slot.name} holds {incarnations}"
    assert (slot in model.slots) != slot.is_leaving, f"{slot.name} is in the table, or is not"
    assert slot.replica is not None or slot.successor is None, f"{slot.name} is vacant and has a successor"
    if slot.successor is not None:
        is_new = slot.successor.incarnation == slot.incarnation
        assert is_new, f"{slot.name}: its successor is not its latest process"
        assert not slot.successor.was_ready, f"{slot.name}: its successor is ready, and has not taken over"
    if slot.retired is not None:
        assert slot.retired.state is not ReplicaState.READY, f"{slot.name}: one that is retired goes on"
    if model.standing in AT_REST:
        assert not any(r.state in WORKING for r in slot.replicas()), f"{slot.name} works, and its model is at rest"


def _validate_replica(broker: Broker, slot: Slot, replica: Replica, now_s: float) -> None:
    model = broker.models[slot.model]
    name = f"{slot.name}#{replica.incarnation}"
    pools: dict[Credit, Container[Replica]] = {
        Credit.IDLE: model.idle,
        Credit.PREFETCH: model.prefetchable,
        Credit.JOIN: model.joinable,
    }
    for credit, pool in pools.items():
        assert (replica in pool) == (replica.credit is credit), f"{name} in the wrong pool"
    is_draining = replica.state is ReplicaState.DRAINING
    assert (replica in broker.processes.draining) == is_draining, f"{name}: whether it drains is not noted"
    assert not is_draining or replica.live_requests(), f"{name} drains, and holds nothing"
    assert replica.running is not None or replica.prefetched is None, f"{name} prefetched while nothing runs"
    assert not replica.concurrency or replica.prefetched is None, f"{name} prefetched, and batches continuously"
    for batch in replica.batches():
        assert batch.open, f"{name} keeps batch {batch.number}, which is done"
        assert replica.was_ready, f"{name} got work before it was ready"
        assert batch.size == 1 or not batch.alone, f"{name}: batch {batch.number} is to be alone, and is not"
        assert not batch.alone or len(list(replica.batches())) == 1, f"{name}: company for batch {batch.number}"
        if replica.concurrency:
            assert len(batch.open) <= replica.concurrency, f"{name} holds more than it takes"
        else:
            assert not replica.limits.size_max or batch.size <= replica.limits.size_max, f"{name}: batch is too large"
        for request in batch.live_requests():
            assert broker.ledger.requests.get(request.id) is request, f"{name} holds a request that nobody admitted"
            assert batch.alone == request.alone, f"{name}: request {request.id.hex()} shares, and must not"
    if broker.ending.stopped:
        return
    if replica.state is not ReplicaState.KILLED:
        assert replica in broker.timers, f"{name} is watched by no timer"
    if replica.state is ReplicaState.READY:
        settings = broker.settings
        assert replica.silent == (now_s >= replica.heard_s + settings.replica_silence_s), f"{name}: silence unnoticed"
    if replica.state in WORKING:
        assert not broker.processes.is_hung(replica, now_s), f"{name}: a hang is unnoticed"


def _validate_model(broker: Broker, model: Model) -> None:
    requests = [request for request in broker.ledger.requests.values() if request.model == model.name]
    queued = {request.id for request in requests if request.state is RequestState.QUEUED}
    assert {request.id for request in model.backlog} == queued, f"{model.name}: queue and ledger disagree"
    assert len(model.backlog) == len(queued), f"{model.name}: a request is queued twice"
    model.backlog.validate()
    waiting = [request for request in requests if request.state in WAITING]
    room = sum(replica.room for replica in model.joinable)
    assert model.joinable.total == room, f"{model.name}: room for {model.joinable.total}, and not for {room}"
    assert model.waiting_count == len(waiting), f"{model.name}: waiting_count is {model.waiting_count}"
    assert model.waiting_bytes == sum(r.body_bytes for r in waiting), f"{model.name}: waiting_bytes is wrong"
    # Admission looks at what waits and at what idle replicas can take; a death can send what runs back to the queue.
    processes = [replica for replica in broker.keeper.replicas() if replica.model == model.name]
    concurrency = max([model.concurrency, *(replica.concurrency for replica in processes)])
    size_max = max(model.settings.max_batch_size, concurrency)
    if size_max:
        # Of each slot that ever was, a process and the one before it may have been given as much as they take.
        ever = [*(slot.name for slot in broker.keeper.slots.values()), *broker.keeper.last_incarnations]
        slots_max = sum(name.rpartition("/")[0] == model.name for name in ever)
        admitted_max = model.settings.queue_size_max + 2 * slots_max * size_max
        assert len(requests) <= admitted_max, f"{model.name}: {len(requests)} requests, more than {admitted_max}"
    assert model.tally.admitted == sum(model.tally.ended.values()) + len(requests), f"{model.name}: lost a request"
    assert model.ready == {r for r in processes if r.is_ready}, f"{model.name}: counts {model.ready} as ready"
    strangers = [r for r in (*model.idle, *model.prefetchable, *model.joinable) if r not in processes]
    assert not strangers, f"{model.name}: {strangers} have credit, and are gone"
    if model.standing in AT_REST:
        assert not requests, f"{model.name} is at rest, and {len(requests)} requests wait"
    given_up = {slot.name for slot in model.slots if slot.failure is not None}
    assert model.given_up == given_up, f"{model.name}: counts {model.given_up} as given up"
    assert not (model.is_failed and queued), f"{model.name} has failed, and requests wait for it"
    for digest, ban in model.bans.items():
        assert ban.digest == digest, f"{model.name}: a ban is filed under another digest"
        assert broker.timers.at_s(ban) == ban.until_s, f"{model.name}: a ban never ends"


def _validate_work_conservation(broker: Broker, model: Model, now_s: float) -> None:
    """No replica rests while a request waits that it could take."""
    head = model.backlog.head
    if head is None:
        return
    kept = model.kept_for_suspects()
    for replica in model.joinable:
        assert head.alone, f"{replica.slot} has room while {len(model.backlog)} requests wait"
        assert replica.running is not None, f"{replica.slot} is empty while a request waits that must be alone"
        is_kept = model.backlog.first_to_share is None or replica in kept
        assert is_kept, f"{replica.slot} has room, and is kept for nobody"
    for replica in model.idle:
        held = now_s < head.arrived_s + model.settings.max_wait_s and not model.backlog.fills(head, replica.limits)
        assert held, f"{replica.slot} is idle while {len(model.backlog)} requests wait"
        assert not broker.draining, f"{replica.slot} is idle, and its batch waits for company during a drain"
        hold_s = broker.timers.at_s(model)
        assert hold_s is not None, f"{model.name}: a batch waits for company with no timer"
    for replica in model.prefetchable:
        assert model.idle or head.alone or not model.backlog.fills(head, replica.limits), (
            f"{replica.slot} could prefetch a full batch"
        )


def _validate_fronts(broker: Broker, now_s: float) -> None:
    held = Counter(id(request) for front in broker.fronts.known.values() for request in front.requests.values())
    assert held == Counter(id(r) for r in broker.ledger.requests.values()), "fronts and ledger disagree"
    for front in broker.fronts.known.values():
        assert all(request.front is front for request in front.requests.values()), "a request is with another front"
        assert front in broker.timers, f"front {front.id.hex()} is watched by no timer"
        assert now_s < front.heard_s + broker.settings.front_silence_s, f"front {front.id.hex()}: silence unnoticed"


def _validate_loads(broker: Broker, now_s: float) -> None:
    keeper = broker.keeper
    assert keeper.loads <= broker.settings.parallel_loads, f"{keeper.loads} loads at once"
    fillable = {
        slot.name
        for slot in keeper.slots.values()
        if slot.replica is None and not slot.is_lost_for_good and broker.models[slot.model].standing not in AT_REST
    }
    assert keeper.fillable == fillable, "the set of fillable slots is wrong"
    if not broker.is_ending and not broker.ending.stopped and keeper.loads < broker.settings.parallel_loads:
        slots = [keeper.slots[name] for name in fillable]
        due = [slot.name for slot in slots if slot.respawn_s <= now_s and broker.ending.wants(slot)]
        assert not due, f"{due} could load, and nothing does"
    for name in fillable:
        slot = keeper.slots[name]
        assert slot.respawn_s <= now_s or slot in broker.timers, f"{name} waits for a respawn with no timer"

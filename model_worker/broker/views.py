"""What can be seen of the broker from outside: its records as the protocol's plain ones.

Owns the words for states. Changes nothing.

A model is `unloaded` or `idle` by its standing, else `ready` while at least one replica is READY and heard, `failed`
while all its slots are given up, `loading` otherwise; `reason` says what is missing. A slot is `vacant` (waiting for
its turn to load, or for a back-off), `unloaded` with its model, `failed`, or what its replica is: the phase it reports
while it loads, `ready`, `silent`, `draining`, `failing`, `stopping`, `killed`.
"""

from __future__ import annotations

from model_worker.broker.models import Model
from model_worker.broker.records import AT_REST, Replica, ReplicaState, Slot, Standing
from shared.messages import ModelState, Phase, SlotState


def model_state(model: Model) -> ModelState:
    ready = model.ready_count
    if model.standing is not Standing.SERVING:
        state, reason = _REST[model.standing]
    elif ready:
        state, reason = "ready", ""
    elif model.is_failed:
        state, reason = "failed", model.failure_reason
    else:
        state, reason = "loading", "; ".join(f"{slot.name}: {_obstacle(slot)}" for slot in model.slots)
    return ModelState(
        name=model.name,
        task=model.settings.task,
        state=state,
        reason=reason,
        required=model.settings.required,
        replicas_ready=ready,
        replicas_total=len(model.slots),
        queued=model.waiting_count,
        mixes_parameters=model.mixes_parameters,
        was_ready=any(slot.ever_ready for slot in model.slots),
    )


_REST = {
    Standing.CLOSING: ("unloaded", "unloaded by an operator; what was let in before is being finished"),
    Standing.UNLOADED: ("unloaded", "unloaded by an operator, until it is loaded again"),
    Standing.IDLE: ("idle", "unloaded because nobody asked for it; the next request has it loaded"),
}


def slot_state(slot: Slot, standing: Standing, now_s: float) -> SlotState:
    replica = slot.replica
    return SlotState(
        slot=slot.name,
        model=slot.model,
        device=slot.device,
        pid=replica.pid if replica else 0,
        incarnation=slot.incarnation,
        state=_word(slot, standing),
        reason=_reason(slot),
        loads=slot.loads,
        restarts=max(0, slot.incarnation - 1),
        memory_bytes=replica.memory_bytes if replica else 0,
        batches=slot.batches,
        requests=slot.requests,
        held=sum(len(batch.open) for batch in replica.batches()) if replica else 0,
        progress=replica.progress if replica else -1.0,
        heard_ms_ago=max(0, round((now_s - replica.heard_s) * 1000)) if replica else -1,
        choices=replica.choices if replica else {},
        steps=replica.progress_count if replica else 0,
        step_items=replica.step_items if replica else 0,
    )


def _word(slot: Slot, standing: Standing) -> str:
    replica = slot.replica
    if replica is None and standing in AT_REST:
        return "unloaded"
    if slot.failure is not None and (replica is None or replica.state is ReplicaState.LOADING):
        return "failed"
    if replica is None:
        return "vacant"
    if replica.state is ReplicaState.READY and replica.silent:
        return "silent"
    if replica.state in (ReplicaState.LOADING, ReplicaState.READY):
        return replica.phase.value
    return str(replica.state.value)


def _reason(slot: Slot) -> str:
    """What is to be said of a slot beside its state: who takes its replica's place or had it before, why that ended or
    will, what its load is at, why it ended before."""
    if slot.successor is not None:
        return f"its next process, pid {slot.successor.pid}: {_doing(slot.successor)}"
    if slot.retired is not None:
        return f"its process from before, pid {slot.retired.pid}: {_doing(slot.retired)}"
    if slot.replica is None or slot.replica.reason:
        return slot.reason if slot.replica is None else slot.replica.reason
    doing = slot.replica.doing
    return f"{doing} (before: {slot.reason})" if doing and slot.reason else doing or slot.reason


def _obstacle(slot: Slot) -> str:
    """Why a slot is not ready, in a few words."""
    if slot.replica is None:
        return slot.reason or "waiting for its turn to load"
    return f"{_doing(slot.replica)} (before: {slot.reason})" if slot.reason else _doing(slot.replica)


def _doing(replica: Replica) -> str:
    if replica.state is ReplicaState.LOADING:
        progress = f" {replica.progress:.0%}" if replica.progress >= 0 and replica.phase is not Phase.STARTING else ""
        return replica.phase.value + progress + (f", {replica.doing}" if replica.doing else "")
    if replica.silent and replica.state is ReplicaState.READY:
        return "not heard"
    if replica.state is ReplicaState.DRAINING:
        return f"finishes {len(replica.live_requests())} requests"
    return replica.reason or replica.phase.value

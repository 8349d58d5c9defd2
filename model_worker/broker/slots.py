"""The keeper of slots: starts model processes, watches them, and replaces those that end.

Owns the life of replicas: who may load, who loads too long, who is silent, how long to wait before the next try, and
when a slot is given up. Refuses to know about requests: `machine` asks what a process held before it reports an exit.

When a slot may be filled again
-------------------------------
    it never was READY   each failed load counts; after `load_attempts_max` of them the slot is given up for good
    it was READY before  each end counts as a death; a successful item sets the count back. `breaker_deaths_max` deaths
                         within `breaker_window_s` open the breaker: the slot is given up, and tried again after
                         `breaker_window_s`. The trial stands until an item succeeds; if it dies before, the breaker is
                         open again at once
    permanent failure    the load itself said that a new try cannot help: given up for good, at once

The wait before the next try is `respawn_delays_s`, by the number of failures in a row. While a trial loads, its slot
still counts as failed, so that requests are refused at once and not held until their deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from model_worker.broker.effects import Effect, KillReplica, Log, SendStop, SpawnReplica
from model_worker.broker.events import ReplicaPhaseChanged, ReplicaPulsed
from model_worker.broker.models import Model
from model_worker.broker.records import BatchLimits, Cause, Failure, Replica, ReplicaState, Slot
from model_worker.broker.settings import BrokerSettings, ModelSettings
from model_worker.broker.timers import Timers
from shared.messages import Phase, SlotName

SIGKILL = 9


class SlotKeeper:
    """All slots, in the order of the plan, and their replicas."""

    def __init__(
        self,
        settings: BrokerSettings,
        slots: Sequence[Slot],
        models: Mapping[str, Model],
        timers: Timers[object],
        effects: list[Effect],
    ) -> None:
        self.slots: dict[SlotName, Slot] = {slot.name: slot for slot in slots}
        self._settings = settings
        self._models = models
        self._timers = timers
        self._effects = effects
        # Vacant slots that may be filled, now or later; empty in a healthy server, which makes `spawn` free.
        self.fillable: set[SlotName] = set(self.slots)

    # --- looking up ----------------------------------------------------------------------------------------------

    def current(self, name: SlotName, incarnation: int) -> Replica | None:
        """The replica, unless another incarnation or none holds the slot: whatever that one still says is void."""
        slot = self.slots.get(name)
        if slot is None or slot.replica is None or slot.replica.incarnation != incarnation:
            return None
        return slot.replica

    def replicas(self) -> list[Replica]:
        """All processes that are there, in slot order."""
        return [slot.replica for slot in self.slots.values() if slot.replica is not None]

    @property
    def loads(self) -> int:
        """Processes that hold memory for a load that is not done; a failed one counts until it has exited."""
        return sum(not replica.was_ready for replica in self.replicas())

    @property
    def is_hopeless(self) -> bool:
        """Whether no model was ever ready, none can become so, and every process has exited."""
        slots = self.slots.values()
        return bool(slots) and all(
            slot.failure is not None and slot.replica is None and not slot.ever_ready for slot in slots
        )

    # --- starting ------------------------------------------------------------------------------------------------

    def spawn(self, now_s: float, wanted: Callable[[Slot], bool]) -> None:
        """Fills vacant slots that are due and wanted, in slot order, as far as `parallel_loads` allows."""
        if all(self.slots[name].respawn_s > now_s for name in self.fillable):
            return
        room = self._settings.parallel_loads - self.loads
        for slot in self.slots.values():
            if room <= 0:
                return
            if slot.name in self.fillable and slot.respawn_s <= now_s and wanted(slot):
                self._spawn(slot, now_s)
                room -= 1

    def _spawn(self, slot: Slot, now_s: float) -> None:
        self.fillable.discard(slot.name)
        slot.incarnation += 1
        slot.on_trial = slot.failure is Failure.BREAKER
        model = self._models[slot.model]
        slot.replica = Replica(
            slot=slot.name,
            model=slot.model,
            incarnation=slot.incarnation,
            spawned_s=now_s,
            due_s=now_s + model.settings.load_timeout_s,
            heard_s=now_s,
            progressed_s=now_s,
            limits=BatchLimits(model.settings.max_batch_size, model.settings.max_batch_cost),
        )
        if slot.last_cause is not None:
            model.tally.restarts[slot.last_cause] += 1
        self._effects.append(SpawnReplica(slot.name, slot.incarnation))
        self._log("info", "replica_spawned", slot.replica)
        self.arm(slot, now_s)

    def spawn_failed(self, slot: Slot, reason: str, now_s: float) -> None:
        """The incarnation never became a process."""
        replica = slot.replica
        assert replica is not None
        self._log("error", "spawn_failed", replica, reason=reason)
        self._vacate(slot, replica, "spawn_failed", f"cannot start a process: {reason}", now_s)

    def changed_phase(self, replica: Replica, event: ReplicaPhaseChanged, now_s: float) -> None:
        """What the process says about itself, up to and including READY or FAILED."""
        if replica.state not in (ReplicaState.LOADING, ReplicaState.READY):
            return  # it is on its way out, and its last words do not change that
        replica.phase = event.phase
        replica.progress = event.progress
        replica.doing = "" if event.phase in (Phase.FAILED, Phase.READY) else event.detail
        if event.phase is Phase.FAILED:
            self._failing(replica, event.detail or "failed without a reason", event.permanent, now_s)
        elif event.phase is not Phase.READY:
            if replica.state is ReplicaState.READY:
                # It gets no more work, and nothing would ever end it: what is loaded stays so until the process ends.
                self.fail(replica, f"said {event.phase.value!r} after it was ready", now_s)
        elif replica.state is ReplicaState.LOADING:
            self._ready(replica, event, now_s)
        self._models[replica.model].note_credit(replica)

    def _ready(self, replica: Replica, event: ReplicaPhaseChanged, now_s: float) -> None:
        slot = self.slots[replica.slot]
        settings = self._models[replica.model].settings
        replica.move(ReplicaState.READY)
        replica.was_ready = slot.ever_ready = True
        replica.limits = BatchLimits(
            settings.max_batch_size or event.max_batch_size, settings.max_batch_cost or event.max_batch_cost
        )
        replica.choices = event.choices
        replica.concurrency = event.concurrency
        slot.loads += 1
        slot.failure = None
        self._models[slot.model].given_up.discard(slot.name)
        slot.reason = ""
        self._log("info", "replica_ready", replica, load_s=round(now_s - replica.spawned_s, 3))
        self.arm(slot, now_s)

    # --- watching ------------------------------------------------------------------------------------------------

    def heard(self, replica: Replica, now_s: float) -> None:
        """Anything came from the process."""
        replica.heard_s = now_s
        if replica.silent:
            replica.silent = False
            self.arm(self.slots[replica.slot], now_s)
            self._models[replica.model].note_credit(replica)
            self._log("info", "replica_heard_again", replica)

    def pulsed(self, replica: Replica, event: ReplicaPulsed, now_s: float) -> None:
        replica.memory_bytes = event.memory_bytes
        replica.step_items = event.step_items
        if event.progress_count != replica.progress_count:
            replica.progress_count = event.progress_count
            replica.progressed_s = max(replica.progressed_s, now_s - event.running_s)

    def succeeded(self, replica: Replica) -> None:
        """An item ended well: what happened before is forgiven."""
        slot = self.slots[replica.slot]
        slot.deaths = 0
        slot.death_times_s.clear()
        slot.on_trial = False

    def is_hung(self, replica: Replica, now_s: float) -> bool:
        """Whether its work has stood still for too long."""
        return replica.state is ReplicaState.READY and replica.running is not None and now_s >= self._hung_at_s(replica)

    def _hung_at_s(self, replica: Replica) -> float:
        timeout_s = self._model_settings(replica).batch_timeout_s
        return replica.progressed_s + timeout_s + self._settings.pulse_tolerance_s

    def check(self, replica: Replica, now_s: float) -> None:
        """Acts on every limit of time that has passed, except the one of `is_hung`."""
        settings = self._settings
        if replica.state is ReplicaState.LOADING:
            if now_s >= replica.due_s:
                timeout_s = self._model_settings(replica).load_timeout_s
                self.kill(replica, "load_timeout", f"the load took longer than {timeout_s:g} s")
        elif replica.state in (ReplicaState.FAILING, ReplicaState.STOPPING):
            if now_s >= replica.due_s:
                self.kill(replica, replica.cause, f"{replica.reason}; no exit within {settings.stop_timeout_s:g} s")
        elif replica.state is ReplicaState.READY:
            if not replica.silent and now_s >= replica.heard_s + settings.replica_silence_s:
                replica.silent = True
                self._models[replica.model].note_credit(replica)
                self._log("warning", "replica_quarantined", replica, silence_s=settings.replica_silence_s)
            if replica.running is None and now_s >= replica.heard_s + settings.replica_silence_kill_s:
                self.kill(replica, "silent", f"not heard for {settings.replica_silence_kill_s:g} s")

    def arm(self, slot: Slot, now_s: float) -> None:
        """Sets the slot's timer for the next limit that could pass; called after whatever makes one come earlier."""
        due_s = self._due_s(slot)
        if due_s is not None and due_s > now_s:
            self._timers.advance(slot, due_s)

    def _due_s(self, slot: Slot) -> float | None:
        replica, settings = slot.replica, self._settings
        if replica is None:
            return None if slot.is_lost_for_good else slot.respawn_s
        if replica.state in (ReplicaState.LOADING, ReplicaState.FAILING, ReplicaState.STOPPING):
            return replica.due_s
        if replica.state is not ReplicaState.READY:
            return None
        limits_s = []
        if not replica.silent:
            limits_s.append(replica.heard_s + settings.replica_silence_s)
        if replica.running is not None:
            limits_s.append(self._hung_at_s(replica))
        else:
            limits_s.append(replica.heard_s + settings.replica_silence_kill_s)
        return min(limits_s)

    # --- ending --------------------------------------------------------------------------------------------------

    def kill(self, replica: Replica, cause: Cause | None, reason: str, *, dump_stacks: bool = False) -> None:
        replica.cause, replica.reason = cause, reason
        replica.move(ReplicaState.KILLED)
        self._models[replica.model].note_credit(replica)
        self._effects.append(KillReplica(replica.slot, replica.incarnation, reason, dump_stacks))

    def fail(self, replica: Replica, reason: str, now_s: float) -> None:
        """The process is about to end by itself; it gets no more work, and is killed if it stays."""
        replica.cause = "crashed" if replica.was_ready else "load_failed"
        replica.reason = reason
        replica.move(ReplicaState.FAILING)
        replica.due_s = now_s + self._settings.stop_timeout_s
        self._models[replica.model].note_credit(replica)
        self.arm(self.slots[replica.slot], now_s)

    def _failing(self, replica: Replica, reason: str, permanent: bool, now_s: float) -> None:
        self.fail(replica, reason, now_s)
        if permanent:
            self._give_up(self.slots[replica.slot], Failure.PERMANENT, reason)

    def stop(self, now_s: float) -> None:
        """Ends every process: the broker has no more use for them."""
        self.stop_loads(lambda slot: True)
        for replica in self.replicas():
            if replica.state in (ReplicaState.READY, ReplicaState.FAILING):
                replica.cause, replica.reason = "stopped", "told to stop"
                replica.move(ReplicaState.STOPPING)
                replica.due_s = now_s + self._settings.stop_timeout_s
                self._models[replica.model].note_credit(replica)
                self._effects.append(SendStop(replica.slot, replica.incarnation))
                self.arm(self.slots[replica.slot], now_s)

    def stop_loads(self, unwanted: Callable[[Slot], bool]) -> None:
        """Ends loads that nobody waits for. A load hears nothing, so it is killed; nothing is lost with it."""
        for replica in self.replicas():
            if replica.state is ReplicaState.LOADING and unwanted(self.slots[replica.slot]):
                self.kill(replica, "stopped", "still loading while the model server stops")

    def exited(self, slot: Slot, exit_code: int, now_s: float) -> None:
        """The process of the present incarnation is gone; the slot is vacant, or given up."""
        replica = slot.replica
        assert replica is not None
        cause = replica.cause or ("crashed" if replica.was_ready else "load_failed")
        reason = end_of(replica, exit_code)
        fields: dict[str, object] = {"cause": cause}
        fields |= {"signal": -exit_code} if exit_code < 0 else {"exit_code": exit_code}
        if replica.cause is None:
            # One that was known before is in the log already: in the process's own last line, or in that of its kill.
            fields["reason"] = reason
        self._log("info" if cause == "stopped" else "error", "replica_exited", replica, **fields)
        self._vacate(slot, replica, cause, reason, now_s)

    def _vacate(self, slot: Slot, replica: Replica, cause: Cause, reason: str, now_s: float) -> None:
        replica.move(ReplicaState.GONE)
        replica.running = replica.prefetched = None
        self._models[slot.model].note_credit(replica)
        slot.replica = None
        slot.last_cause = cause
        if cause != "stopped" and not slot.is_lost_for_good:
            slot.reason = reason
            if slot.ever_ready:
                self._count_death(slot, now_s)
            else:
                self._count_failed_load(slot, now_s)
        if not slot.is_lost_for_good:
            self.fillable.add(slot.name)
        self.arm(slot, now_s)

    def _count_failed_load(self, slot: Slot, now_s: float) -> None:
        slot.failed_loads += 1
        if slot.failed_loads >= self._settings.load_attempts_max:
            self._give_up(slot, Failure.ATTEMPTS, f"{slot.reason} (failed loads: {slot.failed_loads})")
        else:
            slot.respawn_s = now_s + self._delay_s(slot.failed_loads)

    def _count_death(self, slot: Slot, now_s: float) -> None:
        settings = self._settings
        slot.deaths += 1
        slot.death_times_s.append(now_s)
        while slot.death_times_s[0] < now_s - settings.breaker_window_s:
            slot.death_times_s.popleft()
        if slot.on_trial or len(slot.death_times_s) >= settings.breaker_deaths_max:
            reason = f"{slot.reason} (deaths without a success between them: {slot.deaths})"
            slot.respawn_s = now_s + settings.breaker_window_s
            self._give_up(slot, Failure.BREAKER, reason)
        else:
            slot.respawn_s = now_s + self._delay_s(slot.deaths)

    def _give_up(self, slot: Slot, failure: Failure, reason: str) -> None:
        slot.failure = failure
        self._models[slot.model].given_up.add(slot.name)
        slot.reason = reason
        fields: dict[str, object] = {"slot": slot.name, "model": slot.model, "failure": failure.value, "reason": reason}
        # The last slot of a model takes the model with it: one event, one line.
        event = "model_failed" if self._models[slot.model].is_failed else "slot_given_up"
        self._effects.append(Log("error", event, fields))

    def _delay_s(self, failures: int) -> float:
        delays_s = self._settings.respawn_delays_s
        return delays_s[min(failures, len(delays_s)) - 1]

    def _model_settings(self, replica: Replica) -> ModelSettings:
        return self._models[replica.model].settings

    def _log(
        self, level: Literal["debug", "info", "warning", "error"], event: str, replica: Replica, **fields: object
    ) -> None:
        self._effects.append(Log(level, event, {"slot": replica.slot, "incarnation": replica.incarnation, **fields}))


def end_of(replica: Replica, exit_code: int) -> str:
    """Why a process ended, in words that fit behind a colon: what the broker knew, else what the exit code says."""
    if replica.cause is not None:
        return replica.reason
    if exit_code == -SIGKILL:
        told = "killed by signal 9, probably out of memory"
    elif exit_code < 0:
        told = f"killed by signal {-exit_code}"
    else:
        told = f"exited with code {exit_code}"
    return told if replica.was_ready else f"{told} while it loaded"

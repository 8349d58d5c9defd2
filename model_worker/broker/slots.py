"""The keeper of slots: which process fills which slot, and when a vacant one is filled again.

Owns the table of slots: who may load, how long to wait before the next try, when a slot is given up, who takes whose
place, and which slots come and go. Refuses to know about requests: `machine` asks what a process held before it reports
an exit; and about the life of a single process: that is `processes`.

When a slot may be filled again
-------------------------------
    it never was READY   each failed load counts; after `load_attempts_max` of them the slot is given up for good
    it was READY before  each end counts as a death; a successful item sets the count back. `breaker_deaths_max` deaths
                         within `breaker_window_s` open the breaker: the slot is given up, and tried again after
                         `breaker_window_s`. The trial stands until an item succeeds; if it dies before, the breaker is
                         open again at once
    permanent failure    the load itself said that a new try cannot help: given up for good, at once
    told to stop         counts as nothing

The wait before the next try is `respawn_delays_s`, by the number of failures in a row. While a trial loads, its slot
still counts as failed, so that requests are refused at once and not held until their deadlines.

Who is in a slot
----------------
A slot has one process, its `replica`. While it is renewed a second one may load beside it, its `successor`: what
becomes of that is no failure of the slot's. The successor takes the replica's place when it is READY, or when the
replica ends before that; a replica that has lost its place is `retired`: it finishes what it holds, and is told to
stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from model_worker.broker.effects import Effect, Log, SpawnReplica
from model_worker.broker.events import ReplicaPhaseChanged
from model_worker.broker.models import Model
from model_worker.broker.processes import Processes
from model_worker.broker.records import (
    AT_REST,
    BatchLimits,
    Cause,
    Failure,
    Replica,
    ReplicaState,
    Slot,
)
from model_worker.broker.settings import BrokerSettings, SlotSettings
from model_worker.broker.timers import Timers
from shared.messages import Phase, SlotName


class SlotKeeper:
    """All slots, in the order of the plan, and their replicas."""

    def __init__(
        self,
        settings: BrokerSettings,
        slots: Sequence[Slot],
        models: Mapping[str, Model],
        processes: Processes,
        timers: Timers[object],
        effects: list[Effect],
    ) -> None:
        self.slots: dict[SlotName, Slot] = {slot.name: slot for slot in slots}
        self._settings = settings
        self._models = models
        self._processes = processes
        self._timers = timers
        self._effects = effects
        # Vacant slots that may be filled, now or later; empty in a healthy server, which makes `spawn` free.
        self.fillable: set[SlotName] = set(self.slots)
        # Of slots that were taken out of the table, their last incarnations: these never repeat.
        self.last_incarnations: dict[SlotName, int] = {}

    # --- looking up ----------------------------------------------------------------------------------------------

    def current(self, name: SlotName, incarnation: int) -> Replica | None:
        """The replica of this incarnation; None if it has ended, or never was: whatever it still says is void."""
        slot = self.slots.get(name)
        if slot is None:
            return None
        if slot.replica is not None and slot.replica.incarnation == incarnation:
            return slot.replica
        return next((replica for replica in slot.replicas() if replica.incarnation == incarnation), None)

    def replicas(self) -> list[Replica]:
        """All processes that are there, in slot order."""
        return [replica for slot in self.slots.values() for replica in slot.replicas()]

    @property
    def loads(self) -> int:
        """Processes that hold memory for a load that is not done; a failed one counts until it has exited."""
        return sum(not replica.was_ready for replica in self.replicas())

    def may_load(self, now_s: float) -> bool:
        """Whether one more process may load now, besides those of vacant slots."""
        due = sum(self.slots[name].respawn_s <= now_s for name in self.fillable)
        return self.loads + due < self._settings.parallel_loads

    def seats(self) -> list[SlotName]:
        """Every slot, as often as it has processes, and once while it has none: what is to fit into memory."""
        return [slot.name for slot in self.slots.values() for _ in (tuple(slot.replicas()) or (None,))]

    def used_bytes(self) -> dict[str, int]:
        """By model, what the largest of its processes takes, as pulsed."""
        used: dict[str, int] = {}
        for replica in self.replicas():
            used[replica.model] = max(used.get(replica.model, 0), replica.memory_bytes)
        return used

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
                self.fillable.discard(slot.name)
                slot.on_trial = slot.failure is Failure.BREAKER
                if slot.last_cause is not None:
                    self._models[slot.model].tally.restarts[slot.last_cause] += 1
                slot.replica = self._spawn(slot, now_s)
                room -= 1

    def spawn_successor(self, slot: Slot, now_s: float) -> None:
        """Has a process loaded beside the slot's own, to take its place."""
        assert len(list(slot.replicas())) == 1, f"{slot.name} is being renewed already"
        self._models[slot.model].tally.restarts["stopped"] += 1
        slot.successor = self._spawn(slot, now_s)

    def _spawn(self, slot: Slot, now_s: float) -> Replica:
        slot.incarnation += 1
        settings = self._models[slot.model].settings
        replica = Replica(
            slot=slot.name,
            model=slot.model,
            incarnation=slot.incarnation,
            spawned_s=now_s,
            due_s=now_s + settings.load_timeout_s,
            heard_s=now_s,
            progressed_s=now_s,
            limits=BatchLimits(settings.max_batch_size, settings.max_batch_cost),
        )
        self._effects.append(SpawnReplica(slot.name, slot.incarnation))
        self._processes.log("info", "replica_spawned", replica)
        self._processes.arm(replica, now_s)
        return replica

    def spawn_failed(self, replica: Replica, reason: str, now_s: float) -> None:
        """The incarnation never became a process."""
        self._processes.log("error", "spawn_failed", replica, reason=reason)
        self._processes.forget(replica)
        self._vacate(replica, "spawn_failed", f"cannot start a process: {reason}", now_s)

    def changed_phase(self, replica: Replica, event: ReplicaPhaseChanged, now_s: float) -> None:
        """What the process says about itself, up to and including READY or FAILED."""
        if replica.state not in (ReplicaState.LOADING, ReplicaState.READY, ReplicaState.DRAINING):
            return  # it is on its way out, and its last words do not change that
        replica.phase = event.phase
        replica.progress = event.progress
        replica.doing = "" if event.phase in (Phase.FAILED, Phase.READY) else event.detail
        if event.phase is Phase.FAILED:
            self._failing(replica, event.detail or "failed without a reason", event.permanent, now_s)
        elif event.phase is not Phase.READY:
            if replica.state is ReplicaState.READY:
                # It gets no more work, and nothing would ever end it: what is loaded stays so until the process ends.
                self._processes.fail(replica, f"said {event.phase.value!r} after it was ready", now_s)
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
        self._lift_failure(slot)
        self._processes.log("info", "replica_ready", replica, load_s=round(now_s - replica.spawned_s, 3))
        self._processes.arm(replica, now_s)
        if replica is slot.successor:
            self._take_over(slot, now_s)

    def _take_over(self, slot: Slot, now_s: float) -> None:
        """The successor is the slot's process from now on; the one before, if it is still there, retires."""
        slot.replica, slot.successor, slot.retired = slot.successor, None, slot.replica
        slot.on_trial = False
        if slot.retired is not None:
            self._processes.dismiss(slot.retired, now_s)

    # --- what is known of a slot ---------------------------------------------------------------------------------

    def succeeded(self, replica: Replica) -> None:
        """An item ended well: what happened before is forgiven."""
        slot = self.slots[replica.slot]
        slot.deaths = 0
        slot.death_times_s.clear()
        slot.on_trial = False

    def revive(self, slot: Slot, now_s: float) -> None:
        """An operator wants it tried again, whatever happened before."""
        self._lift_failure(slot)
        slot.failed_loads = slot.deaths = 0
        slot.death_times_s.clear()
        slot.respawn_s = now_s
        self._note_vacancy(slot)

    def _lift_failure(self, slot: Slot) -> None:
        slot.failure = None
        slot.reason = ""
        self._models[slot.model].given_up.discard(slot.name)

    def arm_vacant(self, slot: Slot, now_s: float) -> None:
        """Sets the slot's timer for when it may be filled."""
        if slot.name in self.fillable and slot.respawn_s > now_s:
            self._timers.advance(slot, slot.respawn_s)

    def note_standing(self, model: Model, now_s: float) -> None:
        """Its standing has changed, and with it whether its vacant slots may be filled."""
        for slot in model.slots:
            self._note_vacancy(slot)
            self.arm_vacant(slot, now_s)

    def _note_vacancy(self, slot: Slot) -> None:
        at_rest = self._models[slot.model].standing in AT_REST
        if slot.replica is None and not (slot.is_lost_for_good or slot.is_leaving or at_rest):
            self.fillable.add(slot.name)
        else:
            self.fillable.discard(slot.name)

    # --- ending --------------------------------------------------------------------------------------------------

    def _failing(self, replica: Replica, reason: str, permanent: bool, now_s: float) -> None:
        slot = self.slots[replica.slot]
        self._processes.fail(replica, reason, now_s)
        if permanent and replica is slot.replica:
            self._give_up(slot, Failure.PERMANENT, reason)

    def stop(self, now_s: float) -> None:
        """Ends every process: the broker has no more use for them."""
        self.stop_loads(lambda slot: True)
        for replica in self.replicas():
            if replica.state in (ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.FAILING):
                self._processes.stop(replica, now_s)

    def stop_loads(self, unwanted: Callable[[Slot], bool]) -> None:
        """Ends loads that nobody waits for. A load hears nothing, so it is killed; nothing is lost with it."""
        for replica in self.replicas():
            if replica.state is ReplicaState.LOADING and unwanted(self.slots[replica.slot]):
                self._processes.kill(replica, "stopped", "still loading while the model server stops")

    def exited(self, replica: Replica, exit_code: int, now_s: float) -> None:
        """The process is gone; if it was its slot's own, that is vacant, or given up."""
        cause, reason = self._processes.exited(replica, exit_code)
        self._vacate(replica, cause, reason, now_s)

    def _vacate(self, replica: Replica, cause: Cause, reason: str, now_s: float) -> None:
        slot = self.slots[replica.slot]
        slot.last_end = reason
        if replica is slot.successor:
            slot.successor = None
        elif replica is slot.retired:
            slot.retired = None
        else:
            self._lose_replica(slot, cause, reason, now_s)
        if slot.is_leaving and slot.replica is None and slot.retired is None:
            self._forget(slot)

    def _lose_replica(self, slot: Slot, cause: Cause, reason: str, now_s: float) -> None:
        slot.replica = None
        slot.last_cause = cause
        if cause != "stopped" and not (slot.is_lost_for_good or slot.is_leaving):
            slot.reason = reason
            if slot.ever_ready:
                self._count_death(slot, now_s)
            else:
                self._count_failed_load(slot, now_s)
        if slot.successor is not None:
            self._take_over(slot, now_s)
        self._note_vacancy(slot)
        self.arm_vacant(slot, now_s)

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
        slot.reason = reason
        fields: dict[str, object] = {"slot": slot.name, "model": slot.model, "failure": failure.value, "reason": reason}
        model = self._models[slot.model]
        if not slot.is_leaving:
            model.given_up.add(slot.name)
        # The last slot of a model takes the model with it: one event, one line.
        event = "model_failed" if model.is_failed else "slot_given_up"
        self._effects.append(Log("error", event, fields))

    def _delay_s(self, failures: int) -> float:
        delays_s = self._settings.respawn_delays_s
        return delays_s[min(failures, len(delays_s)) - 1]

    # --- the table -----------------------------------------------------------------------------------------------

    def add(self, model: Model, planned: Iterable[SlotSettings]) -> None:
        """New slots, behind the others of their model."""
        added = [
            Slot(new.name, new.model, new.device, incarnation=self.last_incarnations.pop(new.name, 0))
            for new in planned
        ]
        assert not self.slots.keys() & {slot.name for slot in added}, f"{model.name}: a slot is added twice"
        model.slots += tuple(added)
        self._set_table([*self.slots.values(), *added])
        self.fillable.update(slot.name for slot in added)

    def remove(self, model: Model, removed: Sequence[Slot], now_s: float) -> None:
        """Takes slots out of the table, each as soon as its process, which finishes what it holds, is gone."""
        model.slots = tuple(slot for slot in model.slots if slot not in removed)
        for slot in removed:
            slot.is_leaving = True
            model.given_up.discard(slot.name)
            self.fillable.discard(slot.name)
            for replica in slot.replicas():
                self._processes.dismiss(replica, now_s)
            if slot.replica is None and slot.retired is None:
                self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        self.last_incarnations[slot.name] = slot.incarnation
        self._timers.clear(slot)
        del self.slots[slot.name]

    def _set_table(self, slots: Iterable[Slot]) -> None:
        """In the order of the configuration, and of their numbers."""
        slots = list(slots)
        self.slots.clear()
        for model in self._models:
            self.slots.update({slot.name: slot for slot in slots if slot.model == model})

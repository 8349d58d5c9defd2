"""What model processes say and what becomes of them, as far as it concerns the requests they hold.

Owns the fence: what a process says counts only while its slot knows its incarnation, and what it says of an item only
if it holds that item under the present attempt. The rest is counted and dropped. Leaves the life of a process to
`processes`, and what follows for its slot to `slots`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from model_worker.broker.dispatch import Dispatcher
from model_worker.broker.effects import Effect, RelayChunk
from model_worker.broker.events import (
    ChunkArrived,
    ItemFinished,
    ReplicaConnected,
    ReplicaExited,
    ReplicaPhaseChanged,
    ReplicaPulsed,
    ReplicaSpawned,
    SpawnFailed,
)
from model_worker.broker.ledger import Ledger
from model_worker.broker.models import Model
from model_worker.broker.processes import Processes, end_of
from model_worker.broker.records import WORKING, Replica, ReplicaState, Request
from model_worker.broker.slots import SlotKeeper
from model_worker.broker.suspicion import Suspicion
from shared.errors import Code
from shared.messages import Phase, SlotName


class Reports:
    """The handlers of all facts about replicas."""

    def __init__(
        self,
        models: Mapping[str, Model],
        keeper: SlotKeeper,
        processes: Processes,
        ledger: Ledger,
        dispatcher: Dispatcher,
        suspicion: Suspicion,
        effects: list[Effect],
        stir: Callable[[str], None],
    ) -> None:
        """`stir` says that something has changed for a model."""
        # Messages dropped because they came from a dead incarnation or were about an ended attempt.
        self.fenced = 0
        self._models = models
        self._keeper = keeper
        self._processes = processes
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._suspicion = suspicion
        self._effects = effects
        self._stir = stir

    def replica_spawned(self, event: ReplicaSpawned, now_s: float) -> None:
        replica = self._current(event.slot, event.incarnation)
        if replica is not None:
            replica.pid = event.pid

    def spawn_failed(self, event: SpawnFailed, now_s: float) -> None:
        replica = self._current(event.slot, event.incarnation)
        if replica is not None:
            self._keeper.spawn_failed(replica, event.reason, now_s)
            self._stir(replica.model)

    def replica_connected(self, event: ReplicaConnected, now_s: float) -> None:
        self._hear_replica(event.slot, event.incarnation, now_s)

    def replica_phase_changed(self, event: ReplicaPhaseChanged, now_s: float) -> None:
        replica = self._hear_replica(event.slot, event.incarnation, now_s)
        if replica is None:
            return
        self._keeper.changed_phase(replica, event, now_s)
        model = self._models[replica.model]
        if replica.state is ReplicaState.READY and event.phase is Phase.READY:
            model.mixes_parameters = event.mixes_parameters
            model.backlog.arrange(mixes_parameters=event.mixes_parameters, pads=event.pads)
            model.concurrency = event.concurrency
        self._stir(model.name)

    def replica_pulsed(self, event: ReplicaPulsed, now_s: float) -> None:
        replica = self._hear_replica(event.slot, event.incarnation, now_s)
        if replica is not None:
            self._processes.pulsed(replica, event, now_s)

    def item_finished(self, event: ItemFinished, now_s: float) -> None:
        replica = self._hear_replica(event.slot, event.incarnation, now_s)
        if replica is None:
            return
        batch = replica.batch_of(event.id, event.attempt)
        if batch is None:
            self.fenced += 1
            return
        replica.progressed_s = now_s
        request = batch.open.pop(event.id)
        if event.code is Code.REPLICA_FAULT and replica.state in WORKING:
            # Whatever it were given now would die with it.
            self._processes.fail(replica, event.message or "the process is no longer usable", now_s)
        if request.batch is not batch:
            self.fenced += 1  # it ended before; the report only returns credit
        elif event.code is Code.REPLICA_FAULT:
            self._suspicion.shared_a_fault(request, event)
        else:
            self._item_reported(request, replica, event, now_s)
        self._dispatcher.return_credit(self._models[replica.model], replica, batch, now_s)
        self._stir(replica.model)

    def _item_reported(self, request: Request, replica: Replica, event: ItemFinished, now_s: float) -> None:
        self._keeper.slots[replica.slot].requests += 1
        if event.code is Code.OK:
            self._keeper.succeeded(replica)
            model = self._models[request.model]
            model.pace.observe_item(request.body_bytes, event.cost)
            if replica.concurrency:
                model.observe_continuous(now_s - request.started_s, event.batch_size)
        self._ledger.relay(request, event)

    def chunk_arrived(self, event: ChunkArrived, now_s: float) -> None:
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

    def replica_due(self, replica: Replica, now_s: float) -> None:
        if self._processes.is_hung(replica, now_s):
            self._end_hung(replica)
        else:
            self._processes.check(replica, now_s)
        self._processes.arm(replica, now_s)

    def _end_hung(self, replica: Replica) -> None:
        reason = f"hung: no progress for {self._models[replica.model].settings.batch_timeout_s:g} s"
        self._processes.kill(replica, "hung", reason, dump_stacks=True)
        self._suspicion.hung(replica, reason)

    def replica_exited(self, event: ReplicaExited, now_s: float) -> None:
        replica = self._current(event.slot, event.incarnation)
        if replica is None:
            return
        reason = end_of(replica, event.exit_code)
        witnesses = replica.live_requests()
        self._keeper.exited(replica, event.exit_code, now_s)
        for request in witnesses:
            self._suspicion.witnessed_death(request, replica, reason)
        self._stir(replica.model)

    def _current(self, slot: SlotName, incarnation: int) -> Replica | None:
        replica = self._keeper.current(slot, incarnation)
        if replica is None:
            self.fenced += 1
        return replica

    def _hear_replica(self, slot: SlotName, incarnation: int, now_s: float) -> Replica | None:
        replica = self._current(slot, incarnation)
        if replica is not None:
            if replica.silent:
                self._stir(replica.model)
            self._processes.heard(replica, now_s)
        return replica

"""The dispatcher: binds queued requests to replicas, as late as possible.

Owns the rule of credit: who may get work, when a batch that is not full yet waits, and what becomes of a replica's
batches when the last item is reported. Refuses to order requests; that is the backlog's.

The order is strict: while the most urgent request is held back for company (`max_wait_s`), so are those behind it, and
so they are while it waits for a replica of its own, because it must run alone. With continuous batching that would be a
standstill: while all replicas are busy, none of them ever becomes empty by itself. There some are kept free for those
that must be alone, and the others go on.
"""

from __future__ import annotations

from model_worker.broker.effects import BatchEntry, Effect, SendBatch
from model_worker.broker.ledger import Ledger
from model_worker.broker.models import Model
from model_worker.broker.processes import Processes
from model_worker.broker.records import Batch, Replica, Request, RequestState
from model_worker.broker.slots import SlotKeeper
from model_worker.broker.timers import Timers


class Dispatcher:
    """Moves requests from backlogs into replicas."""

    def __init__(
        self,
        keeper: SlotKeeper,
        processes: Processes,
        ledger: Ledger,
        timers: Timers[object],
        effects: list[Effect],
    ) -> None:
        self._keeper = keeper
        self._processes = processes
        self._ledger = ledger
        self._timers = timers
        self._effects = effects
        # Numbers count from 1 and never repeat.
        self._batch_number = 0

    def dispatch(self, model: Model, now_s: float, *, may_hold: bool) -> None:
        """Gives out everything that credit allows. With `may_hold`, small batches wait for `max_wait_s`."""
        if model.joinable:
            self._dispatch_singly(model, now_s)
        backlog = model.backlog
        while (head := backlog.head) is not None:
            replica = next(iter(model.idle), None)
            if replica is not None:
                full = backlog.fills(head, replica.limits)
                hold_s = head.arrived_s + model.settings.max_wait_s
                if may_hold and not full and now_s < hold_s:
                    self._timers.advance(model, hold_s)
                    return
            else:
                replica = next(iter(model.prefetchable), None)
                if replica is None or head.alone or not backlog.fills(head, replica.limits):
                    return
                full = True
            requests = backlog.take(replica.limits)
            if full and not head.alone:
                model.pace.observe_full_batch(len(requests))
            self._send(model, replica, requests, now_s)

    def _dispatch_singly(self, model: Model, now_s: float) -> None:
        """Has requests join replicas that batch continuously, the most urgent first, until there is no more room."""
        joined: dict[Replica, list[Request]] = {}
        backlog, rooms = model.backlog, model.joinable
        kept: frozenset[Replica] | None = None
        while (request := backlog.head) is not None:
            replica = rooms.empty if request.alone else rooms.roomiest()
            if replica is None and request.alone:
                # It waits for a replica that is kept for it; those that may share go on elsewhere.
                if kept is None:
                    kept = model.kept_for_suspects()
                request = backlog.first_to_share
                replica = rooms.roomiest(but=kept)
            if request is None or replica is None:
                break
            backlog.remove(request)
            self._join(model, replica, request, now_s)
            joined.setdefault(replica, []).append(request)
        for replica, requests in joined.items():
            self._order(replica, self._next_number(), requests)

    def _join(self, model: Model, replica: Replica, request: Request, now_s: float) -> None:
        batch = replica.running
        if batch is None:
            batch = replica.running = Batch(self._next_number(), request.alone, size=0, open={}, started_s=now_s)
            self._start(replica, batch, now_s)
            self._processes.arm(replica, now_s)
        batch.size += 1
        batch.open[request.id] = request
        self._ledger.assign([request], batch, replica, RequestState.RUNNING, now_s)
        model.note_credit(replica)

    def return_credit(self, model: Model, replica: Replica, batch: Batch, now_s: float) -> None:
        """The replica has reported an item. With the batch's last one, the prefetched batch, if there is one, runs."""
        if batch.open:
            if replica.concurrency:
                model.note_credit(replica)
            return
        if batch is replica.prefetched:
            replica.prefetched = None
        else:
            if not replica.concurrency:
                model.pace.observe_batch(now_s - batch.started_s)
            replica.running, replica.prefetched = replica.prefetched, None
            if replica.running is not None:
                self._start(replica, replica.running, now_s)
                self._ledger.start(replica.running)
        model.note_credit(replica)
        self._processes.arm(replica, now_s)

    def _send(self, model: Model, replica: Replica, requests: list[Request], now_s: float) -> None:
        batch = Batch(
            number=self._next_number(),
            alone=requests[0].alone,
            size=len(requests),
            open={request.id: request for request in requests},
            started_s=now_s,
        )
        if replica.running is None:
            replica.running = batch
            self._start(replica, batch, now_s)
            self._ledger.assign(requests, batch, replica, RequestState.RUNNING, now_s)
        else:
            replica.prefetched = batch
            self._ledger.assign(requests, batch, replica, RequestState.PREFETCHED, now_s)
        model.note_credit(replica)
        model.tally.batches += 1
        model.tally.batch_size.observe(batch.size)
        self._processes.arm(replica, now_s)
        self._order(replica, batch.number, requests)

    def _order(self, replica: Replica, number: int, requests: list[Request]) -> None:
        self._keeper.slots[replica.slot].batches += 1
        entries = tuple(
            BatchEntry(request.id, request.attempt, request.operation, request.deadline_s, request.stream)
            for request in requests
        )
        self._effects.append(SendBatch(replica.slot, replica.incarnation, number, requests[0].alone, entries))

    def _next_number(self) -> int:
        self._batch_number += 1
        return self._batch_number

    @staticmethod
    def _start(replica: Replica, batch: Batch, now_s: float) -> None:
        batch.started_s = replica.progressed_s = now_s

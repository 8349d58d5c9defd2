"""The checker is checked: each bug is planted into the core, and the worlds must show it, for the right reason.

The core's own invariants are switched off here, so that what catches the bug is the judgement from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from model_worker.broker.backlog import Backlog
from model_worker.broker.dispatch import Dispatcher
from model_worker.broker.effects import KillReplica, ReleasePayload, SendReply
from model_worker.broker.ledger import Ledger
from model_worker.broker.machine import Broker
from model_worker.broker.models import Model
from model_worker.broker.records import Credit, Replica, ReplicaState, Request
from model_worker.broker.slots import SlotKeeper
from model_worker.broker.suspicion import Suspicion
from shared.errors import Code
from tests.simulation.checker import Violation
from tests.simulation.world import World

SEEDS_MAX = 500

Plant = Callable[[pytest.MonkeyPatch], None]


def answers_twice(patch: pytest.MonkeyPatch) -> None:
    answer = Ledger.answer

    def twice(self: Ledger, request: Request, code: Code, message: str, retry_after_s: float = 0.0) -> None:
        answer(self, request, code, message, retry_after_s)
        self._effects.append(SendReply(request.front.id, request.id, code))

    patch.setattr(Ledger, "answer", twice)


def answers_cancelled_requests(patch: pytest.MonkeyPatch) -> None:
    def answered(self: Ledger, requests: list[Request]) -> None:
        for request in requests:
            self.answer(request, Code.CANCELLED, "")

    patch.setattr(Ledger, "release", answered)


def forgets_to_release_payloads(patch: pytest.MonkeyPatch) -> None:
    def silent(self: Ledger, requests: list[Request]) -> None:
        for request in requests:
            self._end(request, Code.CANCELLED)

    patch.setattr(Ledger, "release", silent)


def releases_instead_of_answering(patch: pytest.MonkeyPatch) -> None:
    def released(self: Ledger, request: Request, code: Code, message: str, retry_after_s: float = 0.0) -> None:
        self._effects.append(ReleasePayload(request.id))
        self._end(request, code)

    patch.setattr(Ledger, "answer", released)


def ignores_deadlines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Broker, "_deadline_reached", lambda self, request, now_s: None)


def answers_without_the_value(patch: pytest.MonkeyPatch) -> None:
    def valueless(self: Ledger, request: Request, event: Any) -> None:
        self.answer(request, event.code, "")

    patch.setattr(Ledger, "relay", valueless)


def does_not_isolate_suspects(patch: pytest.MonkeyPatch) -> None:
    requeue = Ledger.requeue_alone

    def in_company(self: Ledger, request: Request) -> None:
        requeue(self, request)
        self._models[request.model].backlog.remove(request)
        request.alone = False
        self._models[request.model].backlog.add(request)

    patch.setattr(Ledger, "requeue_alone", in_company)


def blames_at_the_first_death(patch: pytest.MonkeyPatch) -> None:
    def harsh(self: Suspicion, request: Request, replica: Replica, reason: str) -> None:
        self._ledger.answer(request, Code.POISON_INPUT, reason)

    patch.setattr(Suspicion, "witnessed_death", harsh)


def runs_everything_again(patch: pytest.MonkeyPatch) -> None:
    def lenient(self: Suspicion, request: Request, replica: Replica, reason: str) -> None:
        self._ledger.requeue_alone(request)

    patch.setattr(Suspicion, "witnessed_death", lenient)


def prefetches_behind_suspects(patch: pytest.MonkeyPatch) -> None:
    credit: Any = Replica.credit

    def careless(self: Replica) -> Credit:
        if self.is_ready and self.running is not None and self.prefetched is None and not self.concurrency:
            return Credit.PREFETCH
        found: Credit = credit.fget(self)
        return found

    patch.setattr(Replica, "credit", property(careless))


def loses_credit(patch: pytest.MonkeyPatch) -> None:
    def lost(self: Dispatcher, model: Any, replica: Replica, batch: Any, now_s: float) -> None:
        if batch is replica.running:
            replica.running = replica.prefetched
            replica.prefetched = None

    patch.setattr(Dispatcher, "return_credit", lost)


def ignores_the_batch_limit(patch: pytest.MonkeyPatch) -> None:
    take = Backlog.take

    def greedy(self: Backlog, limits: Any) -> list[Request]:
        return [request for _ in range(2) if self.head is not None for request in take(self, limits)]

    patch.setattr(Backlog, "take", greedy)


def overfills_continuous_batches(patch: pytest.MonkeyPatch) -> None:
    def roomy(self: Replica) -> int:
        return 0 if self.running is not None and self.running.alone else self.concurrency

    patch.setattr(Replica, "room", property(roomy))


def joins_suspects(patch: pytest.MonkeyPatch) -> None:
    roomiest = Model.roomiest
    patch.setattr(Model, "roomiest", lambda self, alone: roomiest(self, alone=False))


def sends_continuous_work_batch_by_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "room", property(lambda self: self.concurrency if self.running is None else 0))


def gives_work_to_the_dying(patch: pytest.MonkeyPatch) -> None:
    def hopeful(self: SlotKeeper, replica: Replica, reason: str, now_s: float) -> None:
        """A process that told of a fault goes on as if nothing had happened."""

    patch.setattr(SlotKeeper, "fail", hopeful)


def fences_no_attempts(patch: pytest.MonkeyPatch) -> None:
    def gullible(self: Replica, request_id: Any, attempt: int) -> Any:
        return next((batch for batch in self.batches() if request_id in batch.open), None)

    patch.setattr(Replica, "batch_of", gullible)


def fences_no_incarnations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotKeeper, "current", lambda self, name, incarnation: self.slots[name].replica)


def never_notices_silence(patch: pytest.MonkeyPatch) -> None:
    check = SlotKeeper.check

    def patient(self: SlotKeeper, replica: Replica, now_s: float) -> None:
        if replica.state is not ReplicaState.READY:
            check(self, replica, now_s)

    patch.setattr(SlotKeeper, "check", patient)


def lets_loads_take_for_ever(patch: pytest.MonkeyPatch) -> None:
    check = SlotKeeper.check

    def patient(self: SlotKeeper, replica: Replica, now_s: float) -> None:
        if replica.state is not ReplicaState.LOADING:
            check(self, replica, now_s)

    patch.setattr(SlotKeeper, "check", patient)


def loads_too_many_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotKeeper, "loads", property(lambda self: 0))


def forgets_that_a_slot_is_taken(patch: pytest.MonkeyPatch) -> None:
    kill = SlotKeeper.kill

    def hasty(self: SlotKeeper, replica: Replica, cause: Any, reason: str, *, dump_stacks: bool = False) -> None:
        kill(self, replica, cause, reason, dump_stacks=dump_stacks)
        self.fillable.add(replica.slot)

    patch.setattr(SlotKeeper, "kill", hasty)


def never_notices_hangs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotKeeper, "is_hung", lambda self, replica, now_s: False)


def kills_the_wrong_incarnation(patch: pytest.MonkeyPatch) -> None:
    kill = SlotKeeper.kill

    def astray(self: SlotKeeper, replica: Replica, cause: Any, reason: str, *, dump_stacks: bool = False) -> None:
        kill(self, replica, cause, reason, dump_stacks=dump_stacks)
        self._effects[-1] = KillReplica(replica.slot, replica.incarnation + 1, reason, dump_stacks)

    patch.setattr(SlotKeeper, "kill", astray)


@pytest.mark.parametrize(
    ("plant", "promise"),
    [
        (answers_twice, "answered after its end"),
        (answers_cancelled_requests, "after its cancellation|to a front that does not wait"),
        (forgets_to_release_payloads, "has no answer|payloads are kept|never answered"),
        (releases_instead_of_answering, "dropped while its front waits"),
        (ignores_deadlines, "has no answer"),
        (answers_without_the_value, "ok without a value"),
        (does_not_isolate_suspects, "has company"),
        (blames_at_the_first_death, "was blamed after 1 deaths"),
        (runs_everything_again, "must not run twice|sent again after 2 deaths"),
        (prefetches_behind_suspects, "holds company for a request that must run alone"),
        (loses_credit, "rests while a request waits"),
        (ignores_the_batch_limit, "items in a batch of at most|has company"),
        (overfills_continuous_batches, "items, and takes"),
        (joins_suspects, "holds company for a request that must run alone|has company"),
        (sends_continuous_work_batch_by_batch, "has room while a request waits"),
        (gives_work_to_the_dying, "work that it cannot do"),
        (fences_no_attempts, "another attempt"),
        (fences_no_incarnations, "was believed|work that it cannot do|loads at once"),
        (never_notices_silence, "and is silent|is silent for|hangs for"),
        (lets_loads_take_for_ever, "loads for"),
        (loads_too_many_at_once, "loads at once"),
        (forgets_that_a_slot_is_taken, "filled while it was taken"),
        (never_notices_hangs, "hangs for"),
        (kills_the_wrong_incarnation, "does not hold the slot"),
    ],
)
def test_a_planted_bug_is_caught(plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    def run_worlds() -> None:
        for seed in range(SEEDS_MAX):
            World(seed, validate=False).run()

    with pytest.raises(Violation, match=promise):
        run_worlds()

"""The checker is checked: each bug is planted into the core, and the worlds must show it, for the right reason.

The core's own invariants are switched off here, so that what catches the bug is the judgement from outside. Every
promise has a bug that breaks it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from model_worker.broker import admission, machine
from model_worker.broker.backlog import Backlog
from model_worker.broker.dispatch import Dispatcher
from model_worker.broker.disuse import DisuseWatch
from model_worker.broker.effects import KillReplica, ReleasePayload, SendReply, SpawnReplica, StopServer
from model_worker.broker.ending import Ending
from model_worker.broker.errands import Outcome, ServerDrain, Unload
from model_worker.broker.ledger import Ledger
from model_worker.broker.machine import Broker
from model_worker.broker.managing import Managing
from model_worker.broker.models import Model
from model_worker.broker.processes import Processes
from model_worker.broker.records import WORKING, Credit, Replica, ReplicaState, Request, Slot, Standing
from model_worker.broker.rooms import Rooms
from model_worker.broker.slots import SlotKeeper
from model_worker.broker.suspicion import Suspicion
from model_worker.broker.timers import Timers
from shared.errors import Code
from shared.messages import SlotName
from tests.simulation.checker import Checker
from tests.simulation.promises import Promise, Violation
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
    patch.setattr(Rooms, "empty", property(lambda self: self.roomiest()))


def keeps_everything_for_suspects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Model, "kept_for_suspects", lambda self: frozenset(self.joinable))


def sends_continuous_work_batch_by_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "room", property(lambda self: self.concurrency if self.running is None else 0))


def gives_work_to_the_dying(patch: pytest.MonkeyPatch) -> None:
    def hopeful(self: Processes, replica: Replica, reason: str, now_s: float) -> None:
        """A process that told of a fault goes on as if nothing had happened."""

    patch.setattr(Processes, "fail", hopeful)


def gives_work_to_those_that_drain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "is_ready", property(lambda self: self.state in WORKING and not self.silent))


def fences_no_attempts(patch: pytest.MonkeyPatch) -> None:
    def gullible(self: Replica, request_id: Any, attempt: int) -> Any:
        return next((batch for batch in self.batches() if request_id in batch.open), None)

    patch.setattr(Replica, "batch_of", gullible)


def fences_no_incarnations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotKeeper, "current", lambda self, name, incarnation: self.slots[name].replica)


def never_notices_silence(patch: pytest.MonkeyPatch) -> None:
    check = Processes.check

    def patient(self: Processes, replica: Replica, now_s: float) -> None:
        if replica.state is not ReplicaState.READY:
            check(self, replica, now_s)

    patch.setattr(Processes, "check", patient)


def lets_loads_take_for_ever(patch: pytest.MonkeyPatch) -> None:
    check = Processes.check

    def patient(self: Processes, replica: Replica, now_s: float) -> None:
        if replica.state is not ReplicaState.LOADING:
            check(self, replica, now_s)

    patch.setattr(Processes, "check", patient)


def loads_too_many_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotKeeper, "loads", property(lambda self: 0))


def forgets_that_a_slot_is_taken(patch: pytest.MonkeyPatch) -> None:
    spawn = SlotKeeper.spawn

    def hasty(self: SlotKeeper, now_s: float, wanted: Any) -> None:
        self.fillable.update(replica.slot for replica in self.replicas() if replica.state is ReplicaState.KILLED)
        spawn(self, now_s, wanted)

    patch.setattr(SlotKeeper, "spawn", hasty)


def never_notices_hangs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Processes, "is_hung", lambda self, replica, now_s: False)


def kills_the_wrong_incarnation(patch: pytest.MonkeyPatch) -> None:
    kill = Processes.kill

    def astray(self: Processes, replica: Replica, cause: Any, reason: str, *, dump_stacks: bool = False) -> None:
        kill(self, replica, cause, reason, dump_stacks=dump_stacks)
        self._effects[-1] = KillReplica(replica.slot, replica.incarnation + 1, reason, dump_stacks)

    patch.setattr(Processes, "kill", astray)


def answers_late(patch: pytest.MonkeyPatch) -> None:
    reached = Broker._deadline_reached

    def late(self: Broker, request: Request, now_s: float) -> None:
        if now_s < request.deadline_s + 0.5:
            self.timers.set(request, request.deadline_s + 0.5)
        else:
            reached(self, request, now_s)

    patch.setattr(Broker, "_deadline_reached", late)


def drops_what_was_in_a_dead_process(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspicion, "witnessed_death", lambda self, request, replica, reason: None)


def counts_the_cancelled_as_served(patch: pytest.MonkeyPatch) -> None:
    def served(self: Ledger, requests: list[Request]) -> None:
        for request in requests:
            self._effects.append(ReleasePayload(request.id))
            self._end(request, Code.OK)

    patch.setattr(Ledger, "release", served)


def tells_no_process_of_cancels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "send_cancels", lambda self: self._cancels.clear())


def gives_out_the_cheapest_first(patch: pytest.MonkeyPatch) -> None:
    def cheap(self: Backlog, limits: Any) -> list[Request]:
        request = min(self, key=lambda request: (request.cost, request.sequence))
        self.remove(request)
        return [request]

    patch.setattr(Backlog, "take", cheap)


def lets_nobody_grow_old(patch: pytest.MonkeyPatch) -> None:
    admit = Ledger.admit

    def by_priority_alone(self: Ledger, event: Any, front: Any, urgency_s: float, now_s: float) -> None:
        admit(self, event, front, event.priority * 1e6 + now_s, now_s)

    patch.setattr(Ledger, "admit", by_priority_alone)


def admits_without_limits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "_over_limits", lambda model, event: None)


def counts_no_bytes(patch: pytest.MonkeyPatch) -> None:
    move = Ledger._move

    def weightless(self: Ledger, request: Request, state: Any) -> None:
        move(self, request, state)
        self._models[request.model].waiting_bytes = 0

    patch.setattr(Ledger, "_move", weightless)
    admit = Ledger.admit

    def admitted(self: Ledger, event: Any, front: Any, urgency_s: float, now_s: float) -> None:
        admit(self, event, front, urgency_s, now_s)
        self._models[event.model].waiting_bytes = 0

    patch.setattr(Ledger, "admit", admitted)


def bans_nothing(patch: pytest.MonkeyPatch) -> None:
    ban = Suspicion.ban
    patch.setattr(Suspicion, "ban", lambda self, model, digest, until_s: ban(self, model, digest[::-1], until_s))


def bans_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspicion, "lift_ban", lambda self, ban: None)


def runs_poison_until_it_stops(patch: pytest.MonkeyPatch) -> None:
    """Also hides it from those who look at what is sent: the third run is that of somebody else."""

    def lenient(self: Suspicion, request: Request, replica: Replica, reason: str) -> None:
        self._ledger.requeue_alone(request)

    patch.setattr(Suspicion, "witnessed_death", lenient)
    patch.setattr(Checker, "_judge_entry", lambda self, batch, life, attempt: None)


def holds_batches_for_ever(patch: pytest.MonkeyPatch) -> None:
    fills = Backlog.fills
    dispatch = Dispatcher.dispatch

    def held(self: Dispatcher, model: Model, now_s: float, *, may_hold: bool) -> None:
        head = model.backlog.head
        if model.settings.max_wait_s and not model.concurrency and may_hold and head is not None:
            replica = next(iter(model.idle), None)
            if replica is not None and not fills(model.backlog, head, replica.limits):
                return
        dispatch(self, model, now_s, may_hold=may_hold)

    patch.setattr(Dispatcher, "dispatch", held)


def fills_a_slot_nobody_planned(patch: pytest.MonkeyPatch) -> None:
    spawn = SlotKeeper._spawn

    def generous(self: SlotKeeper, slot: Slot, now_s: float) -> Replica:
        self._effects.append(SpawnReplica(SlotName(f"{slot.model}/99"), 1))
        return spawn(self, slot, now_s)

    patch.setattr(SlotKeeper, "_spawn", generous)


def forgets_a_slot(patch: pytest.MonkeyPatch) -> None:
    exited = SlotKeeper.exited

    def forgotten(self: SlotKeeper, replica: Replica, exit_code: int, now_s: float) -> None:
        exited(self, replica, exit_code, now_s)
        self.fillable.discard(replica.slot)

    patch.setattr(SlotKeeper, "exited", forgotten)


def endures_those_that_fail(patch: pytest.MonkeyPatch) -> None:
    check = Processes.check

    def patient(self: Processes, replica: Replica, now_s: float) -> None:
        if replica.state is not ReplicaState.FAILING:
            check(self, replica, now_s)

    patch.setattr(Processes, "check", patient)


def lets_in_while_it_drains(patch: pytest.MonkeyPatch) -> None:
    refuse = admission.refuse_at_door

    def hospitable(*arguments: Any, closed: str) -> Any:
        return refuse(*arguments, closed="")

    patch.setattr(machine, "refuse_at_door", hospitable)


def has_endless_grace(patch: pytest.MonkeyPatch) -> None:
    ask = Ending.ask
    patch.setattr(Ending, "ask", lambda self, grace_s, now_s: ask(self, grace_s + 100.0, now_s))


def stops_over_its_processes(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Ending) -> None:
        if self.drain is not None and self.drain.stopping:
            self._stop(StopServer(0, "drained"))

    patch.setattr(Ending, "finish", hasty)


def keeps_timers_of_what_has_ended(patch: pytest.MonkeyPatch) -> None:
    clear = Timers.clear

    def hoard(self: Timers[Any], subject: Any) -> None:
        if not isinstance(subject, Request):
            clear(self, subject)

    patch.setattr(Timers, "clear", hoard)
    reached = Broker._deadline_reached

    def unless_ended(self: Broker, request: Request, now_s: float) -> None:
        if request.id in self.ledger.requests:
            reached(self, request, now_s)

    patch.setattr(Broker, "_deadline_reached", unless_ended)


def miscounts_refusals(patch: pytest.MonkeyPatch) -> None:
    refuse = Ledger.refuse

    def twice(self: Ledger, event: Any, refusal: Any) -> None:
        refuse(self, event, refusal)
        if event.model in self._models:
            self._models[event.model].tally.rejected[refusal.code.value] += 1

    patch.setattr(Ledger, "refuse", twice)


def answers_operators_twice(patch: pytest.MonkeyPatch) -> None:
    answer = Managing._answer

    def twice(self: Managing, order: Any, outcome: Any) -> None:
        answer(self, order, outcome)
        answer(self, order, outcome)

    patch.setattr(Managing, "_answer", twice)


def forgets_operators_when_it_stops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Managing, "abandon", lambda self, reason, now_s: self.running.clear())


def says_that_it_is_drained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServerDrain, "go_on", lambda self, now_s: Outcome("done", "drained"))


def says_that_it_is_unloaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unload, "go_on", lambda self, now_s: Outcome("done", "unloaded"))


def takes_processes_away_before_others_serve(patch: pytest.MonkeyPatch) -> None:
    spawn = SlotKeeper.spawn_successor

    def hasty(self: SlotKeeper, slot: Slot, now_s: float) -> None:
        spawn(self, slot, now_s)
        assert slot.replica is not None
        self._processes.dismiss(slot.replica, now_s)

    patch.setattr(SlotKeeper, "spawn_successor", hasty)


def stops_processes_with_work_in_them(patch: pytest.MonkeyPatch) -> None:
    dismiss = Processes.dismiss

    def rude(self: Processes, replica: Replica, now_s: float) -> None:
        if replica.state is ReplicaState.READY:
            self.stop(replica, now_s)
        else:
            dismiss(self, replica, now_s)

    patch.setattr(Processes, "dismiss", rude)


def leaves_drained_processes_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Processes, "stop_drained", lambda self, now_s: None)


def takes_the_lowest_slots_away(patch: pytest.MonkeyPatch) -> None:
    remove = SlotKeeper.remove

    def wrong(self: SlotKeeper, model: Model, removed: Any, now_s: float) -> None:
        remove(self, model, model.slots[: len(removed)], now_s)

    patch.setattr(SlotKeeper, "remove", wrong)


def unloads_what_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    used = DisuseWatch.used

    def once(self: DisuseWatch, model: Model, now_s: float) -> None:
        if model.disuse is not None and model.disuse.since_s == 0.0:
            used(self, model, now_s)

    patch.setattr(DisuseWatch, "used", once)


def unloads_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DisuseWatch, "due", lambda self, disuse, now_s, managed: None)


def turns_away_who_asks_for_an_idle_model(patch: pytest.MonkeyPatch) -> None:
    refuse = admission.refuse_at_door

    def unkind(models: Any, event: Any, urgency_s: float, now_s: float, *, closed: str) -> Any:
        model = models.get(event.model)
        if model is not None and model.standing is Standing.IDLE and not closed:
            return admission.Refusal(Code.MODEL_LOADING, "it is idle")
        return refuse(models, event, urgency_s, now_s, closed=closed)

    patch.setattr(machine, "refuse_at_door", unkind)


def wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DisuseWatch, "wake", lambda self, model, now_s: None)


PLANTS: list[tuple[Plant, str, set[Promise]]] = [
    (answers_twice, "answered after its end", {Promise.ONE_ANSWER}),
    (releases_instead_of_answering, "dropped while its front waits", {Promise.ONE_ANSWER}),
    (ignores_deadlines, "has no answer", {Promise.IN_TIME}),
    (answers_late, "has no answer|was answered .* late", {Promise.IN_TIME}),
    (drops_what_was_in_a_dead_process, "rests while|has room|passed over", {Promise.CONSERVATION, Promise.ORDER}),
    (answers_cancelled_requests, "after its cancellation|to a front that does not wait", {Promise.NOBODY_WAITS}),
    (answers_without_the_value, "ok without a value", {Promise.OWN_VALUE}),
    (fences_no_attempts, "another attempt", {Promise.OWN_VALUE}),
    (
        fences_no_incarnations,
        "was believed|that it cannot do|loads at once|rests while",
        {Promise.FENCE, Promise.FITNESS, Promise.LOADS, Promise.CONSERVATION},
    ),
    (kills_the_wrong_incarnation, "does not hold the slot", {Promise.FENCE}),
    (
        gives_work_to_the_dying,
        "work that it cannot do|cannot go on, and stays",
        {Promise.FITNESS, Promise.PATIENCE},
    ),
    (gives_work_to_those_that_drain, "work that it cannot do", {Promise.FITNESS}),
    (never_notices_silence, "and is silent|is silent for|hangs for", {Promise.FITNESS, Promise.PATIENCE}),
    (ignores_the_batch_limit, "items in a batch of at most|has company", {Promise.CREDIT, Promise.ALONE}),
    (overfills_continuous_batches, "items, and takes", {Promise.CREDIT}),
    (does_not_isolate_suspects, "has company", {Promise.ALONE}),
    (prefetches_behind_suspects, "holds company for a request that must run alone", {Promise.ALONE}),
    (joins_suspects, "holds company for a request that must run alone|has company", {Promise.ALONE}),
    (runs_everything_again, "must not run twice|was sent . times", {Promise.ONE_RETRY}),
    (blames_at_the_first_death, "was blamed after 1 deaths", {Promise.BLAME}),
    (bans_for_ever, "was blamed after 0 deaths", {Promise.BLAME}),
    (bans_nothing, "its payload is banned", {Promise.POISON}),
    (runs_poison_until_it_stops, "ended 3 processes", {Promise.POISON}),
    (loses_credit, "rests while a request waits", {Promise.CONSERVATION}),
    (sends_continuous_work_batch_by_batch, "have room for 0 suspects", {Promise.CONSERVATION}),
    (keeps_everything_for_suspects, "have room for . suspects", {Promise.CONSERVATION}),
    (holds_batches_for_ever, "rests while a request waits", {Promise.CONSERVATION}),
    (gives_out_the_cheapest_first, "was passed over", {Promise.ORDER}),
    (lets_nobody_grow_old, "was passed over|rests while", {Promise.ORDER, Promise.CONSERVATION}),
    (admits_without_limits, "wait for", {Promise.BOUNDS}),
    (counts_no_bytes, "bytes wait for", {Promise.BOUNDS}),
    (fills_a_slot_nobody_planned, "is not planned", {Promise.SLOT_TABLE}),
    (forgets_that_a_slot_is_taken, "filled while it was taken", {Promise.SLOT_TABLE}),
    (takes_the_lowest_slots_away, "is to go, and was to stay|is said to have", {Promise.SLOT_TABLE}),
    (loads_too_many_at_once, "loads at once", {Promise.LOADS}),
    (forgets_a_slot, "after its back-off", {Promise.REFILL}),
    (wakes_nobody, "after its back-off", {Promise.REFILL}),
    (never_notices_hangs, "hangs for", {Promise.PATIENCE}),
    (lets_loads_take_for_ever, "loads for", {Promise.PATIENCE}),
    (endures_those_that_fail, "cannot go on, and stays", {Promise.PATIENCE}),
    (leaves_drained_processes_alone, "has drained, and was not told to stop", {Promise.PATIENCE}),
    (tells_no_process_of_cancels, "was not told that nobody waits", {Promise.CANCELS_TOLD}),
    (lets_in_while_it_drains, "let in through a shut door", {Promise.DRAINING}),
    (has_endless_grace, "the grace is over", {Promise.DRAINING}),
    (stops_over_its_processes, "stopped over the processes", {Promise.DRAINING}),
    (answers_operators_twice, "answered twice", {Promise.MANAGED}),
    (forgets_operators_when_it_stops, "were never answered", {Promise.MANAGED}),
    (says_that_it_is_drained, "said to be drained", {Promise.MANAGED}),
    (says_that_it_is_unloaded, "said to be unloaded, and has processes", {Promise.MANAGED}),
    (takes_processes_away_before_others_serve, "nobody is there in its place", {Promise.HANDOVER}),
    (stops_processes_with_work_in_them, "was told to stop, and holds", {Promise.HANDOVER}),
    (unloads_what_is_asked_for, "was told to stop, and . requests wait", {Promise.REST}),
    (unloads_nothing, "is kept for nobody", {Promise.REST}),
    (turns_away_who_asks_for_an_idle_model, "turned away from a model that nobody has unloaded", {Promise.REST}),
    (counts_the_cancelled_as_served, "what ended was", {Promise.COUNTERS}),
    (miscounts_refusals, "refused were", {Promise.COUNTERS}),
    (
        forgets_to_release_payloads,
        "payloads are kept|was cancelled, and is kept|was taken from m0/0, and is alive",
        {Promise.NOTHING_KEPT, Promise.NOBODY_WAITS, Promise.ONE_ANSWER},
    ),
    (keeps_timers_of_what_has_ended, "timers for", {Promise.NOTHING_KEPT}),
]
"""Each bug, what its worlds say, and the promises that it may break first; the first one listed is what it is about."""


@pytest.mark.parametrize(("plant", "words", "promises"), PLANTS, ids=[plant.__name__ for plant, _, _ in PLANTS])
def test_a_planted_bug_is_caught(
    plant: Plant, words: str, promises: set[Promise], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def run_worlds() -> None:
        for seed in range(SEEDS_MAX):
            World(seed, validate=False).run()

    with pytest.raises(Violation, match=words) as caught:
        run_worlds()
    assert caught.value.promise in promises


def test_every_promise_has_a_bug_that_breaks_it() -> None:
    broken = set().union(*(promises for _, _, promises in PLANTS if len(promises) == 1))
    assert broken == set(Promise)

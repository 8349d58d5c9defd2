"""A whole cluster under a virtual clock: fronts, a network, processes, and the broker core with a stand-in for its
shell.

Everything is drawn from one seed, so a world can be run again and looked at. The checker watches every fact and every
order; the core's own invariants are checked as well, in every turn of some worlds and now and then in the others.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from model_worker.broker import effects as do
from model_worker.broker import events as happened
from model_worker.broker.machine import Broker
from shared.messages import RequestId
from tests.simulation.checker import Checker, Violation
from tests.simulation.clock import Clock
from tests.simulation.fronts import Front
from tests.simulation.processes import Process
from tests.simulation.weather import Nature, draw_concurrency, draw_settings, draw_weather

STEPS_MAX = 200_000
VALIDATE_EVERY = 25
# More than every load, hang, breaker and grace of these worlds together takes.
END_S_MAX = 300.0
GRACE_S = 15.0

Trace = Callable[[str], None]


class World:
    def __init__(self, seed: int, trace: Trace | None = None, *, validate: bool = True) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.settings = draw_settings(self.rng)
        self.weather = draw_weather(self.rng)
        self.models = {slot.name: slot.model for slot in self.settings.slots}
        self.mixes_parameters = self.rng.random() < 0.3
        # How many requests a process runs at once, by model; 0: it computes batch by batch.
        self.concurrency = draw_concurrency(random.Random(f"{seed} concurrency"), self.settings)
        self.broker = Broker(self.settings, 0.0)
        self.checker = Checker(self.settings)
        # What an input is, by the number that its id starts with; the same number is the same payload.
        self.natures: dict[bytes, Nature] = {}
        self.payloads: set[RequestId] = set()
        self.kills: Counter[RequestId] = Counter()
        self.turns = 0
        self._trace = trace
        self._validate_every = 0 if not validate else 1 if seed % 10 == 0 else VALIDATE_EVERY
        self._processes: dict[tuple[str, int], Process] = {}
        self._wake_at_s: float | None = None
        # While the loop is stalled, facts pile up.
        self._stalled = False
        self._inbox: list[happened.Event] = []
        self._request_number = 0
        self._requests_left = self.weather.requests + self.weather.requests_after_drain

    # --- running -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """To the end.

        Raises:
            Violation, AssertionError: a promise, or an invariant of the core, was broken.
        """
        self._carry_out(self.broker.start(0.0))
        for _ in range(self.weather.fronts):
            Front(self)
        steps = 0
        while self.checker.stopped is None:
            if not self.clock.step():
                raise Violation("the world has come to rest before the server has")
            steps += 1
            if steps > STEPS_MAX or self.clock.now_s > END_S_MAX:
                raise Violation(f"no end after {steps} steps and {self.clock.now_s:.0f} s")
        self.checker.judge_end(len(self.payloads), self.kills)
        self._judge_core_at_end()

    def _judge_core_at_end(self) -> None:
        broker = self.broker
        broker.validate(self.clock.now_s)
        assert not broker.ledger.requests
        for model in broker.models.values():
            assert (model.waiting_count, model.waiting_bytes, len(model.backlog)) == (0, 0, 0)
            assert not model.idle
            assert not model.prefetchable

    def take_request_number(self) -> int | None:
        """The next one, or None if this world has had its requests. Towards the end, the server drains."""
        if self._requests_left == 0:
            return None
        self._requests_left -= 1
        if self._requests_left == self.weather.requests_after_drain:
            self.clock.after(self.rng.uniform(0.0, 10.0), lambda: self.deliver(happened.DrainRequested(GRACE_S)))
        self._request_number += 1
        return self._request_number

    def nature(self, request_id: RequestId) -> Nature:
        return self.natures[request_id[:8]]

    def process_died(self, process: Process) -> None:
        self.kills.update(process.culprits)

    # --- the shell -----------------------------------------------------------------------------------------------

    def deliver(self, event: happened.Event) -> None:
        """A fact reaches the model server's loop."""
        if self.checker.stopped is not None:
            return
        if not self._stalled and self.rng.random() < self.weather.loop_stalls / 50:
            self._stalled = True
            self.clock.after(self.rng.uniform(0.1, 8.0), self._end_stall)
        if self._stalled:
            self._inbox.append(event)
        else:
            self._tell(event)

    def _end_stall(self) -> None:
        self._stalled = False
        self.checker.listening_since_s = self.clock.now_s
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self._tell(event)

    def _tell(self, event: happened.Event) -> None:
        if self.checker.stopped is not None:
            return
        now_s = self.clock.now_s
        if isinstance(event, happened.RequestArrived):
            if event.id in self.checker.ended:
                return  # a duplicate of what has ended: ids are unique, so nobody sends that
            self.payloads.add(event.id)
            if self.broker.refused_digests(event.model):
                event = replace(event, digest=event.id[:8])
        if self._trace is not None:
            self._trace(f"{now_s:10.4f}  {event}")
        outer_cause = self.checker.cause
        self.checker.saw_event(event, now_s)
        effects = self.broker.handle(event, now_s)
        self.turns += 1
        if self._validate_every and self.turns % self._validate_every == 0:
            self.broker.validate(now_s)
            self._look_at_views(now_s)
        self._carry_out(effects)
        self.checker.cause = outer_cause
        if outer_cause is None:
            self.checker.judge_turn(now_s)
            self._set_alarm()

    def _look_at_views(self, now_s: float) -> None:
        """Nothing to judge: they must be possible in every state."""
        states, totals = self.broker.model_states(), self.broker.counters()
        slots = self.broker.slot_states(now_s)
        assert len(states) == len(totals) == len(self.settings.models)
        assert len(slots) == len(self.settings.slots)

    def _set_alarm(self) -> None:
        wake_at_s = self.broker.wake_at_s
        if wake_at_s is not None and (self._wake_at_s is None or wake_at_s < self._wake_at_s):
            self._wake_at_s = wake_at_s
            self.clock.at(wake_at_s, lambda: self._wake(wake_at_s))

    def _wake(self, meant_s: float) -> None:
        if self._wake_at_s != meant_s:
            return  # an earlier alarm has replaced this one
        self._wake_at_s = None
        wake_at_s = self.broker.wake_at_s
        if wake_at_s is not None and wake_at_s <= self.clock.now_s:
            self.deliver(happened.TimePassed())
        if not self._stalled:
            self._set_alarm()

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            if self._trace is not None:
                self._trace(f"            -> {effect}")
            self._perform(effect)

    def _perform(self, effect: do.Effect) -> None:
        now_s, checker = self.clock.now_s, self.checker
        match effect:
            case do.SendReply():
                checker.saw_reply(effect, now_s)
                self.payloads.discard(effect.id)
            case do.ReleasePayload():
                checker.saw_release(effect, now_s)
                self.payloads.discard(effect.id)
            case do.RelayChunk():
                checker.saw_chunk(effect)
            case do.SendBatch():
                checker.saw_batch(effect, now_s)
                self._reach(effect.slot, effect.incarnation, lambda process: process.take_batch(effect))
            case do.SendCancel():
                self._reach(effect.slot, effect.incarnation, lambda process: process.cancel(effect.ids))
            case do.SendStop():
                checker.saw_stop(effect.slot, effect.incarnation)
                self._reach(effect.slot, effect.incarnation, lambda process: process.stop())
            case do.SpawnReplica():
                checker.saw_spawn(effect, now_s)
                self._spawn(effect)
            case do.KillReplica():
                checker.saw_kill(effect)
                process = self._processes[effect.slot, effect.incarnation]
                self.clock.after(0.25 if effect.dump_stacks else 0.0, lambda: process.die(-9))
            case do.DigestPoison():
                self._tell(happened.PoisonDigested(effect.model, effect.id[:8]))
            case do.StopServer():
                checker.saw_server_stop(effect)
            case do.Log():
                pass
            case _:
                raise Violation(f"{effect} was ordered, and nobody knows why")

    def _spawn(self, spawn: do.SpawnReplica) -> None:
        if self.rng.random() < self.weather.spawns_fail:
            self._tell(happened.SpawnFailed(spawn.slot, spawn.incarnation, "no more processes"))
            return
        process = Process(self, spawn.slot, spawn.incarnation)
        self._processes[spawn.slot, spawn.incarnation] = process
        self._tell(happened.ReplicaSpawned(spawn.slot, spawn.incarnation, 1000 + len(self._processes)))

    def _reach(self, slot: str, incarnation: int, action: Callable[[Process], None]) -> None:
        process = self._processes[slot, incarnation]
        process.from_broker.carry(self.rng.uniform(0.0, 0.002), lambda: None if process.dead else action(process))

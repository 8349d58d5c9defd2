"""A whole cluster under a virtual clock: fronts, a network, processes, and the broker core with a stand-in for its
shell.

Everything is drawn from one seed, so a world can be run again and looked at. The checker watches every fact and every
order; the core's own invariants are checked as well, in every turn of some worlds and now and then in the others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from msgspec.structs import replace

from model_worker.broker import effects as do
from model_worker.broker import events as happened
from model_worker.broker.machine import Broker
from shared.messages import RequestId, SlotName
from tests.simulation.checker import Checker
from tests.simulation.clock import Clock
from tests.simulation.faults import NATURES, Fault, Faults, dice
from tests.simulation.fronts import Front
from tests.simulation.judge import judge_end, judge_slot_table, judge_turn
from tests.simulation.operators import Operator, SimulatedPlanner
from tests.simulation.processes import ENDS_ITS_PROCESS, Process
from tests.simulation.promises import Promise, Violation
from tests.simulation.recipe import Recipe
from tests.simulation.weather import draw_settings, draw_weather

STEPS_MAX = 200_000
VALIDATE_EVERY = 25
# More than every load, hang, breaker and grace of these worlds together takes.
END_S_MAX = 300.0
GRACE_S = 15.0
# The shell has a turn at least this often, because it has pulses to send.
SHELL_PULSE_S = 1.0

Trace = Callable[[str], None]


class World:
    def __init__(self, recipe: Recipe | int, trace: Trace | None = None, *, validate: bool = True) -> None:
        self.recipe = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
        seed = self.recipe.seed
        self.clock = Clock()
        self.settings = draw_settings(seed, models_max=self.recipe.models_max, replicas_max=self.recipe.replicas_max)
        self.weather = draw_weather(seed, self.settings)
        self.faults = Faults(seed, self.weather.chances, self.recipe.spared)
        self.checker = Checker(self.settings)
        self.broker = Broker(self.settings, 0.0, SimulatedPlanner(self, self.weather.room))
        # What an input does to whoever computes it, by the number that its id starts with: the same number is the same
        # payload.
        self.natures: dict[bytes, Fault | None] = {}
        self.payloads: set[RequestId] = set()
        self.turns = 0
        self.events = 0
        self.requests_taken = 0
        every_turn = self.recipe.validate_each_turn or seed % 10 == 0
        self._validate_every = 0 if not validate else 1 if every_turn else VALIDATE_EVERY
        self._trace = trace
        self._rng = dice(seed, "world")
        self._processes: dict[tuple[str, int], Process] = {}
        self._wake_at_s: float | None = None
        # Facts that wait for the end of the turn, or of a stall.
        self._inbox: list[happened.Event] = []
        self._stalled = False
        self._turn_begun = False
        # The core was told something since it last settled.
        self._unsettled = False
        self._front_numbers = itertools.count(1)
        self._request_numbers = iter(range(1, self.weather.requests + self.weather.requests_after_drain + 1))

    # --- running -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """To the end.

        Raises:
            Violation, AssertionError: a promise, or an invariant of the core, was broken.
        """
        self._carry_out(self.broker.start(0.0))
        for _ in range(min(self.weather.fronts, self.recipe.fronts_max)):
            self.add_front()
        self._operator = Operator(self)
        if self.weather.turn_s:
            self._pulse()
        steps = 0
        while self.checker.stopped is None:
            if not self.clock.step():
                raise Violation(Promise.DRAINING, "the world has come to rest before the server has")
            steps += 1
            if steps > STEPS_MAX or self.clock.now_s > END_S_MAX:
                raise Violation(Promise.DRAINING, f"no end after {steps} steps and {self.clock.now_s:.0f} s")
        judge_end(self.checker, self.broker, self.payloads)
        if self._validate_every:
            self.broker.validate(self.clock.now_s)

    def add_front(self) -> None:
        Front(self, next(self._front_numbers))

    def take_request_number(self) -> int | None:
        """The next one, or None if this world has had its requests. Towards the end, the server drains."""
        number = next(self._request_numbers, None)
        self.requests_taken += number is not None
        if number == self.weather.requests:
            self._plan_drain()
        return number

    def _plan_drain(self) -> None:
        drain_s = self._rng.uniform(0.0, 10.0)
        self.clock.after(drain_s, lambda: self.deliver(happened.DrainRequested(GRACE_S)))
        if self.faults.strikes(Fault.SECOND_DRAIN, "operator"):
            grace_s = self._rng.choice((0.0, 2.0, 60.0))
            again_s = drain_s + self._rng.uniform(0.0, 5.0)
            self.clock.after(again_s, lambda: self.deliver(happened.DrainRequested(grace_s)))

    # --- payloads ------------------------------------------------------------------------------------------------

    def give_nature(self, payload: bytes) -> None:
        if payload not in self.natures:
            name = f"payload{int.from_bytes(payload, 'big')}"
            self.natures[payload] = next((fault for fault in NATURES if self.faults.strikes(fault, name)), None)

    def bad_payload(self, rng: random.Random) -> bytes | None:
        bad = [payload for payload, nature in self.natures.items() if nature in ENDS_ITS_PROCESS]
        return rng.choice(bad) if bad else None

    def some_request(self, rng: random.Random) -> RequestId:
        """Anybody's, alive where there is one."""
        alive = list(self.checker.lives)
        return rng.choice(alive) if alive else RequestId(rng.randbytes(16))

    def process_died(self, culprits: list[RequestId]) -> None:
        self.checker.saw_death(culprits)

    # --- the shell: facts ----------------------------------------------------------------------------------------

    def deliver(self, event: happened.Event) -> None:
        """A fact reaches the model server's loop."""
        if self.checker.stopped is not None:
            return
        self._inbox.append(event)
        if not self._stalled and self.faults.strikes(Fault.LOOP_STALL, "loop"):
            self._stalled = True
            self.clock.after(self._rng.uniform(0.1, 8.0), self._end_stall)
        self._begin_turn()

    def _begin_turn(self) -> None:
        if self._stalled or self._turn_begun:
            return
        if self.weather.turn_s:
            self._turn_begun = True
            self.clock.after(self.weather.turn_s, self._end_turn)
        else:
            self._take_inbox()

    def _end_turn(self) -> None:
        self._turn_begun = False
        if not self._stalled:
            self._take_inbox()

    def _end_stall(self) -> None:
        self._stalled = False
        self.checker.listening_since_s = self.clock.now_s
        self._take_inbox()

    def _take_inbox(self) -> None:
        """One turn of the loop, or one for each fact where the core settles each time."""
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self._tell(event)
            if not self.weather.turn_s:
                self._close_turn()
        if self.weather.turn_s and self.checker.stopped is None:
            self._tell(happened.TimePassed(), settles=True)
            self._close_turn()

    def _tell(self, event: happened.Event, *, settles: bool = False, is_aside: bool = False) -> None:
        if self.checker.stopped is not None:
            return
        now_s = self.clock.now_s
        if isinstance(event, happened.RequestArrived):
            if event.id in self.checker.lives:
                self._tell(happened.TimePassed(), settles=settles)  # its own end may be due in this very moment
            if event.id in self.checker.ended:
                # Nobody sends again what was answered: ids that have ended are not kept, so it would be a new request.
                return
            self.payloads.add(event.id)
            if self.broker.refused_digests(event.model):
                event = replace(event, digest=event.id[:8])
        if self._trace is not None:
            self._trace(f"{now_s:10.4f}  {event}")
        outer_cause = self.checker.cause
        self.checker.saw_event(event, now_s)
        more_follow = bool(self.weather.turn_s) and not settles
        effects = self.broker.handle(event, now_s, more_follow=more_follow or is_aside)
        self.events += 1
        self._unsettled = more_follow
        self._carry_out(effects)
        self.checker.event_is_over()
        self.checker.cause = outer_cause

    def _close_turn(self) -> None:
        now_s = self.clock.now_s
        self.turns += 1
        judge_turn(self.checker, self.payloads, now_s)
        if self._validate_every and self.turns % self._validate_every == 0 and not self._unsettled:
            self.broker.validate(now_s)
            judge_slot_table(self.checker, self.broker, now_s)
            # Nothing to judge: they must be possible in every state.
            assert len(self.broker.model_states()) == len(self.broker.counters()) == len(self.settings.models)
        self._set_alarm()

    # --- the shell: time -----------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        self._begin_turn()
        self.clock.after(SHELL_PULSE_S, self._pulse)

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
            if self.weather.turn_s:
                self._begin_turn()  # which ends with the news that time has passed
            else:
                self.deliver(happened.TimePassed())
        if not self._stalled and not self._turn_begun:
            self._set_alarm()

    # --- the shell: orders ---------------------------------------------------------------------------------------

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
                self._reach(effect.slot, effect.incarnation, lambda process: process.computer.take_batch(effect))
            case do.SendCancel():
                checker.saw_cancel(effect)
                self._reach(effect.slot, effect.incarnation, lambda process: process.computer.cancel(effect.ids))
            case do.SendDrain():
                checker.saw_drain(effect)
                self._reach(effect.slot, effect.incarnation, lambda process: process.drain())
            case do.SendManaged():
                order = checker.orders.get(effect.token)
                shown = [SlotName(slot.slot) for slot in self.broker.slot_states(now_s)]
                checker.saw_managed(effect, shown)
                if order is not None:
                    self._operator.answered(order, effect)
            case do.SendStop():
                checker.saw_stop(effect.slot, effect.incarnation, now_s)
                self._reach(effect.slot, effect.incarnation, lambda process: process.stop())
            case do.SpawnReplica():
                checker.saw_spawn(effect, now_s)
                self._spawn(effect)
            case do.KillReplica():
                checker.saw_kill(effect, now_s)
                self._processes[effect.slot, effect.incarnation].kill(0.25 if effect.dump_stacks else 0.0)
            case do.DigestPoison():
                # Told in the middle of a turn's orders, so that nothing else may be ordered because of it.
                self._tell(happened.PoisonDigested(effect.model, effect.id[:8]), is_aside=True)
            case do.StopServer():
                checker.saw_server_stop(effect)
            case do.Log():
                pass
            case _:
                raise AssertionError(f"{effect} was ordered, and nobody knows why")

    def _spawn(self, spawn: do.SpawnReplica) -> None:
        if self.faults.strikes(Fault.SPAWN_FAILS, spawn.slot):
            self._tell(happened.SpawnFailed(spawn.slot, spawn.incarnation, "no more processes"))
            return
        self._processes[spawn.slot, spawn.incarnation] = Process(self, spawn.slot, spawn.incarnation)
        self._tell(happened.ReplicaSpawned(spawn.slot, spawn.incarnation, 1000 + len(self._processes)))

    def _reach(self, slot: SlotName, incarnation: int, action: Callable[[Process], None]) -> None:
        process = self._processes[slot, incarnation]
        latency_s = process.rng.uniform(0.0, 0.002)
        process.from_broker.carry(latency_s, lambda: None if process.dead else action(process))

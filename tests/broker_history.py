"""Scripted histories for the broker core: tell it facts in a few words, move its clock, see exactly what it orders.

After every event the core's invariants are checked. Log effects are kept apart, in `logs`; everything else is returned
in order.
"""

from __future__ import annotations

from collections.abc import Iterable

from model_worker.broker.effects import (
    BatchEntry,
    Effect,
    Log,
    SendBatch,
    SendManaged,
    SendReply,
    SpawnReplica,
)
from model_worker.broker.events import (
    ChunkArrived,
    Event,
    FrontId,
    FrontPulsed,
    ItemFinished,
    ManageRequested,
    ReplicaConnected,
    ReplicaExited,
    ReplicaPhaseChanged,
    ReplicaPulsed,
    ReplicaSpawned,
    RequestArrived,
    RequestCancelled,
    TimePassed,
)
from model_worker.broker.machine import Broker
from model_worker.broker.planning import Planner
from model_worker.broker.settings import BrokerSettings, ModelSettings, SlotSettings
from shared.errors import Code
from shared.messages import Phase, RequestId, SlotName

FRONT = FrontId(b"front-1")
OPERATOR = FrontId(b"operator")
QA0, QA1 = SlotName("qa/0"), SlotName("qa/1")
PULSE_S = 0.5


def model_settings(
    name: str = "qa",
    *,
    max_batch_size: int = 1,
    max_batch_cost: int = 0,
    max_wait_s: float = 0.0,
    queue_size_max: int = 100,
    queue_bytes_max: int = 1_000_000,
    load_timeout_s: float = 600.0,
    batch_timeout_s: float = 60.0,
    idle_unload_s: float = 0.0,
) -> ModelSettings:
    return ModelSettings(
        name,
        "question-answering",
        True,
        max_batch_size,
        max_batch_cost,
        max_wait_s,
        queue_size_max,
        queue_bytes_max,
        load_timeout_s,
        batch_timeout_s,
        idle_unload_s,
    )


def broker_settings(
    models: Iterable[ModelSettings] = (model_settings(),), slots: int = 1, **limits: float
) -> BrokerSettings:
    """`slots` per model, named `<model>/<number>`. Hangs are noticed on the second, unless `limits` say otherwise."""
    models = tuple(models)
    planned = tuple(
        SlotSettings(SlotName(f"{model.name}/{number}"), model.name, "cpu")
        for model in models
        for number in range(slots)
    )
    return BrokerSettings(models, planned, **{"pulse_tolerance_s": 0.0, **limits})  # type: ignore[arg-type]


def request_id(number: int) -> RequestId:
    return RequestId(number.to_bytes(16, "big"))


def entry(number: int, attempt: int = 1, deadline_s: float = 60.0) -> BatchEntry:
    return BatchEntry(request_id(number), attempt, "predict", deadline_s, False)


class History:
    """A broker with a clock."""

    def __init__(self, settings: BrokerSettings | None = None, planner: Planner | None = None) -> None:
        self.settings = settings or broker_settings()
        self.now_s = 0.0
        self.broker = Broker(self.settings, 0.0, planner)
        self._tokens = 0
        self.logs: list[Log] = []
        # What was ordered and returned by no call so far (in `wait`), and everything that ever was.
        self.all_effects: list[Effect] = []
        self.fronts: set[FrontId] = set()
        self.started = self._take(self.broker.start(0.0))

    # --- the clock -----------------------------------------------------------------------------------------------

    def wait(self, seconds: float, *, pulses: bool = True) -> list[Effect]:
        """Lets time pass, ringing each timer when it is due; with `pulses`, fronts and READY replicas stay heard."""
        effects: list[Effect] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            wake_at_s = self.broker.wake_at_s
            until_s = end_s if wake_at_s is None else min(end_s, max(wake_at_s, self.now_s))
            self.now_s = min(until_s, self.now_s + PULSE_S) if pulses else until_s
            if pulses:
                effects.extend(self._pulse())
            effects.extend(self.tell(TimePassed()))
        return effects

    def _pulse(self) -> list[Effect]:
        effects: list[Effect] = []
        for front in sorted(self.fronts):
            effects.extend(self.tell(FrontPulsed(front)))
        for replica in self.broker.keeper.replicas():
            if replica.was_ready:
                effects.extend(self.pulse(replica.slot, replica.progress_count))
        return effects

    # --- facts ---------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> list[Effect]:
        return self._take(self.broker.handle(event, self.now_s))

    def ready(
        self,
        slot: SlotName = QA0,
        *,
        mixes_parameters: bool = False,
        max_batch_size: int = 0,
        max_batch_cost: int = 0,
        concurrency: int = 0,
        pads: bool = True,
    ) -> list[Effect]:
        """The slot's present incarnation starts, connects, loads and is READY."""
        incarnation = self.broker.keeper.slots[slot].incarnation
        return [
            *self.tell(ReplicaSpawned(slot, incarnation, 1000 + incarnation)),
            *self.tell(ReplicaConnected(slot, incarnation)),
            *self.tell(ReplicaPhaseChanged(slot, incarnation, Phase.LOADING, 0.5)),
            *self.tell(
                ReplicaPhaseChanged(
                    slot,
                    incarnation,
                    Phase.READY,
                    mixes_parameters=mixes_parameters,
                    max_batch_size=max_batch_size,
                    max_batch_cost=max_batch_cost,
                    concurrency=concurrency,
                    pads=pads,
                )
            ),
        ]

    def arrive(
        self,
        number: int,
        *,
        front: FrontId = FRONT,
        model: str = "qa",
        operation: str = "predict",
        batch_key: bytes = b"",
        cost: int = 1,
        body_bytes: int = 10,
        timeout_s: float = 60.0,
        priority: int = 0,
        stream: bool = False,
        retryable: bool = True,
        digest: bytes = b"",
    ) -> list[Effect]:
        self.fronts.add(front)
        return self.tell(
            RequestArrived(
                front,
                request_id(number),
                model,
                operation,
                batch_key,
                cost,
                body_bytes,
                self.now_s + timeout_s,
                priority,
                stream,
                retryable,
                digest,
            )
        )

    def cancel(self, number: int, front: FrontId = FRONT) -> list[Effect]:
        return self.tell(RequestCancelled(front, request_id(number)))

    def finish(
        self,
        number: int,
        code: Code = Code.OK,
        *,
        slot: SlotName = QA0,
        incarnation: int = 1,
        attempt: int = 1,
        cost: int = 1,
        message: str = "",
    ) -> list[Effect]:
        return self.tell(ItemFinished(slot, incarnation, request_id(number), attempt, code, cost, message=message))

    def chunk(self, number: int, *, slot: SlotName = QA0, incarnation: int = 1, attempt: int = 1) -> list[Effect]:
        return self.tell(ChunkArrived(slot, incarnation, request_id(number), attempt))

    def pulse(self, slot: SlotName = QA0, progress_count: int = 0) -> list[Effect]:
        incarnation = self.broker.keeper.slots[slot].incarnation
        return self.tell(ReplicaPulsed(slot, incarnation, progress_count, 0.0, 1 << 20))

    def order(self, action: str, model: str = "", replicas: int = 0) -> list[Effect]:
        """An operator's; tokens count from 1."""
        self._tokens += 1
        return self.tell(ManageRequested(OPERATOR, self._tokens, action, model, replicas))

    def exit(self, exit_code: int = -9, *, slot: SlotName = QA0, incarnation: int = 0) -> list[Effect]:
        """The slot's latest incarnation ends, or another one."""
        return self.tell(ReplicaExited(slot, incarnation or self.broker.keeper.slots[slot].incarnation, exit_code))

    # --- looking -------------------------------------------------------------------------------------------------

    def _take(self, effects: list[Effect]) -> list[Effect]:
        self.broker.validate(self.now_s)
        self.logs.extend(effect for effect in effects if isinstance(effect, Log))
        ordered: list[Effect] = [effect for effect in effects if not isinstance(effect, Log)]
        self.all_effects.extend(ordered)
        return ordered

    def log_events(self) -> list[str]:
        return [log.event for log in self.logs]

    def last_log(self, event: str) -> Log:
        return next(log for log in reversed(self.logs) if log.event == event)


def replies(effects: Iterable[Effect]) -> dict[int, Code]:
    """Request number to code of every reply."""
    return {int.from_bytes(effect.id, "big"): effect.code for effect in effects if isinstance(effect, SendReply)}


def reply(effects: Iterable[Effect], number: int) -> SendReply:
    """The one reply to this request."""
    [found] = [effect for effect in effects if isinstance(effect, SendReply) and effect.id == request_id(number)]
    return found


def batches(effects: Iterable[Effect]) -> list[tuple[str, list[int]]]:
    """Slot and request numbers of every batch sent."""
    return [
        (effect.slot, [int.from_bytes(item.id, "big") for item in effect.entries])
        for effect in effects
        if isinstance(effect, SendBatch)
    ]


def spawns(effects: Iterable[Effect]) -> list[tuple[str, int]]:
    return [(effect.slot, effect.incarnation) for effect in effects if isinstance(effect, SpawnReplica)]


def managed(effects: Iterable[Effect]) -> list[tuple[int, str]]:
    """Token and outcome of every order that was answered."""
    return [(effect.token, effect.outcome) for effect in effects if isinstance(effect, SendManaged)]

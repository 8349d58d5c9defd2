"""What one simulated world is like, drawn from its seed: each has some troubles and not others."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from model_worker.broker.settings import BrokerSettings, ModelSettings, SlotSettings
from shared.messages import SlotName
from tests.simulation.faults import Fault, dice

# In how many worlds a fault may happen, and how often at most in those, per occasion.
RARITY: dict[Fault, tuple[float, float]] = {
    Fault.INVALID: (0.5, 0.2),
    Fault.COSTLY: (0.3, 0.1),
    Fault.SLOW: (0.4, 0.1),
    Fault.POISON: (0.5, 0.05),
    Fault.FAULTY: (0.3, 0.05),
    Fault.HANGING: (0.3, 0.03),
    Fault.SPAWN_FAILS: (0.1, 0.2),
    Fault.LOAD_CRASH: (0.3, 0.4),
    Fault.LOAD_FAILURE: (0.3, 0.4),
    Fault.LOAD_HANG: (0.2, 0.2),
    Fault.READY_CRASH: (0.2, 0.3),
    Fault.IDLE_CRASH: (0.3, 0.05),
    Fault.BATCH_CRASH: (0.4, 0.05),
    Fault.BATCH_OUT_OF_MEMORY: (0.2, 0.1),
    Fault.ITEM_FAILURE: (0.3, 0.1),
    Fault.FREEZE: (0.3, 0.05),
    Fault.GIL_HELD: (0.3, 0.05),
    Fault.LAGGARD: (0.3, 0.3),
    Fault.FORGOTTEN_ITEM: (0.1, 0.02),
    Fault.LIE: (0.3, 0.1),
    Fault.PHASE_LIE: (0.1, 0.5),
    Fault.LATE_WORDS: (0.4, 0.8),
    Fault.STOP_IGNORED: (0.3, 0.5),
    Fault.SLOW_KILL: (0.2, 0.5),
    Fault.FRONT_DEATH: (0.3, 0.05),
    Fault.FRONT_LEAVES: (0.3, 0.05),
    Fault.FRONT_FREEZE: (0.2, 0.1),
    Fault.CANCEL: (0.6, 0.3),
    Fault.FOREIGN_CANCEL: (0.2, 0.1),
    Fault.DUPLICATE: (0.2, 0.05),
    Fault.LATE_ARRIVAL: (0.2, 0.1),
    Fault.MISFIT: (0.2, 0.1),
    Fault.BURST: (0.2, 0.05),
    Fault.LOOP_STALL: (0.15, 0.001),
    Fault.SECOND_DRAIN: (0.2, 1.0),
    Fault.LULL: (0.3, 0.1),
    Fault.RELOAD: (0.3, 0.2),
    Fault.SCALE: (0.3, 0.2),
    Fault.UNLOAD: (0.15, 0.1),
    Fault.LOAD: (0.1, 0.1),
    Fault.DRAIN: (0.1, 0.1),
    Fault.NONSENSE: (0.1, 0.1),
}


@dataclass(frozen=True)
class Weather:
    """Chances, per occasion: 0.0 where this world is spared. And the shape of its traffic."""

    chances: Mapping[Fault, float]
    streams: float
    unretryable: float
    requests: int
    requests_after_drain: int
    fronts: int
    request_every_s: float
    front_latency_s: float
    moody_after_s: float
    """Loads and processes are sound before this moment, so that most worlds have a history of success."""
    turn_s: float
    """How long the loop gathers facts before it lets the core settle; 0.0: it settles after each."""
    mixes_parameters: bool
    pads: bool
    room: int
    """How many processes fit into memory."""
    concurrency: Mapping[str, int]
    """By model, how many requests its processes run at once; 0: they compute batch by batch."""


def draw_weather(seed: int, settings: BrokerSettings) -> Weather:
    rng = dice(seed, "weather")

    def maybe(share: float, top: float) -> float:
        return rng.uniform(0.0, top) if rng.random() < share else 0.0

    return Weather(
        chances={fault: maybe(*RARITY[fault]) for fault in Fault},
        streams=maybe(0.5, 0.5),
        unretryable=maybe(0.5, 0.5),
        requests=rng.randint(40, 160),
        requests_after_drain=rng.choice((0, 0, 10, 30)),
        fronts=rng.randint(1, 3),
        request_every_s=rng.choice((0.01, 0.05, 0.3)),
        front_latency_s=rng.choice((0.005, 0.005, 0.3)),
        moody_after_s=rng.choice((0.0, 5.0, 5.0)),
        turn_s=rng.choice((0.0, 0.0, 0.002, 0.05)),
        mixes_parameters=rng.random() < 0.3,
        pads=dice(seed, "pads").random() < 0.6,
        room=rng.choice((1, 99, 99)),
        concurrency={model.name: rng.choice((0, 0, 0, 1, 3, 20)) for model in settings.models},
    )


def draw_settings(seed: int, *, models_max: int, replicas_max: int) -> BrokerSettings:
    rng = dice(seed, "settings")
    models = tuple(_model(rng, f"m{number}") for number in range(rng.choice((1, 1, 2))))[:models_max]
    slots = tuple(
        SlotSettings(SlotName(f"{model.name}/{number}"), model.name, "cpu")
        for model in models
        for number in range(min(dice(seed, model.name).randint(1, 3), replicas_max))
    )
    return BrokerSettings(
        models,
        slots,
        parallel_loads=rng.randint(1, 3),
        load_attempts_max=rng.choice((2, 3)),
        respawn_delays_s=(0.0, 0.5, 1.0, 2.0),
        breaker_deaths_max=rng.choice((3, 5)),
        breaker_window_s=20.0,
        poison_ban_s=rng.choice((5.0, 30.0)),
        replica_silence_kill_s=12.0,
        stop_timeout_s=2.0,
    )


def _model(rng: random.Random, name: str) -> ModelSettings:
    return ModelSettings(
        name=name,
        task="echo",
        required=True,
        max_batch_size=rng.choice((1, 2, 4, 16)),
        max_batch_cost=rng.choice((0, 0, 50, 200)),
        max_wait_s=rng.choice((0.0, 0.0, 0.0, 0.05)),
        queue_size_max=rng.choice((4, 20, 500)),
        queue_bytes_max=rng.choice((2_000, 1_000_000)),
        load_timeout_s=30.0,
        batch_timeout_s=4.0,
        idle_unload_s=dice(rng.random(), name).choice((0.0, 0.0, 0.0, 1.5, 4.0)),
    )

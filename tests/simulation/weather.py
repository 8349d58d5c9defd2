"""What goes wrong in one simulated world, drawn from its seed: each world has some troubles and not others."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from model_worker.broker.settings import BrokerSettings, ModelSettings, SlotSettings
from shared.messages import SlotName

Nature = Literal["plain", "invalid", "slow", "poison", "faulty", "hanging"]
"""What an input does to the process that runs it: nothing, an error of its own, take long, kill it, break its device,
hang it."""


@dataclass(frozen=True)
class Weather:
    """Chances, per occasion. 0.0 where this world is spared."""

    natures: dict[Nature, float]
    load_crashes: float
    load_fails: float
    load_hangs: float
    batch_crashes: float
    freezes: float
    lies: float
    late_words: float
    laggards: float
    ignores_stop: float
    loop_stalls: float
    fronts_die: float
    fronts_leave: float
    cancels: float
    duplicates: float
    streams: float
    unretryable: float
    misfits: float
    spawns_fail: float
    requests: int
    requests_after_drain: int
    fronts: int
    request_every_s: float
    moody_after_s: float
    """Loads and processes are sound before this moment, so that most worlds have a history of success."""


def draw_weather(rng: random.Random) -> Weather:
    def maybe(share: float, top: float) -> float:
        return rng.uniform(0.0, top) if rng.random() < share else 0.0

    natures: dict[Nature, float] = {
        "plain": 1.0,
        "invalid": maybe(0.5, 0.2),
        "slow": maybe(0.4, 0.1),
        "poison": maybe(0.5, 0.05),
        "faulty": maybe(0.3, 0.05),
        "hanging": maybe(0.3, 0.03),
    }
    return Weather(
        natures=natures,
        load_crashes=maybe(0.3, 0.4),
        load_fails=maybe(0.3, 0.4),
        load_hangs=maybe(0.2, 0.2),
        batch_crashes=maybe(0.4, 0.05),
        freezes=maybe(0.3, 0.05),
        lies=maybe(0.3, 0.1),
        late_words=maybe(0.4, 0.8),
        laggards=maybe(0.3, 0.3),
        ignores_stop=maybe(0.3, 0.5),
        loop_stalls=maybe(0.15, 0.05),
        fronts_die=maybe(0.3, 0.05),
        fronts_leave=maybe(0.3, 0.05),
        cancels=maybe(0.6, 0.3),
        duplicates=maybe(0.2, 0.05),
        streams=maybe(0.5, 0.5),
        unretryable=maybe(0.5, 0.5),
        misfits=maybe(0.2, 0.1),
        spawns_fail=maybe(0.1, 0.2),
        requests=rng.randint(40, 160),
        requests_after_drain=rng.choice((0, 0, 10, 30)),
        fronts=rng.randint(1, 3),
        request_every_s=rng.choice((0.01, 0.05, 0.3)),
        moody_after_s=rng.choice((0.0, 5.0, 5.0)),
    )


def draw_settings(rng: random.Random) -> BrokerSettings:
    models = tuple(
        ModelSettings(
            name=f"m{number}",
            task="echo",
            required=True,
            max_batch_size=rng.choice((1, 2, 4, 16)),
            max_batch_cost=rng.choice((0, 0, 50, 200)),
            max_wait_s=rng.choice((0.0, 0.0, 0.0, 0.05)),
            queue_size_max=rng.choice((4, 20, 500)),
            queue_bytes_max=rng.choice((2_000, 1_000_000)),
            load_timeout_s=30.0,
            batch_timeout_s=4.0,
        )
        for number in range(rng.choice((1, 1, 2)))
    )
    slots = tuple(
        SlotSettings(SlotName(f"{model.name}/{number}"), model.name, "cpu")
        for model in models
        for number in range(rng.randint(1, 3))
    )
    return BrokerSettings(
        models,
        slots,
        parallel_loads=rng.randint(1, 3),
        load_attempts_max=rng.choice((2, 3)),
        respawn_delays_s=(0.0, 0.5, 1.0, 2.0),
        breaker_deaths_max=rng.choice((3, 5)),
        breaker_window_s=20.0,
        poison_ban_s=30.0,
        replica_silence_kill_s=12.0,
        stop_timeout_s=2.0,
    )


def draw_concurrency(rng: random.Random, settings: BrokerSettings) -> dict[str, int]:
    """Which models batch continuously, and how many requests their processes run at once; 0: they do not."""
    return {model.name: rng.choice((0, 0, 0, 1, 3, 20)) for model in settings.models}

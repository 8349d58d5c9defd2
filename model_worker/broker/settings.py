"""The limits the broker core works within: plain numbers, decided before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import SlotName


@dataclass(frozen=True, slots=True)
class ModelSettings:
    name: str
    task: str
    required: bool
    max_batch_size: int
    max_batch_cost: int
    """Padded units (tokens, for text) that one batch may hold: `max(cost) * n`. 0: bounded by size only."""
    max_wait_s: float
    queue_size_max: int
    """Requests that may wait (queued or prefetched, not running)."""
    queue_bytes_max: int
    load_timeout_s: float
    batch_timeout_s: float
    idle_unload_s: float = 0.0
    """After so long without a request its processes end, until the next one. 0.0: never."""


@dataclass(frozen=True, slots=True)
class SlotSettings:
    name: SlotName
    model: str
    device: str


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Section 7 of the architecture document says which promise each number belongs to."""

    models: tuple[ModelSettings, ...]
    slots: tuple[SlotSettings, ...]
    parallel_loads: int = 1
    load_attempts_max: int = 3
    respawn_delays_s: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    breaker_deaths_max: int = 5
    breaker_window_s: float = 600.0
    poison_ban_s: float = 600.0
    front_silence_s: float = 3.0
    replica_silence_s: float = 3.0
    replica_silence_kill_s: float = 60.0
    pulse_tolerance_s: float = 0.7
    """How much older than the truth the last word on a replica's progress may be: pulses come each half second."""
    stop_timeout_s: float = 5.0
    ageing_s_per_priority: float = 5.0

"""The table of slots as it grows while the server runs, and what each slot's processes are started with.

Owns the answers to the broker core's `Planner`: made with the function that makes the table at the start, and with the
same judgement of what fits into memory. Remembers where it has put every slot. Asks nothing of the machine: the
inventory is that of the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from model_worker.broker.settings import SlotSettings
from model_worker.placement import Slot, check_memory, plan
from model_worker.preflight import Preflight
from model_worker.specs import ReplicaSpec
from shared.errors import ConfigurationError
from shared.messages import DeviceState, SlotName


class GrowingPlan:
    """A `Planner`. `environment` is the user's own, as for `placement.plan`."""

    def __init__(self, ready: Preflight, environment: Mapping[str, str]) -> None:
        self._ready = ready
        self._environment = environment
        # Everything that was ever placed. A slot that was taken out of the table and comes back is placed anew.
        self._slots: dict[SlotName, Slot] = {slot.name: slot for slot in ready.slots}

    # --- the core's questions ------------------------------------------------------------------------------------

    def grow(
        self, model: str, replicas: int, present: Sequence[SlotName], used_bytes: Mapping[str, int]
    ) -> tuple[SlotSettings, ...]:
        placed = [self._slots[name] for name in present]
        counts = {**Counter(slot.model for slot in placed), model: replicas}
        models = tuple(
            configured.model_copy(update={"replicas": counts[configured.name]})
            for configured in self._ready.config.models
        )
        config = self._ready.config.model_copy(update={"models": models})
        table = plan(config, self._ready.inventory, self._environment, placed)
        self._check(table, used_bytes)
        added = [slot for slot in table if slot.name not in present]
        self._slots.update({slot.name: slot for slot in added})
        return tuple(SlotSettings(slot.name, slot.model, slot.device) for slot in added)

    def crowding(self, processes: Sequence[SlotName], used_bytes: Mapping[str, int]) -> str:
        try:
            self._check([self._slots[name] for name in processes], used_bytes)
        except ConfigurationError as error:
            return str(error)
        return ""

    def _check(self, slots: Sequence[Slot], used_bytes: Mapping[str, int]) -> None:
        """
        Raises:
            ConfigurationError: they do not fit.
        """
        weights_bytes = self._ready.weights_bytes
        sizes = {name: max(size or 0, used_bytes.get(name, 0)) for name, size in weights_bytes.items()}
        check_memory(slots, sizes, self._ready.inventory, self._ready.config.server.memory_fraction_max)

    # --- the shell's ---------------------------------------------------------------------------------------------

    def replica_spec(self, slot: SlotName, incarnation: int, endpoint: str) -> ReplicaSpec:
        """What this incarnation is started with."""
        return self._ready.replica_spec(self._slots[slot], incarnation, endpoint)

    def devices(self) -> tuple[DeviceState, ...]:
        """Every device that a slot was ever put on."""
        return replace(self._ready, slots=tuple(self._slots.values())).devices()

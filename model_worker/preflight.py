"""Everything that can be known before a process is started: the slot table, the sizes, and whether it all fits.

Owns the one path from a configuration to a plan, used by the model server itself and by `headwaiter plan`, `check`
and `serve`. Starts nothing, binds nothing, imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from model_worker.broker.settings import BrokerSettings, ModelSettings, SlotSettings
from model_worker.devices import Inventory, take_inventory
from model_worker.placement import Slot, check_memory, crowd_words, plan
from model_worker.runtimes import sources
from model_worker.specs import ReplicaSpec, RuntimeSpec
from model_worker.units import CPU, cuda_units
from shared.config import Config, ModelConfig
from shared.errors import ConfigurationError
from shared.messages import DeviceState
from shared.tracing import check_tracing


@dataclass(frozen=True, slots=True)
class Remark:
    """Something about a plan that its operator should know, although it can be carried out."""

    about: str
    """The model's name, or the device."""
    text: str
    is_doubtful: bool
    """Whether it is likely that something else was meant."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """A plan that may be carried out."""

    config: Config
    inventory: Inventory
    slots: tuple[Slot, ...]
    weights_bytes: dict[str, int | None]
    """By model name; None where it cannot be told before loading (a hub id, a user's own class, broken files)."""

    def remarks(self) -> list[Remark]:
        """Why each hub id was taken for one, and how many processes share a core."""
        remarks = []
        for model in self.config.models:
            spec = runtime_spec(self.config, model)
            if sources.is_hub_id(spec.source):
                understood = sources.hub_words(spec)
                remarks.append(Remark(model.name, understood.text, understood.is_doubtful))
        if crowd := crowd_words(self.slots):
            remarks.append(Remark("cpu", crowd, is_doubtful=True))
        return remarks

    def broker_settings(self) -> BrokerSettings:
        server = self.config.server
        return BrokerSettings(
            models=tuple(_model_settings(model) for model in self.config.models),
            slots=tuple(SlotSettings(slot.name, slot.model, slot.device) for slot in self.slots),
            parallel_loads=server.parallel_loads,
            load_attempts_max=server.load_attempts_max,
            stop_timeout_s=server.stop_timeout_s,
        )

    def devices(self) -> tuple[DeviceState, ...]:
        """Every device that the slots name, in plan order, with its whole memory: the machine's, where it has none of
        its own."""
        accelerators = self.inventory.accelerators
        names = {accelerator.uuid: accelerator.name for accelerator in accelerators}
        names |= {part.uuid: part.name for accelerator in accelerators for part in accelerator.mig_instances}
        sizes_bytes = {unit.id: unit.memory_bytes for unit in cuda_units(self.inventory)}
        sizes_bytes |= dict.fromkeys((CPU.id, "mps"), self.inventory.memory_bytes)
        ids = {slot.device: slot.device_id for slot in self.slots}
        return tuple(
            DeviceState(device, names.get(device_id, ""), sizes_bytes.get(device_id, 0))
            for device, device_id in ids.items()
        )

    def replica_spec(self, slot: Slot, incarnation: int, endpoint: str) -> ReplicaSpec:
        model = self.config.model(slot.model)
        return ReplicaSpec(
            slot=slot.name,
            incarnation=incarnation,
            endpoint=endpoint,
            torch_device=slot.torch_device,
            environment=dict(slot.environment),
            cores=slot.cores,
            threads=slot.threads,
            runtime=runtime_spec(self.config, model),
            max_batch_size=model.max_batch_size,
            max_batch_cost=model.max_batch_cost,
            log_level=self.config.logging.level,
            log_format=self.config.logging.format,
            tracing=self.config.tracing.enabled,
        )


def preflight(
    config: Config, inventory: Inventory | None = None, environment: Mapping[str, str] | None = None
) -> Preflight:
    """Checks paths and tasks, places every replica, and adds up the memory.

    What is wrong with a model that is not `required` does not keep the others from serving: its process finds out.

    Raises:
        ConfigurationError: one line with the offending value and the remedy.
    """
    drafted = draft(config, inventory, environment)
    check_fit(drafted)
    return drafted


def draft(
    config: Config, inventory: Inventory | None = None, environment: Mapping[str, str] | None = None
) -> Preflight:
    """The plan without the sum of the memory, so that a plan that does not fit can still be shown.

    Raises:
        ConfigurationError: a required model cannot be found, or a replica cannot be placed.
    """
    if not config.models:
        raise ConfigurationError("no model is configured: add a [[models]] entry", keys=("model",))
    check_tracing(config.tracing.enabled)
    config = config.model_copy(update={"models": tuple(with_task(config, model) for model in config.models)})
    inventory = inventory or take_inventory()
    slots = plan(config, inventory, os.environ if environment is None else environment)
    weights_bytes = {model.name: _weights_bytes(config, model, slots) for model in config.models}
    return Preflight(config, inventory, slots, weights_bytes)


def with_task(config: Config, model: ModelConfig) -> ModelConfig:
    """The model with the task that its weights are made for, if the configuration names none.

    Raises:
        ConfigurationError: that cannot be told, and the model is required.
    """
    if model.task or model.is_custom:
        return model
    try:
        return model.model_copy(update={"task": sources.detect_task(runtime_spec(config, model))})
    except ConfigurationError:
        if model.required:
            raise
        return model


def _weights_bytes(config: Config, model: ModelConfig, slots: Sequence[Slot]) -> int | None:
    """What one replica's weights take in memory: `auto` on a CPU means float32, whatever is stored."""
    spec = runtime_spec(config, model)
    if spec.dtype == "auto" and any(slot.model == model.name and slot.torch_device == "cpu" for slot in slots):
        spec = replace(spec, dtype="float32")
    try:
        return sources.check(spec)
    except ConfigurationError:
        if model.required:
            raise
        return None


def check_fit(drafted: Preflight) -> None:
    """
    Raises:
        ConfigurationError: the weights planned on a device are larger than it allows.
    """
    fraction_max = drafted.config.server.memory_fraction_max
    check_memory(drafted.slots, drafted.weights_bytes, drafted.inventory, fraction_max)


def runtime_spec(config: Config, model: ModelConfig) -> RuntimeSpec:
    return RuntimeSpec(
        name=model.name,
        source=model.model,
        task=model.task,
        dtype=model.dtype,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        compile=model.compile,
        options=dict(model.options),
        python_path=tuple(str(entry) for entry in config.python_path),
        start=str(config.models_start),
    )


def _model_settings(model: ModelConfig) -> ModelSettings:
    return ModelSettings(
        name=model.name,
        task=model.task or model.model,
        required=model.required,
        max_batch_size=model.max_batch_size,
        max_batch_cost=model.max_batch_cost,
        max_wait_s=model.max_wait_ms / 1000,
        queue_size_max=model.queue_size_max,
        queue_bytes_max=model.queue_bytes_max,
        load_timeout_s=model.load_timeout_s,
        batch_timeout_s=model.batch_timeout_s,
        idle_unload_s=model.idle_unload_s,
    )

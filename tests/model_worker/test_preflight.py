"""From a configuration to a plan that fits, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from model_worker.devices import Accelerator, Inventory, MigInstance
from model_worker.preflight import draft, preflight
from shared.config import Config, ModelConfig, ServerConfig
from shared.errors import ConfigurationError
from shared.messages import DeviceState


@pytest.fixture
def half_precision_model(tmp_path: Path) -> ModelConfig:
    """A checkpoint of 2,000 weights, stored in two bytes each."""
    save_file({"weight": np.zeros(2000, dtype=np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    return ModelConfig(name="m", model=str(tmp_path), task="fill-mask", devices=("cpu",))


def inventory(memory_bytes: int) -> Inventory:
    return Inventory(accelerators=(), cores=(0, 1), core_count=2, memory_bytes=memory_bytes, cuda_visible_devices=None)


def test_weights_on_a_cpu_count_as_float32_unless_another_type_is_named(half_precision_model: ModelConfig) -> None:
    as_usual = draft(Config(models=(half_precision_model,)), inventory(10**9), {})
    assert as_usual.weights_bytes == {"m": 8000}
    named = half_precision_model.model_copy(update={"dtype": "float16"})
    assert draft(Config(models=(named,)), inventory(10**9), {}).weights_bytes == {"m": 4000}


def test_a_plan_that_does_not_fit_is_refused_but_can_be_drafted(half_precision_model: ModelConfig) -> None:
    config = Config(models=(half_precision_model,), server=ServerConfig(memory_fraction_max=0.5))
    assert len(draft(config, inventory(8000), {}).slots) == 1
    with pytest.raises(ConfigurationError, match=r"cpu cannot hold .* m/0"):
        preflight(config, inventory(8000), {})
    assert len(preflight(config, inventory(16_000), {}).slots) == 1


def test_a_model_without_a_task_gets_the_one_its_weights_are_made_for(half_precision_model: ModelConfig) -> None:
    unnamed = half_precision_model.model_copy(update={"task": ""})
    assert draft(Config(models=(unnamed,)), inventory(10**9), {}).config.model("m").task == "fill-mask"
    elsewhere = unnamed.model_copy(update={"model": "org/name"})
    with pytest.raises(ConfigurationError, match=r"model 'm' needs a task, such as .*'org/name' is taken for a hub id"):
        draft(Config(models=(elsewhere,)), inventory(10**9), {})
    optional = elsewhere.model_copy(update={"required": False})
    assert len(draft(Config(models=(optional,)), inventory(10**9), {}).slots) == 1


def test_no_model_is_no_plan() -> None:
    with pytest.raises(ConfigurationError, match=r"no model is configured: add a \[\[models\]\] entry"):
        preflight(Config(), inventory(10**9), {})


def test_a_broken_model_keeps_the_others_from_a_plan_only_if_it_is_required(half_precision_model: ModelConfig) -> None:
    gone = half_precision_model.model_copy(update={"name": "gone", "model": f"{half_precision_model.model}/gone"})
    with pytest.raises(ConfigurationError, match="no such file or directory"):
        preflight(Config(models=(half_precision_model, gone)), inventory(10**9), {})
    optional = gone.model_copy(update={"required": False})
    planned = preflight(Config(models=(half_precision_model, optional)), inventory(10**9), {})
    assert [slot.name for slot in planned.slots] == ["m/0", "gone/0"]
    assert planned.weights_bytes == {"m": 8000, "gone": None}
    # What is wrong with the plan itself is refused all the same.
    absent = optional.model_copy(update={"devices": ("cuda:7",)})
    with pytest.raises(ConfigurationError, match="cuda:7"):
        preflight(Config(models=(half_precision_model, absent)), inventory(10**9), {})


def test_each_device_of_the_plan_is_told_once_with_its_whole_memory(half_precision_model: ModelConfig) -> None:
    slices = (MigInstance("MIG-1", "1g.10gb", 10 * 2**30), MigInstance("MIG-2", "1g.10gb", 10 * 2**30))
    gpus = (
        Accelerator("cuda", 0, "GPU-0", "H100", 80 * 2**30),
        Accelerator("cuda", 1, "GPU-1", "H100", 80 * 2**30, mig=True, mig_instances=slices),
    )
    devices = ("cuda:0", "cuda:0", "MIG-2", "cpu")
    config = Config(models=(half_precision_model.model_copy(update={"devices": devices}),))
    machine = replace(inventory(64 * 2**30), accelerators=gpus)
    assert draft(config, machine, {}).devices() == (
        DeviceState("cuda:0", "H100", 80 * 2**30),
        DeviceState("MIG-2", "1g.10gb", 10 * 2**30),
        DeviceState("cpu", "", 64 * 2**30),
    )

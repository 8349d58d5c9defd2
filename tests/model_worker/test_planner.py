"""Slots that are added while the server runs: placed as at the start, beside those that are there."""

from __future__ import annotations

import pytest

from model_worker.devices import Accelerator, Inventory
from model_worker.placement import plan
from model_worker.planner import GrowingPlan
from model_worker.preflight import Preflight
from shared.config import Config, ModelConfig, ServerConfig
from shared.errors import ConfigurationError
from shared.messages import SlotName

GIB = 2**30


def planner(*models: ModelConfig, gpus: int = 0, fraction_max: float = 0.5) -> GrowingPlan:
    accelerators = tuple(Accelerator("cuda", index, f"GPU-{index}", "Fake", 80 * GIB) for index in range(gpus))
    inventory = Inventory(accelerators, tuple(range(4)), 4, 64 * GIB)
    config = Config(models=models, server=ServerConfig(memory_fraction_max=fraction_max))
    weights_bytes: dict[str, int | None] = dict.fromkeys((model.name for model in models), None)
    return GrowingPlan(Preflight(config, inventory, plan(config, inventory, {}), weights_bytes), {})


def model(name: str, device: str = "cpu", replicas: int = 1, cores: int | None = None) -> ModelConfig:
    return ModelConfig(name=name, model="m:M", devices=(device,), replicas=replicas, cores=cores)


def names(*slots: str) -> list[SlotName]:
    return [SlotName(slot) for slot in slots]


def test_added_slots_go_where_fewest_are_and_the_others_stay() -> None:
    grown = planner(model("a", "cuda"), model("b", "cuda"), gpus=3)
    [added] = grown.grow("a", 2, names("a/0", "b/0"), {})
    assert (added.name, added.model, added.device) == ("a/1", "a", "cuda:2")
    [again] = grown.grow("a", 3, names("a/0", "a/1", "b/0"), {})
    assert again.device == "cuda:0"
    spec = grown.replica_spec(SlotName("a/1"), 1, "ipc://x")
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "GPU-2"
    assert [device.device for device in grown.devices()] == ["cuda:0", "cuda:1", "cuda:2"]


def test_a_slot_on_the_cpu_gets_the_cores_that_a_start_would_give_it() -> None:
    grown = planner(model("a"))
    assert grown.replica_spec(SlotName("a/0"), 1, "ipc://x").cores == (0, 1, 2, 3)
    grown.grow("a", 2, names("a/0"), {})
    spec = grown.replica_spec(SlotName("a/1"), 1, "ipc://x")
    assert (spec.cores, spec.threads) == ((2, 3), 2)
    assert grown.replica_spec(SlotName("a/0"), 2, "ipc://x").cores == (0, 1, 2, 3)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    grown = planner(model("a"))
    assert len(grown.grow("a", 3, names("a/0"), {"a": 10 * GIB})) == 2
    with pytest.raises(ConfigurationError, match=r"a/0 10.0 GiB.*together 40.0 GiB, but .* allows 32.0 GiB"):
        grown.grow("a", 4, names("a/0"), {"a": 10 * GIB})


def test_slots_without_cores_or_without_a_free_device_are_refused() -> None:
    of_cores = planner(model("a", cores=2))
    with pytest.raises(ConfigurationError, match=r"names 6 cores .* there are 4"):
        of_cores.grow("a", 3, names("a/0"), {})
    of_devices = planner(ModelConfig(name="a", model="m:M", devices=("cuda:0", "cuda:1")), model("b", "cuda"), gpus=3)
    assert of_devices.grow("a", 3, names("a/0", "a/1", "b/0"), {})[0].device == "cuda:0"
    others = planner(
        ModelConfig(name="a", model="m:M", devices=("cuda:0", "cuda:1"), replicas=1), model("b", "cuda:1"), gpus=2
    )
    with pytest.raises(ConfigurationError, match="are both placed on cuda:1"):
        others.grow("a", 2, names("a/0", "b/0"), {})


def test_a_second_process_of_a_slot_counts_as_much_as_the_first() -> None:
    grown = planner(model("a"))
    assert grown.crowding(names("a/0", "a/0"), {"a": 16 * GIB}) == ""
    assert "together 34.0 GiB" in grown.crowding(names("a/0", "a/0"), {"a": 17 * GIB})


def test_a_slot_that_went_and_comes_back_is_placed_anew() -> None:
    grown = planner(model("a", "cuda"), model("b", "cuda"), gpus=3)
    grown.grow("a", 2, names("a/0", "b/0"), {})
    [added] = grown.grow("a", 2, names("a/0", "b/0"), {})
    assert added.device == "cuda:2"

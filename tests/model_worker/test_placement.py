"""The slot table: a pure function of configuration, inventory and environment, and everything that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_worker.devices import Accelerator, Inventory, MigInstance
from model_worker.placement import Slot, check_memory, crowd_words, plan
from shared.config import Config
from shared.errors import ConfigurationError

GIB = 2**30


def gpu(index: int) -> Accelerator:
    return Accelerator("cuda", index, f"GPU-{index}{index}", "Fake", 80 * GIB)


def cut_gpu(index: int, *slices: str) -> Accelerator:
    instances = tuple(MigInstance(uuid, "slice", 10 * GIB) for uuid in slices)
    return Accelerator("cuda", index, f"GPU-{index}{index}", "Fake", 80 * GIB, mig=True, mig_instances=instances)


def machine(
    *accelerators: Accelerator,
    cores: int = 8,
    core_count: int | None = None,
    visible: str | None = None,
    problem: str = "",
) -> Inventory:
    return Inventory(accelerators, tuple(range(cores)), core_count or cores, 64 * GIB, visible, problem)


def model(name: str, *devices: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": "m:M", "devices": devices or ("cpu",), **keys}


def configuration(*models: dict[str, Any], **server: Any) -> Config:
    return Config(models=models, server=server)


def planned(inventory: Inventory, *models: dict[str, Any], **server: Any) -> tuple[Slot, ...]:
    return plan(configuration(*models, **server), inventory, {})


def table(inventory: Inventory, *models: dict[str, Any], **server: Any) -> list[tuple[str, str]]:
    return [(slot.name, slot.device) for slot in planned(inventory, *models, **server)]


def refusal(inventory: Inventory, *models: dict[str, Any], **server: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        planned(inventory, *models, **server)
    text = str(caught.value)
    assert "\n" not in text
    return text


FOUR_GPUS = machine(*map(gpu, range(4)))


def test_there_is_one_slot_per_device_by_default_in_configuration_order() -> None:
    assert table(FOUR_GPUS, model("qa", "cuda:2", "0"), model("ner", "cpu")) == [
        ("qa/0", "cuda:2"),
        ("qa/1", "cuda:0"),
        ("ner/0", "cpu"),
    ]


def test_replicas_are_dealt_over_the_devices_in_turn() -> None:
    assert table(FOUR_GPUS, model("qa", "cuda:3", "cuda:1", replicas=5)) == [
        ("qa/0", "cuda:3"),
        ("qa/1", "cuda:1"),
        ("qa/2", "cuda:3"),
        ("qa/3", "cuda:1"),
        ("qa/4", "cuda:3"),
    ]


def test_cuda_takes_the_least_used_gpu_first_and_named_devices_before_it() -> None:
    slots = table(FOUR_GPUS, model("a", "cuda", replicas=3), model("b", "cuda:1"))
    assert slots == [("a/0", "cuda:0"), ("a/1", "cuda:2"), ("a/2", "cuda:3"), ("b/0", "cuda:1")]
    again = table(machine(gpu(0), gpu(1)), model("a", "cuda", replicas=5))
    assert [device for _, device in again] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]


def test_a_gpu_is_pinned_by_uuid_and_seen_as_the_first() -> None:
    (slot,) = planned(FOUR_GPUS, model("qa", "cuda:3"))
    assert slot.torch_device == "cuda:0"
    assert slot.environment["CUDA_VISIBLE_DEVICES"] == "GPU-33"
    assert slot.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert slot.cores == ()
    assert slot.device_id == "GPU-33"


def test_a_cpu_slot_sees_no_gpu() -> None:
    (slot,) = planned(FOUR_GPUS, model("qa", "cpu"))
    assert slot.torch_device == "cpu"
    assert slot.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_auto_is_a_gpu_where_there_is_one_and_says_what_it_became() -> None:
    (on_gpu,) = planned(FOUR_GPUS, model("qa", "auto"))
    (on_cpu,) = planned(machine(), model("qa", "auto"))
    assert (on_gpu.asked, on_gpu.device) == ("auto", "cuda:0")
    assert (on_cpu.asked, on_cpu.device) == ("auto", "cpu")


def test_auto_does_not_turn_a_broken_driver_into_a_slow_service() -> None:
    text = refusal(machine(problem="the driver is mismatched"), model("qa", "auto"))
    assert "the driver is mismatched" in text
    assert "cpu" in text


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "3"])
def test_cuda_without_cuda_is_refused(device: str) -> None:
    text = refusal(machine(), model("qa", device))
    assert "qa/0" in text
    assert repr(device) in text
    assert "no CUDA GPU" in text
    assert "problem of the driver" in refusal(machine(problem="problem of the driver"), model("qa", device))
    assert "CUDA_VISIBLE_DEVICES=''" in refusal(machine(visible=""), model("qa", device))


def test_an_index_out_of_range_is_refused_with_those_there_are() -> None:
    text = refusal(machine(gpu(0), gpu(1)), model("qa", "cuda:2"))
    assert "'cuda:2'" in text
    assert "cuda:1" in text


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "-1", "gpu-aa", "cuda:99999999", "٣", ""]
)
def test_an_unknown_device_is_refused_with_the_known_kinds(device: str) -> None:
    text = refusal(FOUR_GPUS, model("qa", device))
    assert repr(device) in text
    assert "cuda:N" in text


def test_mps_is_refused_off_the_mac_and_placed_on_it() -> None:
    assert "Apple" in refusal(machine(), model("qa", "mps"))
    (slot,) = planned(machine(Accelerator("mps", 0, "", "arm", 16 * GIB)), model("qa", "mps"))
    assert (slot.device, slot.torch_device) == ("mps", "mps")
    assert "CUDA_VISIBLE_DEVICES" not in slot.environment


# --- ids ---------------------------------------------------------------------------------------------------------


def test_ids_are_passed_through_as_text_where_gpus_cannot_be_asked() -> None:
    slots = planned(machine(), model("qa", "GPU-abc", "MIG-1/2/3"))
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["GPU-abc", "MIG-1/2/3"]
    assert [slot.device for slot in slots] == ["GPU-abc", "MIG-1/2/3"]
    assert all(slot.torch_device == "cuda:0" for slot in slots)


def test_an_index_counts_in_a_list_of_ids_where_gpus_cannot_be_asked() -> None:
    (slot,) = planned(machine(visible="GPU-a,MIG-b"), model("qa", "cuda:1"))
    assert slot.environment["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    assert "no CUDA GPU" in refusal(machine(visible="GPU-a,MIG-b"), model("qa", "cuda:2"))
    assert "no CUDA GPU" in refusal(machine(visible="0,1"), model("qa", "cuda:1"))


@pytest.mark.parametrize("visible", ["GPU-a,MIG-b", ""])
def test_an_id_that_the_visible_list_hides_is_refused(visible: str) -> None:
    assert "hidden by CUDA_VISIBLE_DEVICES" in refusal(machine(visible=visible), model("qa", "GPU-c"))


def test_a_known_id_is_completed_and_an_unknown_or_ambiguous_one_refused() -> None:
    (slot,) = planned(FOUR_GPUS, model("qa", "GPU-2"))
    assert slot.environment["CUDA_VISIBLE_DEVICES"] == slot.device == "GPU-22"
    assert "GPU-33" in refusal(FOUR_GPUS, model("qa", "GPU-9"))
    assert "4 devices" in refusal(FOUR_GPUS, model("qa", "GPU-"))


def test_two_slices_in_one_slot_are_refused() -> None:
    text = refusal(machine(cut_gpu(0, "MIG-a", "MIG-b")), model("qa", "MIG-a,MIG-b"))
    assert "['MIG-a', 'MIG-b']" in text


def test_one_slice_per_slot_is_placed_and_cuda_deals_out_slices() -> None:
    cut = machine(cut_gpu(0, "MIG-a", "MIG-b"), gpu(1))
    assert table(cut, model("qa", "MIG-a"), model("ner", "MIG-b")) == [("qa/0", "MIG-a"), ("ner/0", "MIG-b")]
    assert [device for _, device in table(cut, model("qa", "cuda", replicas=3))] == ["MIG-a", "MIG-b", "cuda:1"]


@pytest.mark.parametrize("device", ["cuda:0", "0", "GPU-00"])
def test_a_gpu_cut_into_slices_is_not_taken_for_a_whole(device: str) -> None:
    assert "MIG-a" in refusal(machine(cut_gpu(0, "MIG-a")), model("qa", device))


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_in_mig_mode_without_slices_is_no_place(device: str) -> None:
    assert "no slices" in refusal(machine(cut_gpu(0)), model("qa", device))


# --- sharing -----------------------------------------------------------------------------------------------------


def test_two_models_on_one_gpu_are_refused_by_name_unless_allowed() -> None:
    models = model("qa", "cuda:1"), model("ner", "GPU-11")
    text = refusal(FOUR_GPUS, *models)
    for part in ("'qa'", "'ner'", "allow_shared_devices"):
        assert part in text
    assert len(planned(FOUR_GPUS, *models, allow_shared_devices=True)) == 2


def test_cuda_finds_no_place_beside_another_model_unless_allowed() -> None:
    models = model("qa", "cuda"), model("ner", "cuda"), model("cls", "cuda")
    text = refusal(machine(gpu(0), gpu(1)), *models)
    for part in ("cls/0", "cuda:0 by 'qa'", "cuda:1 by 'ner'", "allow_shared_devices"):
        assert part in text
    shared = table(machine(gpu(0), gpu(1)), *models, allow_shared_devices=True)
    assert [device for _, device in shared] == ["cuda:0", "cuda:1", "cuda:0"]


def test_replicas_of_one_model_may_share_a_gpu_and_models_the_cpu() -> None:
    assert len(planned(machine(gpu(0)), model("qa", "cuda:0", replicas=3))) == 3
    assert len(planned(machine(), model("qa", "cpu"), model("ner", "cpu"))) == 2


# --- cores and threads -------------------------------------------------------------------------------------------


def cores_of(inventory: Inventory, *models: dict[str, Any]) -> list[tuple[int, ...]]:
    return [slot.cores for slot in planned(inventory, *models)]


def test_cores_are_dealt_evenly_and_contiguously() -> None:
    slots = planned(machine(cores=8), model("qa", replicas=3))
    assert [slot.cores for slot in slots] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert [slot.threads for slot in slots] == [3, 3, 2]
    assert slots[2].environment["OMP_NUM_THREADS"] == "2"


def test_named_cores_come_first_and_the_rest_is_shared() -> None:
    found = cores_of(machine(cores=8), model("a", replicas=2), model("b", cores=4))
    assert found == [(4, 5), (6, 7), (0, 1, 2, 3)]


def test_more_slots_than_cores_take_turns_with_one_thread() -> None:
    slots = planned(machine(cores=2), model("qa", replicas=5))
    assert [slot.cores for slot in slots] == [(0,), (1,), (0,), (1,), (0,)]
    assert {slot.threads for slot in slots} == {1}


def test_more_cores_named_than_there_are_is_refused_with_the_claims() -> None:
    text = refusal(machine(cores=8), model("qa", cores=3, replicas=2), model("ner", cores=3))
    for part in ("qa/1 3", "ner/0 3", "9 cores", "8"):
        assert part in text
    assert "none left for ner/0" in refusal(machine(cores=4), model("qa", cores=4), model("ner"))
    assert cores_of(machine(cores=4), model("qa", cores=4)) == [(0, 1, 2, 3)]


def test_under_a_quota_threads_follow_the_quota_and_cores_stay_disjoint() -> None:
    slots = planned(machine(cores=64, core_count=8), model("qa", replicas=4))
    assert [slot.threads for slot in slots] == [2, 2, 2, 2]
    assert [len(slot.cores) for slot in slots] == [16, 16, 16, 16]
    assert len({core for slot in slots for core in slot.cores}) == 64


def test_the_host_side_of_a_gpu_does_not_open_a_pool_as_wide_as_the_machine() -> None:
    slots = planned(FOUR_GPUS, model("qa", "cuda", replicas=4))
    assert [slot.threads for slot in slots] == [2, 2, 2, 2]
    assert {slot.environment["MKL_NUM_THREADS"] for slot in slots} == {"2"}


def test_the_users_own_thread_count_wins() -> None:
    environment = {
        "OMP_NUM_THREADS": "5,2",
        "TOKENIZERS_PARALLELISM": "true",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024",
        "OMP_WAIT_POLICY": "ACTIVE",
    }
    (slot,) = plan(configuration(model("qa")), machine(), environment)
    assert slot.threads == 5
    assert "OMP_NUM_THREADS" not in slot.environment
    assert "TOKENIZERS_PARALLELISM" not in slot.environment
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & slot.environment.keys()
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in slot.environment
    assert slot.environment["MKL_NUM_THREADS"] == "5"
    (usual,) = plan(configuration(model("qa")), machine(), {"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "1"})
    assert usual.threads == 8
    assert usual.environment["TOKENIZERS_PARALLELISM"] == "false"
    assert usual.environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert usual.environment["GOMP_SPINCOUNT"] == "10000"
    assert usual.environment["RAYON_NUM_THREADS"] == "8"
    assert usual.environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "32"
    assert "MKL_NUM_THREADS" not in usual.environment


@pytest.mark.parametrize("value", ["0", "x", "-3", "9" * 5000])
def test_a_thread_count_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match="OMP_NUM_THREADS"):
        plan(configuration(model("qa")), machine(), {"OMP_NUM_THREADS": value})


# --- memory ------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_with_device_sizes_and_remedy() -> None:
    slots = planned(FOUR_GPUS, model("qa", "cuda:1"), model("ner", "cuda:1"), allow_shared_devices=True)
    sizes: dict[str, int | None] = {"qa": 50 * GIB, "ner": 30 * GIB}
    with pytest.raises(ConfigurationError) as caught:
        check_memory(slots, sizes, FOUR_GPUS, 0.95)
    for part in ("cuda:1", "qa/0 50.0 GiB", "ner/0 30.0 GiB", "80.0 GiB", "76.0 GiB", "0.95", "fewer replicas"):
        assert part in str(caught.value)
    check_memory(slots, sizes, FOUR_GPUS, 1.0)


def test_replicas_on_the_cpu_add_up_in_host_memory() -> None:
    slots = planned(machine(), model("qa", replicas=3))
    with pytest.raises(ConfigurationError, match="cpu cannot hold"):
        check_memory(slots, {"qa": 25 * GIB}, machine(), 1.0)
    check_memory(slots, {"qa": 20 * GIB}, machine(), 1.0)


def test_a_slice_is_measured_by_its_own_memory() -> None:
    cut = machine(cut_gpu(0, "MIG-a"))
    with pytest.raises(ConfigurationError, match="MIG-a"):
        check_memory(planned(cut, model("qa", "MIG-a")), {"qa": 11 * GIB}, cut, 1.0)


def test_unknown_sizes_and_unknown_devices_are_not_guessed() -> None:
    check_memory(planned(machine(), model("qa")), {"qa": None}, machine(), 0.01)
    check_memory(planned(machine(), model("qa", "GPU-abc")), {"qa": 10**15}, machine(), 0.01)


# --- always ------------------------------------------------------------------------------------------------------

DEVICES = ["auto", "cpu", "cuda", "cuda:0", "1", "GPU-22", "MIG-a", "GPU-none", "mps"]
MODELS = st.lists(
    st.fixed_dictionaries(
        {"devices": st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3, unique=True)},
        optional={"replicas": st.integers(1, 5), "cores": st.integers(1, 4)},
    ),
    max_size=4,
)
MACHINES = st.builds(
    lambda gpus, cores, quota, cut: machine(
        *map(gpu, range(gpus)), *([cut_gpu(gpus, "MIG-a")] if cut else []), cores=cores, core_count=min(cores, quota)
    ),
    st.integers(0, 4),
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
)


@given(MODELS, MACHINES, st.booleans())
def test_the_same_input_gives_the_same_sound_table(
    models: list[dict[str, Any]], inventory: Inventory, allow_shared: bool
) -> None:
    def outcome() -> tuple[Slot, ...] | str:
        named = [{"name": f"m{index}", "model": "m:M", **entry} for index, entry in enumerate(models)]
        try:
            return plan(configuration(*named, allow_shared_devices=allow_shared), inventory, {})
        except ConfigurationError as error:
            return str(error)

    slots = outcome()
    assert slots == outcome()
    if isinstance(slots, str):
        return
    assert len(slots) == sum(entry.get("replicas") or len(entry["devices"]) for entry in models)
    assert len({slot.name for slot in slots}) == len(slots)
    on_cpu = [slot for slot in slots if slot.device == "cpu"]
    assert all(slot.cores and set(slot.cores) <= set(inventory.cores) and slot.threads >= 1 for slot in on_cpu)
    if len(on_cpu) <= inventory.core_count and not any("cores" in entry for entry in models):
        assert sum(len(slot.cores) for slot in on_cpu) == len({core for slot in on_cpu for core in slot.cores})
    users: dict[str, set[str]] = {}
    for slot in slots:
        if slot.torch_device == "cuda:0":
            users.setdefault(slot.environment["CUDA_VISIBLE_DEVICES"], set()).add(slot.model)
    assert allow_shared or all(len(names) == 1 for names in users.values())


def test_processes_that_share_a_core_are_told_with_numbers_and_remedy() -> None:
    two_cores = machine(cores=2)
    assert crowd_words(planned(two_cores, model("a", replicas=2))) is None
    assert crowd_words(planned(FOUR_GPUS, model("a", "cuda", replicas=40), model("b"))) is None
    text = crowd_words(planned(two_cores, model("a", replicas=500)))
    assert text is not None
    assert text.startswith("500 model processes (a 500) share 2 CPU cores, up to 250 on one: ")
    assert text.endswith("lower replicas to 2 in all, or give some of them another device")
    # Cores that were named are nobody else's.
    text = crowd_words(planned(two_cores, model("a", cores=1), model("b", replicas=3)))
    assert text is not None
    assert text.startswith("3 model processes (b 3) share 1 CPU core, up to 3 on one: ")
    text = crowd_words(planned(machine(cores=1), model("a"), model("b")))
    assert text is not None
    assert "lower replicas" not in text

"""The inventory: what the machine, its control groups and `CUDA_VISIBLE_DEVICES` let this process use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from model_worker import devices
from model_worker.cgroups import Limits, read_limits
from model_worker.devices import Gpu, Inventory, MigInstance, in_topology_order, list_gpus_of_nvml, take_inventory
from shared.errors import ConfigurationError

GIB = 2**30
SLICES = (MigInstance("MIG-a", "1g.10gb", 10 * GIB), MigInstance("MIG-b", "1g.10gb", 10 * GIB))
GPUS = (
    Gpu("GPU-aaaa", "Big", 80 * GIB),
    Gpu("GPU-abbb", "Big", 80 * GIB),
    Gpu("GPU-cccc", "Cut", 80 * GIB, mig=True, mig_instances=SLICES),
)


def inventory(visible: str | None = None, gpus: Sequence[Gpu] = GPUS, limits: Limits | None = None) -> Inventory:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return take_inventory(environment, lambda: gpus, limits or Limits())


def uuids(found: Inventory) -> list[str]:
    return [accelerator.uuid for accelerator in found.accelerators]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aaaa", "GPU-abbb", "GPU-cccc"]),
        ("2,0", ["GPU-cccc", "GPU-aaaa"]),
        (" 1 , GPU-aaaa", ["GPU-abbb", "GPU-aaaa"]),
        ("MIG-b,1", ["MIG-b", "GPU-abbb"]),
        ("GPU-ab", ["GPU-abbb"]),
        ("1,-1,0", ["GPU-abbb"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_accelerators_are_those_of_cuda_visible_devices_in_its_order(visible: str | None, expected: list[str]) -> None:
    found = inventory(visible)
    assert uuids(found) == expected
    assert [accelerator.index for accelerator in found.accelerators] == list(range(len(expected)))
    assert found.cuda_visible_devices == visible
    assert found.cuda_problem == ""


@pytest.mark.parametrize(
    ("visible", "fault"),
    [("0,7", "no GPU '7'"), ("GPU-zzzz", "no GPU 'GPU-zzzz'"), ("GPU-a", "no GPU 'GPU-a'"), ("1,GPU-abbb", "twice")],
)
def test_a_visible_list_that_cuda_would_cut_short_is_told(visible: str, fault: str) -> None:
    found = inventory(visible)
    assert fault in found.cuda_problem
    assert visible in found.cuda_problem
    assert found.accelerators == ()


def test_a_slice_is_no_gpu_cut_into_slices() -> None:
    (accelerator,) = inventory("MIG-a").accelerators
    assert not accelerator.mig
    assert accelerator.memory_bytes == 10 * GIB
    (whole,) = inventory("2").accelerators
    assert whole.mig
    assert whole.mig_instances == SLICES


def test_a_broken_driver_is_told_and_not_mistaken_for_none() -> None:
    def broken() -> Sequence[Gpu]:
        raise ConfigurationError("the driver does not work")

    found = take_inventory({}, broken, Limits())
    assert found.cuda_problem == "the driver does not work"
    assert found.accelerators == ()


def test_cores_are_those_this_process_may_use() -> None:
    found = inventory()
    assert set(found.cores) == os.sched_getaffinity(0)
    assert found.core_count == len(found.cores)


@pytest.mark.parametrize(("cpus", "expected"), [(0.5, 1), (1.9, 1), (10_000.0, None)])
def test_a_cpu_quota_lowers_the_count_but_not_below_one(cpus: float, expected: int | None) -> None:
    found = inventory(limits=Limits(cpus=cpus))
    assert found.core_count == (expected or len(found.cores))


def test_memory_is_the_smaller_of_host_and_control_group() -> None:
    assert inventory(limits=Limits(memory_bytes=GIB)).memory_bytes == GIB
    assert inventory(limits=Limits(memory_bytes=2**62)).memory_bytes == inventory().memory_bytes


def test_threads_of_one_physical_core_are_neighbours(tmp_path: Path) -> None:
    for core, (package, physical) in enumerate([(0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (1, 0)]):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{physical}\n")
    assert in_topology_order({0, 1, 2, 3, 4, 5}, tmp_path) == (0, 3, 1, 4, 2, 5)
    assert in_topology_order({5, 1}, tmp_path / "absent") == (1, 5)


def test_taking_the_inventory_imports_no_torch() -> None:
    program = (
        "import sys; from model_worker.devices import take_inventory; take_inventory(); print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


# --- control groups ----------------------------------------------------------------------------------------------


def control_groups(root: Path, memberships: str, mounts: list[tuple[str, str, str]], files: dict[str, str]) -> Path:
    """A `/proc/self` whose mounts (root, directory below `root`, "type options") lie below `root`."""
    proc = root / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(memberships)
    lines = [
        f"30 23 0:28 {inner} {root / outer} rw - {kind.split()[0]} cgroup {kind.split()[1]}"
        for inner, outer, kind in mounts
    ]
    (proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n" + "\n".join(lines) + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return proc


def test_the_tightest_limit_on_the_way_up_holds_in_version_2(tmp_path: Path) -> None:
    files = {
        "v2/a/b/cpu.max": "max 100000",
        "v2/a/cpu.max": "150000 100000",
        "v2/a/b/memory.max": "2000",
        "v2/a/memory.max": "3000",
        "v2/other/cpu.max": "1000 100000",
    }
    proc = control_groups(tmp_path, "0::/a/b\n", [("/", "v2", "cgroup2 rw")], files)
    assert read_limits(proc) == Limits(cpus=1.5, memory_bytes=2000)


def test_limits_of_version_1_are_found_by_controller(tmp_path: Path) -> None:
    files = {
        "cpu/job/cpu.cfs_quota_us": "400000",
        "cpu/job/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1",
        "memory/job/memory.limit_in_bytes": "5000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    mounts = [("/", "cpu", "cgroup rw,cpu,cpuacct"), ("/", "memory", "cgroup rw,memory"), ("/", "v2", "cgroup2 rw")]
    proc = control_groups(tmp_path, "3:cpu,cpuacct:/job\n2:memory:/job\n0::/\n", mounts, files)
    assert read_limits(proc) == Limits(cpus=4.0, memory_bytes=5000)


@pytest.mark.parametrize("group", ["/docker/x", "/docker/x/inner", "/elsewhere"])
def test_a_mount_that_shows_part_of_the_tree_is_understood(tmp_path: Path, group: str) -> None:
    files = {"v2/memory.max": "7000"}
    proc = control_groups(tmp_path, f"0::{group}\n", [("/docker/x", "v2", "cgroup2 rw")], files)
    assert read_limits(proc) == Limits(memory_bytes=7000)


def test_no_control_groups_are_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == Limits()


# --- NVML --------------------------------------------------------------------------------------------------------


class FakeNvml(ModuleType):
    """As much of pynvml as is used here, over a list of GPUs in the order NVML happens to have."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801
        pass

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801
        pass

    class NVMLError_NotFound(NVMLError):  # noqa: N801
        pass

    def __init__(self, gpus: Sequence[SimpleNamespace] = (), init_error: Exception | None = None) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.init_error = init_error
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error:
            raise self.init_error
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimpleNamespace:  # noqa: N802
        if getattr(self.gpus[index], "lost", False):
            raise self.NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu: SimpleNamespace) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=gpu.bus)

    def nvmlDeviceGetUUID(self, gpu: SimpleNamespace) -> str | bytes:  # noqa: N802
        uuid: str | bytes = gpu.uuid
        return uuid

    def nvmlDeviceGetName(self, gpu: SimpleNamespace) -> str:  # noqa: N802
        return "Fake"

    def nvmlDeviceGetMemoryInfo(self, gpu: SimpleNamespace) -> SimpleNamespace:  # noqa: N802
        if gpu.memory is None:
            raise self.NVMLError_NotSupported
        return SimpleNamespace(total=gpu.memory)

    def nvmlDeviceGetMigMode(self, gpu: SimpleNamespace) -> list[int]:  # noqa: N802
        if not hasattr(gpu, "slices"):
            raise self.NVMLError_NotSupported
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: SimpleNamespace) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: SimpleNamespace, index: int) -> SimpleNamespace:  # noqa: N802
        if index not in gpu.slices:
            raise self.NVMLError_NotFound
        found: SimpleNamespace = gpu.slices[index]
        return found


def test_nvml_lists_gpus_in_bus_order_with_their_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = SimpleNamespace(uuid="MIG-x", memory=5)
    nvml = FakeNvml(
        [
            SimpleNamespace(bus="00000000:C1:00.0", uuid=b"GPU-late", memory=9),
            SimpleNamespace(bus="00000000:17:00.0", uuid="GPU-cut", memory=8, slices={3: cut}),
            SimpleNamespace(bus="00000000:18:00.0", uuid="GPU-integrated", memory=None),
        ]
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert list_gpus_of_nvml() == (
        Gpu("GPU-cut", "Fake", 8, mig=True, mig_instances=(MigInstance("MIG-x", "Fake", 5),)),
        Gpu("GPU-integrated", "Fake", 0),
        Gpu("GPU-late", "Fake", 9),
    )
    assert nvml.open == 0


@pytest.mark.parametrize("error", [FakeNvml.NVMLError_LibraryNotFound, FakeNvml.NVMLError_DriverNotLoaded])
def test_no_driver_means_no_gpus(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=error()))
    monkeypatch.setattr(devices, "_DRIVER_TRACES", (Path("/nonexistent"),))
    assert list_gpus_of_nvml() == ()


def test_a_driver_without_its_library_is_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=FakeNvml.NVMLError_LibraryNotFound()))
    monkeypatch.setattr(devices, "_DRIVER_TRACES", (Path("/dev/null"),))
    with pytest.raises(ConfigurationError, match="NVIDIA_DRIVER_CAPABILITIES=compute,utility"):
        list_gpus_of_nvml()


def test_other_nvml_errors_are_never_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    mismatch = FakeNvml(init_error=FakeNvml.NVMLError("driver/library version mismatch"))
    monkeypatch.setitem(sys.modules, "pynvml", mismatch)
    with pytest.raises(ConfigurationError, match=r"version mismatch.*nvidia-smi"):
        list_gpus_of_nvml()
    lost = FakeNvml([SimpleNamespace(lost=True)])
    monkeypatch.setitem(sys.modules, "pynvml", lost)
    with pytest.raises(ConfigurationError, match="GPU is lost"):
        list_gpus_of_nvml()
    assert lost.open == 0

"""What this machine offers: accelerators, CPU cores and memory, as one `Inventory`.

Owns asking the NVIDIA management library, the scheduler and the control groups. Never initialises CUDA and never
imports torch: the model server is the parent of every process that will. Decides nothing about who gets what.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from model_worker.cgroups import Limits, read_limits
from shared.errors import ConfigurationError

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# What a working or broken NVIDIA driver leaves in /dev: on Linux, and on Linux under Windows.
_DRIVER_TRACES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A slice of a GPU. A CUDA process sees one at most, so a slot is one slice."""

    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Accelerator:
    kind: Literal["cuda", "mps"]
    index: int
    """The N of `cuda:N`: the place in this process's `CUDA_VISIBLE_DEVICES`, else in PCI bus order."""
    uuid: str
    """`GPU-…`, or `MIG-…` where `CUDA_VISIBLE_DEVICES` names a slice; empty for `mps`."""
    name: str
    memory_bytes: int
    """0: not known."""
    mig: bool = False
    """Whether the GPU is cut into slices: then only they can be used, never the whole."""
    mig_instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    accelerators: tuple[Accelerator, ...]
    cores: tuple[int, ...]
    """The CPU cores this process may run on; neighbours in this order share a physical core where there are threads."""
    core_count: int
    """Cores' worth of time it may use: fewer than `cores` under a CPU quota. At least 1."""
    memory_bytes: int
    """Of the host, or of the control group if that allows less."""
    cuda_visible_devices: str | None = None
    """As this process was given it; None: not set; empty: no GPU at all."""
    cuda_problem: str = ""
    """Why the GPUs of this machine cannot be told, in one line, although it has an NVIDIA driver or should have."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the management library lists it, whatever `CUDA_VISIBLE_DEVICES` says."""

    uuid: str
    name: str
    memory_bytes: int
    mig: bool = False
    mig_instances: tuple[MigInstance, ...] = field(default=())


ListGpus = Callable[[], Sequence[Gpu]]
"""GPUs in PCI bus order; empty where there is no driver.

Raises:
    ConfigurationError: there is a driver, and it does not work.
"""


def take_inventory(
    environment: Mapping[str, str] | None = None, list_gpus: ListGpus | None = None, limits: Limits | None = None
) -> Inventory:
    """Looks at the machine. The arguments are for tests; by default all three are this process's own.

    What is wrong with the GPUs is told, not raised: a configuration without them need not care.
    """
    visible = (os.environ if environment is None else environment).get(CUDA_VISIBLE_DEVICES)
    limits = read_limits() if limits is None else limits
    cores = _cores()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    accelerators: tuple[Accelerator, ...] = ()
    problem = ""
    try:
        if gpus := (list_gpus or list_gpus_of_nvml)():
            accelerators = tuple(_visible_accelerators(gpus, visible))
    except ConfigurationError as error:
        problem = str(error)
    if _is_apple_silicon():
        accelerators += (Accelerator("mps", 0, "", platform.processor(), memory_bytes),)
    return Inventory(
        accelerators=accelerators,
        cores=cores,
        core_count=len(cores) if limits.cpus is None else max(1, min(len(cores), int(limits.cpus))),
        memory_bytes=memory_bytes if limits.memory_bytes is None else min(memory_bytes, limits.memory_bytes),
        cuda_visible_devices=visible,
        cuda_problem=problem,
    )


def split_visible(visible: str) -> list[str]:
    """The entries of a `CUDA_VISIBLE_DEVICES`, up to the first one that means "nothing from here on"."""
    entries: list[str] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        if entry in ("", "NoDevFiles", "none") or entry.startswith("-"):
            break
        entries.append(entry)
    return entries


def _visible_accelerators(gpus: Sequence[Gpu], visible: str | None) -> Iterator[Accelerator]:
    entries = [str(index) for index in range(len(gpus))] if visible is None else split_visible(visible)
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        found = _find_visible(gpus, entry)
        if found is None or found.uuid in seen:
            # CUDA would hide this entry and all behind it, or every GPU there is, and say nothing.
            known = ", ".join(f"{number} ({gpu.uuid})" for number, gpu in enumerate(gpus))
            fault = f"there is no GPU {entry!r} on this machine" if found is None else f"{entry!r} is named twice"
            raise ConfigurationError(f"CUDA_VISIBLE_DEVICES={visible}: {fault}: correct or unset it; there are {known}")
        seen.add(found.uuid)
        yield Accelerator(
            "cuda",
            index,
            found.uuid,
            found.name,
            found.memory_bytes,
            mig=isinstance(found, Gpu) and found.mig,
            mig_instances=found.mig_instances if isinstance(found, Gpu) else (),
        )


def _find_visible(gpus: Sequence[Gpu], entry: str) -> Gpu | MigInstance | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    units: list[Gpu | MigInstance] = [*gpus, *(instance for gpu in gpus for instance in gpu.mig_instances)]
    # CUDA takes any beginning of an id that fits one device only.
    found = [unit for unit in units if unit.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def list_gpus_of_nvml() -> tuple[Gpu, ...]:
    """`ListGpus` through NVML, the library behind nvidia-smi. Needs no CUDA context and leaves none.

    Raises:
        ConfigurationError: the library or the driver is there, and one of the two does not work.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        if any(trace.exists() for trace in _DRIVER_TRACES):
            raise ConfigurationError(
                f"this machine has an NVIDIA driver, but its management library does not answer ({error}): in a "
                "container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            ) from None
        return ()
    except pynvml.NVMLError as error:
        raise ConfigurationError(f"the NVIDIA driver does not work ({error}): see what nvidia-smi says") from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        handles.sort(key=lambda handle: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        return tuple(_describe_gpu(pynvml, handle) for handle in handles)
    except pynvml.NVMLError as error:
        raise ConfigurationError(f"a GPU of this machine does not answer ({error}): see what nvidia-smi says") from None
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class Driver:
    version: str
    """Of the NVIDIA driver, such as `580.95.05`."""
    cuda: tuple[int, int]
    """The newest CUDA (major, minor) whose programs it runs; of one major version it runs all."""


def read_driver() -> Driver | None:
    """The NVIDIA driver of this machine; None where there is none that answers."""
    import pynvml

    try:
        pynvml.nvmlInit()
        version, cuda = pynvml.nvmlSystemGetDriverVersion(), int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        # What is wrong, if anything, is told by the inventory.
        return None
    # NVML writes 12.8 as 12080.
    return Driver(_text(version), (cuda // 1000, cuda % 1000 // 10))


def _describe_gpu(pynvml: Any, handle: Any) -> Gpu:
    uuid, name, memory_bytes = _describe_unit(pynvml, handle)
    try:
        mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError_NotSupported:
        mig = False
    return Gpu(uuid, name, memory_bytes, mig, tuple(_mig_instances(pynvml, handle)) if mig else ())


def _mig_instances(pynvml: Any, handle: Any) -> Iterator[MigInstance]:
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        yield MigInstance(*_describe_unit(pynvml, instance))


def _describe_unit(pynvml: Any, handle: Any) -> tuple[str, str, int]:
    try:
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:
        # A GPU that shares the host's memory has none of its own to tell.
        memory_bytes = 0
    return _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle)), memory_bytes


def _text(value: str | bytes) -> str:
    # Bytes in older releases of the binding.
    return value.decode() if isinstance(value, bytes) else value


def _cores() -> tuple[int, ...]:
    if sys.platform == "darwin":
        return tuple(range(os.cpu_count() or 1))
    return in_topology_order(os.sched_getaffinity(0))


def in_topology_order(cores: set[int], topology: Path = _CPU_TOPOLOGY) -> tuple[int, ...]:
    """Cores with the threads of one physical core side by side, so that a contiguous share holds whole ones."""

    def place(core: int) -> tuple[int, int, int]:
        directory = topology / f"cpu{core}" / "topology"
        try:
            package, physical = (int((directory / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            return 0, core, core
        return package, physical, core

    return tuple(sorted(cores, key=place))


def _is_apple_silicon() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"

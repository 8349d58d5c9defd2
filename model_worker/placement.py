"""The slot table: which replica of which model runs on which device, with which cores and which pins.

Owns one pure function of configuration, inventory and the user's environment: the same input gives the same table, on
every start and in `headwaiter plan`. Asks nothing of the machine, starts nothing, and never falls back: what cannot be
placed as it was asked for is refused.

In order: the devices that the configuration names are taken first, wherever in it they stand; then each `cuda` takes
the accelerator with the fewest replicas so far, the lowest index among equals; then the CPU slots share out the cores.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from model_worker.devices import CUDA_VISIBLE_DEVICES, Inventory
from model_worker.units import CPU, Unit, cuda_units, find_unit, no_cuda
from model_worker.weights import human_bytes
from shared.config import Config
from shared.errors import ConfigurationError
from shared.messages import SlotName

# Each library reads its own variable at its import, and without it opens a pool as wide as the machine.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
# Enough for all layers of a model at the shapes in use.
KERNELS_KEPT = "32"
# Turns of a loop, about a tenth of a millisecond: as long as the longest pause between two operations of a forward.
SPIN_COUNT = "10000"


@dataclass(frozen=True, slots=True)
class Slot:
    """One place on one device, for one model process at a time."""

    name: SlotName
    model: str
    asked: str
    """The entry of `devices` that this slot comes from."""
    device: str
    """For people: `cpu`, `cuda:1`, `mps`, or the id of a GPU or slice that was named by it."""
    device_id: str
    """The same for all slots on one device: the UUID of an accelerator, `cpu` or `mps`."""
    torch_device: str
    """As the model process sees it, behind its pin."""
    environment: dict[str, str]
    """The pins the process is started with."""
    cores: tuple[int, ...]
    """The cores it may run on; empty: all of them, for the host's side of an accelerator."""
    threads: int
    """Torch threads inside one operation."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One replica that has no place yet."""

    slot: SlotName
    model: str
    asked: str
    cores: int | None


def plan(
    config: Config, inventory: Inventory, environment: Mapping[str, str], placed: Sequence[Slot] = ()
) -> tuple[Slot, ...]:
    """The slot table, in configuration order. `environment` is the user's own; its thread counts win over ours.

    Slots that were `placed` before stay as they are, and the others find their places beside them.

    Raises:
        ConfigurationError: a device is unknown, absent, or taken by another model, or the cores do not suffice.
    """
    requests = tuple(_requests(config))
    known = {slot.name: slot for slot in placed}
    units = _place(requests, inventory, config.server.allow_shared_devices, known)
    shares = _share_cores(requests, units, inventory)
    user_threads = _user_threads(environment)
    slots = []
    for request, unit, (cores, threads) in zip(requests, units, shares, strict=True):
        if request.slot in known:
            slots.append(known[request.slot])
            continue
        threads = user_threads or threads
        slots.append(
            Slot(
                name=request.slot,
                model=request.model,
                asked=request.asked,
                device=unit.device,
                device_id=unit.id,
                torch_device="cuda:0" if unit.kind == "cuda" else unit.kind,
                environment=_pins(unit, threads, environment),
                cores=cores,
                threads=threads,
            )
        )
    return tuple(slots)


def check_memory(
    slots: Sequence[Slot], sizes_bytes: Mapping[str, int | None], inventory: Inventory, fraction_max: float
) -> None:
    """Refuses a plan whose weights alone are larger than their device. Sizes are by model; None: cannot be told.

    Raises:
        ConfigurationError: names the device, the sizes and the remedy.
    """
    capacities = {unit.id: unit.memory_bytes for unit in cuda_units(inventory)}
    capacities["cpu"] = capacities["mps"] = inventory.memory_bytes
    for device_id in dict.fromkeys(slot.device_id for slot in slots):
        here = [slot for slot in slots if slot.device_id == device_id]
        # A slot may stand here twice, with two processes.
        sizes = [(slot.name, sizes_bytes.get(slot.model) or 0) for slot in here]
        planned_bytes = sum(size for _, size in sizes)
        capacity_bytes = capacities.get(device_id, 0)
        if capacity_bytes and planned_bytes > capacity_bytes * fraction_max:
            named = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes if size)
            raise ConfigurationError(
                f"{here[0].device} cannot hold the weights planned on it: {named}, together "
                f"{human_bytes(planned_bytes)}, but server.memory_fraction_max = {fraction_max:g} allows "
                f"{human_bytes(int(capacity_bytes * fraction_max))} of its {human_bytes(capacity_bytes)}: use fewer "
                "replicas, a smaller dtype or model, or another device"
            )


def crowd_words(slots: Sequence[Slot]) -> str | None:
    """In words, how many processes share a CPU core, and what to do about it; None where each has its own."""
    on_cpu = [slot for slot in slots if slot.device_id == CPU.id]
    crowd = Counter(core for slot in on_cpu for core in slot.cores)
    crowded = {slot.model for slot in on_cpu if any(crowd[core] > 1 for core in slot.cores)}
    if not crowded:
        return None
    sharing = [slot for slot in on_cpu if slot.model in crowded]
    seats = len({slot.cores for slot in sharing})
    counts = Counter(slot.model for slot in sharing)
    named = ", ".join(f"{model} {count}" for model, count in counts.items())
    remedy = f"lower replicas to {seats} in all, or " if len(sharing) > len(counts) else ""
    return (
        f"{len(sharing)} model processes ({named}) share {seats} CPU {'core' if seats == 1 else 'cores'}, up to "
        f"{max(crowd.values())} on one: each has its own weights in memory, and they compute in turns; {remedy}give "
        "some of them another device"
    )


def _requests(config: Config) -> Iterator[_Request]:
    for model in config.models:
        for index in range(model.replicas or len(model.devices)):
            asked = model.devices[index % len(model.devices)]
            yield _Request(SlotName(f"{model.name}/{index}"), model.name, asked, model.cores)


class _Occupancy:
    """Which models are on which accelerator so far."""

    def __init__(self, allow_shared: bool) -> None:
        self._allow_shared = allow_shared
        self._models: defaultdict[str, list[str]] = defaultdict(list)

    def count(self, unit: Unit) -> int:
        return len(self._models[unit.id])

    def other_model(self, unit: Unit, model: str) -> str | None:
        """The model that keeps `model` off this unit."""
        if self._allow_shared or unit.kind == "cpu":
            return None
        return next((other for other in self._models[unit.id] if other != model), None)

    def take(self, unit: Unit, model: str) -> None:
        if other := self.other_model(unit, model):
            raise ConfigurationError(
                f"models {other!r} and {model!r} are both placed on {unit.device}: give one of them another device, "
                "or set server.allow_shared_devices = true"
            )
        self._models[unit.id].append(model)


def _place(
    requests: Sequence[_Request], inventory: Inventory, allow_shared: bool, placed: Mapping[SlotName, Slot]
) -> list[Unit]:
    occupancy = _Occupancy(allow_shared)
    named = [
        _unit_of(placed[request.slot]) if request.slot in placed else _named_unit(request, inventory)
        for request in requests
    ]
    for request, unit in zip(requests, named, strict=True):
        if unit is not None:
            occupancy.take(unit, request.model)
    return [unit or _free_unit(request, inventory, occupancy) for request, unit in zip(requests, named, strict=True)]


def _unit_of(slot: Slot) -> Unit:
    """Where it is; its memory is not asked for again."""
    kinds: dict[str, Literal["cuda", "cpu", "mps"]] = {"cuda:0": "cuda", "cpu": "cpu", "mps": "mps"}
    return Unit(kinds[slot.torch_device], slot.device_id, slot.device)


def _named_unit(request: _Request, inventory: Inventory) -> Unit | None:
    """None: any GPU will do."""
    if request.asked == "cuda":
        return None
    if request.asked != "auto":
        return find_unit(request.slot, request.asked, inventory)
    if inventory.cuda_problem:
        # A GPU that does not work today must not turn into a service that is slow from now on.
        raise ConfigurationError(
            f'{request.slot}: devices = "auto" cannot choose: {inventory.cuda_problem}; or say devices = "cpu"'
        )
    return None if any(accelerator.kind == "cuda" for accelerator in inventory.accelerators) else CPU


def _free_unit(request: _Request, inventory: Inventory, occupancy: _Occupancy) -> Unit:
    units = tuple(cuda_units(inventory))
    if not units:
        raise no_cuda(request.slot, request.asked, inventory)
    free = [unit for unit in units if occupancy.other_model(unit, request.model) is None]
    if not free:
        taken = ", ".join(f"{unit.device} by {occupancy.other_model(unit, request.model)!r}" for unit in units)
        raise ConfigurationError(
            f"{request.slot}: no GPU is free for model {request.model!r}, taken are {taken}: lower the replicas of one "
            "of them, name another device, or set server.allow_shared_devices = true"
        )
    # min keeps the first of equals, and the units are in index order.
    unit = min(free, key=occupancy.count)
    occupancy.take(unit, request.model)
    return unit


def _share_cores(
    requests: Sequence[_Request], units: Sequence[Unit], inventory: Inventory
) -> list[tuple[tuple[int, ...], int]]:
    """For each request the cores it may run on, and its threads."""
    # Under a CPU quota there is less time than there are cores. Each core's worth of time then gets several
    # neighbouring cores to spend it on: pinning every container of a host to its first cores would make them collide.
    width = len(inventory.cores) // inventory.core_count
    seats = [inventory.cores[index * width : (index + 1) * width] for index in range(inventory.core_count)]
    cpu_requests = [request for request, unit in zip(requests, units, strict=True) if unit.kind == "cpu"]
    named = [request for request in cpu_requests if request.cores is not None]
    unnamed = [request for request in cpu_requests if request.cores is None]
    counts = {request.slot: request.cores or 0 for request in named}
    left = len(seats) - sum(counts.values())
    if left < 0 or (left == 0 and unnamed):
        raise _too_few_cores(named, unnamed, len(seats))
    if len(unnamed) <= left:
        for index, request in enumerate(unnamed):
            counts[request.slot] = left // len(unnamed) + (index < left % len(unnamed))
        unnamed = []
    shares: dict[SlotName, list[tuple[int, ...]]] = {}
    first = 0
    for slot, count in counts.items():
        shares[slot] = seats[first : first + count]
        first += count
    for index, request in enumerate(unnamed):
        # More slots than cores: they take turns, one thread each.
        shares[request.slot] = [seats[first + index % left]]
    # The host's side of an accelerator tokenises and launches kernels; it is not pinned, only kept from opening a
    # pool as wide as the machine.
    host_threads = max(1, inventory.core_count // max(1, len(requests)))
    return [
        (tuple(core for seat in shares[request.slot] for core in seat), len(shares[request.slot]))
        if request.slot in shares
        else ((), host_threads)
        for request in requests
    ]


def _too_few_cores(named: Sequence[_Request], unnamed: Sequence[_Request], core_count: int) -> ConfigurationError:
    claims = ", ".join(f"{request.slot} {request.cores}" for request in named)
    rest = f", with none left for {', '.join(request.slot for request in unnamed)}" if unnamed else ""
    return ConfigurationError(
        f"the configuration names {sum(request.cores or 0 for request in named)} cores ({claims}){rest}, and there are "
        f"{core_count}: lower cores or replicas, or leave cores out for equal shares"
    )


def _user_threads(environment: Mapping[str, str]) -> int | None:
    value = environment.get("OMP_NUM_THREADS", "")
    if not value:
        return None
    # A list is one number for each level of nesting; torch opens the outermost only.
    outermost = value.split(",")[0].strip()
    if not (outermost.isascii() and outermost.isdecimal() and len(outermost) < 6 and int(outermost)):
        raise ConfigurationError(f"OMP_NUM_THREADS={value} is not a number of threads: correct or unset it")
    return int(outermost)


def _pins(unit: Unit, threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    pins: dict[str, str] = {}
    if unit.kind == "cuda":
        pins = {CUDA_VISIBLE_DEVICES: unit.id, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    elif unit.kind == "cpu":
        # A model that was put on the CPU must not find a GPU and take it.
        pins = {CUDA_VISIBLE_DEVICES: ""}
    ours = {variable: str(threads) for variable in THREAD_VARIABLES}
    # OpenMP's threads otherwise wait for each other by spinning, for milliseconds. Whenever one of their cores is taken
    # for a moment, by a front worker, a tokenizer or another replica, the rest burn theirs: throughput falls to a
    # fraction. GNU's library, which torch brings, may spin for a moment: most waits are shorter.
    if not environment.get("OMP_WAIT_POLICY"):
        ours |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT}
    # Tokenizing has one thread to itself, and a pool of the tokenizer's own does not survive a fork by a model's code.
    ours["TOKENIZERS_PARALLELISM"] = "false"
    # torch keeps compiled kernels for each shape it meets on a CPU, 1,024 of them by default. Texts of all lengths
    # bring ever new shapes: the process grows by hundreds of megabytes, and is no faster for it.
    ours["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = KERNELS_KEPT
    return pins | {variable: value for variable, value in ours.items() if not environment.get(variable)}

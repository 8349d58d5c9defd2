"""From the text of a `devices` entry to the one thing a slot can be put on.

Owns the grammar of device names and the refusal of each that names nothing, or more than one thing. Ids such as
`GPU-…` and `MIG-…` are text throughout. Pure, like the placement that it serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from model_worker.devices import Accelerator, Inventory, split_visible
from shared.errors import ConfigurationError

_INDEX = re.compile(r"(?:cuda:)?([0-9]{1,4})")
_ID_PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class Unit:
    """The CPU, or one accelerator or slice of one that a process can have to itself."""

    kind: Literal["cuda", "cpu", "mps"]
    id: str
    """What `CUDA_VISIBLE_DEVICES` of a process there has to be, for `cuda`; unique for all kinds."""
    device: str
    """For people."""
    memory_bytes: int = 0
    """0: not known."""


CPU = Unit("cpu", "cpu", "cpu")


def cuda_units(inventory: Inventory) -> Iterator[Unit]:
    """Every place for a CUDA process, in index order: a GPU, or the slices of one that is cut into slices."""
    for accelerator in _cuda(inventory):
        if not accelerator.mig:
            yield Unit("cuda", accelerator.uuid, f"cuda:{accelerator.index}", accelerator.memory_bytes)
        for instance in accelerator.mig_instances:
            yield Unit("cuda", instance.uuid, instance.uuid, instance.memory_bytes)


def find_unit(slot: str, asked: str, inventory: Inventory) -> Unit:
    """The unit that `asked` names: `cpu`, `mps`, `cuda:N`, `N`, `GPU-…` or `MIG-…`.

    Raises:
        ConfigurationError: no such device, in words that say which ones there are.
    """
    if asked == "cpu":
        return CPU
    if asked == "mps":
        if any(accelerator.kind == "mps" for accelerator in inventory.accelerators):
            return Unit("mps", "mps", "mps", inventory.memory_bytes)
        raise ConfigurationError(f"{slot}: device 'mps' needs a Mac with Apple silicon, which this machine is not")
    if "," in asked:
        raise ConfigurationError(
            f"{slot}: device {asked!r} names several, and a model process has one (CUDA itself would use the first "
            f"slice only): make them separate entries, devices = {asked.replace(' ', '').split(',')}"
        )
    if index := _INDEX.fullmatch(asked):
        return _unit_at(slot, asked, int(index[1]), inventory)
    if asked.startswith(_ID_PREFIXES):
        return _unit_by_id(slot, asked, inventory)
    raise ConfigurationError(f"{slot}: unknown device {asked!r}: use auto, cpu, mps, cuda, cuda:N, N, GPU-… or MIG-…")


def no_cuda(slot: str, asked: str, inventory: Inventory) -> ConfigurationError:
    """Why nothing can be placed on CUDA, with the remedy."""
    if inventory.cuda_problem:
        return ConfigurationError(f"{slot}: device {asked!r} cannot be used: {inventory.cuda_problem}")
    reason = "this machine has no CUDA GPU"
    if any(True for _ in _cuda(inventory)):
        reason = "the GPUs of this machine are in MIG mode and have no slices (nvidia-smi mig -cgi … -C makes some)"
    elif inventory.cuda_visible_devices is not None:
        reason = f"there is no CUDA GPU with CUDA_VISIBLE_DEVICES={inventory.cuda_visible_devices!r}"
    return ConfigurationError(
        f"{slot}: device {asked!r} cannot be used: {reason}; say 'cpu', or 'auto' for a GPU only where there is one"
    )


def _cuda(inventory: Inventory) -> Iterator[Accelerator]:
    return (accelerator for accelerator in inventory.accelerators if accelerator.kind == "cuda")


def _unit_at(slot: str, asked: str, index: int, inventory: Inventory) -> Unit:
    accelerators = tuple(_cuda(inventory))
    if index < len(accelerators):
        return _whole(slot, asked, accelerators[index], f"cuda:{index}")
    if accelerators:
        known = ", ".join(f"cuda:{accelerator.index} ({accelerator.name})" for accelerator in accelerators)
        raise ConfigurationError(f"{slot}: there is no device {asked!r}; there are {known}")
    visible = split_visible(inventory.cuda_visible_devices or "")
    if index < len(visible) and visible[index].startswith(_ID_PREFIXES):
        # The GPUs cannot be asked, but the operator listed them, and an index counts in that list.
        return Unit("cuda", visible[index], f"cuda:{index}")
    raise no_cuda(slot, asked, inventory)


def _unit_by_id(slot: str, asked: str, inventory: Inventory) -> Unit:
    accelerators = tuple(_cuda(inventory))
    if not accelerators:
        return _unit_on_trust(slot, asked, inventory)
    units = {unit.id: unit for unit in cuda_units(inventory)}
    wholes = {accelerator.uuid: accelerator for accelerator in accelerators}
    ids = [*dict.fromkeys((*wholes, *units))]
    # CUDA takes any beginning of an id that fits one device only; an id in full is always itself.
    found = [asked] if asked in ids else [known for known in ids if known.startswith(asked)]
    if len(found) != 1:
        fault = f"{len(found)} devices have an id that begins with" if found else "there is no device"
        hidden = (
            f" with CUDA_VISIBLE_DEVICES={inventory.cuda_visible_devices}" if inventory.cuda_visible_devices else ""
        )
        raise ConfigurationError(f"{slot}: {fault} {asked!r}{hidden}; there are {', '.join(ids)}")
    if found[0] in wholes:
        return _whole(slot, asked, wholes[found[0]], found[0])
    return units[found[0]]


def _unit_on_trust(slot: str, asked: str, inventory: Inventory) -> Unit:
    # Nothing here can tell whether this id exists (NVML is often missing where CUDA works), so it is the model
    # process that will say so. What the list this server was given does not hold is known to be hidden, though.
    visible = None if inventory.cuda_visible_devices is None else split_visible(inventory.cuda_visible_devices)
    if visible is not None and asked not in visible and all(entry.startswith(_ID_PREFIXES) for entry in visible):
        raise ConfigurationError(
            f"{slot}: device {asked!r} is hidden by CUDA_VISIBLE_DEVICES={inventory.cuda_visible_devices!r}: "
            "add it there, or unset the variable"
        )
    return Unit("cuda", asked, asked)


def _whole(slot: str, asked: str, accelerator: Accelerator, device: str) -> Unit:
    if not accelerator.mig:
        return Unit("cuda", accelerator.uuid, device, accelerator.memory_bytes)
    # CUDA would take the first slice without a word.
    slices = ", ".join(instance.uuid for instance in accelerator.mig_instances) or "none yet"
    raise ConfigurationError(
        f"{slot}: device {asked!r} is cut into slices (MIG), and one process has one slice: name one of them, "
        f"or say 'cuda' for a free one; there are {slices}"
    )

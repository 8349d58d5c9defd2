"""`headwaiter plan`: the slot table, and how full each device gets, before anything is started.

Owns the two tables and their JSON. The plan itself is made in `placement.py`, which the model server uses as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags, load_config
from model_worker.commands.screen import console, show
from model_worker.devices import Inventory
from model_worker.placement import THREAD_VARIABLES, Slot
from model_worker.preflight import Preflight, check_fit, draft
from model_worker.runtimes import sources
from model_worker.units import cuda_units
from model_worker.weights import human_bytes
from shared.errors import ConfigurationError

BAR_CELLS = 20
# What fills the bar, and what is left of it.
BAR = ("█", "░")
BAR_ASCII = ("#", ".")


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What the plan puts on one device."""

    device: str
    slots: int
    weights_bytes: int
    """Of the models whose size is known before they are loaded."""
    unknown: int
    """Slots of models whose size is not."""
    memory_bytes: int
    """0: not known."""


def run_plan(flags: Flags, as_json: bool) -> Exit:
    """Prints the plan, also one that does not fit; then says so.

    Raises:
        ConfigurationError: there is no plan: the configuration is refused, or a replica cannot be placed.
    """
    drafted = draft(load_config(flags))
    refusal = ""
    try:
        check_fit(drafted)
    except ConfigurationError as error:
        refusal = str(error)
    if as_json:
        print(json.dumps(as_document(drafted, refusal), indent=2, ensure_ascii=False))
    else:
        out = console()
        show(out, slot_table(drafted))
        out.print()
        show(out, device_table(drafted, BAR_ASCII if out.options.ascii_only else BAR))
        for remark in drafted.remarks():
            out.print(Text(f"! {remark.about}: {remark.text}", "yellow" if remark.is_doubtful else ""))
    if refusal:
        print(f"headwaiter: {refusal}", file=sys.stderr)
        return Exit.CONFIGURATION
    return Exit.OK


def as_document(drafted: Preflight, refusal: str) -> dict[str, object]:
    return {
        "slots": [asdict(slot) | {"weights_bytes": drafted.weights_bytes[slot.model]} for slot in drafted.slots],
        "devices": [asdict(use) for use in device_uses(drafted)],
        "remarks": [asdict(remark) for remark in drafted.remarks()],
        "fits": not refusal,
        "refusal": refusal,
    }


def slot_table(drafted: Preflight) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("SLOT", "MODEL", "TASK", "DEVICE", "CORES", "THREADS", "WEIGHTS", "PINS"):
        table.add_column(heading, justify="right" if heading in ("THREADS", "WEIGHTS") else "left", overflow="fold")
    for slot in drafted.slots:
        model = drafted.config.model(slot.model)
        size = drafted.weights_bytes[slot.model]
        table.add_row(
            slot.name,
            f"{model.model} (hub id)" if sources.is_hub_id(model.model) else model.model,
            model.task or "own class",
            device_words(slot),
            core_ranges(slot.cores) or "all",
            str(slot.threads),
            human_bytes(size) if size is not None else "?",
            " ".join(f"{name}={value}" for name, value in slot.environment.items() if name not in THREAD_VARIABLES),
        )
    return table


def device_table(drafted: Preflight, bar: tuple[str, str] = BAR) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("DEVICE", "SLOTS", "WEIGHTS", "MEMORY", ""):
        table.add_column(heading, justify="right" if heading in ("SLOTS", "WEIGHTS", "MEMORY") else "left")
    for use in device_uses(drafted):
        weights = human_bytes(use.weights_bytes) if use.weights_bytes or not use.unknown else "?"
        if use.weights_bytes and use.unknown:
            weights += " + ?"
        memory = human_bytes(use.memory_bytes) if use.memory_bytes else "not known"
        full = _bar(use, drafted.config.server.memory_fraction_max, bar)
        table.add_row(use.device, str(use.slots), weights, memory, full)
    return table


def device_uses(drafted: Preflight) -> Iterator[DeviceUse]:
    """One for each device that the plan uses, in the order of the slots."""
    memory = _memory_by_device(drafted.inventory)
    for device_id in dict.fromkeys(slot.device_id for slot in drafted.slots):
        slots = [slot for slot in drafted.slots if slot.device_id == device_id]
        sizes = [drafted.weights_bytes[slot.model] for slot in slots]
        yield DeviceUse(
            device=slots[0].device,
            slots=len(slots),
            weights_bytes=sum(size for size in sizes if size is not None),
            unknown=sizes.count(None),
            memory_bytes=memory.get(device_id, 0),
        )


def _memory_by_device(inventory: Inventory) -> dict[str, int]:
    shared = {"cpu": inventory.memory_bytes, "mps": inventory.memory_bytes}
    return shared | {unit.id: unit.memory_bytes for unit in cuda_units(inventory)}


def device_words(slot: Slot) -> str:
    """The device, and what was asked for where that was left open."""
    return slot.device if slot.asked == slot.device else f"{slot.device} ({slot.asked})"


def core_ranges(cores: tuple[int, ...]) -> str:
    """
    >>> core_ranges((0, 1, 2, 8))
    '0-2,8'
    """
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _bar(use: DeviceUse, fraction_max: float, cells: tuple[str, str]) -> Text:
    if not use.memory_bytes or (use.unknown and not use.weights_bytes):
        return Text("")
    fraction = use.weights_bytes / use.memory_bytes
    filled = min(BAR_CELLS, round(fraction * BAR_CELLS))
    style = "red" if fraction > fraction_max else "green"
    done, rest = cells
    return Text(done * filled, style) + Text(rest * (BAR_CELLS - filled), "dim") + Text(f" {fraction:.0%}", style)

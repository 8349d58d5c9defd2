"""`headwaiter status`: what was planned beside what is observed.

Owns the tables and their JSON. Asks the model server over its socket, so it works while no web worker runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags, load_config
from model_worker.commands.observer import Unreachable, fetch_snapshot
from model_worker.commands.screen import console, counted, show
from model_worker.preflight import draft
from model_worker.weights import human_bytes
from shared.config import Config
from shared.errors import ConfigurationError
from shared.messages import ModelState, SlotState, Snapshot

STYLES = {"ready": "green", "failed": "bold red"}


def run_status(flags: Flags, as_json: bool) -> Exit:
    """Prints it. `Exit.OK` says that every model that `/readyz` waits for is ready.

    Raises:
        ConfigurationError: the configuration, which names the run directory, is refused.
    """
    config = load_config(flags)
    try:
        snapshot = fetch_snapshot(config.run_directory)
    except Unreachable as error:
        if as_json:
            print(json.dumps({"reachable": False, "reason": str(error)}, indent=2, ensure_ascii=False))
        print(f"headwaiter: {error}", file=sys.stderr)
        return Exit.UNAVAILABLE
    differences = plan_differences(config, snapshot)
    if as_json:
        document = {"reachable": True, **snapshot.by_name(), "plan_differences": differences}
        print(json.dumps(document, indent=2, ensure_ascii=False, default=str))
    else:
        out = console()
        out.print(Text(headline(snapshot)))
        out.print()
        show(out, slot_table(snapshot))
        out.print()
        show(out, model_table(snapshot))
        for difference in differences:
            out.print(Text(f"! {difference}", "yellow"))
    return Exit.OK if all_ready(snapshot) else Exit.NOT_READY


def all_ready(snapshot: Snapshot) -> bool:
    required = [model for model in snapshot.models if model.required]
    return not snapshot.draining and bool(snapshot.models) and all(model.answers for model in required)


def plan_differences(config: Config, snapshot: Snapshot) -> list[str]:
    """What a start with the present configuration would do otherwise; empty when nothing is configured here."""
    if not config.models:
        return []
    try:
        planned = {slot.name: slot for slot in draft(config).slots}
    except ConfigurationError as error:
        return [f"the present configuration would not start: {error}"]
    running = {slot.slot: slot for slot in snapshot.slots}
    missing = [name for name in planned if name not in running]
    surplus = [name for name in running if name not in planned]
    differences = [
        f"slot {name} is configured but does not run: scale its model, or restart the model server" for name in missing
    ]
    differences += [
        f"slot {name} runs but is not configured: its model was scaled, or the configuration has changed"
        for name in surplus
    ]
    for name, slot in planned.items():
        if name in running and running[name].device != slot.device:
            differences.append(f"slot {name} is planned on {slot.device} but runs on {running[name].device}")
    return differences


def headline(snapshot: Snapshot) -> str:
    clients = f", {counted(snapshot.clients, 'client', 'clients')} in other programs" if snapshot.clients else ""
    draining = ", draining" if snapshot.draining else ""
    return (
        f"model server {snapshot.pid}, version {snapshot.version}, up {duration(snapshot.uptime_s)}, "
        f"{counted(snapshot.fronts, 'front worker', 'front workers')}{clients}{draining}"
    )


def slot_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("SLOT", "DEVICE", "STATE"):
        table.add_column(heading, no_wrap=True)
    for heading in ("PID", "INCARNATION", "LOADS", "RESTARTS", "MEMORY", "BATCHES", "REQUESTS", "HELD"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("REASON", overflow="fold")
    for slot in snapshot.slots:
        table.add_row(
            slot.slot,
            slot.device,
            Text(state_words(slot), STYLES.get(slot.state, "yellow")),
            str(slot.pid or "–"),
            str(slot.incarnation),
            str(slot.loads),
            str(slot.restarts),
            human_bytes(slot.memory_bytes) if slot.memory_bytes else "–",
            str(slot.batches),
            str(slot.requests),
            str(slot.held),
            Text(slot.reason),
        )
    return table


def model_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("MODEL", "TASK", "STATE"):
        table.add_column(heading, no_wrap=True)
    for heading in ("READY", "QUEUED", "BATCH COST"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("REASON", overflow="fold")
    for model in snapshot.models:
        table.add_row(
            model.name,
            model.task,
            Text(model.state + ("" if model.required else " (optional)"), STYLES.get(model.state, "yellow")),
            _ready_words(model),
            str(model.queued),
            batch_cost_words([slot for slot in snapshot.slots if slot.model == model.name]),
            Text(model.reason),
        )
    return table


def _ready_words(model: ModelState) -> str:
    return f"{model.replicas_ready}/{model.replicas_total}"


def batch_cost_words(slots: Sequence[SlotState]) -> str:
    """Most padded units of a batch, as each replica was told or has measured; how is in `--json`."""
    costs = {slot.choices.get("max_batch_cost") for slot in slots} - {None}
    return ", ".join("no limit" if cost == 0 else str(cost) for cost in sorted(costs, key=str)) or "–"


def state_words(slot: SlotState) -> str:
    """The state, with progress where it is known: `loading 40 %`."""
    return f"{slot.state} {slot.progress:.0%}" if 0 <= slot.progress < 1 and slot.state != "ready" else slot.state


def duration(seconds: float) -> str:
    """
    >>> duration(93784)
    '1d 2h'
    """
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, length)
        if count:
            parts.append(f"{count:.0f}{unit}")
    return " ".join(parts[:2]) or "0s"

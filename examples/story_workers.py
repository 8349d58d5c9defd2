"""Story 1: four copies of one text-generation model, exactly four, in the same places, however often it is started.

    python -m examples.story_workers                  anywhere: two tiny models whose load holds the GIL; 10 minutes
    python -m examples.story_workers --restarts 2     the same, sooner
    python -m examples.story_workers --full           on a GPU: GPT-J-6B's shape in half precision, 4 copies on one

`uvicorn app:app --workers 4` with a pipeline in it gives four copies, or three, or one: its master kills a worker that
does not answer within 5 s, and a worker that loads may not. Here the number of copies is the number of slots. Exits
with 0 if everything that is claimed was seen.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Protocol

import psutil
from rich.table import Table

from examples.made_models import make_apart
from examples.stage import Report, Stage, tell_and_exit, wait_for
from examples.story_models import noted
from model_worker.devices import Accelerator, take_inventory

REPLICAS = 4
# Each start takes the next number of front workers: it must not matter.
FRONT_WORKERS = (1, 2, 4)
SHAPES = ("gpt-neo", "gpt-j")
PROMPT = "The owner of the red hat is"
PARAMETERS = {"max_new_tokens": 8}
# Enough that each of the replicas gets some, however they are dealt out.
QUESTIONS = 32
FULL_WEIGHTS_BYTES = 12_100_000_000
# Beside the weights: CUDA's own context, the workspace and a small cache, in each process.
FULL_MARGIN_BYTES = 1_500_000_000
FULL_DISK_BYTES = 14_000_000_000
LOAD_MARGIN_S = 180.0
FULL_LOAD_S = 330.0

Place = tuple[str, tuple[int, ...]]


def main() -> int:
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="story-") as directory:
        if arguments.full:
            return tell_full(Path(directory))
        return tell(Path(directory), arguments.shape or SHAPES, arguments.load_seconds, arguments.restarts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.story_workers", description="Four copies, always four.")
    parser.add_argument("--load-seconds", type=float, default=15.0, help="how long each load holds the GIL")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated; default: both")
    parser.add_argument(
        "--full", action="store_true", help="GPT-J-6B's shape on a GPU; takes 14 GB of disk for a while"
    )
    return parser


# --- on any machine ----------------------------------------------------------------------------------------------


def tell(directory: Path, shapes: Collection[str], load_s: float, restarts: int) -> int:
    report = Report(f"{REPLICAS} copies, and each load holds the GIL for {load_s:g} s")
    for shape in shapes:
        make_apart(shape, directory / shape)
        report.say(
            f"{shape}: one start and {restarts} restarts, with {', '.join(map(str, FRONT_WORKERS))} fronts in turn"
        )
        tables: list[dict[str, Place]] = []
        for number in range(restarts + 1):
            workers = FRONT_WORKERS[number % len(FRONT_WORKERS)]
            with report.group(f"{shape}, start {number + 1} with {workers} fronts", in_full=number == 0):
                tables.append(tell_start(report, directory, shape, load_s, workers, kill=number == restarts))
        same = all(table == tables[0] for table in tables)
        report.claim(f"{shape}: the same slot table at each of {len(tables)} starts", same, tables)
        report.table(place_table(tables[0]))
    return report.end()


def tell_start(
    report: Report, directory: Path, shape: str, load_s: float, workers: int, *, kill: bool
) -> dict[str, Place]:
    """One start and its end; returns the slot table that was seen."""
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".journal") as file:
        journal = Path(file.name)
        options = {"directory": str(directory / shape), "seconds": load_s, "journal": str(journal)}
        model = {
            "name": shape,
            "model": "examples.slow_generation:SlowGeneration",
            "device": "cpu",
            "replicas": REPLICAS,
            "options": options,
        }
        with Stage([model], workers=workers, server={"parallel_loads": REPLICAS}) as stage:
            start_s = time.monotonic()
            seen = watch_until_ready(stage, load_s + LOAD_MARGIN_S)
            report.say(f"all {REPLICAS} ready after {time.monotonic() - start_s:.1f} s")
            table = check_table(report, stage)
            loads = noted(journal, "loaded")
            report.claim(f"{REPLICAS} processes, none killed while it loaded", len(seen) == REPLICAS, seen)
            report.claim("one load in each", sorted(loads) == sorted(seen), loads)
            fronts = stage.front_workers()
            report.claim(f"{workers} front worker{'s' * (workers > 1)}", len(fronts) == workers, fronts)
            check_answers(report, stage, shape)
            if kill:
                kill_one(report, stage, f"{shape}/{REPLICAS // 2}", load_s + LOAD_MARGIN_S)
            code = stage.stop()
            report.claim("stops cleanly", code == 0, code)
    return table


def watch_until_ready(stage: Stage, within_s: float) -> set[int]:
    """Waits, and returns every process that was there for a model on the way, also one that has gone since."""
    seen: set[int] = set()

    def look() -> bool:
        seen.update(stage.model_processes())
        time.sleep(0.2)
        return stage.all_ready()

    wait_for(look, "every slot is ready", within_s)
    return seen | stage.model_processes()


def check_table(report: Report, stage: Stage) -> dict[str, Place]:
    """Compares what was planned, what the model server says, and what the processes themselves show."""
    plan, slots = stage.plan(), stage.slots()
    report.claim("status has the slots of the plan", list(plan) == list(slots), list(slots))
    wrong = []
    table: dict[str, Place] = {}
    for name, planned in plan.items():
        slot = slots.get(name, {})
        table[name] = (str(slot.get("device")), observed_cores(slot.get("pid", 0)))
        pins = observed_pins(slot.get("pid", 0), planned["environment"])
        cores = tuple(planned["cores"]) or tuple(sorted(os.sched_getaffinity(0)))
        if table[name] != (planned["device"], cores) or pins != planned["environment"]:
            wrong.append(f"{name}: planned {planned}, seen {table[name]} {pins}")
        if (slot.get("incarnation"), slot.get("loads"), slot.get("restarts")) != (1, 1, 0):
            wrong.append(f"{name}: {slot}")
    report.claim("device, cores and pins of each process are the planned ones", not wrong, wrong)
    return table


def observed_cores(pid: int) -> tuple[int, ...]:
    with contextlib.suppress(ProcessLookupError):
        return tuple(sorted(os.sched_getaffinity(pid))) if pid else ()
    return ()


def observed_pins(pid: int, planned: Mapping[str, str]) -> dict[str, str]:
    """What the process's environment says, which was fixed before its first import."""
    try:
        environment = psutil.Process(pid).environ() if pid else {}
    except psutil.Error:
        return {}
    return {name: environment[name] for name in planned if name in environment}


def check_answers(report: Report, stage: Stage, model: str) -> None:
    before = {name: slot["requests"] for name, slot in stage.slots().items()}
    body = {"inputs": PROMPT, "parameters": PARAMETERS}
    answers = stage.post_many(model, [body] * QUESTIONS, at_once=2 * REPLICAS)
    # A slot's numbers arrive with its next sign of life, a second later at most.
    wait_for(
        lambda: sum(slot["requests"] - before[name] for name, slot in stage.slots().items()) >= QUESTIONS,
        "the slots count their requests",
        10,
    )
    idle = [name for name, slot in stage.slots().items() if slot["requests"] == before[name]]
    report.claim("every copy answers", not idle, f"{idle} had nothing to do")
    texts = {answer["generated_text"] for answer in answers}
    report.claim("every copy says the same", len(texts) == 1, texts)


def kill_one(report: Report, stage: Stage, slot: str, within_s: float) -> None:
    """kill -9 of one copy: the same slot comes back, in the same place, and nobody else notices."""
    before = stage.slots()
    place = (before[slot]["device"], observed_cores(before[slot]["pid"]))
    os.kill(before[slot]["pid"], signal.SIGKILL)
    wait_for(lambda: stage.slots()[slot]["incarnation"] == 2 and stage.all_ready(), f"{slot} is back", within_s)
    after = stage.slots()
    same = (after[slot]["device"], observed_cores(after[slot]["pid"])) == place
    report.claim(f"kill -9 of {slot}: it is back in the same place, counted as one restart",
                 same and after[slot]["restarts"] == 1, after[slot])  # fmt: skip
    others = [name for name in before if name != slot and before[name]["pid"] != after[name]["pid"]]
    report.claim(f"kill -9 of {slot}: no other copy was touched", not others, others)


def place_table(places: Mapping[str, Place]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("SLOT", "DEVICE", "CORES"):
        table.add_column(heading)
    for name, (device, cores) in places.items():
        table.add_row(name, device, ",".join(map(str, cores)))
    return table


# --- on a GPU ----------------------------------------------------------------------------------------------------


def tell_full(directory: Path) -> int:
    found = take_inventory()
    refusal = refuse_full(found.accelerators, found.cuda_problem, shutil.disk_usage(directory).free)
    if refusal:
        print(f"story_workers: {refusal}", file=sys.stderr)
        return 1
    gpu = next(unit for unit in found.accelerators if unit.kind == "cuda")
    return tell_device(directory, "gpt-j-6b", "cuda:0", NvidiaDevice(gpu.uuid), FULL_LOAD_S)


def refuse_full(accelerators: Collection[Accelerator], problem: str, disk_bytes: int) -> str:
    """Why `--full` cannot be told on this machine, in one line; empty where it can."""
    gpus = [unit for unit in accelerators if unit.kind == "cuda"]
    needed = REPLICAS * (FULL_WEIGHTS_BYTES + FULL_MARGIN_BYTES)
    if not gpus:
        return f"--full needs an NVIDIA GPU with {needed / 1e9:.0f} GB; {problem or 'this machine has none'}"
    if gpus[0].memory_bytes < needed:
        return f"--full needs a GPU with {needed / 1e9:.0f} GB; {gpus[0].name} has {gpus[0].memory_bytes / 1e9:.0f}"
    if disk_bytes < FULL_DISK_BYTES:
        return f"--full needs {FULL_DISK_BYTES / 1e9:.0f} GB of disk; {disk_bytes / 1e9:.0f} are free: set TMPDIR"
    return ""


class Device(Protocol):
    """What a driver tells about one device."""

    def processes(self) -> dict[int, int]:
        """Bytes held by each process that computes there, by pid."""

    def used_bytes(self) -> int: ...


class NvidiaDevice:
    """One GPU as the driver's management library (NVML) sees it."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def processes(self) -> dict[int, int]:
        import pynvml

        with _nvml():
            handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            return {
                entry.pid: entry.usedGpuMemory or 0 for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            }

    def used_bytes(self) -> int:
        import pynvml

        with _nvml():
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(self._uuid)).used)


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def tell_device(directory: Path, shape: str, device: str, watched: Device, within_s: float) -> int:
    """Four copies of `shape` on one device, which `watched` can be asked about; with `kill -9` of one of them."""
    report = Report(f"{REPLICAS} copies of {shape} on {device}")
    start_s = time.monotonic()
    make_apart(shape, directory / shape)
    weights_bytes = sum(file.stat().st_size for file in (directory / shape).glob("*.safetensors"))
    report.say(f"made {weights_bytes / 2**30:.1f} GiB of weights in {time.monotonic() - start_s:.0f} s")
    model = {
        "name": shape,
        "model": str(directory / shape),
        "task": "text-generation",
        "devices": [device],
        "replicas": REPLICAS,
    }
    before, used_before = set(watched.processes()), watched.used_bytes()
    with Stage([model], workers=2) as stage:
        start_s = time.monotonic()
        seen = watch_until_ready(stage, within_s)
        report.say(f"{REPLICAS} loads, one after the other, took {time.monotonic() - start_s:.0f} s")
        report.claim(f"{REPLICAS} processes, none killed while it loaded", len(seen) == REPLICAS, seen)
        check_table(report, stage)
        check_device(report, set(watched.processes()) - before, slot_pids(stage))
        rose = watched.used_bytes() - used_before
        report.claim(
            f"the device's memory holds {REPLICAS} copies: {rose / 2**30:.1f} GiB more than before",
            REPLICAS * weights_bytes <= rose,
        )
        check_answers(report, stage, shape)
        kill_one(report, stage, f"{shape}/{REPLICAS // 2}", within_s)
        check_device(report, set(watched.processes()) - before, slot_pids(stage))
        report.table(device_table(stage.slots(), watched.processes()))
        code = stage.stop()
        report.claim("stops cleanly", code == 0, code)
    left = set(watched.processes()) - before
    report.claim("afterwards nothing of it is on the device", not left, left)
    return report.end()


def check_device(report: Report, listed: Set[int], pids: Set[int]) -> None:
    """Compares the driver's own list, without what was there before, with the pids of the slot table."""
    if not listed:
        report.say("the driver lists no processes here, as in some containers; the device's memory has to tell")
        return
    if len(listed) == len(pids) and listed.isdisjoint(pids):
        report.say("the driver lists pids of another namespace, the host's; their number is compared")
        pids = listed
    seen = f"{sorted(listed)} on the device, {sorted(pids)} in the slot table"
    report.claim(f"the driver's own list has the {len(pids)} processes of the slot table", listed == pids, seen)


def slot_pids(stage: Stage) -> set[int]:
    return {slot["pid"] for slot in stage.slots().values()}


def device_table(slots: Mapping[str, Mapping[str, Any]], processes: Mapping[int, int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("SLOT", "DEVICE", "PID", "INCARNATION", "ON THE DEVICE, BY THE DRIVER"):
        table.add_column(heading, justify="left" if heading in ("SLOT", "DEVICE") else "right")
    for name, slot in slots.items():
        held = processes.get(slot["pid"])
        words = f"{held / 2**30:.1f} GiB" if held else "listed" if held == 0 else "–"
        table.add_row(name, slot["device"], str(slot["pid"]), str(slot["incarnation"]), words)
    return table


if __name__ == "__main__":
    tell_and_exit("story_workers", main)

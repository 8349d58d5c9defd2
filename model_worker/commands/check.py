"""`headwaiter check`: is this machine fit for this configuration, point by point.

Owns the list of points and their order. Starts no model; what it finds wrong it says with the remedy, and then goes on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from model_worker.commands import checks
from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags, load_config, told
from model_worker.commands.observer import Unreachable, fetch_snapshot
from model_worker.commands.screen import console, counted, show
from model_worker.commands.status import duration
from model_worker.devices import Driver, Inventory, read_driver, take_inventory
from model_worker.placement import crowd_words
from model_worker.preflight import preflight, runtime_spec, with_task
from model_worker.runtimes import sources
from model_worker.weights import human_bytes
from shared.config import Config, ModelConfig
from shared.errors import ConfigurationError
from shared.messages import Snapshot

PACKAGES_SHOWN = ("torch", "transformers", "fastapi", "uvicorn", "pyzmq", "supervisor")


class Outcome(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


STYLES = {Outcome.OK: "green", Outcome.WARN: "yellow", Outcome.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    point: str
    outcome: Outcome
    detail: str
    """What was found; for `warn` and `fail` with what to do about it."""


def run_check(flags: Flags, as_json: bool) -> Exit:
    findings = list(examine(flags))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            table.add_row(Text(finding.outcome, STYLES[finding.outcome]), finding.point, Text(finding.detail))
        show(console(), table)
    failed = any(finding.outcome is Outcome.FAIL for finding in findings)
    return Exit.CONFIGURATION if failed else Exit.OK


def examine(flags: Flags) -> Iterator[Finding]:
    """All points, the machine's first. What depends on a configuration is left out when there is no valid one."""
    yield from _python()
    yield from machine()
    try:
        config = load_config(flags)
    except ConfigurationError as error:
        yield Finding("configuration", Outcome.FAIL, str(error))
        return
    yield Finding("configuration", Outcome.OK, f"valid; {counted(len(config.models), 'model', 'models')}")
    yield _attempt("packages", lambda: checks.check_packages(config))
    if config.http.routers:
        yield _attempt("routers", lambda: checks.check_routers(config))
    running = _running(config)
    yield _run_directory(config, running)
    yield _port(config, running)
    if config.http.host not in ("127.0.0.1", "localhost", "::1") and not config.http.api_keys:
        detail = f"http.host = {config.http.host!r} lets the network in without a key: set http.api_keys"
        yield Finding("access", Outcome.WARN, detail)
    models = [_model_finding(config, model) for model in config.models]
    yield from models
    if all(finding.outcome is not Outcome.FAIL for finding in models):
        yield _plan(config)


def _running(config: Config) -> Snapshot | None:
    """What the model server of this very configuration says of itself, if it runs."""
    try:
        return fetch_snapshot(config.run_directory)
    except (Unreachable, ConfigurationError):
        return None


def _run_directory(config: Config, running: Snapshot | None) -> Finding:
    if running is None:
        return _attempt("run directory", lambda: checks.check_run_directory(config))
    server = f"model server {running.pid}, up {duration(running.uptime_s)}"
    detail = f"{config.run_directory} is in use by this very service: {server}"
    return Finding("run directory", Outcome.OK, detail)


def _port(config: Config, running: Snapshot | None) -> Finding:
    finding = _attempt("port", lambda: checks.check_port(config))
    if finding.outcome is Outcome.OK or running is None or checks.epoch_behind_port(config) != running.epoch:
        return finding
    host, port = config.http.host, config.http.port
    return Finding("port", Outcome.OK, f"{host}:{port} is taken by this very service{checks.holder_words(port)}")


def _attempt(point: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(point, Outcome.OK, check())
    except ConfigurationError as error:
        return Finding(point, Outcome.FAIL, told(error))


def _python() -> Iterator[Finding]:
    version = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    yield Finding("python", Outcome.OK, version)
    if sys.platform != "linux":
        yield Finding(
            "system", Outcome.FAIL, f"{platform.system()}: headwaiter runs on Linux, also in a container or WSL 2"
        )
    versions = []
    for package in PACKAGES_SHOWN:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    yield Finding("versions", Outcome.OK, ", ".join(versions))


def machine() -> Iterator[Finding]:
    try:
        inventory = take_inventory()
    except ConfigurationError as error:
        yield Finding("accelerators", Outcome.FAIL, str(error))
        return
    yield from _accelerators(inventory)
    cores = f"{inventory.core_count} of {os.cpu_count()} cores may be used"
    if inventory.core_count < len(inventory.cores):
        cores += f" (a CPU quota; {len(inventory.cores)} by affinity)"
    yield Finding("cores", Outcome.OK, cores)
    yield Finding("memory", Outcome.OK, f"{human_bytes(inventory.memory_bytes)} may be used")
    yield _open_files()


def _open_files() -> Finding:
    allowed = checks.open_files_allowed()
    if checks.OPEN_FILES_MIN <= allowed < checks.OPEN_FILES_FEW:
        detail = f"{allowed:.0f}, one per connection is needed: raise the hard limit with ulimit -Hn or LimitNOFILE="
        return Finding("open files", Outcome.WARN, detail)
    return _attempt("open files", checks.check_open_files)


def _accelerators(inventory: Inventory) -> Iterator[Finding]:
    if inventory.cuda_problem:
        yield Finding("accelerators", Outcome.WARN, inventory.cuda_problem)
    for accelerator in inventory.accelerators:
        memory = human_bytes(accelerator.memory_bytes) if accelerator.memory_bytes else "memory not known"
        name = f"{accelerator.kind}:{accelerator.index} {accelerator.name}, {memory} {accelerator.uuid}".strip()
        if accelerator.mig:
            name += f", cut into {len(accelerator.mig_instances)} MIG slices"
        yield Finding("accelerators", Outcome.OK, name)
    if not inventory.accelerators and not inventory.cuda_problem:
        yield Finding("accelerators", Outcome.OK, "none; models run on the CPU")
    if inventory.cuda_visible_devices is not None and inventory.accelerators:
        detail = f"CUDA_VISIBLE_DEVICES={inventory.cuda_visible_devices} is set: cuda:0 is the first that it names"
        yield Finding("accelerators", Outcome.OK, detail)
    if any(accelerator.kind == "cuda" for accelerator in inventory.accelerators):
        yield from _cuda_build(read_driver(), cuda_of_torch())


def _cuda_build(driver: Driver | None, built_for: tuple[int, int] | Literal["no torch"] | None) -> Iterator[Finding]:
    """Whether the torch of this Python can use the GPUs with the driver of this machine."""
    if built_for == "no torch":
        return  # `packages` says so, if a model needs it
    if built_for is None:
        detail = "this torch is built for the CPU and cannot use the GPUs: install the CUDA build of the same version"
        yield Finding("driver", Outcome.WARN, detail)
    elif driver is not None:
        runs, needs = (".".join(map(str, version)) for version in (driver.cuda, built_for))
        fits = driver.cuda[0] >= built_for[0]
        detail = f"NVIDIA {driver.version} runs CUDA {runs}, torch is built for {needs}"
        remedy = "" if fits else ": update the driver, or install the torch that is built for an older CUDA"
        yield Finding("driver", Outcome.OK if fits else Outcome.FAIL, detail + remedy)


def cuda_of_torch() -> tuple[int, int] | Literal["no torch"] | None:
    """The CUDA version that the installed torch is built for; None: for no CUDA. Read without importing it."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return "no torch"
    text = Path(package.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda(?:: [^=]+)? = '(\d+)\.(\d+)'", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def _plan(config: Config) -> Finding:
    try:
        ready = preflight(config)
    except ConfigurationError as error:
        return Finding("plan", Outcome.FAIL, told(error))
    crowd = crowd_words(ready.slots)
    processes = f"{counted(len(ready.slots), 'model process', 'model processes')}; headwaiter plan shows each"
    return Finding("plan", Outcome.WARN if crowd else Outcome.OK, f"{processes}; {crowd}" if crowd else processes)


def _model_finding(config: Config, model: ModelConfig) -> Finding:
    finding = _attempt(f"model {model.name}", partial(_model, config, model))
    if finding.outcome is Outcome.FAIL and not model.required:
        return replace(finding, outcome=Outcome.WARN, detail=f"will be failed, and is not required: {finding.detail}")
    spec = runtime_spec(config, model)
    if finding.outcome is Outcome.OK and sources.is_hub_id(spec.source) and sources.hub_words(spec).is_doubtful:
        return replace(finding, outcome=Outcome.WARN)
    return finding


def _model(config: Config, model: ModelConfig) -> str:
    spec = runtime_spec(config, with_task(config, model))
    weights_bytes = sources.check(spec)
    facts = [spec.task, *sources.describe(spec)]
    if weights_bytes is not None:
        facts.append(f"{human_bytes(weights_bytes)} of weights")
    return f"{model.model}: {'; '.join(fact for fact in facts if fact)}"

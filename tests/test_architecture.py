"""The shape of the project, checked: who may import whom, and what stays out of which process."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

from shared.version import VERSION

ROOT = Path(__file__).resolve().parent.parent

# (module or package, what it must never import, directly or through first-party modules)
BANS = [
    ("shared", ["frontend", "model_worker", "fastapi", "torch", "transformers"]),
    ("shared.errors", ["shared.messages", "shared.config", "zmq", "msgpack", "pydantic"]),
    ("shared.messages", ["zmq", "msgpack", "pydantic"]),
    ("shared.wire", ["zmq", "asyncio", "time"]),
    ("shared.tensors", ["zmq"]),
    ("shared.config", ["zmq"]),
    ("shared.sockets", ["msgpack"]),
    ("frontend", ["model_worker", "torch", "transformers"]),
    ("frontend.client", ["fastapi"]),
    ("frontend.blocking", ["fastapi"]),
    ("frontend.pending", ["zmq", "asyncio", "fastapi"]),
    ("frontend.surfaces", ["msgpack"]),
    ("model_worker", ["frontend", "fastapi"]),
    ("model_worker.server", ["torch", "transformers", "asyncio", "model_worker.runtimes"]),
    ("model_worker.preflight", ["torch", "transformers"]),
    ("model_worker.start", ["torch", "transformers"]),
    ("model_worker.replica.stages", ["zmq", "model_worker.broker"]),
    ("model_worker.replica", ["model_worker.broker", "model_worker.server", "torch", "transformers"]),
    ("model_worker.runtimes.base", ["torch", "zmq"]),
    ("model_worker.runtimes.batching", ["torch", "zmq"]),
    ("model_worker.runtimes.sources", ["torch", "transformers"]),
    (
        "model_worker.broker",
        ["zmq", "time", "os", "asyncio", "threading", "logging", "random", "torch", "model_worker.runtimes"],
    ),
]
# Imports that happen in one kind of process only: the model process.
LATE = {"torch", "transformers"}


@pytest.fixture(scope="session")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "shared", "frontend", "model_worker", include_external_packages=True, exclude_type_checking_imports=True
    )


def first_party(graph: grimp.ImportGraph, module: str) -> set[str]:
    """The module with everything inside it, and every first-party module that these import."""
    roots = {name for name in graph.modules if name == module or name.startswith(module + ".")}
    assert roots, f"{module} does not exist"
    reached = set(roots)
    for root in roots:
        reached |= {
            name
            for name in graph.find_upstream_modules(root)
            if name.split(".")[0] in ("shared", "frontend", "model_worker")
        }
    return reached


@pytest.mark.parametrize(("module", "banned"), BANS, ids=[module for module, _ in BANS])
def test_no_module_reaches_what_it_must_not_know(graph: grimp.ImportGraph, module: str, banned: list[str]) -> None:
    reached = first_party(graph, module)
    for name in banned:
        importers = {
            importer
            for importer in reached
            for imported in graph.find_modules_directly_imported_by(importer)
            if imported == name or imported.startswith(name + ".")
        }
        outside = {importer for importer in importers if not (name in LATE and allows_late_import(importer))}
        assert not outside, f"{module} must not import {name}, but {sorted(outside)} does"


def allows_late_import(importer: str) -> bool:
    """Runtimes are imported by name, in a model process only (the next test proves that)."""
    return importer.startswith("model_worker.runtimes.")


@pytest.mark.parametrize(
    "module", ["headwaiter", "frontend.app", "frontend.client", "model_worker.start", "model_worker.__main__"]
)
def test_importing_the_torch_free_parts_leaves_torch_out(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_the_core_is_pure_to_the_last_import() -> None:
    """What the broker core really pulls in, not only what it names: no clock, no randomness of its own."""
    code = (
        "import sys; before = set(sys.modules); import model_worker.broker.machine; "
        "print(sorted(set(sys.modules) - before))"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", _with_site(code)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = set(eval(out.stdout))
    assert not loaded & {"zmq", "asyncio", "threading", "logging", "random", "socket", "pydantic", "msgpack"}


def _with_site(code: str) -> str:
    return f"import sys; sys.path[:0] = {[str(ROOT), *[p for p in sys.path if p]]!r}; {code}"


def test_nothing_forks_and_every_start_method_is_named() -> None:
    """A forked child inherits sockets, locks and thread pools in whatever state they are in."""
    for folder in ("shared", "frontend", "model_worker"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            for forbidden in (
                "os.fork(",
                'get_context("fork',
                "set_start_method(",
                "import pickle",
                "multiprocessing.Pool(",
            ):
                assert forbidden not in text, f"{file.relative_to(ROOT)} uses {forbidden}"


def test_the_version_has_one_value() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


def test_base_dependencies_carry_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if line.startswith(("torch", "transformers", "tokenizers"))]

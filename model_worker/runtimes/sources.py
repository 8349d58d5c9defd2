"""What the `model` key of the configuration points at, told without importing torch, transformers or the model.

Owns the five spellings of a source and what can be found wrong with one before any process is started. Refuses the
network: whether a hub id exists is found out by the model process that loads it.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_worker import weights
from model_worker.runtimes import nearby, tasks
from model_worker.specs import RuntimeSpec
from shared.errors import ConfigurationError
from shared.suggestions import did_you_mean

_PACKAGE_PREFIX = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_GGUF_MAGIC = b"GGUF"
_OWN_PACKAGES = ("frontend", "headwaiter", "model_worker", "shared")
_MODULES_FILE = "modules.json"
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from."""

    kind: Literal["directory", "gguf", "hub", "class"]
    location: str
    """A directory (of the file, for `gguf`), a hub id, or the module of a `class`, by kind."""
    file: str | None = None
    """The file's name inside `location`; for `gguf` only."""
    attribute: str | None = None
    """The name of the class inside its module; for `class` only."""

    @property
    def is_local(self) -> bool:
        """Whether loading it may not touch the network."""
        return self.kind in ("directory", "gguf")

    @property
    def path(self) -> Path:
        """The directory, or the `.gguf` file itself."""
        return Path(self.location, self.file) if self.file else Path(self.location)


def resolve(source: str) -> Source:
    """Reads a source of the configuration, in which paths are absolute; local ones exist when this returns.

    Raises:
        ConfigurationError: one line with the missing path, package or the spelling that is none of the five.
    """
    if os.path.isabs(source):
        return _resolve_path(Path(source), source)
    if source.startswith(_PACKAGE_PREFIX):
        return _resolve_path(_find_in_package(source), source)
    if "://" in source:
        raise ConfigurationError(
            f"model = {source!r} is a web address: name a directory, or a hub's model by its id, such as 'org/name'"
        )
    module, colon, attribute = source.partition(":")
    if colon:
        if "/" in module or not all(part.isidentifier() for part in (*module.split("."), attribute)):
            raise ConfigurationError(
                f"model = {source!r} is neither a class (my_module:MyModel) nor files of a package (package:name/path)"
            )
        return Source("class", module, attribute=attribute)
    if not is_hub_id(source):
        raise ConfigurationError(f"model = {source!r} is neither a path nor a hub id such as 'org/name'")
    return Source("hub", source)


def check(spec: RuntimeSpec) -> int | None:
    """Finds what can be known to be wrong before a process is started; returns the bytes of the weights.

    None where they cannot be told: a hub id, a class of the user's own.

    Raises:
        ConfigurationError: one line: a missing path, an unreadable file, or weights that are made for another task.
    """
    source = resolve(spec.source)
    if source.kind == "class":
        _check_class(source, spec.python_path)
        return None
    tasks.check_known(spec.task)
    tasks.check_packages(spec.task)
    if source.kind == "gguf":
        _check_gguf(source, spec.task)
    elif source.kind == "directory":
        _check_directory(Path(source.location), spec.task)
    else:
        return None
    return weights.weights_bytes(source.path, spec.dtype)


def describe(spec: RuntimeSpec) -> list[str]:
    """What `check` can say of a source that it has passed: the class or the architectures, the format, what it brings.

    Raises:
        ConfigurationError: as `check`.
    """
    source = resolve(spec.source)
    if source.kind == "hub":
        return [hub_words(spec).text, "its files are looked at when the model process loads them"]
    if source.kind == "class":
        return [f"a class of your own, in {find_module_file(source.location, [*sys.path, *spec.python_path])}"]
    if source.kind == "gguf":
        return [weights.layout(source.path)]
    directory = _transformer_directory(source.path)
    facts = [", ".join(_architectures(directory)), weights.layout(source.path)]
    if _brings_code(directory):
        allowed = "is allowed" if spec.trust_remote_code else "runs only with trust_remote_code = true"
        facts.append(f"brings Python code of its own, which {allowed}")
    return [fact for fact in facts if fact]


def is_hub_id(source: str) -> bool:
    """Whether it has the form of one, and of nothing else."""
    return not os.path.isabs(source) and _HUB_ID.fullmatch(source) is not None


@dataclass(frozen=True, slots=True)
class Understood:
    """How a name that may be two things was read, in words."""

    text: str
    is_doubtful: bool
    """Whether something on this machine has nearly the same name."""


def hub_words(spec: RuntimeSpec) -> Understood:
    """Why the source of `spec`, a hub id, is one: there is no directory of that name; perhaps one that is nearly so."""
    start = Path(spec.start).absolute()
    guess = nearby.did_you_mean(start / spec.source, start)
    text = (
        f"{spec.source!r} is taken for a hub id: there is no directory {start / spec.source}{guess}; for a directory, "
        f"write './{spec.source}'"
    )
    return Understood(text, is_doubtful=bool(guess))


def detect_task(spec: RuntimeSpec) -> str:
    """The task that the weights of `spec` are made for, told without loading them.

    Raises:
        ConfigurationError: there are no such weights, or they may serve no task or several; says which.
    """
    found = resolve(spec.source)
    if found.kind == "hub":
        raise _unclear_task(spec, f"it can be told only from files on this machine, and {hub_words(spec).text}")
    if found.kind == "gguf":
        fitting = sorted(tasks.GGUF_TASKS)
        held = "a .gguf file"
    elif (found.path / _MODULES_FILE).is_file():
        return tasks.EMBEDDING
    else:
        architectures = _architectures(found.path)
        fitting = tasks.made_for(architectures)
        held = ", ".join(architectures) or "weights of no named architecture"
    if len(fitting) != 1:
        outcome = f"serves several: {', '.join(fitting)}" if fitting else "serves no task by itself"
        raise _unclear_task(spec, f"{spec.source} holds {held}, which {outcome}")
    return fitting[0]


def _unclear_task(spec: RuntimeSpec, why: str) -> ConfigurationError:
    return ConfigurationError(
        f'model {spec.name!r} needs a task, such as task = "text-classification": {why}', keys=("task",)
    )


def find_module_file(module: str, search_path: Sequence[str]) -> Path | None:
    """The file of `module`, found along `search_path` without importing it or any package above it."""
    entries: Sequence[str] | None = search_path
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        # Editable installations hook into the import system; the path finder alone does not see them.
        spec = importlib.machinery.PathFinder.find_spec(name, entries)
        if spec is None and "." not in name:
            spec = _find_hooked(name)
        if spec is None:
            return None
        entries = spec.submodule_search_locations
        if entries is None and name != module:
            return None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


def taken_name(module: str | None) -> str:
    """What to add to an error about a module that is not there; empty, unless headwaiter itself has its name."""
    package = (module or "").partition(".")[0]
    return f"; {package!r} is a package of headwaiter's own: rename yours" if package in _OWN_PACKAGES else ""


def _find_hooked(top_level_name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(top_level_name)
    except ValueError:  # a module in sys.modules that has no spec, such as __main__
        return None


def _resolve_path(path: Path, source: str) -> Source:
    if not path.exists():
        raise ConfigurationError(f"model = {source!r}: no such file or directory{nearby.did_you_mean(path)}")
    if path.is_dir():
        return Source("directory", str(path.absolute()))
    if path.suffix == ".gguf":
        return Source("gguf", str(path.parent.absolute()), file=path.name)
    raise ConfigurationError(
        f"model = {source!r} is a file but not a .gguf file: name the directory that holds config.json"
    )


def _find_in_package(source: str) -> Path:
    name, _, inside = source.removeprefix(_PACKAGE_PREFIX).partition("/")
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(f"model = {source!r}: expected package:import_name/path/inside")
    file = find_module_file(name, sys.path)
    if file is None:
        raise ConfigurationError(f"model = {source!r}: the package {name!r} is not installed for {sys.executable}")
    path = file.parent / inside
    if ".." in Path(inside).parts or not path.exists():
        raise ConfigurationError(
            f"model = {source!r}: the package {name!r} has no {inside!r} (looked in {file.parent})"
        )
    return path


def _check_class(source: Source, python_path: Sequence[str]) -> None:
    file = find_module_file(source.location, [*sys.path, *python_path])
    if file is None:
        searched = ", ".join(python_path) or "the installed packages"
        guess = did_you_mean(source.location, _modules_in(python_path))
        raise ConfigurationError(
            f"no module {source.location!r}{guess} for the model class {source.attribute!r}: looked in {searched}; "
            f"python_path names the directories of your own classes{taken_name(source.location)}"
        )
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(f"{file}: not valid Python: {error}") from None
    names = _names_bound_at_top_level(tree)
    if names is not None and source.attribute not in names:
        guess = did_you_mean(str(source.attribute), names)
        raise ConfigurationError(
            f"{file} defines no {source.attribute!r}{guess}: model = 'module:Class' names a class in it"
        )


def _modules_in(python_path: Sequence[str]) -> list[str]:
    return [file.stem for entry in python_path for file in sorted(Path(entry).glob("*.py"))]


def _names_bound_at_top_level(tree: ast.Module) -> set[str] | None:
    """None if that cannot be told: a star import, or a module `__getattr__`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if names & {"*", "__getattr__"} else names


def _check_gguf(source: Source, task: str) -> None:
    if task not in tasks.GGUF_TASKS:
        fitting = ", ".join(sorted(tasks.GGUF_TASKS))
        raise ConfigurationError(f"task = {task!r} does not fit {source.path}: a .gguf file serves {fitting}")
    try:
        with source.path.open("rb") as stream:
            magic = stream.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ConfigurationError(f"{source.path}: cannot be read: {error.strerror}") from None
    if magic != _GGUF_MAGIC:
        raise ConfigurationError(f"{source.path}: not a GGUF file: it begins with {magic!r} (an incomplete download?)")


def _check_directory(directory: Path, task: str) -> None:
    directory = _transformer_directory(directory)
    architectures = _architectures(directory)
    if not any(True for pattern in _WEIGHT_PATTERNS for _ in directory.glob(pattern)):
        raise ConfigurationError(f"{directory}: no weights there (*.safetensors or *.bin)")
    tasks.check_architectures(str(directory), task, architectures)
    if tasks.canonical(task) == tasks.QUESTION_ANSWERING:
        rows = weights.rows_of(directory, tasks.ANSWER_HEAD)
        tasks.check_answer_head(str(directory), architectures, _label_count(directory) if rows is None else rows)


def _transformer_directory(directory: Path) -> Path:
    """Where the transformer is: sentence-transformers may keep it in a folder of its own, named in its modules."""
    modules = _read_json(directory / _MODULES_FILE) if (directory / _MODULES_FILE).is_file() else []
    first = modules[0] if isinstance(modules, list) and modules and isinstance(modules[0], dict) else {}
    return directory / str(first.get("path", ""))


def _architectures(directory: Path) -> list[str]:
    """Those that the directory's config.json names; most often one."""
    architectures = _config(directory).get("architectures")
    return [str(name) for name in architectures] if isinstance(architectures, list) else []


def _label_count(directory: Path) -> int | None:
    """How many labels the directory's config.json says the head has; None if it says nothing."""
    config = _config(directory)
    labels, count = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict):
        return len(labels)
    return count if isinstance(count, int) else None


def _brings_code(directory: Path) -> bool:
    """Whether the configuration names classes in files beside it, as models with code of their own do."""
    return bool(_config(directory).get("auto_map"))


def _config(directory: Path) -> dict[str, object]:
    if not (directory / "config.json").is_file():
        raise ConfigurationError(f"{directory}: no config.json there: is it the directory of a model?")
    config = _read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise ConfigurationError(f"{directory / 'config.json'}: not an object: is it the directory of a model?")
    return config


def _read_json(file: Path) -> object:
    try:
        value: object = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{file}: not valid JSON: {error}") from None
    return value

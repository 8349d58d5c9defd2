"""Which class runs which task, and how a class of the user's own becomes a `Model`.

Owns the table from task to runtime, as text that is imported only when it is used. Refuses to import torch itself:
`known_tasks` and `build` of a class that needs none are free of it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from model_worker.runtimes import sources, tasks
from model_worker.runtimes.base import Model
from model_worker.runtimes.tasks import known_tasks
from model_worker.specs import RuntimeSpec
from shared.errors import ConfigurationError, LoadError

__all__ = ["build", "known_tasks"]

_PIPELINE_RUNTIME = "model_worker.runtimes.pipeline_task:PipelineModel"

RUNTIMES: dict[str, str] = {
    tasks.EMBEDDING: "model_worker.runtimes.embedding:EmbeddingModel",
    tasks.QUESTION_ANSWERING: "model_worker.runtimes.question_answering:QuestionAnsweringModel",
    tasks.TEXT_GENERATION: "model_worker.runtimes.generation:GenerationModel",
    **dict.fromkeys(tasks.TEXT_TO_TEXT_TASKS, "model_worker.runtimes.text_to_text:TextToTextModel"),
    **dict.fromkeys(tasks.PIPELINE_TASKS, _PIPELINE_RUNTIME),
}
"""`module:attribute` by task; the attribute is called with the `RuntimeSpec`. A new task is one line here."""


_METHODS = tuple(name for name, method in vars(Model).items() if inspect.isfunction(method))
"""What a class of the user's own may define, and headwaiter calls."""


def build(spec: RuntimeSpec) -> Model:
    """Makes the model that `spec` describes, not loaded yet. Imports torch if its runtime does.

    Raises:
        LoadError: one line, always `permanent`: the source, the task, the class or its options are wrong.
    """
    try:
        source = sources.resolve(spec.source)
        if source.kind == "class":
            return _build_own_class(source.location, str(source.attribute), spec)
        tasks.check_known(spec.task)
        tasks.check_packages(spec.task)
    except ConfigurationError as error:
        raise LoadError(str(error), permanent=True) from None
    module, _, attribute = RUNTIMES[tasks.canonical(spec.task)].partition(":")
    try:
        factory: Callable[[RuntimeSpec], Model] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise LoadError(
            f"task = {spec.task!r} needs the package {error.name!r}: install headwaiter[worker]", permanent=True
        ) from error
    return factory(spec)


def _build_own_class(module_name: str, attribute: str, spec: RuntimeSpec) -> Model:
    where = f"{module_name}:{attribute}"
    for entry in spec.python_path:
        # Behind everything else: a directory of the user's cannot shadow an installed module.
        if entry not in sys.path:
            sys.path.append(entry)
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except AttributeError as error:
        raise LoadError(f"{where}: {error}", permanent=True) from error
    except Exception as error:
        # Whatever the user's module does at import is reported with its own words; the traceback goes along as cause.
        taken = sources.taken_name(error.name) if isinstance(error, ImportError) else ""
        raise LoadError(
            f"{where}: cannot be imported: {type(error).__name__}: {error}{taken}", permanent=True
        ) from error
    model_class = _as_model_class(found, where)
    try:
        inspect.signature(model_class).bind(**spec.options)
    except TypeError as error:
        raise LoadError(
            f"{where}: options do not fit its constructor: {error}; it takes {inspect.signature(model_class)}",
            permanent=True,
        ) from None
    try:
        return model_class(**spec.options)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{where}: its constructor failed: {type(error).__name__}: {error}", permanent=True) from error


def _missing(found: type) -> list[str]:
    """Methods that `found` would have to write, by what it has written."""

    def has(name: str) -> bool:
        return getattr(found, name, None) not in (None, getattr(Model, name))

    # `load` may still decide that it steps, and has `forward` for when it decides otherwise.
    steps = getattr(found, "continuous_batching", False) or (has("step") and not has("forward"))
    return [name for name in ("load", *(("join", "leave", "step") if steps else ("forward",))) if not has(name)]


def _as_model_class(found: Any, where: str) -> type[Model]:
    """`found` itself, or, if it only looks like a `Model`, a subclass that gets what it lacks from `Model`."""
    if not isinstance(found, type):
        raise LoadError(f"{where} is not a class but {type(found).__name__}: {found!r:.80}", permanent=True)
    missing = _missing(found)
    if missing:
        raise LoadError(
            f"{where} lacks {' and '.join(missing)}: a model class has load(device) and forward(items), or, with "
            "continuous_batching, join(item), leave(item) and step()",
            permanent=True,
        )
    waiting = [name for name in _METHODS if inspect.iscoroutinefunction(getattr(found, name, None))]
    if waiting:
        raise LoadError(
            f"{where}: {' and '.join(waiting)} cannot be async: each method is called on a thread of its own, and may "
            "block there",
            permanent=True,
        )
    if issubclass(found, Model):
        return found
    try:
        return type(found.__name__, (found, Model), {"__module__": found.__module__})
    except TypeError as error:
        raise LoadError(f"{where} cannot be used as a model ({error}): derive it from Model", permanent=True) from None

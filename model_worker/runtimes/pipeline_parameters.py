"""What a caller may pass to one of transformers' pipelines, and which values make sense.

Owns the names a pipeline knows, read from its own signatures, and the checks that the pipelines lack: they swallow
unknown names and fail late, or in a thread of their own, on bad values. Runs on the prepare thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from model_worker.runtimes import checks
from shared.errors import InvalidInput

TRUNCATION = "truncation"
# What may reach a tokenizer through a pipeline that passes keywords on, by itself or in a dictionary of them.
_TOKENIZER_PARAMETERS = frozenset({TRUNCATION, "max_length", "padding", "add_special_tokens"})
_TOKENIZER_DICTIONARIES = ("tokenizer_kwargs", "tokenize_kwargs")
_GENERATION_DICTIONARY = "generate_kwargs"
# Known to a pipeline, but not for callers: a part of another program's command line, waiting times for downloads that
# do not happen, and dictionaries that reach functions with far more power than the task has.
_WITHHELD = frozenset(
    {"args_parser", "decoder_kwargs", "forward_params", "image_processor_kwargs", "parameters", "preprocess_params"}
    | {"processor_kwargs", "tesseract_config", "timeout"}
)
# For models that know no limit of their own.
_LENGTH_MAX = 32_768
_FUNCTIONS = ("sigmoid", "softmax", "none")
_AGGREGATIONS = ("none", "simple", "first", "average", "max")


class PipelineParameters:
    """The parameters of one pipeline object."""

    def __init__(self, pipeline: Any, limit_tokens: int | None) -> None:
        self._pipeline = pipeline
        self._limit_tokens = limit_tokens
        accepted, open_ended = _names(pipeline._sanitize_parameters)
        if open_ended:
            for method in (pipeline.preprocess, pipeline.postprocess):
                names, _ = _names(method, skip=1)
                accepted |= names
            if pipeline.tokenizer is not None and TRUNCATION in _reaching_preprocess(pipeline):
                accepted |= _TOKENIZER_PARAMETERS
            if getattr(pipeline, "_pipeline_calls_generate", False):
                accepted |= _generation_parameters() | {_GENERATION_DICTIONARY}
        self._accepted = accepted - _WITHHELD
        self.known = self._accepted | ({TRUNCATION} if pipeline.tokenizer is not None else set())
        """Names a caller may use. `truncation` is there for every pipeline that has a tokenizer."""

    def check(self, parameters: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Returns what to call the pipeline with, and whether over-long text may be cut.

        Raises:
            InvalidInput: an unknown name, or a value that cannot be meant.
        """
        checks.refuse_unknown(parameters, self.known)
        arguments = dict(parameters)
        for name, value in parameters.items():
            check = _CHECKS.get(name)
            if check is not None:
                arguments[name] = check(name, value)
        self._check_lengths(arguments)
        for name in _TOKENIZER_DICTIONARIES:
            if name in arguments:
                self._check_dictionary(name, arguments[name], _TOKENIZER_PARAMETERS)
        if _GENERATION_DICTIONARY in arguments:
            # `generate` itself takes more, such as the name of a repository with code to run in its place.
            self._check_dictionary(_GENERATION_DICTIONARY, arguments[_GENERATION_DICTIONARY], _generation_parameters())
        may_truncate = bool(arguments.get(TRUNCATION, False)) or any(
            bool(arguments.get(name, {}).get(TRUNCATION)) for name in _TOKENIZER_DICTIONARIES
        )
        if TRUNCATION in arguments and TRUNCATION not in self._accepted:
            truncation = arguments.pop(TRUNCATION)
            if "tokenizer_kwargs" in self._accepted:
                arguments["tokenizer_kwargs"] = {TRUNCATION: truncation, **arguments.get("tokenizer_kwargs", {})}
        return arguments, may_truncate

    def _check_dictionary(self, name: str, value: object, known: Collection[str]) -> None:
        if not isinstance(value, dict):
            raise InvalidInput(f"{name} must be an object, got {checks.shown(value)}")
        for inner in value:
            if inner not in known:
                raise InvalidInput(f"{name}: unknown {inner!r}; known: {', '.join(sorted(known))}")
        self._check_lengths(value)

    def _check_lengths(self, arguments: dict[str, Any]) -> None:
        for name in ("max_length", "max_new_tokens"):
            if arguments.get(name) is not None:
                # Padding to a length of the caller's choice allocates it, and generating to one takes the time for it,
                # before anything else could refuse.
                checks.whole_number(name, arguments[name], at_least=1, at_most=self._limit_tokens or _LENGTH_MAX)
        if arguments.get("stride") is not None and self._limit_tokens is not None:
            # The tokenizer does not raise but panics where windows cannot move forward.
            room = self._limit_tokens - self._pipeline.tokenizer.num_special_tokens_to_add()
            checks.whole_number("stride", arguments["stride"], at_least=0, at_most=room - 1)


def _names(function: Callable[..., object], skip: int = 0) -> tuple[set[str], bool]:
    """The names of a function's parameters, and whether it takes any others as well."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    named = {
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and not parameter.name.startswith("_")
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _reaching_preprocess(pipeline: Any) -> frozenset[str]:
    try:
        preprocess, _, _ = pipeline._sanitize_parameters(**{TRUNCATION: True})
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(preprocess)


def _generation_parameters() -> set[str]:
    from transformers import GenerationConfig

    return {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}


def _check_top_k(name: str, value: object) -> int | None:
    return None if value is None else checks.whole_number(name, value, at_least=1)


def _check_stride(name: str, value: object) -> int | None:
    return None if value is None else checks.whole_number(name, value, at_least=0)


def _check_truncation(name: str, value: object) -> object:
    return value if isinstance(value, str) else checks.boolean(name, value)


def _check_function(name: str, value: object) -> str | None:
    return None if value is None else checks.choice(name, value, _FUNCTIONS)


def _check_labels(name: str, value: object) -> str | list[str]:
    if isinstance(value, str):
        if not value.strip(" ,"):
            raise InvalidInput(f"{name} is empty: give at least one label")
        return value
    return checks.texts(name, value)


def _check_template(name: str, value: object) -> str:
    template = checks.text(name, value)
    if "{}" not in template or set("{}") & set(template.replace("{}", "")):
        raise InvalidInput(
            f"{name} must hold {{}} where the label goes, and no other braces, got {checks.shown(value)}"
        )
    return template


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "top_k": _check_top_k,
    "stride": _check_stride,
    TRUNCATION: _check_truncation,
    "function_to_apply": _check_function,
    "aggregation_strategy": lambda name, value: checks.choice(name, value, _AGGREGATIONS),
    "ignore_labels": lambda name, value: [] if value == [] else checks.texts(name, value),
    "targets": checks.texts,
    "candidate_labels": _check_labels,
    "hypothesis_template": _check_template,
    "multi_label": checks.boolean,
    "is_split_into_words": checks.boolean,
    "return_tensors": checks.boolean,
}

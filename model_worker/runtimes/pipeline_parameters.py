"""What a caller may pass to one of transformers' pipelines, and which values make sense.

Owns the names a pipeline knows, read from its own signatures, and the checks that the pipelines lack: they swallow
unknown names and fail late, or in a thread of their own, on bad values. Part of the prepare stage.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

from model_worker.runtimes import checks, films, media
from model_worker.runtimes.samples import TEXT_TASKS
from shared.errors import InvalidInput

TRUNCATION = "truncation"
# What may reach a tokenizer through a pipeline that passes keywords on, by itself or in a dictionary of them; each
# with a value to try whether it does.
_TOKENIZER_PARAMETERS: dict[str, object] = {
    TRUNCATION: True,
    "max_length": 8,
    "padding": True,
    "add_special_tokens": True,
}
_TOKENIZER_DICTIONARIES = ("tokenizer_kwargs", "tokenize_kwargs")
_GENERATION_DICTIONARY = "generate_kwargs"
# `generate` itself takes more, such as the name of a repository with code to run in its place, or a cache to compile.
_GENERATION_PARAMETERS = frozenset(
    {"do_sample", "language", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens"}
    | {"no_repeat_ngram_size", "num_beams", "num_return_sequences", "repetition_penalty", "task", "temperature"}
    | {"top_k", "top_p", "typical_p"}
)
# Known to a pipeline, but not for callers: a part of another program's command line, waiting times for downloads that
# do not happen, and dictionaries that reach functions with far more power than the task has.
_WITHHELD = frozenset(
    {"args_parser", "decoder_kwargs", "forward_params", "image_processor_kwargs", "offset_mapping", "parameters"}
    | {"preprocess_params", "processor_kwargs", "tesseract_config", "timeout"}
)
# For models that know no limit of their own.
_LENGTH_MAX = 32_768
_BEAMS_MAX = 64
# Each layer of crops has four times as many as the one before, each with a square of points.
_CROP_LAYERS_MAX = 2
_POINTS_MAX = 64
_SECONDS_MAX = 100_000
_LANGUAGES = re.compile(r"[A-Za-z_]+(\+[A-Za-z_]+)*")
_FUNCTIONS = ("sigmoid", "softmax", "none")
_AGGREGATIONS = ("none", "simple", "first", "average", "max")
_PADDINGS = ("longest", "max_length", "do_not_pad")
_UNCUT = "do_not_truncate"
_TRUNCATIONS = ("longest_first", "only_first", "only_second", _UNCUT)


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
            if pipeline.tokenizer is not None:
                accepted |= {name for name in _TOKENIZER_PARAMETERS if _reaches_preprocess(pipeline, name)}
            if getattr(pipeline, "_pipeline_calls_generate", False) and pipeline.model.can_generate():
                accepted |= _GENERATION_PARAMETERS | {_GENERATION_DICTIONARY}
        if pipeline.task in media.INPUT_PARAMETERS:
            accepted.add(media.INPUT_PARAMETERS[pipeline.task])
        self._accepted = accepted - _WITHHELD
        self.known = self._accepted | ({TRUNCATION} if pipeline.task in TEXT_TASKS else set())
        """Names a caller may use. `truncation` is there for every task that reads text."""

    def check(self, parameters: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Returns what to call the pipeline with, and whether over-long text may be cut.

        Raises:
            InvalidInput: an unknown name, or a value that cannot be meant.
        """
        checks.refuse_unknown(parameters, self.known)
        arguments = self._checked(parameters)
        for name in _TOKENIZER_DICTIONARIES:
            if name in arguments:
                arguments[name] = self._check_dictionary(name, arguments[name], _TOKENIZER_PARAMETERS)
        if _GENERATION_DICTIONARY in arguments:
            arguments[_GENERATION_DICTIONARY] = self._check_dictionary(
                _GENERATION_DICTIONARY, arguments[_GENERATION_DICTIONARY], _GENERATION_PARAMETERS
            )
        asked = [
            arguments.get(TRUNCATION),
            *(arguments.get(name, {}).get(TRUNCATION) for name in _TOKENIZER_DICTIONARIES),
        ]
        may_truncate = any(value not in (None, False, _UNCUT) for value in asked)
        if TRUNCATION in arguments and TRUNCATION not in self._accepted:
            truncation = arguments.pop(TRUNCATION)
            if "tokenizer_kwargs" in self._accepted:
                arguments["tokenizer_kwargs"] = {TRUNCATION: truncation, **arguments.get("tokenizer_kwargs", {})}
            else:
                # These pipelines have a way to cut of their own; the caller only says whether.
                checks.boolean(TRUNCATION, truncation)
        return arguments, may_truncate

    def _check_dictionary(self, name: str, value: object, known: Collection[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidInput(f"{name} must be an object, got {checks.shown(value)}")
        for inner in value:
            if inner not in known:
                raise InvalidInput(f"{name}: unknown {inner!r}; known: {', '.join(sorted(known))}")
        return self._checked(value, f"{name}.")

    def _checked(self, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        """The values as the pipeline is to get them; `prefix` goes before a name in an error."""
        checked = dict(values)
        for name, value in values.items():
            if name in _CHECKS:
                checked[name] = _CHECKS[name](prefix + name, value)
        for name in ("max_length", "max_new_tokens", "max_seq_len", "doc_stride"):
            if checked.get(name) is not None:
                # Padding to a length of the caller's choice allocates it, and generating to one takes the time for it,
                # before anything else could refuse.
                checks.whole_number(prefix + name, checked[name], at_least=1, at_most=self._limit_tokens or _LENGTH_MAX)
        if checked.get("stride") is not None and self._limit_tokens is not None:
            # The tokenizer does not raise but panics where windows cannot move forward.
            room = self._limit_tokens - self._pipeline.tokenizer.num_special_tokens_to_add()
            checks.whole_number(prefix + "stride", checked["stride"], at_least=0, at_most=room - 1)
        return checked


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


def _reaches_preprocess(pipeline: Any, name: str) -> bool:
    try:
        preprocess, _, _ = pipeline._sanitize_parameters(**{name: _TOKENIZER_PARAMETERS[name]})
    except (TypeError, ValueError):
        return False
    return name in preprocess


def _check_top_k(name: str, value: object) -> int | None:
    return None if value is None else checks.whole_number(name, value, at_least=1)


def _check_stride(name: str, value: object) -> int | None:
    return None if value is None else checks.whole_number(name, value, at_least=0)


def _check_truncation(name: str, value: object) -> object:
    return checks.choice(name, value, _TRUNCATIONS) if isinstance(value, str) else checks.boolean(name, value)


def _check_padding(name: str, value: object) -> object:
    return checks.choice(name, value, _PADDINGS) if isinstance(value, str) else checks.boolean(name, value)


def _check_targets(name: str, value: object) -> list[str]:
    targets = checks.texts(name, value)
    if "" in targets:
        raise InvalidInput(f"{name} holds an empty string: each target is a word of the model's vocabulary")
    return targets


def _check_beams(name: str, value: object) -> int:
    return checks.whole_number(name, value, at_least=1, at_most=_BEAMS_MAX)


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


def _between(least: int, most: int) -> Callable[[str, object], int]:
    return lambda name, value: checks.whole_number(name, value, at_least=least, at_most=most)


def _check_language(name: str, value: object) -> str:
    # It becomes the name of a file.
    if not isinstance(value, str) or _LANGUAGES.fullmatch(value) is None:
        raise InvalidInput(f"{name} must be the names of languages, such as eng or eng+deu, got {checks.shown(value)}")
    return value


def _check_seconds(name: str, value: object) -> float:
    return checks.number(name, value, at_least=0, at_most=_SECONDS_MAX)


def _check_strides(name: str, value: object) -> Any:
    if isinstance(value, list) and len(value) == 2:
        return [_check_seconds(f"{name}[{index}]", entry) for index, entry in enumerate(value)]
    return None if value is None else _check_seconds(name, value)


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "top_k": _check_top_k,
    "stride": _check_stride,
    TRUNCATION: _check_truncation,
    "function_to_apply": _check_function,
    "aggregation_strategy": lambda name, value: checks.choice(name, value, _AGGREGATIONS),
    "ignore_labels": lambda name, value: [] if value == [] else checks.texts(name, value),
    "delimiter": checks.text,
    "padding": _check_padding,
    "add_special_tokens": checks.boolean,
    "chunk_length_s": _check_seconds,
    "stride_length_s": _check_strides,
    "lang": _check_language,
    "num_frames": _between(1, films.FRAMES_MAX),
    "frame_sampling_rate": _between(1, films.FRAMES_MAX),
    "crops_n_layers": _between(0, _CROP_LAYERS_MAX),
    "crop_n_points_downscale_factor": _between(1, _POINTS_MAX),
    "points_per_crop": _between(1, _POINTS_MAX),
    "points_per_batch": _between(1, _POINTS_MAX**2),
    "num_beams": _check_beams,
    "num_return_sequences": _check_beams,
    "targets": _check_targets,
    "candidate_labels": _check_labels,
    "hypothesis_template": _check_template,
    "multi_label": checks.boolean,
    "is_split_into_words": checks.boolean,
    "return_tensors": checks.boolean,
}

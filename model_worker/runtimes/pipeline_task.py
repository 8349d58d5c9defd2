"""Every task of transformers' pipelines, run in three stages by the pipeline's own code.

A pipeline object does everything in one call: check, tokenise, compute, decode. Here its `__call__` runs in the
prepare stage with the computing taken out (`staging`): the model inputs are kept, and the answer has a hole for each
result. The model inputs of many requests are then collated by the library's own rule and computed at once, cut apart
again, and each request's holes are filled by the pipeline's `postprocess`. Answers are those of
`pipeline(task)(inputs)`, computed alone.

Refuses over-long text (the pipelines fail deep inside the model, or cut silently), unknown parameters (the pipelines
swallow them), and URLs or file names as inputs (the pipelines would read them).
"""

from __future__ import annotations

import copy
import importlib
import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.base import ChunkPipeline, PipelineException, pad_collate_fn
from transformers.pipelines.pt_utils import PipelineIterator

from model_worker.runtimes import (
    batching,
    checks,
    compiling,
    films,
    loading,
    media,
    model_inputs,
    padding,
    samples,
    tasks,
)
from model_worker.runtimes.base import Model
from model_worker.runtimes.pipeline_parameters import PipelineParameters
from model_worker.runtimes.staging import Part, Stager, filled
from model_worker.runtimes.transfer import to_device
from model_worker.specs import RuntimeSpec
from shared.errors import Code, InvalidInput, LoadError, RequestError

logger = logging.getLogger(__name__)

_COMPONENTS = {
    "tokenizer": "AutoTokenizer",
    "feature_extractor": "AutoFeatureExtractor",
    "image_processor": "AutoImageProcessor",
    "video_processor": "AutoVideoProcessor",
    "processor": "AutoProcessor",
}
# A model that its task's auto classes do not know, by task and type of the model: Donut.
_OTHER_CLASSES = {("document-question-answering", "vision-encoder-decoder"): "VisionEncoderDecoderModel"}
# Heads of a body that the pipelines never read, and that many files therefore lack.
_UNUSED_WEIGHTS = ("pooler.",)
_CALLER_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, PipelineException)
# How far a result may be from the one computed alone before a model counts as one that cannot be batched.
_PROBE_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
_PROBE_TOLERANCE_HALF = 0.1


@dataclass(slots=True)
class _Item:
    answer: Any
    parts: list[Part]
    cost: int
    group: Hashable
    parameter_names: tuple[str, ...]
    """Those that the caller gave."""


class PipelineModel(Model):
    """One task of transformers' pipelines. `options` are default values of its parameters."""

    mixes_parameters = True

    def __init__(self, spec: RuntimeSpec) -> None:
        self._spec = spec
        self._task = tasks.canonical(spec.task)
        self._pipeline: Any = None  # the model's; main thread
        self._stager: Stager  # shares the model; prepare stage
        self._finishing: Any = None  # shares the model; finish stage
        self._parameters: PipelineParameters
        self._limit_tokens: int | None = None
        self._token_id_limit: int | None = None
        self._limit_samples: int | None = None  # the shortest recording
        self._collate: Any = None
        self._pad_token_id: int | None = None  # as the model's configuration has it
        self._solo_reason = ""  # why requests run one by one; empty: they are batched
        self._torch_device = "cpu"

    def load(self, device: str) -> None:
        self._torch_device = device
        self._pipeline = self._load_pipeline(device)
        if self._spec.compile and self._generates():
            raise compiling.refuse(self._spec.source, "this pipeline generates, and each step would be compiled anew")
        self._limit_samples = model_inputs.least_samples(self._pipeline.model.config)
        tokenizer = self._pipeline.tokenizer
        if tokenizer is not None:
            self._pad_token_id = getattr(self._pipeline.model.config, "pad_token_id", None)
            self._token_id_limit = loading.token_id_limit(self._pipeline.model, tokenizer)
            self._limit_tokens = loading.position_limit(self._pipeline.model, tokenizer)
            if self._limit_tokens is not None:
                # So that `truncation` and `stride` cut at what the model can take, whatever the tokenizer's file says.
                tokenizer.model_max_length = self._limit_tokens
        if not self._generates():
            self._pipeline.model.config.use_cache = False  # keys and values for steps that never come
        self.max_batch_cost = padding.default_batch_cost(device)
        self._stager = Stager(self._pipeline)
        self._finishing = copy.copy(self._pipeline)
        if tokenizer is not None:
            self._finishing.tokenizer = loading.copy_tokenizer(tokenizer)
        self._parameters = PipelineParameters(self._stager.pipeline, self._limit_tokens)
        self._check_options()
        self._solo_reason = self._prepare_batching() or self._probe_batching()
        if self._solo_reason:
            self._collate = None

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> _Item:
        arguments, may_truncate = self._parameters.check({**self._spec.options, **parameters})
        if self._task in samples.TEXT_TASKS:
            _check_texts(inputs, self._task, arguments)
        else:
            inputs = media.with_named_parts(inputs, self._task, arguments)
            inputs = media.decode(inputs, self._task, self._sampling_rate())
        try:
            with loading.refuse_panics():
                answer, parts = self._stager.stage(inputs, arguments, may_truncate)
        except (*_CALLER_ERRORS, AssertionError) as error:
            given = f" (parameters: {', '.join(sorted(parameters))})" if parameters else ""
            raise InvalidInput(f"{type(error).__name__}: {loading.one_line(error)}{given}") from error
        lengths = [model_inputs.length(chunk) for part in parts for chunk in part.chunks]
        self._check_lengths(parts)
        return _Item(
            answer=answer,
            parts=parts,
            cost=sum(lengths),
            group=(repr(parts[0].forward_parameters), model_inputs.signature(parts[0].chunks[0])) if parts else None,
            parameter_names=tuple(sorted(parameters)),
        )

    def cost(self, item: _Item) -> int:
        return item.cost

    def group(self, item: _Item) -> Hashable:
        # Where nothing can be batched, no two items are alike.
        return id(item) if self._solo_reason else item.group

    def forward(self, items: Sequence[_Item]) -> list[_Item]:
        work = [(part, chunk) for item in items for part in item.parts for chunk in part.chunks]
        outputs: list[Any] = [None] * len(work)
        for positions in self._batches(work):
            chunks = [work[position][1] for position in positions]
            try:
                results = self._run(chunks, work[positions[0]][0].forward_parameters)
            except (*_CALLER_ERRORS, RuntimeError) as error:
                # Of several, each is tried again by itself.
                refusal = self._refusal(items[0], chunks, error) if len(items) == 1 else None
                if refusal is None:
                    raise
                raise refusal from error
            for position, result in zip(positions, results, strict=True):
                outputs[position] = result
            self.report_step()
        for part in (part for item in items for part in item.parts):
            part.outputs = []
        for (part, _), output in zip(work, outputs, strict=True):
            part.outputs.append(output)
        return list(items)

    def finish(self, output: _Item) -> Any:
        if any(model_inputs.holds_nan(result) for part in output.parts for result in part.outputs):
            raise RequestError("the model computed numbers that are not finite (NaN)", code=Code.MODEL_ERROR)
        try:
            with torch.inference_mode():
                results = [self._postprocess(part) for part in output.parts]
        except (*_CALLER_ERRORS, RuntimeError) as error:
            if not output.parameter_names:
                raise
            # The inputs went through the model, so it is a parameter's value that cannot be used.
            raise _misfit(output, error) from error
        return media.to_plain(filled(output.answer, results))

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        longest = padding.warm_up_tokens(self._torch_device, self._limit_tokens)
        return samples.examples(self._task, self._stager.pipeline.tokenizer, longest, self._sampling_rate())

    def samples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        if self._solo_reason:
            return ()
        lengths = padding.sample_tokens(self._torch_device, self._limit_tokens)
        return samples.usual(self._task, self._stager.pipeline.tokenizer, lengths, self._sampling_rate())

    def describe(self) -> dict[str, object]:
        tokenizer = self._pipeline.tokenizer
        return {
            **loading.describe_model(self._pipeline.model),
            "pipeline": type(self._pipeline).__name__,
            "batching": f"one by one: {self._solo_reason}" if self._solo_reason else "on",
            "padding_side": None if tokenizer is None else tokenizer.padding_side,
            "limit_tokens": self._limit_tokens,
            "sampling_rate_hz": self._sampling_rate(),
            "parameters": sorted(self._parameters.known),
        }

    # --- load ---

    def _load_pipeline(self, device: str) -> Any:
        try:
            _, definition, _ = PIPELINE_REGISTRY.check_task(self._task)
        except KeyError:
            raise LoadError(
                f"task = {self._spec.task!r} is not in transformers {transformers.__version__}", permanent=True
            ) from None
        checkpoint = loading.Checkpoint(self._spec, self.report_progress)
        config = checkpoint.load_config()
        other = _OTHER_CLASSES.get((self._task, config.model_type))
        classes = definition["pt"] if other is None else [getattr(transformers, other)]
        model = checkpoint.load_model(classes, config, device, may_lack=_UNUSED_WEIGHTS)
        checkpoint.compile_where_asked(model, device)
        pipeline_class = _import_class(definition["impl"])
        if self._task == media.VIDEO_TASK:
            pipeline_class = films.reading(pipeline_class)
        with checkpoint.one_line_errors("its pipeline"):
            components = {
                name: checkpoint.load_component(
                    name.replace("_", " "), getattr(transformers, auto_class), required=bool(flag)
                )
                for name, auto_class in _COMPONENTS.items()
                if (flag := getattr(pipeline_class, f"_load_{name}", False)) is not False
            }
            return pipeline_class(model=model, task=self._task, device=torch.device(device), **components)

    def _generates(self) -> bool:
        # Some pipelines serve models that generate and models that answer in one step.
        return getattr(self._pipeline, "_pipeline_calls_generate", False) and bool(self._pipeline.model.can_generate())

    def _check_options(self) -> None:
        try:
            self._parameters.check(dict(self._spec.options))
        except InvalidInput as error:
            raise LoadError(f"options of model {self._spec.name!r}: {error.message}", permanent=True) from None

    def _prepare_batching(self) -> str:
        """Sets up collating; returns why it cannot be, or nothing."""
        if self._generates():
            return "the pipeline generates"
        tokenizer = self._pipeline.tokenizer
        processor = self._pipeline.feature_extractor or self._pipeline.image_processor
        if tokenizer is not None and tokenizer.pad_token_id is None:
            token = tokenizer.eos_token or tokenizer.unk_token
            if token is None:
                return "the tokenizer has no token to pad with"
            for owner in (self._pipeline, self._stager.pipeline, self._finishing):
                owner.tokenizer.pad_token = token
        try:
            self._collate = pad_collate_fn(tokenizer, processor)
        except ValueError as error:
            return loading.one_line(error)
        return ""

    def _probe_batching(self) -> str:
        """Computes two requests of different length together and alone; returns what is wrong, or nothing."""
        longest = padding.warm_up_tokens(self._torch_device, self._limit_tokens)
        pair = samples.unequal_pair(self._task, self._stager.pipeline.tokenizer, longest, self._sampling_rate())
        if not pair:
            return "no request is known to try it with"
        try:
            together = [self.finish(output) for output in self.forward([self.prepare(*each) for each in pair])]
        except Exception as error:
            if self._spec.compile:
                # What fails may be the compiler: nobody asked for slow answers.
                raise LoadError(
                    f"{self._spec.source}: with compile = true, two requests together fail: {type(error).__name__}: "
                    f"{loading.one_line(error)}: set compile = false"
                ) from error
            return f"{type(error).__name__}: {loading.one_line(error)}"
        alone = [self.finish(self.forward([self.prepare(*each)])[0]) for each in pair]
        tolerance = _PROBE_TOLERANCES.get(self._pipeline.model.dtype, _PROBE_TOLERANCE_HALF)
        return "" if _close(together, alone, tolerance) else "padding changes the results"

    def _sampling_rate(self) -> int | None:
        pipeline = self._stager.pipeline
        extractor = pipeline.feature_extractor or getattr(pipeline.processor, "feature_extractor", None)
        return None if extractor is None else getattr(extractor, "sampling_rate", None)

    # --- prepare ---

    def _check_lengths(self, parts: Sequence[Part]) -> None:
        tokens = 0
        for index, part in enumerate(parts):
            where = f"inputs[{index}]" if len(parts) > 1 else "inputs"
            for chunk in part.chunks:
                self._check_samples(where, chunk, len(part.chunks))
                length = model_inputs.text_length(chunk)
                if length is None:
                    continue
                tokens += length
                if length == 0:
                    raise InvalidInput(f"{where} holds no tokens: give some text")
                if self._token_id_limit is not None:
                    checks.token_ids(where, int(chunk["input_ids"].max()), self._token_id_limit)
                if self._limit_tokens is not None and length > self._limit_tokens:
                    remedy = "shorten it, or set truncation to true"
                    if "stride" in self._parameters.known and self._task == "token-classification":
                        remedy += ", or stride to read it in windows"
                    raise checks.too_long(where, length, self._limit_tokens, remedy)
        limit = padding.request_cost_max(self._torch_device)
        if tokens > limit:
            raise InvalidInput(f"inputs are {tokens} tokens in all; one request may have {limit}: send several")

    def _check_samples(self, where: str, chunk: Any, pieces: int) -> None:
        length, limit = model_inputs.samples_in(chunk), self._limit_samples
        if limit is None or length is None or length >= limit:
            return
        what = where if pieces == 1 else f"a piece of {where}"
        remedy = "give a longer recording" if pieces == 1 else "choose another chunk_length_s or stride_length_s"
        raise InvalidInput(
            f"{what} is {length} samples long, the model takes no less than {limit}: {remedy}",
            detail={"length_samples": length, "limit_samples": limit},
        )

    # --- forward ---

    def _batches(self, work: Sequence[tuple[Part, Any]]) -> list[list[int]]:
        if self._collate is None:
            return [[position] for position in range(len(work))]
        return batching.split(
            [model_inputs.length(chunk) for _, chunk in work],
            [(repr(part.forward_parameters), model_inputs.signature(chunk)) for part, chunk in work],
            max_batch_cost=self.max_batch_cost,
            max_batch_size=0,
        )

    def _run(self, chunks: Sequence[Any], forward_parameters: dict[str, Any]) -> list[Any]:
        batch, pad_token_id = chunks[0], self._pad_token_id
        if len(chunks) > 1:
            batch = self._collate(chunks)
            pad_token_id = model_inputs.fill_padding(batch, pad_token_id)
            batch = {
                key: to_device(value, self._torch_device) if isinstance(value, torch.Tensor) else value
                for key, value in batch.items()
            }
        if self._pipeline.tokenizer is not None:
            self._pipeline.model.config.pad_token_id = pad_token_id
        # The library's own iterator cuts a batch's output apart, as it does inside `pipeline(…, batch_size=n)`.
        iterator = PipelineIterator([batch], self._pipeline.forward, forward_parameters, loader_batch_size=len(chunks))
        with torch.inference_mode():
            outputs = list(iterator)
        if len(chunks) > 1:
            padded_length = model_inputs.length(batch)
            side = "right" if self._pipeline.tokenizer is None else self._pipeline.tokenizer.padding_side
            outputs = [
                model_inputs.unpadded(output, chunk, padded_length, side)
                for output, chunk in zip(outputs, chunks, strict=True)
            ]
        return outputs

    def _refusal(self, item: _Item, chunks: Sequence[Any], error: Exception) -> InvalidInput | None:
        """What to answer where it is the request that makes the model fail; None where it may be the model."""
        if model_inputs.is_about_size(error):
            sizes = "; ".join(dict.fromkeys(model_inputs.sizes(chunk) for chunk in chunks))
            return InvalidInput(f"inputs of the size {sizes} do not fit this model: {loading.one_line(error)}")
        if isinstance(error, _CALLER_ERRORS) and self._generates() and item.parameter_names:
            return _misfit(item, error)
        return None

    # --- finish ---

    def _postprocess(self, part: Part) -> Any:
        outputs: Any = part.outputs
        if isinstance(self._finishing, ChunkPipeline):
            for output in part.outputs:
                output.pop("is_last", None)
        else:
            outputs = part.outputs[0]
        return self._finishing.postprocess(outputs, **part.postprocess_parameters)


def _import_class(reference: Any) -> Any:
    if not isinstance(reference, str):  # transformers 4 keeps the class itself
        return reference
    module, _, name = reference.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _misfit(item: _Item, error: Exception) -> InvalidInput:
    names = ", ".join(item.parameter_names)
    return InvalidInput(f"these parameters do not fit: {names}: {type(error).__name__}: {loading.one_line(error)}")


def _check_texts(inputs: Any, task: str, arguments: dict[str, Any]) -> None:
    values = inputs if isinstance(inputs, list) else [inputs]
    if not values:
        raise InvalidInput("inputs is an empty list: give at least one text")
    checks.bounded("inputs", values)
    if arguments.get("is_split_into_words"):
        _check_words(inputs)
        return
    for index, value in enumerate(values):
        where = f"inputs[{index}]" if isinstance(inputs, list) else "inputs"
        if task == "text-classification" and isinstance(value, dict):
            _check_pair(where, value)
        elif not isinstance(value, str):
            wanted = 'a string, or an object {"text", "text_pair"}' if task == "text-classification" else "a string"
            # A list in the list is none.
            also = "" if isinstance(inputs, list) else ", or a list of them"
            raise InvalidInput(f"{where} must be {wanted}{also}, got {checks.shown(value)}")


def _check_words(inputs: Any) -> None:
    if not isinstance(inputs, list):
        raise InvalidInput(
            f"inputs must be a list of words where is_split_into_words is true, got {checks.shown(inputs)}"
        )
    if not isinstance(inputs[0], list):
        checks.texts("inputs", inputs)
        return
    for index, words in enumerate(inputs):
        if not isinstance(words, list):
            raise InvalidInput(f"inputs[{index}] must be a list of words like the first, got {checks.shown(words)}")
        checks.texts(f"inputs[{index}]", words)


def _check_pair(where: str, value: dict[str, Any]) -> None:
    if "text" not in value or not set(value) <= {"text", "text_pair"}:
        raise InvalidInput(f'{where} must have "text" and may have "text_pair", got {checks.shown(sorted(value))}')
    for name, text in value.items():
        checks.text(f"{where}.{name}", text)


def _close(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key], tolerance) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_close(left, right, tolerance) for left, right in pairs)
    if isinstance(one, (float, int)) and isinstance(other, (float, int)):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(one, (np.ndarray, torch.Tensor)):
        return np.shape(one) == np.shape(other) and bool(np.allclose(one, other, rtol=tolerance, atol=tolerance))
    # Text follows the numbers, and may flip between two labels of equal score.
    return type(one) is type(other)

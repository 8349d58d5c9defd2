"""Runs a pipeline's own `__call__` with the computing taken out of it.

Owns the three pieces of that: the `Stager` that takes the place of the pipeline's inner loop, the `Part` that keeps
what was prepared, and the `Hole` that stands in the answer until its result is there; so the pipeline itself decides
the shape of every answer. Refuses to compute, and to cut text that nobody asked to be cut.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.pipelines.base import ChunkPipeline

from model_worker.runtimes import loading
from shared.errors import InvalidInput

# What one request is turned into for the model. Real ones take megabytes; a recording can be cut into a million pieces.
_PREPARED_BYTES_MAX = 2**30


@dataclass(frozen=True, slots=True)
class Hole:
    """Stands in an answer for the result of part number `part`."""

    part: int


@dataclass(slots=True)
class Part:
    """One input of a request: what `preprocess` made of it, and the parameters for the other two stages."""

    chunks: list[Any]
    forward_parameters: dict[str, Any]
    postprocess_parameters: dict[str, Any]
    outputs: list[Any] = field(default_factory=list)


class Stager:
    """A pipeline whose `__call__` prepares, and computes nothing. Prepare thread only."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = copy.copy(pipeline)
        self.pipeline.run_single = self._run_single
        self.pipeline.get_iterator = self._get_iterator
        if pipeline.tokenizer is not None:
            self.pipeline.tokenizer = _uncut(pipeline.tokenizer)
        self._parts: list[Part] = []
        self._prepared_bytes = 0

    def stage(self, inputs: Any, arguments: dict[str, Any], may_truncate: bool) -> tuple[Any, list[Part]]:
        """The answer with its holes, and the parts to fill them from; raises whatever the pipeline raises."""
        self._parts, self._prepared_bytes = [], 0
        self.pipeline.call_count = 0  # transformers warns after ten calls, meaning calls that compute
        if self.pipeline.tokenizer is not None:
            self.pipeline.tokenizer.may_truncate = may_truncate
        return self.pipeline(inputs, **arguments), self._parts

    def _run_single(self, inputs: Any, preprocess: Any, forward: Any, postprocess: Any) -> Hole:
        prepared = self.pipeline.preprocess(inputs, **preprocess)
        chunks = []
        for chunk in prepared if isinstance(self.pipeline, ChunkPipeline) else [prepared]:
            self._prepared_bytes += _tensor_bytes(chunk)
            if self._prepared_bytes > _PREPARED_BYTES_MAX:
                raise InvalidInput(
                    f"inputs take more than {_PREPARED_BYTES_MAX} bytes once they are prepared for the model: send "
                    "less at once, or in fewer pieces"
                )
            chunks.append(chunk)
        self._parts.append(Part(chunks, dict(forward), dict(postprocess)))
        return Hole(len(self._parts) - 1)

    def _get_iterator(
        self, inputs: Iterable[Any], num_workers: int, batch_size: int, preprocess: Any, forward: Any, postprocess: Any
    ) -> Iterator[Hole]:
        return (self._run_single(value, preprocess, forward, postprocess) for value in inputs)


def _tensor_bytes(chunk: Any) -> int:
    tensors = chunk.values() if isinstance(chunk, Mapping) else []
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def _uncut(tokenizer: Any) -> Any:
    """A copy that cuts text to the model's own limit only while its `may_truncate` is set.

    Several pipelines ask for that without being told to. Text that is too long then arrives whole, and is refused.
    """

    def call(self: Any, *args: Any, truncation: Any = None, max_length: int | None = None, **keywords: Any) -> Any:
        if not self.may_truncate and max_length is None and not keywords.get("return_overflowing_tokens"):
            truncation = False
        return super(type(self), self).__call__(*args, truncation=truncation, max_length=max_length, **keywords)

    copied = loading.copy_tokenizer(tokenizer)
    # Calls are looked up in the class; its name tells error texts which tokenizer it is.
    copied.__class__ = type(type(tokenizer).__name__, (type(tokenizer),), {"__call__": call, "may_truncate": False})
    return copied


def filled(answer: Any, results: Sequence[Any]) -> Any:
    """The answer with each hole replaced by the result of its part."""
    if isinstance(answer, Hole):
        return results[answer.part]
    if isinstance(answer, (list, tuple)):
        return [filled(entry, results) for entry in answer]
    if isinstance(answer, dict):
        return {key: filled(entry, results) for key, entry in answer.items()}
    return answer

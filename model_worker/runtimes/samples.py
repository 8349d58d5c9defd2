"""Requests that every model of a task can answer, for the warm-up and for trying whether batching works.

Refuses to be clever: repeated words, silence, a grey picture.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

from model_worker.runtimes import media

TEXT_TASKS = frozenset(
    {"feature-extraction", "fill-mask", "text-classification", "token-classification", "zero-shot-classification"}
)
_PARAMETERS: dict[str, dict[str, Any]] = {
    "zero-shot-classification": {"candidate_labels": ["one", "two"]},
    "zero-shot-audio-classification": {"candidate_labels": ["one", "two"]},
    "zero-shot-image-classification": {"candidate_labels": ["one", "two"]},
}
# Tasks whose bare input is one picture or one recording; the others want objects that differ from model to model.
_PICTURE_TASKS = media.IMAGE_TASKS - {
    "document-question-answering",
    "keypoint-matching",
    "mask-generation",
    "zero-shot-object-detection",
}
_PICTURE_PIXELS = 64

Request = tuple[Any, dict[str, Any]]


def examples(task: str, tokenizer: Any, longest_tokens: int, sampling_rate: int | None) -> Sequence[Request]:
    """The largest shape first, then a small one; empty for tasks whose inputs differ too much."""
    if task in TEXT_TASKS:
        parameters = _PARAMETERS.get(task, {})
        if task == "zero-shot-classification":
            # This pipeline adds a sentence of its own to every text: cut back what is then too much.
            parameters = {**parameters, "truncation": True}
        return [(_text(task, tokenizer, size), parameters) for size in (longest_tokens, 1)]
    return unequal_pair(task, tokenizer, longest_tokens, sampling_rate)[:1]


def unequal_pair(task: str, tokenizer: Any, longest_tokens: int, sampling_rate: int | None) -> Sequence[Request]:
    """Two requests of different length where the task has lengths."""
    parameters = _PARAMETERS.get(task, {})
    if task in TEXT_TASKS:
        return [(_text(task, tokenizer, size), parameters) for size in (min(longest_tokens, 12), 1)]
    if task in _PICTURE_TASKS:
        return [(_grey_png(_PICTURE_PIXELS), parameters), (_grey_png(_PICTURE_PIXELS * 2), parameters)]
    if task in media.AUDIO_TASKS and sampling_rate:
        # Long enough for every convolutional front end; the pipelines take the samples out of the object they get.
        return [
            ({"raw": [0.0] * (sampling_rate * seconds), "sampling_rate": sampling_rate}, parameters)
            for seconds in (2, 1)
        ]
    return []


def text_of(tokenizer: Any, tokens_max: int) -> str:
    """Some text of at most `tokens_max` tokens, special tokens counted, and nearly as many."""
    words = ["a", "b", "c", "d", "e", "f", "g", "h"]
    room = tokens_max - tokenizer.num_special_tokens_to_add()
    text = words[0]
    count = 1
    while count < room:
        candidate = f"{text} {words[count % len(words)]}"
        if len(tokenizer(candidate, add_special_tokens=False)["input_ids"]) > room:
            break
        text, count = candidate, count + 1
    return text


def _text(task: str, tokenizer: Any, tokens_max: int) -> str:
    if task != "fill-mask":
        return text_of(tokenizer, tokens_max)
    return f"{text_of(tokenizer, tokens_max - 2)} {tokenizer.mask_token}"


def _grey_png(pixels: int) -> bytes:
    """A square picture, written here so that the image library is needed only by models that read pictures."""

    def block(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", pixels, pixels, 8, 2, 0, 0, 0)
    rows = (b"\x00" + b"\x80" * (3 * pixels)) * pixels
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(rows)) + block(b"IEND", b"")

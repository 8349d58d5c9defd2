"""Requests that every model of a task can answer, for the warm-up and for trying whether batching works.

Refuses to be clever: repeated words, silence, a grey picture.
"""

from __future__ import annotations

import bisect
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
    media.LABELLED_PICTURE_TASK: {"candidate_labels": ["one", "two"], "threshold": 0.0},
}
# Tasks whose bare input is one picture or one recording; the others want objects that differ from model to model.
_PICTURE_TASKS = media.IMAGE_TASKS - {media.DOCUMENT_TASK, "keypoint-matching", "mask-generation"}
_PICTURE_PIXELS = 64
_WORDS = ("a", "b", "c", "d", "e", "f", "g", "h")

Request = tuple[Any, dict[str, Any]]


def examples(task: str, tokenizer: Any, longest_tokens: int, sampling_rate: int | None) -> Sequence[Request]:
    """The largest shape first, then a small one; empty for tasks whose inputs differ too much."""
    return usual(task, tokenizer, (longest_tokens, 1), sampling_rate)


def usual(task: str, tokenizer: Any, lengths: Sequence[int], sampling_rate: int | None) -> Sequence[Request]:
    """Texts of these lengths in tokens; one picture or recording; empty for tasks whose inputs differ too much."""
    if task in TEXT_TASKS:
        parameters = _PARAMETERS.get(task, {})
        if task == "zero-shot-classification":
            # This pipeline adds a sentence of its own to every text: cut back what is then too much.
            parameters = {**parameters, "truncation": True}
        return [(_text(task, tokenizer, length), parameters) for length in lengths]
    return unequal_pair(task, tokenizer, max(lengths), sampling_rate)[:1]


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
    room: int = tokens_max - tokenizer.num_special_tokens_to_add()

    def text(count: int) -> str:
        return " ".join(_WORDS[number % len(_WORDS)] for number in range(count))

    def is_too_long(count: int) -> bool:
        ids: list[int] = tokenizer(text(count), add_special_tokens=False)["input_ids"]
        return len(ids) > room

    # A word is a token at least, and more words are never fewer tokens.
    return text(max(1, bisect.bisect_left(range(1, room + 1), True, key=is_too_long)))


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

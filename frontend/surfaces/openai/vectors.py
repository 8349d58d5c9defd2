"""Writes what an embedding model has told as OpenAI's clients read it.

Owns the two ways to write a vector: a list of numbers, or base64 of its bytes, little-endian float32.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from typing import Any

from shared import tensors
from shared.errors import Code, RequestError
from shared.json_text import dump_json


def write_vectors(value: object, count: int, model: str, *, is_base64: bool) -> bytes:
    """`value` is the answer to `count` texts: `embeddings`, an array [count, dimensions] or lists, and `prompt_tokens`.

    Raises:
        RequestError: `model_error`, if it is no such answer; a class of the user's own may tell anything.
    """
    if not isinstance(value, dict) or not _is_rows(value.get("embeddings"), count):
        text = f"the model's answer is no embedding: it has to be an object with embeddings, {count} of them"
        raise RequestError(text, code=Code.MODEL_ERROR)
    rows: Iterable[Any] = value["embeddings"]
    prompt_tokens = int(value.get("prompt_tokens", 0))
    return dump_json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _as_base64(row) if is_base64 else row}
                for index, row in enumerate(rows)
            ],
            "model": model,
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }
    )


def _is_rows(value: Any, count: int) -> bool:
    if tensors.is_array(value):
        return value.ndim == 2 and len(value) == count
    return isinstance(value, list) and len(value) == count


def _as_base64(row: Any) -> str:
    # Not through numpy's name: a worker that has met no array has not loaded it.
    data = row.astype("<f4").tobytes() if tensors.is_array(row) else struct.pack(f"<{len(row)}f", *row)
    return base64.b64encode(data).decode("ascii")

"""Images and sound as they arrive in a request: raw bytes, base64 text, or samples; nothing else.

Owns what a caller may name as an image or a recording. Refuses URLs and file names: a pipeline given one would fetch
it, or open it on this machine, for whoever asks.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any, Literal

import numpy as np

from model_worker.runtimes import checks
from shared.errors import InvalidInput

Kind = Literal["image", "audio"]

IMAGE_TASKS = frozenset(
    {
        "depth-estimation",
        "document-question-answering",
        "image-classification",
        "image-feature-extraction",
        "image-segmentation",
        "keypoint-matching",
        "mask-generation",
        "object-detection",
        "zero-shot-image-classification",
        "zero-shot-object-detection",
    }
)
AUDIO_TASKS = frozenset({"audio-classification", "automatic-speech-recognition", "zero-shot-audio-classification"})
MIXED_TASKS = frozenset({"any-to-any", "decision", "image-text-to-text", "video-classification"})

_KINDS_OF_KEYS: dict[str, Kind] = {"image": "image", "images": "image", "audio": "audio", "audios": "audio"}
_REFERENCE_KEYS = frozenset({"url", "path", "image_url", "audio_url", "video", "videos", "base64"})


def kind_of_task(task: str) -> Kind | None:
    """What a bare string or bytes object stands for in this task's inputs; None: text."""
    if task in IMAGE_TASKS:
        return "image"
    return "audio" if task in AUDIO_TASKS else None


def decode(inputs: Any, task: str) -> Any:
    """Replaces encoded images (by PIL images) and recordings (by bytes or float32 arrays), at any depth.

    Raises:
        InvalidInput: a URL, a file name, or data that is no image.
    """
    return _decode(inputs, kind_of_task(task), "inputs")


def to_plain(value: Any) -> Any:
    """Turns what pipelines return into plain values: numpy scalars into numbers, PIL images into PNG bytes."""
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "save") and hasattr(value, "getbands"):  # a PIL image, told without importing PIL
        stream = io.BytesIO()
        value.save(stream, format="PNG")
        return stream.getvalue()
    return value


def _decode(value: Any, kind: Kind | None, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(entry, kind, f"{where}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, dict):
        return _decode_object(value, where)
    if kind is None or not isinstance(value, (str, bytes)):
        return value
    data = _from_base64(value, where) if isinstance(value, str) else value
    return _open_image(data, where) if kind == "image" else data


def _decode_object(value: dict[str, Any], where: str) -> dict[str, Any]:
    samples = next((name for name in ("array", "raw") if name in value), None)
    if samples is not None:
        return {**value, samples: _samples(value[samples], f"{where}.{samples}")}
    decoded = {}
    for key, entry in value.items():
        if key in _REFERENCE_KEYS:
            raise InvalidInput(
                f"{where}.{key} is not read: give the data itself, as bytes or base64, under 'image' or 'audio'"
            )
        decoded[key] = _decode(entry, _KINDS_OF_KEYS.get(key), f"{where}.{key}")
    return decoded


def _from_base64(text: str, where: str) -> bytes:
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(
            f"{where} must be bytes or base64; URLs and file names are not read, got {checks.shown(text)}"
        ) from None


def _open_image(data: bytes, where: str) -> Any:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"{where} is not an image that can be read: {error}") from None
    return image


def _samples(value: Any, where: str) -> Any:
    try:
        samples = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise InvalidInput(f"{where} must be a list of numbers, got {checks.shown(value)}") from None
    if samples.ndim != 1 or samples.size == 0:
        raise InvalidInput(f"{where} must be a list of numbers in one dimension, got the shape {samples.shape}")
    return samples

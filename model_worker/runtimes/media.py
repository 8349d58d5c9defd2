"""Images and sound as they arrive in a request: raw bytes, base64 text, or samples; nothing else.

Owns what a caller may name as an image or a recording. Refuses URLs and file names: a pipeline given one would fetch
it, or open it on this machine, for whoever asks.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import io
import json
import wave
from typing import Any, Literal

import numpy as np

from model_worker.runtimes import checks
from shared.errors import InvalidInput

Kind = Literal["image", "audio", "video"]

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
_BARE_SAMPLES_TASK = "zero-shot-audio-classification"
AUDIO_TASKS = frozenset({"audio-classification", "automatic-speech-recognition", _BARE_SAMPLES_TASK})
# Its cells are text, whatever its columns are called.
_TABLE_TASK = "table-question-answering"
_DECISION_TASK = "decision"

_KINDS_OF_KEYS: dict[str, Kind] = {"image": "image", "images": "image", "audio": "audio", "audios": "audio"}
_REFERENCE_KEYS = frozenset({"url", "path", "image_url", "audio_url", "video", "videos", "base64"})


def kind_of_task(task: str) -> Kind | None:
    """What a bare string or bytes object stands for in this task's inputs; None: text."""
    if task in IMAGE_TASKS:
        return "image"
    if task == "video-classification":
        return "video"
    return "audio" if task in AUDIO_TASKS else None


def decode(inputs: Any, task: str, sampling_rate_hz: int | None = None) -> Any:
    """Replaces encoded images (by PIL images) and recordings (by bytes or float32 arrays), at any depth.

    `sampling_rate_hz` is the model's own, for tasks that listen.

    Raises:
        InvalidInput: a URL, a file name, data that is no image, or a recording of a rate that cannot be used.
    """
    if task == _TABLE_TASK:
        return inputs
    if task == _DECISION_TASK:
        return _decode_decision(inputs, "inputs")
    decoded = _decode(inputs, kind_of_task(task), "inputs")
    if task in AUDIO_TASKS and sampling_rate_hz is not None:
        return _at_rate(decoded, "inputs", sampling_rate_hz, bare=task == _BARE_SAMPLES_TASK)
    return decoded


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
    if kind == "image":
        return _open_image(data, where)
    # Video readers take bytes for the name of a file.
    return io.BytesIO(data) if kind == "video" else data


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


def _decode_decision(inputs: Any, where: str) -> Any:
    """A request of the decision pipeline, or its JSON: only its assets are media; all else is the caller's own."""
    if isinstance(inputs, list):
        return [_decode_decision(entry, f"{where}[{index}]") for index, entry in enumerate(inputs)]
    if isinstance(inputs, str):
        try:
            inputs = json.loads(inputs)
        except ValueError as error:
            raise InvalidInput(f"{where} is text, but not the JSON of a request: {error}") from None
    if not isinstance(inputs, dict) or not isinstance(assets := inputs.get("assets") or {}, dict):
        raise InvalidInput(f"{where} must be an object, and its assets as well, got {checks.shown(inputs)}")
    images = {}
    for name, asset in assets.items():
        data = asset.get("data_base64") if isinstance(asset, dict) else asset
        images[name] = _decode(data, "image", f"{where}.assets.{name}")
    return {**inputs, "assets": images} if images else inputs


def _at_rate(value: Any, where: str, rate_hz: int, *, bare: bool) -> Any:
    """Checks the rate of each recording given as samples; `bare`: the pipeline takes the samples alone."""
    if isinstance(value, list):
        return [_at_rate(entry, f"{where}[{index}]", rate_hz, bare=bare) for index, entry in enumerate(value)]
    if isinstance(value, bytes):
        value = _read_wav(value, rate_hz)
    if not isinstance(value, dict):
        return value
    given = value.get("sampling_rate")
    if given != rate_hz and (bare or importlib.util.find_spec("torchaudio") is None):
        raise InvalidInput(
            f"{where}.sampling_rate must be {rate_hz}, got {checks.shown(given)}: recordings are not resampled here"
        )
    return value.get("raw", value.get("array")) if bare else value


def _read_wav(data: bytes, rate_hz: int) -> Any:
    """The samples of a WAV file in its plainest form, at the model's rate, as a decoder for all kinds of files would
    read them; anything else as it is, for the pipeline's decoder."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, rate_hz):
                return data
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    except (wave.Error, EOFError):
        return data
    return {"raw": samples.astype(np.float32) / 32768, "sampling_rate": rate_hz} if samples.size else data


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

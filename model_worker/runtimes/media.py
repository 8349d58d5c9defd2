"""What may stand in a request of a task that sees, hears or speaks, and where in it pictures, sound and films are.

Owns the shape of each task's inputs: what is not listed here does not reach a pipeline, at any depth. Refuses URLs and
file names, wherever they stand: a pipeline given one would fetch it, or open it on this machine, for whoever asks.
`pictures`, `recordings` and `films` read what is found, and bound it.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from model_worker.runtimes import checks
from model_worker.runtimes.films import Film
from model_worker.runtimes.pictures import PictureReader
from model_worker.runtimes.recordings import RecordingReader
from shared.errors import InvalidInput

# Their bare input is one picture.
_PICTURE_TASKS = frozenset(
    {
        "depth-estimation",
        "image-classification",
        "image-feature-extraction",
        "image-segmentation",
        "mask-generation",
        "object-detection",
        "zero-shot-image-classification",
    }
)
# This pipeline takes the samples alone.
_BARE_SAMPLES_TASK = "zero-shot-audio-classification"
AUDIO_TASKS = frozenset({"audio-classification", "automatic-speech-recognition", _BARE_SAMPLES_TASK})
VIDEO_TASK = "video-classification"
DOCUMENT_TASK = "document-question-answering"
LABELLED_PICTURE_TASK = "zero-shot-object-detection"
IMAGE_TASKS = _PICTURE_TASKS | {DOCUMENT_TASK, LABELLED_PICTURE_TASK, "keypoint-matching"}

INPUT_PARAMETERS = {DOCUMENT_TASK: "word_boxes", LABELLED_PICTURE_TASK: "candidate_labels"}
"""By task: the part of its inputs that may also be a parameter, as Hugging Face's clients send it."""

# Of one table. The tokenizer cuts row by row, and begins anew each time.
_CELLS_MAX = 4096
# Words of one document, and labels of one picture, each of which is a model input of its own.
_WORDS_MAX = 8192
_BOX_MAX = 1000
_LABELS_MAX = 256

Read = Callable[[Any, str], Any]
"""Reads one value; the text is what an error calls it."""


def decode(inputs: Any, task: str, sampling_rate_hz: int | None = None) -> Any:
    """What the task's pipeline is to be called with: pictures as PIL images, recordings as float32 samples.

    `sampling_rate_hz` is the model's own, for tasks that listen.

    Raises:
        InvalidInput: a URL, a file name, data that cannot be read or is too large, or another shape.
    """
    return _Request(task, sampling_rate_hz).read(inputs)


def with_named_parts(inputs: Any, task: str, arguments: dict[str, Any]) -> Any:
    """The inputs together with what may also be given as a parameter, and is then taken out of `arguments`."""
    name = INPUT_PARAMETERS.get(task)
    if name is None or arguments.get(name) is None:
        return inputs
    part = arguments.pop(name)

    def joined(value: Any, where: str) -> Any:
        if task == LABELLED_PICTURE_TASK and isinstance(value, (str, bytes)):
            value = {"image": value}
        return {name: part, **value} if isinstance(value, dict) else value

    return _one_or_list(inputs, "inputs", joined)


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


class _Request:
    """The inputs of one request: the bounds hold for all that is in them."""

    def __init__(self, task: str, rate_hz: int | None) -> None:
        self._task = task
        self._pictures = PictureReader()
        self._recordings = RecordingReader(rate_hz)

    def read(self, inputs: Any) -> Any:
        task = self._task
        if task in _PICTURE_TASKS:
            return _one_or_list(inputs, "inputs", self._picture)
        if task in AUDIO_TASKS:
            return _one_or_list(inputs, "inputs", self._recording)
        if task in _READERS:
            return _READERS[task](self, inputs)
        return inputs

    # --- single media ---

    def _picture(self, value: Any, where: str) -> Any:
        return self._pictures.read(_bytes(value, where), where)

    def _recording(self, value: Any, where: str) -> Any:
        """As the pipelines of the tasks that only listen take it."""
        if not isinstance(value, dict):
            return self._samples(value, where)
        bare = self._task == _BARE_SAMPLES_TASK
        recording = self._recordings.read_object(value, where, may_resample=not bare)
        return recording["raw"] if bare else recording

    def _samples(self, value: Any, where: str) -> Any:
        """Samples at the model's rate."""
        if isinstance(value, dict):
            return self._recordings.read_object(value, where, may_resample=False)["raw"]
        if isinstance(value, (str, bytes)):
            return self._recordings.read_file(_bytes(value, where), where)
        return self._recordings.read_samples(value, where)

    def _some_pictures(self, value: Any, where: str) -> Any:
        """One, or a list; of a list for each of several texts."""
        if isinstance(value, list) and value and isinstance(value[0], list):
            return [_one_or_list(entry, f"{where}[{index}]", self._picture) for index, entry in enumerate(value)]
        return _one_or_list(value, where, self._picture)

    def _some_recordings(self, value: Any, where: str) -> Any:
        """One, or a list; a list of numbers is one."""
        is_one = isinstance(value, list) and value and isinstance(value[0], (int, float))
        return self._samples(value, where) if is_one else _one_or_list(value, where, self._samples)

    # --- objects ---

    def read_films(self, inputs: Any) -> Any:
        return _one_or_list(inputs, "inputs", lambda value, where: Film(_bytes(value, where), where))

    def read_documents(self, inputs: Any) -> Any:
        return _one_or_list(inputs, "inputs", self._document)

    def _document(self, value: Any, where: str) -> dict[str, Any]:
        _check_keys(value, where, needed=("question",), known=("question", "image", "word_boxes"))
        document: dict[str, Any] = {"question": checks.text(f"{where}.question", value["question"])}
        if value.get("image") is not None:
            document["image"] = self._picture(value["image"], f"{where}.image")
        if value.get("word_boxes") is not None:
            document["word_boxes"] = _word_boxes(value["word_boxes"], f"{where}.word_boxes")
        if len(document) == 1:
            raise InvalidInput(f"{where} has neither image nor word_boxes: give at least one of them")
        return document

    def read_labelled_pictures(self, inputs: Any) -> Any:
        return _one_or_list(inputs, "inputs", self._labelled_picture)

    def _labelled_picture(self, value: Any, where: str) -> dict[str, Any]:
        keys = ("image", "candidate_labels")
        _check_keys(value, where, needed=keys, known=keys)
        labels = value["candidate_labels"]
        labels = checks.texts(f"{where}.candidate_labels", labels.split(",") if isinstance(labels, str) else labels)
        if len(labels) > _LABELS_MAX:
            raise InvalidInput(f"{where}.candidate_labels are {len(labels)}; at most {_LABELS_MAX} at once")
        return {"image": self._picture(value["image"], f"{where}.image"), "candidate_labels": labels}

    def read_picture_pairs(self, inputs: Any) -> Any:
        if isinstance(inputs, list) and inputs and all(isinstance(entry, list) for entry in inputs):
            return [self._pair(pair, f"inputs[{index}]") for index, pair in enumerate(inputs)]
        return self._pair(inputs, "inputs")

    def _pair(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list) or len(value) != 2:
            raise InvalidInput(f"{where} must be a list of two pictures, got {checks.shown(value)}")
        return [self._picture(picture, f"{where}[{index}]") for index, picture in enumerate(value)]

    def read_tables(self, inputs: Any) -> Any:
        return _one_or_list(inputs, "inputs", _table)

    # --- chats, and text beside media ---

    def read_prompts_with_pictures(self, inputs: Any) -> Any:
        pictures = self._some_pictures
        return self._read_prompts(inputs, {"image": pictures, "images": pictures}, needed=("images", "text"))

    def read_prompts_with_media(self, inputs: Any) -> Any:
        pictures = self._some_pictures
        media: dict[str, Read] = {"image": pictures, "images": pictures, "audio": self._some_recordings}
        return self._read_prompts(inputs, media, needed=("text",))

    def read_speeches(self, inputs: Any) -> Any:
        return self._read_prompts(inputs, {}, needed=())

    def _read_prompts(self, inputs: Any, media: dict[str, Read], needed: tuple[str, ...]) -> Any:
        """A text, an object of text and media, a chat, or a list of one of them."""

        def read(value: Any, where: str) -> Any:
            if isinstance(value, str):
                return value
            if _is_chat(value):
                return self._chat(value, where)
            if not media:
                raise InvalidInput(f"{where} must be a string or a list of messages, got {checks.shown(value)}")
            _check_keys(value, where, needed=(), known=("text", *media))
            readers: dict[str, Read] = {"text": _texts, **media}
            found = {
                # The pipelines know one of the two names alone.
                "images" if key == "image" else key: readers[key](entry, f"{where}.{key}")
                for key, entry in value.items()
                if entry is not None
            }
            _check_keys(found, where, needed=needed, known=tuple(found))
            return found

        return read(inputs, "inputs") if _is_chat(inputs) else _one_or_list(inputs, "inputs", read)

    def _chat(self, messages: list[Any], where: str) -> list[Any]:
        checks.bounded(where, messages)
        return [self._message(message, f"{where}[{index}]") for index, message in enumerate(messages)]

    def _message(self, message: Any, where: str) -> dict[str, Any]:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise InvalidInput(f"{where} must be a message with role and content, got {checks.shown(message)}")
        content = message["content"]
        if isinstance(content, list):
            checks.bounded(f"{where}.content", content)
            content = [self._part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        elif content is not None:
            content = checks.text(f"{where}.content", content)
        return {**message, "content": content}

    def _part(self, part: Any, where: str) -> dict[str, Any]:
        """One part of a message, as chat templates and processors have it; also as OpenAI's clients send it."""
        match part:
            case {"type": "text", "text": str(text)} if len(part) == 2:
                return {"type": "text", "text": text}
            case {"type": "image", "image": data} if len(part) == 2:
                return {"type": "image", "image": self._picture(data, f"{where}.image")}
            case {"type": "image_url", "image_url": {"url": data} | str(data)} if len(part) == 2:
                return {"type": "image", "image": self._picture(data, f"{where}.image_url")}
            case {"type": "audio", "audio": data} if len(part) == 2:
                return {"type": "audio", "audio": self._samples(data, f"{where}.audio")}
            case {"type": "input_audio", "input_audio": {"data": data}} if len(part) == 2:
                return {"type": "audio", "audio": self._samples(data, f"{where}.input_audio.data")}
        raise InvalidInput(
            f'{where} must be {{"type": "text", "text"}}, {{"type": "image", "image"}} or {{"type": "audio", "audio"}} '
            f"with the data itself, as bytes or base64; URLs and file names are not read, got {checks.shown(part)}"
        )

    # --- decisions ---

    def read_decisions(self, inputs: Any) -> Any:
        return _one_or_list(inputs, "inputs", self._decision)

    def _decision(self, value: Any, where: str) -> Any:
        """A request of the decision pipeline, or its JSON: only its assets are media; all else is the caller's own."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise InvalidInput(f"{where} is text, but not the JSON of a request: {error}") from None
        if not isinstance(value, dict) or not isinstance(assets := value.get("assets") or {}, dict):
            raise InvalidInput(f"{where} must be an object, and its assets as well, got {checks.shown(value)}")
        images = {}
        for name, asset in assets.items():
            data = asset.get("data_base64") if isinstance(asset, dict) else asset
            images[name] = self._picture(data, f"{where}.assets.{name}")
        return {**value, "assets": images} if images else value


_READERS: dict[str, Callable[[_Request, Any], Any]] = {
    "any-to-any": _Request.read_prompts_with_media,
    "decision": _Request.read_decisions,
    DOCUMENT_TASK: _Request.read_documents,
    "image-text-to-text": _Request.read_prompts_with_pictures,
    "keypoint-matching": _Request.read_picture_pairs,
    "table-question-answering": _Request.read_tables,
    "text-to-audio": _Request.read_speeches,
    VIDEO_TASK: _Request.read_films,
    LABELLED_PICTURE_TASK: _Request.read_labelled_pictures,
}


def _one_or_list(value: Any, where: str, read: Read) -> Any:
    if not isinstance(value, list):
        return read(value, where)
    if not value:
        raise InvalidInput(f"{where} is an empty list: give at least one")
    checks.bounded(where, value)
    return [read(entry, f"{where}[{index}]") for index, entry in enumerate(value)]


def _texts(value: Any, where: str) -> str | list[str]:
    return value if isinstance(value, str) else checks.texts(where, value)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _check_keys(value: Any, where: str, *, needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} must be an object with {', '.join(known)}, got {checks.shown(value)}")
    for key in value:
        if key not in known:
            raise InvalidInput(f"{where}.{key[:60]} is not read: an object here has {', '.join(known)}")
    for key in needed:
        if key not in value:
            raise InvalidInput(f"{where} has no {key}")


def _bytes(value: Any, where: str) -> bytes:
    """The content of a file: bytes, or base64, also as a `data:` URL."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"{where} must be bytes or base64, got {checks.shown(value)}")
    text = value.partition(",")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(
            f"{where} must be bytes or base64; URLs and file names are not read, got {checks.shown(value)}"
        ) from None


def _word_boxes(value: Any, where: str) -> list[list[Any]]:
    """Words with their places. An accelerator that looks up a place that is none ends the process for everybody."""
    if not isinstance(value, list) or not value or len(value) > _WORDS_MAX:
        raise InvalidInput(f"{where} must be a list of 1 to {_WORDS_MAX} words with their boxes")
    return [_word_box(entry, f"{where}[{index}]") for index, entry in enumerate(value)]


def _word_box(value: Any, where: str) -> list[Any]:
    match value:
        case [str(word), [left, top, right, bottom] as box] if all(_is_place(place) for place in box):
            if left <= right and top <= bottom:
                return [word, [int(place) for place in box]]
    raise InvalidInput(
        f"{where} must be [word, [left, top, right, bottom]] with numbers from 0 to {_BOX_MAX}, got "
        f"{checks.shown(value)}"
    )


def _is_place(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and 0 <= value <= _BOX_MAX


def _table(value: Any, where: str) -> dict[str, Any]:
    """`{"table": {column: cells}, "query"}`; all cells are text."""
    keys = ("table", "query")
    _check_keys(value, where, needed=keys, known=keys)
    table = value["table"]
    if not isinstance(table, dict) or not table:
        raise InvalidInput(f"{where}.table must be an object of columns, each a list of texts")
    columns = {name: checks.texts(f"{where}.table.{name}", cells) for name, cells in table.items()}
    if len({len(cells) for cells in columns.values()}) > 1:
        raise InvalidInput(f"{where}.table has columns of different lengths")
    cells = sum(map(len, columns.values()))
    if cells > _CELLS_MAX:
        raise InvalidInput(f"{where}.table has {cells} cells; one table may have {_CELLS_MAX}")
    queries = checks.texts(f"{where}.query", value["query"])
    return {"table": columns, "query": value["query"] if isinstance(value["query"], str) else queries}

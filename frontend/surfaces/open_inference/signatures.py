"""What each task's tensors mean: from a request's tensors to questions for the model, and from its answers to tensors.

Owns the names of inputs and outputs. Refuses to check what a model itself checks: the length of a text, the values of
parameters, the content of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from frontend.surfaces.open_inference.tensors import (
    BYTES,
    BYTES_ELEMENTS_MAX,
    Input,
    Output,
    output_of_array,
    output_of_elements,
)
from shared import tensors
from shared.errors import Code, InvalidInput, RequestError
from shared.json_text import dump_json

OUTPUT = "output"
# Each item is a request to the model, and so many wait for one by default (queue_size_max).
ITEMS_MAX = 1024


class Kind(Enum):
    """What the elements of an input are to the model."""

    TEXT = "text"
    FILE = "file"
    """The bytes of a picture, recording or film."""
    JSON = "JSON"
    """What the native route takes as `inputs`."""


@dataclass(frozen=True, slots=True)
class Described:
    """An input or output in a model's metadata; -1 in a shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Signature:
    """The tensors of a class of the user's own: any, and each answer tells its own. The base of those that are known.

    Inputs become a dict by their names: numbers are arrays, BYTES are (nested) lists of `bytes`.
    """

    inputs: tuple[Described, ...] = ()
    outputs: tuple[Described, ...] = ()
    default_output = OUTPUT
    """The name of an answer that is one array, and has no name of its own."""

    def questions(self, given: Sequence[Input], *, is_raw: bool) -> Sequence[object]:
        """What to ask the model, one thing for each of its requests. `is_raw`: they came without JSON, and so nameless.

        Raises:
            InvalidInput: these are not the model's tensors.
        """
        if is_raw:
            raise InvalidInput("a body without JSON is for models whose one input is known: send the JSON as well")
        return [{tensor.name: _plain(tensor) for tensor in given}]

    def answers(self, values: Sequence[object]) -> list[Output]:
        """The outputs, from what the model has answered to each question.

        Raises:
            RequestError: `model_error`, where they are none that the protocol has tensors for.
        """
        [value] = values
        if isinstance(value, dict):
            return [_output(str(name), entry) for name, entry in value.items()]
        return [_output(self.default_output, value)]


class TaskSignature(Signature):
    """A task whose inputs are BYTES of one length, one item for each element, and whose outputs are JSON."""

    items_max = ITEMS_MAX

    def __init__(self, *required: tuple[str, Kind], optional: Mapping[str, Kind] | None = None) -> None:
        self._required = dict(required)
        self._kinds = {**self._required, **(optional or {})}
        self.inputs = tuple(Described(name, BYTES, (-1,)) for name in self._required)
        self.outputs = (Described(OUTPUT, BYTES, (-1,)),)

    def questions(self, given: Sequence[Input], *, is_raw: bool) -> Sequence[object]:
        named = self._named(given, is_raw=is_raw)
        columns = {name: _items(tensor, self._kinds[name], self.items_max) for name, tensor in named.items()}
        counts = {name: len(items) for name, items in columns.items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise InvalidInput(f"the inputs must have equally many elements, one for each item; they have: {told}")
        if len(self._required) == len(columns) == 1:
            [items] = columns.values()
            return items
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _named(self, given: Sequence[Input], *, is_raw: bool) -> dict[str, Input]:
        if len(given) == len(self._required) == 1:
            # Where there is only one, its name says nothing.
            return {next(iter(self._required)): given[0]}
        if is_raw:
            raise InvalidInput(f"a body without JSON is one input; this model has {', '.join(self._required)}")
        named = {tensor.name: tensor for tensor in given}
        known = ", ".join(self._kinds)
        for name in named:
            if name not in self._kinds:
                raise named[name].refuse(f"is not one of this model's: {known}")
        for name in self._required:
            if name not in named:
                raise InvalidInput(f"input {name!r} is missing; this model takes {known}")
        return named

    def answers(self, values: Sequence[object]) -> list[Output]:
        return [output_of_elements(OUTPUT, [dump_json(value) for value in values])]


class EmbeddingSignature(TaskSignature):
    """All texts are one question, and its answer is one array."""

    # The model has a bound of its own for these.
    items_max = BYTES_ELEMENTS_MAX
    default_output = "embeddings"

    def __init__(self) -> None:
        super().__init__(("text", Kind.TEXT))
        self.outputs = (Described(self.default_output, "FP32", (-1, -1)),)

    def questions(self, given: Sequence[Input], *, is_raw: bool) -> Sequence[object]:
        return [super().questions(given, is_raw=is_raw)]

    def answers(self, values: Sequence[object]) -> list[Output]:
        return Signature.answers(self, values)


class GenerationSignature(TaskSignature):
    """Beside the whole answer as JSON, its text alone."""

    def __init__(self) -> None:
        super().__init__(("text", Kind.TEXT))
        self.outputs = (Described("text", BYTES, (-1,)), *self.outputs)

    def answers(self, values: Sequence[object]) -> list[Output]:
        texts = [_generated_text(value) for value in values]
        return [output_of_elements("text", texts), *super().answers(values)]


class AudioSignature(TaskSignature):
    """Recordings as files; or one as samples, in `raw` and `sampling_rate`."""

    def __init__(self) -> None:
        super().__init__(("audio", Kind.FILE))

    def questions(self, given: Sequence[Input], *, is_raw: bool) -> Sequence[object]:
        named = {tensor.name: tensor for tensor in given}
        if named.keys() != {"raw", "sampling_rate"}:
            return super().questions(given, is_raw=is_raw)
        raw, rate = named["raw"], named["sampling_rate"]
        if not isinstance(raw.content, tensors.Tensor):
            raise raw.refuse("must be numbers, the samples of one recording")
        count = math.prod(raw.shape)
        if count not in raw.shape:
            raise raw.refuse(f"has the shape {list(raw.shape)}: send one recording, [samples]")
        samples = raw.content._replace(shape=(count,))
        return [{"raw": samples, "sampling_rate": _whole_number(rate)}]


_TEXT = TaskSignature(("text", Kind.TEXT))
_IMAGE = TaskSignature(("image", Kind.FILE))
_AUDIO = AudioSignature()
_ANY = TaskSignature(("inputs", Kind.JSON))
_OWN = Signature()

# By task. All others take texts.
_SIGNATURES: dict[str, Signature] = {
    "embedding": EmbeddingSignature(),
    "text-generation": GenerationSignature(),
    "question-answering": TaskSignature(("question", Kind.TEXT), ("context", Kind.TEXT)),
    "text-classification": TaskSignature(("text", Kind.TEXT), optional={"text_pair": Kind.TEXT}),
    "sentiment-analysis": TaskSignature(("text", Kind.TEXT), optional={"text_pair": Kind.TEXT}),
    "document-question-answering": TaskSignature(("image", Kind.FILE), ("question", Kind.TEXT)),
    "video-classification": TaskSignature(("video", Kind.FILE)),
    **dict.fromkeys(("audio-classification", "automatic-speech-recognition", "zero-shot-audio-classification"), _AUDIO),
    **dict.fromkeys(("depth-estimation", "image-classification", "image-feature-extraction"), _IMAGE),
    **dict.fromkeys(("image-segmentation", "mask-generation", "object-detection"), _IMAGE),
    **dict.fromkeys(("zero-shot-image-classification", "zero-shot-object-detection"), _IMAGE),
    **dict.fromkeys(("any-to-any", "image-text-to-text", "keypoint-matching"), _ANY),
    **dict.fromkeys(("decision", "table-question-answering"), _ANY),
}


def signature_of(task: str) -> Signature:
    """`task` is the name of a task, or of a class of the user's own, which has a colon in it."""
    return _OWN if ":" in task else _SIGNATURES.get(task, _TEXT)


# --- from tensors to questions ---------------------------------------------------------------------------------------


def _items(tensor: Input, kind: Kind, items_max: int) -> list[object]:
    """
    Raises:
        InvalidInput: it is no list of items.
    """
    if isinstance(tensor.content, tensors.Tensor):
        raise tensor.refuse(f"must be {BYTES}, {kind.value} each, not {tensor.datatype}")
    if len(tensor.shape) not in (1, 2) or tensor.shape[1:] not in ((), (1,)):
        raise tensor.refuse(f"has the shape {list(tensor.shape)}: send [n], or [n, 1], one element for each item")
    if not 0 < len(tensor.content) <= items_max:
        raise tensor.refuse(f"has {len(tensor.content)} elements: send 1 to {items_max} at once")
    return [_item(tensor, index, element, kind) for index, element in enumerate(tensor.content)]


def _item(tensor: Input, index: int, element: str | bytes, kind: Kind) -> object:
    if kind is Kind.JSON:
        try:
            return orjson.loads(element)
        except orjson.JSONDecodeError as error:
            raise tensor.refuse(f"has no JSON as element {index}: {error.msg}") from None
    if kind is Kind.FILE or isinstance(element, str):
        # A file in JSON is base64, which the model's process reads.
        return element
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        reason = f"byte 0x{element[error.start]:02x} at position {error.start} is out of place"
        raise tensor.refuse(f"has an element {index} that is not UTF-8: {reason}") from None


def _whole_number(tensor: Input) -> int:
    content = tensor.content
    if not isinstance(content, tensors.Tensor) or "INT" not in tensor.datatype or math.prod(tensor.shape) != 1:
        raise tensor.refuse("must be one whole number")
    return int.from_bytes(content.data, "little", signed=tensor.datatype.startswith("INT"))


def _plain(tensor: Input) -> object:
    if isinstance(tensor.content, tensors.Tensor):
        return tensor.content
    elements = [element.encode() if isinstance(element, str) else element for element in tensor.content]
    return _nested(elements, tensor.shape)


def _nested(elements: list[bytes], shape: tuple[int, ...]) -> object:
    if not shape:
        return elements[0]
    if len(shape) == 1:
        return elements
    step = math.prod(shape[1:])
    return [_nested(elements[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]


# --- from answers to tensors -----------------------------------------------------------------------------------------


def _output(name: str, value: Any) -> Output:
    """An array as it is, text and bytes as BYTES, anything else as JSON in one element of BYTES."""
    if tensors.is_array(value):
        return output_of_array(name, value)
    elements = value if isinstance(value, list) else [value]
    if elements and _is_text(elements):
        encoded = (each.encode("utf-8", "replace") if isinstance(each, str) else each for each in elements)
        return output_of_elements(name, list(encoded))
    return output_of_elements(name, [dump_json(value)])


def _is_text(elements: Iterable[object]) -> bool:
    return all(isinstance(element, (str, bytes)) for element in elements)


def _generated_text(value: object) -> bytes:
    text = value.get("generated_text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise RequestError("the model's answer has no generated_text", code=Code.MODEL_ERROR)
    return text.encode("utf-8", "replace")

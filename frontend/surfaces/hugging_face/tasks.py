"""What each task is asked and how it answers, where that is not what transformers' pipelines take and give.

The native routes hand a model's answer on as it is. Hugging Face's clients expect other shapes for some tasks, and
other defaults; here is the whole difference, task by task. Refuses to check what a model checks itself.

Pure: values in, values out.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.json_bodies import json_type
from shared import tensors
from shared.errors import Code, InvalidInput, RequestError

Parameters = dict[str, object]

EMBEDDING = "embedding"
TEXT_GENERATION = "text-generation"
SENTENCE_SIMILARITY = "sentence-similarity"
IMAGE_TEXT_TO_TEXT = "image-text-to-text"
# Names that the configuration takes as well.
_ALIASES: Mapping[str, str] = {
    "ner": "token-classification",
    "sentiment-analysis": "text-classification",
    "text-to-speech": "text-to-audio",
}
# Hugging Face's names for what our models of these tasks are asked.
_ALSO_ASKED_AS: Mapping[str, frozenset[str]] = {
    EMBEDDING: frozenset({"feature-extraction", SENTENCE_SIMILARITY}),
    TEXT_GENERATION: frozenset({"conversational"}),
    IMAGE_TEXT_TO_TEXT: frozenset({"image-to-text", "visual-question-answering"}),
}
_EMBEDDING_KEYS = ("dimensions", "encoding_format", "normalize", "prompt_name", "truncate", "truncation_direction")
# A vector of zeros has no direction; its similarity to anything is 0.
_LENGTH_MIN = 1e-12
_SAMPLE_MAX = 32767


@dataclass(frozen=True, slots=True)
class File:
    """An answer that is sent as it is, and not as JSON: a picture, a recording, a film."""

    content: bytes
    media_type: bytes


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask a model, and what to make of its answer."""

    inputs: object
    parameters: Parameters
    read: Callable[[Any], Any] = _as_it_is


def _ask_as_it_is(inputs: object, parameters: Parameters) -> Question:
    return Question(inputs, parameters)


@dataclass(frozen=True, slots=True)
class Task:
    ask: Callable[[object, Parameters], Question] = _ask_as_it_is
    keys: tuple[str, ...] = ()
    """Parameters that stand beside `inputs`."""
    other_inputs: str = ""
    """A key that may stand in place of `inputs`, and is then all that is in them."""
    takes_bytes: bool = False
    """Whether a body that is no JSON is the input itself: a picture, a recording."""


def canonical(task: str) -> str:
    return _ALIASES.get(task, task)


def is_own_class(task: str) -> bool:
    """Whether it is a class of the user's own, which has its name in place of a task."""
    return ":" in task


def task_of(name: str) -> Task:
    """`name` is canonical."""
    return _OWN_CLASS if is_own_class(name) else _TASKS.get(name, _PLAIN)


def check_asked_as(model: str, task: str, asked: str) -> None:
    """`asked` is the task that a path names; classes of the user's own may be asked for anything.

    Raises:
        InvalidInput: the model is for another one.
    """
    if is_own_class(task) or asked == task or canonical(asked) == task or asked in _ALSO_ASKED_AS.get(task, ()):
        return
    raise InvalidInput(f"model {model!r} is for {task}, and this path asks it for {asked[:60]!r}")


# --- texts ---


def _classify(inputs: object, parameters: Parameters) -> Question:
    """All labels, unless `top_k` says how many, and one list for each text, also for a single one."""
    return Question(inputs if isinstance(inputs, list) else [inputs], {"top_k": None, **parameters})


def _classify_tokens(inputs: object, parameters: Parameters) -> Question:
    """Words that belong together are one, unless told otherwise."""
    return Question(inputs, {"aggregation_strategy": "simple", **parameters})


def _choose_labels(inputs: object, parameters: Parameters) -> Question:
    def read(answer: Any) -> Any:
        return [_pairs(each) for each in answer] if isinstance(answer, list) else _pairs(answer)

    return Question(inputs, parameters, read)


def _pairs(answer: Any) -> list[dict[str, object]]:
    pairs = zip(answer["labels"], answer["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]


def _ask_table(inputs: object, parameters: Parameters) -> Question:
    # The client sends along which model it was told to ask.
    return Question(inputs, {name: value for name, value in parameters.items() if name != "model"})


# --- vectors ---


def _embed(inputs: object, parameters: Parameters) -> Question:
    if isinstance(inputs, dict):
        return _compare(inputs, parameters)
    _check_encoding(parameters)
    return Question(inputs, parameters)


def _extract_features(inputs: object, parameters: Parameters) -> Question:
    if isinstance(inputs, dict):
        raise InvalidInput("this model gives a vector for each token; sentences are compared by task = 'embedding'")
    _check_encoding(parameters)
    if "truncate" in parameters:
        parameters["truncation"] = parameters.pop("truncate")
    return Question(inputs, parameters)


def _check_encoding(parameters: Parameters) -> None:
    encoding = parameters.pop("encoding_format", None)
    if encoding not in (None, "float"):
        raise InvalidInput(
            "encoding_format must be 'float', which is what InferenceClient reads; /v1/embeddings sends base64"
        )


def _compare(inputs: dict[str, Any], parameters: Parameters) -> Question:
    """How alike one sentence and each of the others are: the cosine between their vectors."""
    source, others = inputs.get("source_sentence"), inputs.get("sentences")
    if set(inputs) != {"source_sentence", "sentences"} or not isinstance(source, str):
        raise InvalidInput('inputs must be a text, a list of texts, or {"source_sentence": …, "sentences": […]}')
    if not isinstance(others, list) or not others:
        raise InvalidInput(f"inputs.sentences must be a list of at least one text, got {json_type(others)}")
    return Question([source, *others], parameters, lambda vectors: _similarities(vectors, len(others)))


def _similarities(vectors: Any, count: int) -> list[float]:
    # A worker that has met no array has not loaded numpy; here it has.
    if not tensors.is_array(vectors) or vectors.ndim != 2 or len(vectors) != count + 1:
        raise RequestError(f"the model's answer is no array of {count + 1} vectors", code=Code.MODEL_ERROR)
    rows = vectors.astype("float64")
    rows = rows / ((rows * rows).sum(axis=1, keepdims=True) ** 0.5).clip(_LENGTH_MIN)
    similarities: list[float] = rows[1:].dot(rows[0]).tolist()
    return similarities


# --- sound ---


def _recognise(inputs: object, parameters: Parameters) -> Question:
    renamed = {"generate_kwargs" if name == "generation_parameters" else name: parameters[name] for name in parameters}
    return Question(inputs, renamed)


def _speak(inputs: object, parameters: Parameters) -> Question:
    return Question(inputs, parameters, _as_wav)


def _as_wav(answer: Any) -> File:
    """16 bits a sample; `audio` is an array [samples], [channels, samples] or [1, channels, samples]."""
    audio: Any = answer.get("audio") if isinstance(answer, dict) else None
    if not tensors.is_array(audio) or not 1 <= audio.ndim <= 2:
        raise RequestError("the model's answer is no recording {audio, sampling_rate}", code=Code.MODEL_ERROR)
    channels = 1 if audio.ndim == 1 else len(audio)
    samples = (audio.T.astype("float32").clip(-1.0, 1.0) * _SAMPLE_MAX).round().astype("<i2")
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(int(answer["sampling_rate"]))
        file.writeframes(samples.tobytes())
    return File(stream.getvalue(), b"audio/wav")


# --- pictures and words ---


def _ask_about_picture(inputs: object, parameters: Parameters) -> Question:
    """A picture by itself is to be described; one with a question is to be looked at for its answer.

    Anything else is a prompt, as the pipeline takes it.
    """
    question = parameters.pop("question", None)
    picture = parameters.pop("image", None) or inputs
    if question is None and not isinstance(inputs, bytes):
        return Question(inputs, parameters)
    content: list[object] = [{"type": "image", "image": picture}]
    chat = [{"role": "user", "content": content}]
    parameters = {"return_full_text": False, **parameters}
    if question is None:
        return Question(chat, parameters, _texts)
    # How many answers the client wants; to the model it would be how many tokens to choose from.
    if parameters.pop("top_k", 1) != 1:
        raise InvalidInput("top_k must be 1: this model gives one answer, and no score")
    content.append({"type": "text", "text": question})
    return Question(chat, parameters, lambda answers: [{"answer": each["generated_text"]} for each in answers])


def _texts(answers: Any) -> Any:
    return [{"generated_text": each["generated_text"]} for each in answers]


# --- classes of the user's own ---

# What files begin with, after so many other bytes.
_BEGINNINGS: Sequence[tuple[int, bytes, bytes]] = (
    (0, b"\x89PNG\r\n", b"image/png"),
    (0, b"\xff\xd8\xff", b"image/jpeg"),
    (0, b"GIF8", b"image/gif"),
    (8, b"WEBP", b"image/webp"),
    (8, b"WAVE", b"audio/wav"),
    (0, b"fLaC", b"audio/flac"),
    (0, b"OggS", b"audio/ogg"),
    (4, b"ftyp", b"video/mp4"),
)


def _ask_own_class(inputs: object, parameters: Parameters) -> Question:
    # Who asks about a picture sends it twice, once under this name.
    return Question(inputs, {name: value for name, value in parameters.items() if name != "image"}, _as_file)


def _as_file(answer: Any) -> Any:
    if not isinstance(answer, bytes):
        return answer
    types = (kind for start, magic, kind in _BEGINNINGS if answer[start : start + len(magic)] == magic)
    return File(answer, next(types, b"application/octet-stream"))


_PLAIN = Task()
_MEDIA = Task(takes_bytes=True)
_OWN_CLASS = Task(_ask_own_class, keys=("question", "image"), other_inputs="table", takes_bytes=True)
_TASKS: Mapping[str, Task] = {
    "text-classification": Task(_classify),
    "token-classification": Task(_classify_tokens),
    "zero-shot-classification": Task(_choose_labels),
    "table-question-answering": Task(_ask_table),
    EMBEDDING: Task(_embed, keys=_EMBEDDING_KEYS),
    "feature-extraction": Task(_extract_features, keys=_EMBEDDING_KEYS),
    "automatic-speech-recognition": Task(_recognise, takes_bytes=True),
    "text-to-audio": Task(_speak),
    IMAGE_TEXT_TO_TEXT: Task(_ask_about_picture, keys=("question", "image"), takes_bytes=True),
    **dict.fromkeys(
        (
            "audio-classification",
            "depth-estimation",
            "image-classification",
            "image-feature-extraction",
            "image-segmentation",
            "mask-generation",
            "object-detection",
            "video-classification",
            "zero-shot-audio-classification",
            "zero-shot-image-classification",
            "zero-shot-object-detection",
        ),
        _MEDIA,
    ),
}

"""The tasks there are and the weights each one needs, as plain tables that a torch-free process can read.

Refuses to import transformers; a test compares the names with those of the installed version.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from shared.errors import ConfigurationError
from shared.suggestions import did_you_mean

EMBEDDING = "embedding"
QUESTION_ANSWERING = "question-answering"
TEXT_GENERATION = "text-generation"
SUMMARIZATION = "summarization"
TRANSLATION = "translation"
TEXT_TO_TEXT = "text2text-generation"
TEXT_TO_TEXT_TASKS = (SUMMARIZATION, TEXT_TO_TEXT, TRANSLATION)

# The names that transformers' own pipelines go by, without those tasks that have a runtime of their own.
PIPELINE_TASKS: tuple[str, ...] = (
    "any-to-any",
    "audio-classification",
    "automatic-speech-recognition",
    "decision",
    "depth-estimation",
    "document-question-answering",
    "feature-extraction",
    "fill-mask",
    "image-classification",
    "image-feature-extraction",
    "image-segmentation",
    "image-text-to-text",
    "keypoint-matching",
    "mask-generation",
    "object-detection",
    "table-question-answering",
    "text-classification",
    "text-to-audio",
    "token-classification",
    "video-classification",
    "zero-shot-audio-classification",
    "zero-shot-classification",
    "zero-shot-image-classification",
    "zero-shot-object-detection",
)

ALIASES: dict[str, str] = {
    "ner": "token-classification",
    "sentiment-analysis": "text-classification",
    "text-to-speech": "text-to-audio",
}

GGUF_TASKS = frozenset({TEXT_GENERATION})

# Packages that a task cannot do without, beside those of every model: by module, what to install.
_IMAGES = {"PIL": "headwaiter[images]"}
_PACKAGES: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        (
            "depth-estimation",
            "document-question-answering",
            "image-classification",
            "image-feature-extraction",
            "image-segmentation",
            "image-text-to-text",
            "keypoint-matching",
            "object-detection",
            "zero-shot-image-classification",
            "zero-shot-object-detection",
        ),
        _IMAGES,
    ),
    "mask-generation": {**_IMAGES, "torchvision": "the torchvision that goes with the installed torch"},
    "table-question-answering": {"pandas": "headwaiter[tables]"},
    "video-classification": {**_IMAGES, "av": "headwaiter[video]"},
}

# The end of an architecture's name in config.json says which head the weights were trained with. Only tasks that
# need one certain head are here; the others, and endings in none of these rows, are left to the load.
_ARCHITECTURE_ENDINGS: dict[str, tuple[str, ...]] = {
    "text-classification": ("ForSequenceClassification",),
    "zero-shot-classification": ("ForSequenceClassification",),
    "token-classification": ("ForTokenClassification",),
    "fill-mask": ("ForMaskedLM", "ForPreTraining", "WithLMHeadModel"),
    QUESTION_ANSWERING: ("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
    TEXT_GENERATION: ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
    **dict.fromkeys(TEXT_TO_TEXT_TASKS, ("ForConditionalGeneration", "MTModel", "EncoderDecoderModel")),
    "audio-classification": ("ForSequenceClassification", "ForAudioClassification"),
    "automatic-speech-recognition": ("ForCTC", "ForTDT", "ForConditionalGeneration", "EncoderDecoderModel"),
    "image-classification": ("ForImageClassification", "ForImageClassificationWithTeacher"),
    "object-detection": ("ForObjectDetection",),
    "image-segmentation": ("Segmentation",),
    "depth-estimation": ("ForDepthEstimation",),
    "video-classification": ("ForVideoClassification",),
}
_KNOWN_ENDINGS = frozenset(ending for endings in _ARCHITECTURE_ENDINGS.values() for ending in endings) | {
    "ForMultipleChoice",
    "ForNextSentencePrediction",
}
# The weights of a question answering head in most models: a row for where the answer starts, and one for where it ends.
ANSWER_HEAD = "qa_outputs.weight"
_ANSWER_ROWS = 2
# Heads of another kind, whose size has nothing to do with the number of labels.
_OTHER_ANSWER_HEADS = frozenset(
    {"FlaubertForQuestionAnswering", "SplinterForQuestionAnswering", "XLMForQuestionAnswering"}
    | {"XLNetForQuestionAnswering"}
)
# Tasks that use the body of a text model and ignore its head, whatever that is.
_HEADLESS_TASKS = (EMBEDDING, "feature-extraction")


def known_tasks() -> tuple[str, ...]:
    """Every value that `task` may have, aliases included, sorted."""
    return tuple(
        sorted({EMBEDDING, QUESTION_ANSWERING, TEXT_GENERATION, *TEXT_TO_TEXT_TASKS, *PIPELINE_TASKS, *ALIASES})
    )


def canonical(task: str) -> str:
    """The name behind an alias."""
    return ALIASES.get(task, task)


def check_known(task: str) -> None:
    """
    Raises:
        ConfigurationError: `task` is none of `known_tasks()`.
    """
    if task not in known_tasks():
        raise ConfigurationError(
            f"task = {task!r} is not known{did_you_mean(task, known_tasks())}; known tasks: {', '.join(known_tasks())}",
            keys=("task",),
        )


def check_packages(task: str) -> None:
    """
    Raises:
        ConfigurationError: a package is not installed here that `task` needs.
    """
    for module, remedy in _PACKAGES.get(canonical(task), {}).items():
        if importlib.util.find_spec(module) is None:
            raise ConfigurationError(
                f"task = {task!r} needs the package {module!r}, which is not installed: install {remedy}",
                keys=("task",),
            )


def check_architectures(where: str, task: str, architectures: Sequence[str]) -> None:
    """
    Raises:
        ConfigurationError: the weights at `where` were trained for another task; names the tasks that fit.
    """
    wanted = _ARCHITECTURE_ENDINGS.get(canonical(task), ())
    if not wanted or not architectures or any(name.endswith(wanted) for name in architectures):
        return
    if not all(name.endswith(tuple(_KNOWN_ENDINGS)) for name in architectures):
        return
    raise ConfigurationError(
        f"wrong task for the weights: {where} holds {', '.join(architectures)}, which task = {task!r} cannot use; "
        f"tasks that fit: {', '.join([*made_for(architectures), *_HEADLESS_TASKS])}"
    )


def check_answer_head(where: str, architectures: Sequence[str], rows: int | None) -> None:
    """`rows` is the size of the head, or the number of labels; None: not known.

    Raises:
        ConfigurationError: it cannot be the head that question answering needs.
    """
    if rows in (None, _ANSWER_ROWS) or not _OTHER_ANSWER_HEADS.isdisjoint(architectures):
        return
    raise ConfigurationError(
        f"wrong task for the weights: {where} has a head of {rows} labels (id2label or num_labels in its config.json), "
        f"and task = {QUESTION_ANSWERING!r} needs {_ANSWER_ROWS}, for the start and the end of an answer: use weights "
        "that were trained for question answering"
    )


def made_for(architectures: Sequence[str]) -> list[str]:
    """The tasks that need the head which weights of these architectures have."""
    return [
        name
        for name, endings in _ARCHITECTURE_ENDINGS.items()
        if any(architecture.endswith(endings) for architecture in architectures)
    ]

"""What a caller may ask of question answering, and the shapes in which questions and contexts come.

Owns the parameters, their bounds and defaults, and the wording of what is wrong with them: the names and meanings are
those that the `question-answering` pipeline had until transformers 5 removed it. Refuses unknown names, which that
pipeline swallowed, and to tokenise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_worker.runtimes import checks
from shared.errors import InvalidInput

PARAMETERS = (
    "align_to_words",
    "batch_size",
    "doc_stride",
    "handle_impossible_answer",
    "max_answer_len",
    "max_question_len",
    "max_seq_len",
    "padding",
    "top_k",
    "topk",
)
_MAX_ANSWER_TOKENS = 15
_PADDINGS = ("longest", "max_length", "do_not_pad")
_KEYS = ("question", "context")


@dataclass(frozen=True, slots=True)
class QuestionParameters:
    top_k: int
    max_answer_tokens: int
    may_be_unanswered: bool
    """Whether "no answer" is one of the candidates."""
    align_to_words: bool
    max_window_tokens: int | None
    """Tokens of one window, question and special tokens included; None: the default."""
    overlap_tokens: int | None
    """Tokens of the context that two neighbouring windows share; None: the default."""

    @property
    def candidates(self) -> int:
        """How many spans of each window to look at: where they grow to whole words, several become one."""
        return self.top_k * 2 + 10 if self.align_to_words else self.top_k


@dataclass(frozen=True, slots=True)
class Pair:
    question: str
    context: str
    question_place: str
    """Where in the request the question stands, for errors."""
    context_place: str


def read(parameters: Mapping[str, Any]) -> QuestionParameters:
    """
    Raises:
        InvalidInput: an unknown name, or a value that cannot be meant.
    """
    checks.refuse_unknown(parameters, PARAMETERS)
    given = {name: value for name, value in parameters.items() if value is not None}
    # These three have no effect: questions are never cut, and how rows share a batch changes no answer.
    for name in ("batch_size", "max_question_len"):
        checks.whole_number(name, given.get(name, 1), at_least=1)
    padding = given.get("padding", False)
    if isinstance(padding, str):
        checks.choice("padding", padding, _PADDINGS)
    else:
        checks.boolean("padding", padding)
    top_k_name = "topk" if "topk" in given and "top_k" not in given else "top_k"
    return QuestionParameters(
        top_k=checks.whole_number(top_k_name, given.get(top_k_name, 1), at_least=1),
        max_answer_tokens=checks.whole_number(
            "max_answer_len", given.get("max_answer_len", _MAX_ANSWER_TOKENS), at_least=1
        ),
        may_be_unanswered=checks.boolean("handle_impossible_answer", given.get("handle_impossible_answer", False)),
        align_to_words=checks.boolean("align_to_words", given.get("align_to_words", True)),
        max_window_tokens=_optional_number("max_seq_len", given),
        overlap_tokens=_optional_number("doc_stride", given),
    )


def read_pairs(inputs: object) -> list[Pair]:
    """One object `{"question", "context"}`, whose question or both may be lists, or a list of such objects.

    Raises:
        InvalidInput: another shape, or an empty text.
    """
    if isinstance(inputs, list):
        checks.bounded("inputs", inputs)
        return [_read_pair(f"inputs[{index}]", entry) for index, entry in enumerate(inputs)]
    question, context = _read_object("inputs", inputs)
    if not isinstance(question, list):
        if isinstance(context, list):
            raise InvalidInput(
                "inputs.context is a list and inputs.question is not: give as many questions, or one context"
            )
        return [_read_pair("inputs", inputs)]
    checks.bounded("inputs.question", question)
    if not isinstance(context, list):
        return [
            _pair(entry, context, f"inputs.question[{index}]", "inputs.context") for index, entry in enumerate(question)
        ]
    if len(question) != len(context):
        raise InvalidInput(
            f"inputs.question is a list of {len(question)} and inputs.context one of {len(context)}: "
            "give as many of both, or one context for all questions"
        )
    return [
        _pair(*entries, f"inputs.question[{index}]", f"inputs.context[{index}]")
        for index, entries in enumerate(zip(question, context, strict=True))
    ]


def _read_object(where: str, value: object) -> tuple[object, object]:
    if not isinstance(value, dict):
        also = ", or a list of them" if where == "inputs" else ""
        raise InvalidInput(f'{where} must be an object {{"question", "context"}}{also}, got {checks.shown(value)}')
    for name in value:
        if name not in _KEYS:
            raise InvalidInput(f'{where} has an unknown key {name!r}: it has "question" and "context"')
    for name in _KEYS:
        if name not in value:
            raise InvalidInput(f'{where} has no {name!r}: it must have "question" and "context"')
    return value["question"], value["context"]


def _read_pair(where: str, value: object) -> Pair:
    return _pair(*_read_object(where, value), f"{where}.question", f"{where}.context")


def _pair(question: object, context: object, question_place: str, context_place: str) -> Pair:
    for where, value in ((question_place, question), (context_place, context)):
        if not checks.text(where, value):
            raise InvalidInput(f"{where} is empty: give some text")
    return Pair(str(question), str(context), question_place, context_place)


def _optional_number(name: str, given: Mapping[str, Any]) -> int | None:
    return checks.whole_number(name, given[name], at_least=0) if name in given else None

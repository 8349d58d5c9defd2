"""Writes what transformers' own pipeline answers with the models beside this file: `answers.json` in each directory.

Needs transformers 4.57, the last version that has the pipeline, so it runs in an environment of its own:

    python -m venv /tmp/oracle
    /tmp/oracle/bin/pip install 'transformers==4.57.6' torch
    /tmp/oracle/bin/python tests/question_answering/record_answers.py

It imports nothing of this project, so what it writes is independent of what is compared with it.
"""

from __future__ import annotations

import json
import platform
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

HERE = Path(__file__).resolve().parent
FAMILIES = ("bert", "roberta")
VERSION = "4.57"

Case = tuple[str, Any, dict[str, Any]]

NAME = "What is my name?"
CITY = "Where do I live?"
JOB = "What is my job?"
ME = "My name is Tomi. I live in Oslo. I work as a baker."
FILLERS = [
    "The weather was fine.",
    "It rained all day.",
    "Nobody knew why 😀.",
    "The village slept, the river did not.",
    "We had soup; it was cold.",
    "Müller waited in the cafe\u0301 of 北京.",
    "There were many people.",
]


def long_text(seed: int, sentences: int, told: dict[int, str]) -> str:
    """Filler sentences, with those of `told` at their places."""
    chance = random.Random(seed)
    return " ".join(told.get(index) or chance.choice(FILLERS) for index in range(sentences))


LATE = long_text(1, 120, {97: "My name is Zoravi.", 30: "I live in Lima."})
TWICE = long_text(2, 90, {5: "My name is Ravo.", 60: "My name is RAVO.", 85: "my name is ravo."})
RIVALS = long_text(3, 80, {10: "My name is Dami.", 70: "I am called Peku."})
WORDY = "The price of the hat is 99.50 euro; " + "x" * 700 + " I live in Rome. " + "Zürich-" * 60 + " end"


def asked(question: Any, context: Any) -> dict[str, Any]:
    return {"question": question, "context": context}


def cases(cls: str, sep: str, pad: str) -> Iterator[Case]:
    """Name, inputs and parameters; the tokens are the special ones of the model's tokenizer."""
    for number, (question, context) in enumerate(
        [
            (NAME, ME),
            (CITY, ME),
            (JOB, ME),
            ("Who owns the boat?", "The boat belongs to Keta Brown. The hat is red."),
            ("How much is the hat?", "The hat costs 17.25 dollars; the boat costs 300 dollars."),
            ("When was I born?", "I was born on 12 March 1990."),
            ("What colour is the piano?", "They painted the piano dark blue. It rained all day 😀."),
            ("where does vadi live", "vadi has moved to new york."),
        ]
    ):
        yield f"plain-{number}", asked(question, context), {}
    for top_k in (1, 2, 3, 5, 20, 100):
        for align in (True, False):
            yield f"top_k-{top_k}-{align}", asked(NAME, ME), {"top_k": top_k, "align_to_words": align}
    for name in ("top_k", "topk"):
        yield f"alias-{name}", asked(CITY, ME), {name: 2}
    yield "alias-both", asked(CITY, ME), {"topk": 3, "top_k": 2}
    yield "none", asked(CITY, ME), {"top_k": None, "max_seq_len": None, "doc_stride": None, "padding": None}
    for number, text in enumerate([" ", "\n", "a", ".", "Tomi", " Tomi ", "😀", "\u200b"]):
        yield f"tiny-{number}", asked(NAME, text), {"top_k": 4, "handle_impossible_answer": number % 2 == 0}
    yield "tiny-question", asked("?", ME), {"top_k": 3}
    yield "blank-question", asked(" ", ME), {}
    yield from windows()
    yield from answer_lengths()
    yield from impossible()
    yield from words()
    yield from unicode()
    yield from special_tokens(cls, sep, pad)
    yield from shapes()
    yield from errors()


def windows() -> Iterator[Case]:
    for text_name, question, text in (
        ("late", NAME, LATE),
        ("late", CITY, LATE),
        ("twice", NAME, TWICE),
        ("rivals", NAME, RIVALS),
        ("wordy", CITY, WORDY),
    ):
        for size, overlap in ((None, None), (64, 16), (40, 0), (48, 30), (100, 60), (160, 128)):
            given = {"max_seq_len": size, "doc_stride": overlap}
            parameters = {key: number for key, number in given.items() if number is not None}
            yield (
                f"window-{text_name}-{question[:5]}-{size}-{overlap}",
                asked(question, text),
                {"top_k": 3, **parameters},
            )
    yield "window-default-overlap", asked(NAME, LATE), {"max_seq_len": 50}
    yield "window-padded", asked(NAME, RIVALS), {"max_seq_len": 64, "doc_stride": 8, "padding": "max_length"}
    # Each shift of the text moves the borders of all windows over the answer, one token at a time.
    for shift in range(12):
        text = "soup " * (20 + shift) + "I am called Peku. " + "soup " * 30
        yield f"border-{shift}", asked(NAME, text), {"max_seq_len": 32, "doc_stride": 8, "top_k": 2}
    for size in (0, 1):
        yield f"window-of-{size}", asked(NAME, ME), {"max_seq_len": size}


def answer_lengths() -> Iterator[Case]:
    for most in (1, 2, 3, 5, 15, 1_000):
        yield (
            f"length-{most}",
            asked("When was I born?", "I was born on 12 March 1990."),
            {"max_answer_len": most, "top_k": 3},
        )
        yield f"length-{most}-long", asked(NAME, LATE), {"max_answer_len": most, "max_seq_len": 64, "doc_stride": 16}


def impossible() -> Iterator[Case]:
    off = "The hat is red. Nobody knew why."
    for top_k in (1, 3):
        for possible in (True, False):
            parameters = {"handle_impossible_answer": possible, "top_k": top_k}
            yield f"impossible-{top_k}-{possible}", asked(NAME, off), parameters
            yield f"possible-{top_k}-{possible}", asked(NAME, ME), parameters
            for name, text in (("rivals", RIVALS), ("none", long_text(4, 60, {}))):
                yield (
                    f"impossible-long-{name}-{top_k}-{possible}",
                    asked(NAME, text),
                    {**parameters, "max_seq_len": 64, "doc_stride": 16},
                )


def words() -> Iterator[Case]:
    for number, name in enumerate(["Anna-Kim", "O'Brien", "Zatokuvebi", "McDonald's", "A.B.", "Kim/Lee", "Kim42_x"]):
        for align in (True, False):
            yield f"words-{number}-{align}", asked(NAME, f"My name is {name}."), {"align_to_words": align, "top_k": 2}
    for align in (True, False):
        parameters = {"align_to_words": align, "max_seq_len": 24, "doc_stride": 4, "top_k": 3}
        yield (
            f"words-cut-{align}",
            asked(NAME, "soup " * 9 + "My name is Vadezikomutaburolinepasoderika. " * 3),
            parameters,
        )


def unicode() -> Iterator[Case]:
    contexts = [
        "My name is José 😀 and I live in 北京",
        "My name is Jose\u0301. I live in Zu\u0308rich.",
        "👩‍👩‍👧‍👦🇫🇷 My name is 𐍈omi, I live in Łódź",
        "\ufeffMy name is\u00a0Tomi\u3000and I\u200b live in São Paulo",
        "我的名字是王小明,我住在北京。My name is 王小明.",
        "MY NAME IS İSTANBUL ŞAHİN. I LIVE IN ﬁnland",
        "My name is e\u0301e\u0301e\u0301 and o\u0302",
        "اسمي My name is محمد. I live in القاهرة",
    ]
    for number, context in enumerate(contexts):
        for question in (NAME, CITY):
            for align in (True, False):
                yield (
                    f"unicode-{number}-{question[:5]}-{align}",
                    asked(question, context),
                    {"align_to_words": align, "top_k": 2},
                )
    yield "unicode-question", asked("What is my näme 😀?", ME), {}
    long = "Müller 😀 cafe\u0301 北京 " * 60 + "My name is José."
    yield "unicode-long", asked(NAME, long), {"max_seq_len": 64, "doc_stride": 16, "top_k": 2}


def special_tokens(cls: str, sep: str, pad: str) -> Iterator[Case]:
    for number, token in enumerate((cls, sep, pad)):
        for possible in (True, False):
            parameters = {"top_k": 4, "handle_impossible_answer": possible}
            yield f"special-{number}-context-{possible}", asked(NAME, f"My name is {token} Tomi. {token}"), parameters
            yield f"special-{number}-question-{possible}", asked(f"What {token} is my name?", ME), parameters
    yield "special-only", asked(NAME, cls), {"top_k": 3}
    yield (
        "special-long",
        asked(NAME, f"{cls} soup " * 60 + "My name is Tomi."),
        {"max_seq_len": 40, "doc_stride": 8, "top_k": 5},
    )


def shapes() -> Iterator[Case]:
    three = [NAME, CITY, JOB]
    yield "shape-questions", asked(three, ME), {}
    yield "shape-questions-top_k", asked(three, ME), {"top_k": 2}
    yield "shape-lists", asked([NAME, CITY], [ME, LATE]), {"max_seq_len": 64, "doc_stride": 16}
    yield "shape-one-question", asked([NAME], ME), {}
    yield "shape-one-of-both", asked([NAME], [ME]), {"top_k": 2}
    yield "shape-no-questions", asked([], ME), {}
    yield "shape-nothing", [], {}
    yield "shape-objects", [asked(NAME, ME), asked(CITY, LATE)], {"batch_size": 2}
    yield "shape-one-object", [asked(NAME, ME)], {}
    yield "max_question_len", asked(NAME, ME), {"max_question_len": 2}
    yield "long-question", asked("Tell me: " + "soup " * 60 + NAME, ME), {}


def errors() -> Iterator[Case]:
    for number, inputs in enumerate(
        [
            asked("", ME),
            asked(NAME, ""),
            asked(None, ME),
            asked(NAME, None),
            asked(3, ME),
            asked(NAME, [ME]),
            asked([NAME, CITY], [ME]),
            asked([NAME, ""], ME),
            asked([NAME, None], ME),
            asked([NAME], ""),
            {"question": NAME},
            {"context": ME},
            [{"question": NAME}],
            [{**asked(NAME, ME), "title": "x"}],
            [asked(NAME, None)],
            [None],
            ["a", "b"],
            "a question",
        ]
    ):
        yield f"error-inputs-{number}", inputs, {}
    wrong: list[dict[str, Any]] = [
        {"top_k": 0},
        {"top_k": "3"},
        {"topk": -1},
        {"max_answer_len": 0},
        {"max_answer_len": "x"},
        {"max_seq_len": -1},
        {"doc_stride": -1},
        {"max_seq_len": 64, "doc_stride": 65},
        {"max_seq_len": 64, "doc_stride": 63},
        {"max_seq_len": 2},
    ]
    for number, parameters in enumerate(wrong):
        yield f"error-parameters-{number}", asked(NAME, ME), parameters
    yield "error-no-room", asked("soup " * 300 + NAME, ME), {}
    yield "error-does-not-move", asked(NAME, LATE), {"max_seq_len": 64, "doc_stride": 58}
    yield "error-room-of-one", asked(NAME, ME), {"max_seq_len": 9}


def main() -> None:
    if not transformers.__version__.startswith(VERSION):
        sys.exit(f"this is transformers {transformers.__version__}; the pipeline is that of {VERSION}")
    transformers.logging.set_verbosity_error()
    # Newer versions do not know the task.
    pipeline: Any = transformers.pipeline
    for family in FAMILIES:
        directory = HERE / family
        answerer = pipeline("question-answering", str(directory), device="cpu", torch_dtype=torch.float32)
        tokenizer = answerer.tokenizer
        recorded = []
        for name, inputs, parameters in cases(tokenizer.cls_token, tokenizer.sep_token, tokenizer.pad_token):
            entry: dict[str, Any] = {"name": name, "inputs": inputs, "parameters": parameters}
            try:
                entry["answer"] = (
                    answerer(**inputs, **parameters) if isinstance(inputs, dict) else answerer(inputs, **parameters)
                )
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # the tokenizers panic, which is no Exception
                entry["error"] = f"{type(error).__name__}: {error}"[:200]
            recorded.append(entry)
        versions = {module.__name__: module.__version__ for module in (transformers, torch, numpy)}
        made_with = {**versions, "python": platform.python_version()}
        lines = ",\n".join(json.dumps(entry, ensure_ascii=True) for entry in recorded)
        text = f'{{"made_with": {json.dumps(made_with)}, "cases": [\n{lines}\n]}}\n'
        (directory / "answers.json").write_text(text)
        print(f"{family}: {len(recorded)} cases, {sum('error' in entry for entry in recorded)} of them errors")


if __name__ == "__main__":
    main()

"""Many clients with different parameters at once: every answer is the one the library gives to that request alone."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests import tiny_models
from tests.topology import Service

CLIENTS = 16
REQUESTS = 2000
SCORE_TOLERANCE = 1e-4

TEXTS = [
    *tiny_models.TEXTS,
    "",
    " ",
    "fox",
    "\U0001f98a \u6771\u4eac",
    "e\u0301 \u05e9\u05dc\u05d5\u05dd",
    "[PAD] fox [PAD]",
    "fox \x00 fox",
]
# `truncation` and `max_length` are settings of the tokenizer that every call rewrites.
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"truncation": True, "max_length": 3},
    {"truncation": True, "max_length": 6, "top_k": None},
    {"truncation": True, "top_k": 2},
    {"function_to_apply": "sigmoid", "top_k": None},
]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = ["one", "two", "three"]
    return tiny_models.save(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification", labels=labels)


def test_no_answer_is_that_of_another_request_or_its_parameters(classifier: Path) -> None:
    requests = [*itertools.product(TEXTS, PARAMETERS)]
    make: Any = transformers.pipeline
    pipeline = make("text-classification", model=str(classifier), dtype=torch.float32, device="cpu")
    expected = [pipeline(text, **parameters) for text, parameters in requests]
    model = {"name": "m", "model": classifier, "task": "text-classification", "device": "cpu"}
    with Service([model]) as service, ThreadPoolExecutor(CLIENTS) as clients:
        service.wait_ready()
        limits = httpx.Limits(max_keepalive_connections=CLIENTS)
        with httpx.Client(base_url=service.url, timeout=60, limits=limits) as http:

            def ask(index: int) -> Any:
                text, parameters = requests[index]
                return http.post("/models/m", json={"inputs": text, "parameters": parameters}).json()

            choices = random.Random(0).choices(range(len(requests)), k=REQUESTS)
            answers = list(clients.map(ask, choices))
    wrong = [
        (requests[index], answer, expected[index])
        for index, answer in zip(choices, answers, strict=True)
        if not same(answer, expected[index])
    ]
    assert wrong == []


def same(answer: Any, expected: Any) -> bool:
    return (
        isinstance(answer, list)
        and [entry["label"] for entry in answer] == [entry["label"] for entry in expected]
        and all(
            abs(entry["score"] - other["score"]) < SCORE_TOLERANCE
            for entry, other in zip(answer, expected, strict=True)
        )
    )

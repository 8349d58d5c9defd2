"""Every task of transformers' pipelines through the runtime, compared with the library's own pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.pipelines import PIPELINE_REGISTRY

from model_worker.runtimes import tasks
from model_worker.runtimes.base import Model
from shared import values
from tests import task_cases
from tests.task_cases import CASES, Case, assert_alike, loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]


def computed(model: Model, requests: list[tuple[Any, dict[str, Any]]]) -> tuple[list[Any], int]:
    """The answers, packed and unpacked, and how many requests the fullest forward had."""
    items = [model.prepare(*request) for request in requests]
    by_group: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        by_group.setdefault(model.group(item), []).append(index)
    answers: dict[int, Any] = {}
    for members in by_group.values():
        outputs = model.forward([items[index] for index in members])
        answers.update(zip(members, map(model.finish, outputs), strict=True))
    ordered = [answers[index] for index in range(len(items))]
    sent = [values.unpack([bytes(frame) for frame in values.pack(answer)]) for answer in ordered]
    return sent, max(map(len, by_group.values()))


def test_every_task_of_the_library_has_a_case_or_a_reason() -> None:
    there = set(PIPELINE_REGISTRY.get_supported_tasks()) - {"ner", "sentiment-analysis", "text-to-speech"}
    tried = {case.task for case in CASES}
    assert there == tried | set(task_cases.UNTRIED) | task_cases.ELSEWHERE
    assert there - task_cases.ELSEWHERE == set(tasks.PIPELINE_TASKS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_each_task_answers_as_the_library_does_alone_and_in_a_batch(case: Case) -> None:
    model = loaded(case.task, case.kind, case.labels)
    assert (model.describe()["batching"] == "on") is case.batches, model.describe()["batching"]
    expected = task_cases.pipeline_answers(case)
    together, fullest = computed(model, [(each, case.parameters) for each in case.inputs])
    assert (fullest > 1) is case.batches
    assert_alike(together, expected)
    for each, answer in zip(case.inputs, together, strict=True):
        [alone], _ = computed(model, [(each, case.parameters)])
        assert_alike(alone, answer)
    # Else nothing was compared.
    assert len(set(map(repr, together))) == len(together)

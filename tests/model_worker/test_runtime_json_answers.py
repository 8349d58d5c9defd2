"""Text generation kept to a JSON schema: in a batch with others, to the end, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.runtimes import registry
from model_worker.runtimes.continuous.sampling import Draw, SamplingPlan
from model_worker.runtimes.continuous.sequences import Sampling
from model_worker.runtimes.json_grammar import Grammars
from model_worker.specs import RuntimeSpec
from shared.errors import InvalidInput, RequestError
from tests import tiny_models

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tiny_models.save(tmp_path_factory.mktemp("json"), "LlamaForCausalLM", positions=128)
    loaded = registry.build(RuntimeSpec("tiny", str(directory), "text-generation"))
    loaded.load("cpu")
    assert loaded.continuous_batching
    return loaded


def answers(model: Any, *requests: tuple[str, dict[str, Any]]) -> list[Any]:
    """All of them in one batch; an error stands for itself."""
    items = [model.prepare(*request) for request in requests]
    outputs: dict[Any, Any] = {}
    for item in items:
        model.join(item)
    while len(outputs) < len(items):
        outputs |= {progress.item: progress.output for progress in model.step() if progress.ended}
    return [outputs[item] if isinstance(outputs[item], Exception) else model.finish(outputs[item]) for item in items]


def test_rows_of_one_batch_are_kept_each_to_its_own_schema(model: Any) -> None:
    free: tuple[str, dict[str, Any]] = ("fox", {"max_new_tokens": 8})
    requests: list[tuple[str, dict[str, Any]]] = [
        free,
        ("fox", {"json_schema": SCHEMA, "max_new_tokens": 80}),
        ("fox", {"json_schema": {"enum": [1, 2]}, "max_new_tokens": 8}),
        ("dog", {"json_schema": SCHEMA, "max_new_tokens": 80, "temperature": 2.0, "seed": 4}),
        ("dog", {"json_schema": SCHEMA, "max_new_tokens": 80, "repetition_penalty": 1.5}),
    ]
    told = answers(model, *requests)
    assert told[0] == answers(model, free)[0]
    assert all(answer["finish_reason"] == "stop" for answer in told[1:])
    assert json.loads(told[2]["generated_text"]) in (1, 2)
    for place in (1, 3, 4):
        value = json.loads(told[place]["generated_text"])
        assert list(value) == ["a", "b"]
        assert value["a"] in ("x", "yy")
        assert all(isinstance(entry, bool) for entry in value["b"])
    # The state of an answer is its own: the same again is the same.
    assert answers(model, requests[1])[0] == told[1]


def test_a_schema_is_compiled_once_and_few_are_kept(model: Any) -> None:
    grammars = Grammars(model._tokenizer, model._end_ids)
    first = grammars.compile({"enum": [0]})
    assert grammars.compile({"enum": [0]}) is first
    for number in range(1, 32):
        grammars.compile({"enum": [number]})
    assert grammars.compile({"enum": [0]}) is first
    grammars.compile({"enum": [32]})
    grammars.compile({"enum": [33]})
    assert len(grammars._compiled) == 32
    assert grammars.compile({"enum": [0]}) is first


def test_an_answer_that_cannot_go_on_fails_and_says_why(model: Any) -> None:
    guide = Grammars(model._tokenizer, model._end_ids).compile({"enum": [1]}).start()
    plan = SamplingPlan([Draw(Sampling(), [1], guide)], len(model._tokenizer), torch.device("cpu"))
    assert guide.failure() is None
    [wrong] = model._tokenizer("x", add_special_tokens=False)["input_ids"]
    guide.advance(wrong)
    assert plan.choose(torch.zeros(1, len(model._tokenizer))).is_finite == [False]
    failure = guide.failure()
    assert isinstance(failure, RequestError)
    assert "\n" not in failure.message
    assert "cannot be kept to the schema" in failure.message


def test_scores_behind_the_tokenizers_last_token_are_never_chosen(model: Any) -> None:
    guide = Grammars(model._tokenizer, model._end_ids).compile({"enum": [1]}).start()
    size = len(model._tokenizer)
    logits = torch.zeros(1, size + 8)
    logits[0, size:] = 5.0
    [token] = SamplingPlan([Draw(Sampling(), [1], guide)], size + 8, torch.device("cpu")).choose(logits).token_ids
    assert model._tokenizer.decode([token]) == "1"
    # What was given is not changed.
    assert logits[0, size] == 5.0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"json_schema": True}, "json_schema must be an object"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema cannot be kept to: Invalid type: nonsense"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "cannot be kept to: regex parse error.*unclosed group"),
    ],
)
def test_schemas_that_cannot_be_meant_are_refused(model: Any, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        model.prepare("fox", parameters)


def test_a_model_in_whole_batches_refuses_any_schema(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, "GPT2LMHeadModel")
    model = registry.build(
        RuntimeSpec("tiny", str(directory), "text-generation", options={"continuous_batching": False})
    )
    model.load("cpu")
    for schema in ({}, SCHEMA):
        with pytest.raises(InvalidInput, match="json_schema needs continuous batching"):
            model.prepare("fox", {"json_schema": schema})
    for neutral in ({"frequency_penalty": 0.0}, {"logprobs": False}, {"json_schema": None}):
        model.prepare("fox", neutral)


def test_what_a_model_lacks_is_said() -> None:
    with pytest.raises(InvalidInput, match=r"an end token and a tokenizer\.json"):
        Grammars(object(), [2]).compile({})

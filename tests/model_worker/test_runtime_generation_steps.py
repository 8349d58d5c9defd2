"""Text generation step by step: the runtime around the engine, whose own tests are in `test_continuous_engine.py`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from model_worker.runtimes import generation_steps, registry
from model_worker.runtimes.base import Progress
from model_worker.runtimes.continuous import engines
from model_worker.runtimes.continuous.engines import Choice
from model_worker.specs import RuntimeSpec
from shared.errors import InvalidInput, LoadError
from tests import tiny_models

PROMPTS = ["fox", "The quick brown fox jumps over the lazy dog. Hello", "Paris is the capital"]
POSITIONS = 64
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("gpt2"), "GPT2LMHeadModel", positions=POSITIONS)


def load(directory: Path, **options: object) -> Any:
    model = registry.build(RuntimeSpec("tiny", str(directory), "text-generation", options=dict(options)))
    model.max_batch_size = 4
    model.load("cpu")
    return model


loaded = functools.cache(load)


def run(model: Any, *requests: tuple[Any, dict[str, Any]]) -> list[list[Progress]]:
    """All requests, the next one joining after each step as soon as there is room."""
    items = [model.prepare(*request) for request in requests]
    waiting = list(items)
    told: dict[Any, list[Progress]] = {item: [] for item in items}
    while waiting or not all(events and events[-1].ended for events in told.values()):
        if waiting and model.can_join(waiting[0]):
            model.join(waiting.pop(0))
        for progress in model.step():
            told[progress.item].append(progress)
    return list(told.values())


def answers(model: Any, *requests: tuple[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    return [model.finish(events[-1].output) for events in run(model, *requests)]


def generated_alone(directory: Path, prompt: str) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    transformer: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    transformer.generation_config = GenerationConfig()
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = transformer.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0]
    new: list[int] = ids[inputs["input_ids"].shape[1] :].tolist()
    return new


def test_it_is_the_way_a_model_is_driven_and_status_shows_its_size(directory: Path) -> None:
    model = loaded(directory, cache_tokens=200)
    assert model.continuous_batching
    described = model.describe()
    assert described["batching"].startswith("continuous")
    assert (described["cache_tokens"], described["rows_max"], described["prefix_tokens"]) == (200, 4, 25)
    assert load(directory, prefix_tokens=0).describe()["prefix_bytes_max"] == 0


def test_a_model_that_cannot_be_driven_so_says_why(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_steps, "choose", lambda *arguments, **keywords: Choice(None, "it keeps no cache"))
    model = load(directory)
    assert not model.continuous_batching
    assert model.describe()["no_continuous_batching"] == "it keeps no cache"
    with pytest.raises(InvalidInput, match=r"logprobs needs continuous batching, .*: it keeps no cache"):
        model.prepare("fox", {"logprobs": 1})


def test_answers_of_staggered_requests_are_those_computed_alone(directory: Path) -> None:
    model = loaded(directory, cache_tokens=200)
    for events, prompt in zip(
        run(model, *((prompt, {"max_new_tokens": NEW_TOKENS}) for prompt in PROMPTS)), PROMPTS, strict=True
    ):
        expected = generated_alone(directory, prompt)
        ids = events[-1].output.generated_ids
        assert ids == expected[: len(ids)]


def test_the_pieces_together_are_the_whole_answer(directory: Path) -> None:
    model = loaded(directory, cache_tokens=200)
    for events in run(model, *((prompt, {"max_new_tokens": NEW_TOKENS}) for prompt in PROMPTS)):
        pieces = [model.finish(event.piece)["text"] for event in events if event.piece is not None]
        whole = model.finish(events[-1].output)
        assert "".join(pieces) == whole["generated_text"]
        assert whole.keys() == {"generated_text", "finish_reason", "prompt_tokens", "generated_tokens"}


def test_logprobs_come_with_the_pieces_and_with_the_answer(directory: Path) -> None:
    model = loaded(directory, cache_tokens=200)
    [events] = run(model, (PROMPTS[1], {"max_new_tokens": 3, "logprobs": 2}))
    whole = model.finish(events[-1].output)
    pieces = [score for event in events if event.piece for score in model.finish(event.piece)["logprobs"]]
    assert pieces == whole["logprobs"]
    assert len(pieces) == whole["generated_tokens"]
    assert all(len(score["top"]) == 2 and score["top"][0]["token_id"] == score["token_id"] for score in pieces)
    [chosen] = answers(model, (PROMPTS[1], {"max_new_tokens": 1, "logprobs": True}))
    assert chosen["logprobs"][0].keys() == {"token", "token_id", "logprob"}


def test_each_request_keeps_its_own_parameters(directory: Path) -> None:
    model = loaded(directory, cache_tokens=200)
    seeded = (PROMPTS[1], {"max_new_tokens": NEW_TOKENS, "temperature": 1.5, "seed": 7})
    penalised = (PROMPTS[1], {"max_new_tokens": NEW_TOKENS, "presence_penalty": 2.0, "repetition_penalty": 1.5})
    greedy = (PROMPTS[1], {"max_new_tokens": NEW_TOKENS})
    together = answers(model, seeded, penalised, greedy)
    assert together == [answers(model, request)[0] for request in (seeded, penalised, greedy)]
    assert len({answer["generated_text"] for answer in together}) == 3


def test_what_can_never_fit_is_refused_with_the_numbers(directory: Path) -> None:
    model = load(directory, cache_tokens=30)
    tokens = len(model.prepare(PROMPTS[0], {}).ids)
    message = f"max_new_tokens = 40 and a prompt of {tokens} tokens do not fit: the cache holds 30 tokens, so at most"
    with pytest.raises(InvalidInput, match=message):
        model.prepare(PROMPTS[0], {"max_new_tokens": 40})
    assert model.prepare(PROMPTS[0], {}).max_new_tokens == 30 - tokens
    with pytest.raises(InvalidInput, match=r"inputs is \d+ tokens long, the model takes at most 29"):
        model.prepare("fox " * 40, {})
    assert len(model.prepare("fox " * 40, {"truncate": True, "max_new_tokens": 5}).ids) == 25


def test_a_row_that_leaves_and_comes_back_begins_anew(directory: Path) -> None:
    model = loaded(directory, cache_tokens=200)
    item = model.prepare(PROMPTS[1], {"max_new_tokens": NEW_TOKENS})
    model.join(item)
    for _ in range(4):
        model.step()
    model.leave(item)
    assert model.step() == []
    [expected] = answers(model, (PROMPTS[1], {"max_new_tokens": NEW_TOKENS}))
    model.join(item)
    events: list[Progress] = []
    while not (events and events[-1].ended):
        events += model.step()
    assert model.finish(events[-1].output) == expected


def test_warm_up_fills_the_rows_and_then_a_step_of_reading(directory: Path) -> None:
    model = load(directory, cache_tokens=200, prefill_tokens=20)
    [(text, parameters), (longer, _)] = model.examples()
    items = [model.prepare(text, parameters) for _ in range(4)]
    for item in items:
        assert model.can_join(item)
        model.join(item)
    assert not model.can_join(model.prepare(text, parameters))
    assert 15 < len(model.prepare(longer, {}).ids) <= 20


def test_a_cache_that_does_not_fit_is_halved_unless_it_was_asked_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = engines.build
    asked: list[int] = []

    def short_of_memory(model: Any, tokenizer: Any, limits: Any, **keywords: Any) -> Any:
        asked.append(limits.cache_tokens)
        if limits.cache_tokens > 2_500:
            raise torch.OutOfMemoryError("out of memory")
        return build(model, tokenizer, limits, **keywords)

    monkeypatch.setattr(engines, "build", short_of_memory)
    assert load(directory).describe()["cache_tokens"] == 2_048
    assert asked == [8_192, 4_096, 2_048]
    with pytest.raises(LoadError, match=r"a cache of 3000 tokens does not fit .* lower options.cache_tokens"):
        load(directory, cache_tokens=3_000)

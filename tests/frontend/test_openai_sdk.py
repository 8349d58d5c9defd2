"""OpenAI's SDK, unmodified, against a whole service with small models: each route, whole and streamed."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
import torch
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests import tiny_models
from tests.topology import Service

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the fox?"}]
PROMPTS = ["The quick brown fox", "Paris is"]
NEW_TOKENS = 12
POSITIONS = 256


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    template = tiny_models.CHAT_TEMPLATE
    return {
        "chat": tiny_models.save(
            directory / "chat", "LlamaForCausalLM", positions=POSITIONS, chat_template=template, seed=3
        ),
        "plain": tiny_models.save(directory / "plain", "GPT2LMHeadModel", positions=POSITIONS),
        "vectors": tiny_models.save(directory / "vectors", "BertModel"),
    }


@pytest.fixture(scope="module")
def service(directories: dict[str, Path]) -> Iterator[Service]:
    tasks = {"chat": "text-generation", "plain": "text-generation", "vectors": "embedding"}
    models: list[dict[str, Any]] = [
        {"name": name, "model": path, "task": tasks[name], "device": "cpu"} for name, path in directories.items()
    ]
    # Whole batches: what it streams is one piece, and what needs an engine it refuses.
    models[1]["options"] = {"continuous_batching": False}
    with Service(models, server={"parallel_loads": 2}) as started:
        yield started.wait_ready(120)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    values = {"model": "chat", "messages": MESSAGES, "max_tokens": NEW_TOKENS, **fields}
    return client.chat.completions.create(**values)


def native(service: Service, inputs: object, **parameters: object) -> dict[str, Any]:
    answer = service.ask("chat", inputs, parameters={"max_new_tokens": NEW_TOKENS, **parameters})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def generated_alone(directory: Path, prompt: str, *, is_chat: bool) -> tuple[str, int]:
    """What `generate()` writes, and the number of the prompt's tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not is_chat)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    [ids] = model.generate(**inputs, **settings, eos_token_id=tokenizer.eos_token_id).tolist()
    context = len(inputs["input_ids"][0])
    whole: str = tokenizer.decode(ids, skip_special_tokens=True)
    return whole.removeprefix(tokenizer.decode(ids[:context], skip_special_tokens=True)), context


def chat_prompt(directory: Path) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    prompt: str = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    return prompt


# --- models ----------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed] == ["chat", "plain", "vectors"]
    assert client.models.retrieve("plain") == listed[1]


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_greedy_chat_is_what_generate_and_the_native_route_write(
    client: openai.OpenAI, service: Service, directories: dict[str, Path]
) -> None:
    answer = ask(client)
    text, prompt_tokens = generated_alone(directories["chat"], chat_prompt(directories["chat"]), is_chat=True)
    told = native(service, MESSAGES)
    [choice] = answer.choices
    assert choice.message.content == text == told["generated_text"]
    assert (choice.message.role, choice.index, choice.logprobs) == ("assistant", 0, None)
    assert choice.finish_reason == told["finish_reason"]
    assert answer.usage.prompt_tokens == prompt_tokens == told["prompt_tokens"]
    assert answer.usage.completion_tokens == told["generated_tokens"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.object, answer.model) == ("chat.completion", "chat")
    assert answer.id.startswith("chatcmpl-")


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_streamed_chat_is_the_same_in_chunks(client: openai.OpenAI, include_usage: bool) -> None:
    whole = ask(client)
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(ask(client, stream=True, **options))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    if include_usage:
        last = chunks.pop()
        assert (last.choices, last.usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks)
    first, *middle, end = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(choice.delta.content for choice in middle) == whole.choices[0].message.content
    assert len(middle) > 1
    assert (end.delta.content, end.finish_reason) == (None, whole.choices[0].finish_reason)
    assert not any(choice.finish_reason for choice in (first, *middle))


def test_the_sdks_own_stream_puts_the_answer_together(client: openai.OpenAI) -> None:
    # It takes an answer that was cut off for a failure.
    stop = ask(client).choices[0].message.content[-1]
    values: Any = {"model": "chat", "messages": MESSAGES, "max_tokens": NEW_TOKENS, "stop": stop}
    with client.chat.completions.stream(**values) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == ask(client, stop=stop).choices[0].message.content


def test_an_asynchronous_client_reads_the_same(service: Service, client: openai.OpenAI) -> None:
    async def work() -> tuple[str | None, str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0) as another:
            values: Any = {"model": "chat", "messages": MESSAGES, "max_tokens": NEW_TOKENS}
            whole, stream = await asyncio.gather(
                another.chat.completions.create(**values), another.chat.completions.create(**values, stream=True)
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            vectors = await another.embeddings.create(model="vectors", input="fox")
            assert len(vectors.data[0].embedding) == 16
            names = [model.id async for model in another.models.list()]
            with pytest.raises(openai.NotFoundError):
                await another.models.retrieve("none")
            return whole.choices[0].message.content, "".join(pieces), names

    text, streamed, names = asyncio.run(work())
    assert text == streamed == ask(client).choices[0].message.content
    assert names == ["chat", "plain", "vectors"]


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    for given in (stop, ["never said", stop]):
        choice = ask(client, stop=given).choices[0]
        assert choice.message.content == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
        chunks = list(ask(client, stop=given, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_scores_are_told_token_by_token_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=2)
    tokens = whole.choices[0].logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    for token in tokens:
        # Greedy: the likeliest one was chosen.
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
        assert token.logprob >= token.top_logprobs[1].logprob
        assert token.bytes is None or bytes(token.bytes).decode() == token.token
    chunks = list(ask(client, logprobs=True, top_logprobs=2, stream=True))
    streamed = [token for chunk in chunks for token in (chunk.choices[0].logprobs or _NOTHING).content]
    assert [token.token for token in streamed] == [token.token for token in tokens]
    assert all(not token.top_logprobs for token in ask(client, logprobs=True).choices[0].logprobs.content)


class _NOTHING:
    content: tuple[Any, ...] = ()


def test_a_seed_repeats_an_answer_and_several_answers_differ(client: openai.OpenAI) -> None:
    def texts(**fields: Any) -> list[str]:
        return [choice.message.content for choice in ask(client, **fields).choices]

    assert texts(seed=1, temperature=1.0) == texts(seed=1, temperature=1.0) != texts(seed=2, temperature=1.0)
    several = texts(seed=1, n=3)
    assert several == texts(seed=1, n=3)
    assert len(set(several)) == 3
    assert several[0] == texts(seed=1, temperature=1.0)[0]
    assert len(set(texts(n=2, temperature=0.0))) == 1


def test_several_streamed_answers_are_told_apart_by_their_index(client: openai.OpenAI) -> None:
    whole = ask(client, seed=1, n=3)
    chunks = list(ask(client, seed=1, n=3, stream=True, stream_options={"include_usage": True}))
    texts, ends = [""] * 3, 0
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        ends += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == 3
    assert chunks[-1].usage == whole.usage
    # A prompt counts once, however many answers it gets.
    assert whole.usage.prompt_tokens == ask(client).usage.prompt_tokens


def test_more_than_openai_has_is_taken_as_extra_body(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    assert ask(client, temperature=1.0, extra_body={"top_k": 1}).choices[0].message.content == text
    with pytest.raises(openai.BadRequestError, match="top_k must be at least 0") as caught:
        ask(client, extra_body={"top_k": -1})
    assert caught.value.param == "top_k"


def test_what_the_model_refuses_names_the_callers_field(client: openai.OpenAI) -> None:
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 10_000}, "max_completion_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "fox " * 400}]}, "messages", "context_length_exceeded"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ]
    for fields, param, code in refused:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, **fields, stream=stream)
            assert (caught.value.param, caught.value.code) == (param, code)
            assert param in caught.value.message


def test_a_model_without_a_chat_template_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        ask(client, model="plain")


def test_a_role_that_the_template_refuses_is_the_callers_fault(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "narrator", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="unknown role narrator"):
        ask(client, messages=messages)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_of_a_schema_is_json_of_that_schema(client: openai.OpenAI, temperature: float) -> None:
    class Guest(BaseModel):
        name: Literal["Ann", "Bob"]
        tables: list[Literal[1, 2, 3]] = Field(max_length=2)
        is_hungry: bool

    values: Any = {"model": "chat", "messages": MESSAGES, "max_tokens": 200, "temperature": temperature, "seed": 1}
    parsed = client.chat.completions.parse(**values, response_format=Guest)
    assert isinstance(parsed.choices[0].message.parsed, Guest)
    assert parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**values, response_format=Guest) as stream:
        assert stream.get_final_completion().choices[0].message.content == parsed.choices[0].message.content


def test_a_schema_restricts_its_own_answer_alone(client: openai.OpenAI, service: Service) -> None:
    free = ask(client).choices[0].message.content
    digits = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7, 8, 9]}}}
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda number: ask(client, **({"response_format": digits} if number % 2 else {})), range(6))
        )
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[::2] == [free] * 3
    assert len(set(texts[1::2])) == 1
    assert json.loads(texts[1]) in (7, 8, 9)
    started = ask(client, response_format={"type": "json_object"}, max_tokens=2)
    assert started.choices[0].message.content.startswith("{")
    assert started.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "http://127.0.0.1:9/x"}, "not present in a registry"),
        ({"not": {}}, "Unimplemented keys"),
        ({"enum": ["x" * 70_000]}, "at most 65536 are read"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused(client: openai.OpenAI, schema: Any, reason: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        ask(client, response_format=form)
    assert caught.value.param == "response_format"


# --- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["chat", "plain"])
def test_completions_are_what_generate_writes_for_each_prompt(
    client: openai.OpenAI, directories: dict[str, Path], model: str
) -> None:
    expected = [generated_alone(directories[model], prompt, is_chat=False) for prompt in PROMPTS]
    answer = client.completions.create(model=model, prompt=PROMPTS, max_tokens=NEW_TOKENS)
    assert [choice.text for choice in answer.choices] == [text for text, _ in expected]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(tokens for _, tokens in expected)
    chunks = list(client.completions.create(model=model, prompt=PROMPTS, max_tokens=NEW_TOKENS, stream=True))
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
    assert texts == [text for text, _ in expected]
    assert {chunk.object for chunk in chunks} == {"text_completion"}


def test_token_ids_are_the_text_that_they_stand_for(client: openai.OpenAI, directories: dict[str, Path]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(directories["chat"])
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    texts = client.completions.create(model="chat", prompt=PROMPTS, max_tokens=NEW_TOKENS)
    tokens = client.completions.create(model="chat", prompt=ids, max_tokens=NEW_TOKENS)
    assert tokens.choices == texts.choices
    assert tokens.usage == texts.usage
    one = client.completions.create(model="chat", prompt=ids[0], max_tokens=NEW_TOKENS, echo=True)
    assert one.choices[0].text == PROMPTS[0] + texts.choices[0].text
    for wrong in ([10_000], [-1], [len(tokenizer)]):
        with pytest.raises(openai.BadRequestError, match=r"prompt\[0\] must be at") as caught:
            client.completions.create(model="chat", prompt=wrong)
        assert caught.value.param == "prompt"


def test_echo_puts_the_prompt_before_its_answer(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="chat", prompt=PROMPTS, max_tokens=4)
    expected = [prompt + choice.text for prompt, choice in zip(PROMPTS, plain.choices, strict=True)]
    echoed = client.completions.create(model="chat", prompt=PROMPTS, max_tokens=4, echo=True)
    assert [choice.text for choice in echoed.choices] == expected
    texts = ["", ""]
    for chunk in client.completions.create(model="chat", prompt=PROMPTS, max_tokens=4, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_scores_of_completions_are_lists_side_by_side(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chat", prompt="fox", max_tokens=NEW_TOKENS, logprobs=2)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.top_logprobs is not None
    assert scores.token_logprobs is not None
    assert scores.text_offset is not None
    assert answer.usage is not None
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset)
    assert len(scores.tokens) == answer.usage.completion_tokens
    lengths = [len(token) for token in scores.tokens]
    assert scores.text_offset == [sum(lengths[:place]) for place in range(len(lengths))]
    for token, logprob, likeliest in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert likeliest[token] == logprob
    offsets: list[int] = []
    for chunk in client.completions.create(model="chat", prompt="fox", max_tokens=NEW_TOKENS, logprobs=2, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == scores.text_offset


def test_the_best_of_several_attempts_is_the_likeliest(client: openai.OpenAI) -> None:
    fields: Any = {"model": "chat", "prompt": "fox", "max_tokens": 6, "seed": 5}
    attempts = client.completions.create(**fields, n=4, logprobs=0)

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return float(sum(values) / len(values))

    ranked = [choice.text for choice in sorted(attempts.choices, key=mean, reverse=True)]
    best = client.completions.create(**fields, n=2, best_of=4)
    assert [choice.text for choice in best.choices] == ranked[:2]
    assert best.choices[0].logprobs is None
    # What was made and not sent was made all the same.
    assert best.usage == attempts.usage


def test_what_needs_continuous_batching_is_refused_by_a_model_without(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logprobs needs continuous batching") as caught:
        client.completions.create(model="plain", prompt="fox", logprobs=1)
    assert caught.value.param == "logprobs"


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_vectors_are_the_native_ones_to_the_last_bit(
    client: openai.OpenAI, service: Service, directories: dict[str, Path]
) -> None:
    answer = client.embeddings.create(model="vectors", input=PROMPTS)
    [*vectors] = [entry.embedding for entry in answer.data]
    expected = np.array(service.ask("vectors", PROMPTS).json(), dtype=np.float32)
    np.testing.assert_array_equal(np.array(vectors, dtype=np.float32), expected)
    assert [entry.index for entry in answer.data] == [0, 1]
    tokenizer: Any = AutoTokenizer.from_pretrained(directories["vectors"])
    tokens = sum(len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_base64_is_the_bytes_of_little_endian_floats(client: openai.OpenAI, service: Service) -> None:
    numbers = client.embeddings.create(model="vectors", input="fox", encoding_format="float").data[0].embedding
    told = service.http.post("/v1/embeddings", json={"model": "vectors", "input": "fox", "encoding_format": "base64"})
    data = base64.b64decode(told.json()["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(numbers)}f", data)) == np.array(numbers, dtype=np.float32).tolist()
    without = service.http.post("/v1/embeddings", json={"model": "vectors", "input": "fox"}).json()
    assert without["data"][0]["embedding"] == numbers


def test_fewer_dimensions_are_the_first_ones(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="vectors", input="fox").data[0].embedding
    assert client.embeddings.create(model="vectors", input="fox", dimensions=4).data[0].embedding == whole[:4]
    with pytest.raises(openai.BadRequestError, match="dimensions must be at most 16") as caught:
        client.embeddings.create(model="vectors", input="fox", dimensions=17)
    assert caught.value.param == "dimensions"


def test_text_that_is_too_long_is_refused_with_both_numbers_or_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] is \d+ tokens long") as caught:
        client.embeddings.create(model="vectors", input=["fox", "fox " * 100])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    cut = client.embeddings.create(model="vectors", input="fox " * 100, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == 64

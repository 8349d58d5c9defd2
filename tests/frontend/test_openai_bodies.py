"""How OpenAI's requests are read: what becomes of each field, and which ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frontend.surfaces.openai.bodies import CHOICES_MAX, read_chat, read_completion, read_embedding
from frontend.surfaces.openai.errors import in_callers_words
from shared.errors import Code, InvalidInput, RequestError

MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(**fields: object) -> Any:
    return read_chat({"model": "m", "messages": MESSAGES, **fields})


def completion(**fields: object) -> Any:
    return read_completion({"model": "m", "prompt": "Hello", **fields})


def embedding(**fields: object) -> Any:
    return read_embedding({"model": "m", "input": "Hello", **fields})


def refusal(read: Callable[..., Any], **fields: object) -> InvalidInput:
    with pytest.raises(InvalidInput) as raised:
        read(**fields)
    return raised.value


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_with_nothing_but_messages_leaves_everything_to_the_model() -> None:
    request = chat()
    assert request.questions() == [([{"role": "user", "content": "Hello"}], {})]
    assert (request.stream, request.include_usage, request.wants_logprobs, request.choices) == (False, False, False, 1)


def test_sampling_reaches_the_model_under_its_own_names() -> None:
    sampling: dict[str, object] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "frequency_penalty": 0.1,
        "presence_penalty": -0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "skip_special_tokens": False,
        "truncate": True,
    }
    [(_, parameters)] = chat(**sampling).questions()
    assert parameters == sampling | {"do_sample": True}


def test_any_temperature_above_nothing_draws() -> None:
    assert chat(temperature=1).parameters == {"temperature": 1, "do_sample": True}
    assert chat(temperature=0).parameters == {"temperature": 0}
    assert chat(temperature="hot").parameters == {"temperature": "hot"}


def test_what_is_null_counts_as_not_given() -> None:
    nulls = dict.fromkeys(
        ("temperature", "max_tokens", "stop", "n", "stream", "stream_options", "logprobs", "top_logprobs", "tools")
    )
    assert chat(**nulls).questions() == chat().questions()


def test_the_newer_name_of_the_limit_counts_before_the_older_one() -> None:
    assert chat(max_tokens=5).parameters == {"max_new_tokens": 5}
    request = chat(max_tokens=5, max_completion_tokens=7)
    assert request.parameters == {"max_new_tokens": 7}
    assert request.names["max_new_tokens"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("as it is", "as it is"),
        ([{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}], "in parts"),
        ([], ""),
    ],
)
def test_content_is_a_text_or_a_list_of_text_parts(content: object, text: str) -> None:
    [(messages, _)] = chat(messages=[{"role": "user", "content": content}]).questions()
    assert messages == [{"role": "user", "content": text}]


def test_a_developer_is_what_templates_call_the_system() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "Ann"}]
    [(read, _)] = chat(messages=messages).questions()
    assert read == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "Ann"}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hello", "messages"),
        (["Hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}], "messages[1].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_by_place(messages: object, param: str) -> None:
    error = refusal(chat, messages=messages)
    assert error.detail["param"] == param
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
    ],
)
def test_what_would_be_got_wrong_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    error = refusal(chat, **fields)
    assert error.detail == {"param": param, "code": "unsupported_parameter"}
    assert param in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"functions": [{}], "function_call": "none"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"modalities": ["text"]},
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low"},
        {"a_field_of_next_year": [1, 2]},
    ],
)
def test_what_changes_no_answer_is_ignored(fields: dict[str, object]) -> None:
    assert chat(**fields).questions() == chat().questions()


def test_several_answers_are_drawn_unless_a_temperature_says_otherwise() -> None:
    questions = chat(n=3).questions()
    assert [parameters for _, parameters in questions] == [{"temperature": 1.0, "do_sample": True}] * 3
    assert [parameters for _, parameters in chat(n=2, temperature=0.0).questions()] == [{"temperature": 0.0}] * 2


def test_several_answers_to_one_seed_have_seeds_of_their_own() -> None:
    questions = chat(n=3, seed=2**63 - 2, temperature=1.0).questions()
    assert [parameters["seed"] for _, parameters in questions] == [2**63 - 2, 2**63 - 1, 0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": CHOICES_MAX + 1}, "n"),
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(fields: dict[str, object], param: str) -> None:
    error = refusal(chat, **fields)
    assert error.detail["param"] == param
    assert param in error.message


def test_formats_are_schemas_of_what_to_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    described = {"name": "a", "strict": True, "schema": schema}
    assert chat(response_format={"type": "json_schema", "json_schema": described}).parameters == {"json_schema": schema}
    assert chat(response_format={"type": "json_object"}).parameters == {"json_schema": {"type": "object"}}


def test_scores_are_those_of_the_chosen_token_and_as_many_as_asked() -> None:
    assert chat(logprobs=True).parameters == {"logprobs": 0}
    assert chat(logprobs=True, top_logprobs=3).parameters == {"logprobs": 3}
    assert chat(logprobs=False).parameters == {}


# --- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["one", [3]], ["one", [3]]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_many(prompt: object, prompts: list[object]) -> None:
    assert [inputs for inputs, _ in completion(prompt=prompt).questions()] == prompts


@pytest.mark.parametrize("prompt", [None, [], 5, {"a": 1}, [1, "two"], [1, True], [[1, "two"]], [None]])
def test_prompts_that_cannot_be_read_are_refused(prompt: object) -> None:
    assert refusal(completion, prompt=prompt).detail["param"] == "prompt"


def test_completions_are_sixteen_tokens_long_unless_asked() -> None:
    assert completion().parameters == {"max_new_tokens": 16}
    assert completion(max_tokens=3, logprobs=2).parameters == {"max_new_tokens": 3, "logprobs": 2}


def test_each_prompt_is_asked_once_for_each_attempt() -> None:
    request = completion(prompt=["one", "two"], n=2, best_of=3, seed=5)
    assert [inputs for inputs, _ in request.questions()] == ["one"] * 3 + ["two"] * 3
    assert [parameters["seed"] for _, parameters in request.questions()] == [5, 6, 7] * 2
    # What the attempts are compared by.
    assert request.parameters["logprobs"] == 0
    assert not request.wants_logprobs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "the end"}, "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "stream": True, "prompt": [1, 2]}, "echo"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_completions_that_cannot_be_made_are_refused_by_name(fields: dict[str, object], param: str) -> None:
    error = refusal(completion, **fields)
    assert error.detail["param"] == param


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_a_text_is_a_list_of_one_and_vectors_are_numbers_unless_asked() -> None:
    request = embedding()
    assert (request.texts, request.parameters, request.is_base64) == (["Hello"], {"details": True}, False)
    request = embedding(input=["a", "b"], encoding_format="base64", dimensions=4, normalize=True)
    assert (request.texts, request.is_base64) == (["a", "b"], True)
    assert request.parameters == {"dimensions": 4, "normalize": True, "details": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, 2]}, "input"),
        ({"input": [[1, 2]]}, "input"),
        ({"input": ["a", None]}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_inputs_that_cannot_be_embedded_are_refused(fields: dict[str, object], param: str) -> None:
    assert refusal(embedding, **fields).detail["param"] == param


# --- errors of models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "detail", "told", "param", "code"),
    [
        ("temperature must be a number", {}, "temperature must be a number", "temperature", "invalid_value"),
        ("max_new_tokens must be at least 1", {}, "max_tokens must be at least 1", "max_tokens", "invalid_value"),
        (
            "inputs is 99 tokens long",
            {"limit_tokens": 64},
            "messages is 99 tokens long",
            "messages",
            "context_length_exceeded",
        ),
        ("this model has no chat template", {}, "this model has no chat template", None, "invalid_value"),
    ],
)
def test_what_a_model_refuses_is_told_in_the_callers_words(
    text: str, detail: dict[str, object], told: str, param: str | None, code: str
) -> None:
    error = in_callers_words(InvalidInput(text, detail=detail), chat(temperature=1, max_tokens=5).names)
    assert (error.message, error.detail["param"], error.detail["code"]) == (told, param, code)


def test_other_errors_keep_their_words() -> None:
    error = RequestError("inputs broke the model", code=Code.MODEL_ERROR)
    assert in_callers_words(error, chat().names) is error

"""OpenAI's SDK against a front whose model server fails in every way: what the SDK raises, and how often it tries."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import openai
import pytest

from shared.errors import Code
from tests.fronts import Front, raw_request, read_response
from tests.stub_broker import Answer, Fail, Piece, Request, Step, StubBroker, echo, model_state
from tests.topology import wait_for

MODELS = (
    model_state("chat", task="text-generation"),
    model_state("vectors", task="embedding"),
    model_state("own", task="package.module:Model"),
)
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
TOLD = {"generated_text": "Hi", "finish_reason": "stop", "prompt_tokens": 3, "generated_tokens": 1}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with Front(models=("chat", "vectors", "own"), body_bytes_max=100_000) as started:
        yield started


@pytest.fixture(scope="module")
def running_broker(front: Front) -> Iterator[StubBroker]:
    with StubBroker(front.run_dir, models=MODELS) as started:
        front.wait_ready()
        yield started


@pytest.fixture
def broker(running_broker: StubBroker) -> Iterator[StubBroker]:
    running_broker.behave = echo
    yield running_broker
    running_broker.behave = echo


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "chat", "messages": MESSAGES, **fields})


# --- what the SDK raises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "raised", "status", "told"),
    [
        (Code.INVALID_INPUT, openai.BadRequestError, 400, "invalid_value"),
        (Code.OVERLOADED, openai.RateLimitError, 429, "rate_limit_exceeded"),
        (Code.MODEL_ERROR, openai.InternalServerError, 500, "model_error"),
        (Code.POISON_INPUT, openai.InternalServerError, 500, "poison_input"),
        (Code.MODEL_CRASHED, openai.InternalServerError, 502, "model_crashed"),
        (Code.MODEL_LOADING, openai.InternalServerError, 503, "model_loading"),
        (Code.DRAINING, openai.InternalServerError, 503, "draining"),
        (Code.DEADLINE_EXCEEDED, openai.InternalServerError, 504, "deadline_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_failure_is_the_error_that_the_sdk_has_for_it(
    client: openai.OpenAI,
    broker: StubBroker,
    code: Code,
    raised: type[openai.APIStatusError],
    status: int,
    told: str,
    stream: bool,
) -> None:
    broker.answer_with(Fail(code=code, message="temperature is off"))
    with pytest.raises(raised) as caught:
        ask(client, stream=stream, temperature=1.0)
    error = caught.value
    assert (error.status_code, error.code) == (status, told)
    assert isinstance(error.body, dict)
    assert error.body["message"] == "temperature is off"
    assert error.body["param"] == ("temperature" if code is Code.INVALID_INPUT else None)


@pytest.mark.parametrize(
    ("code", "tries"),
    [
        (Code.OVERLOADED, 2),
        (Code.MODEL_CRASHED, 2),
        (Code.DRAINING, 2),
        (Code.INVALID_INPUT, 1),
        (Code.MODEL_ERROR, 1),
        (Code.POISON_INPUT, 1),
        (Code.DEADLINE_EXCEEDED, 1),
    ],
)
def test_the_sdk_tries_again_only_what_may_end_better(
    client: openai.OpenAI, broker: StubBroker, code: Code, tries: int
) -> None:
    broker.answer_with(Fail(code=code, retry_after_ms=1000))
    with broker.counting() as counted, pytest.raises(openai.APIStatusError):
        ask(client.with_options(max_retries=1))
    assert len(counted) == tries


def test_refusals_say_when_to_come_back_and_what_not_to_repeat(client: openai.OpenAI, broker: StubBroker) -> None:
    broker.answer_with(Fail(code=Code.OVERLOADED, retry_after_ms=2500))
    with pytest.raises(openai.RateLimitError) as busy:
        ask(client)
    assert busy.value.response.headers["retry-after"] == "3"
    broker.answer_with(Fail(code=Code.DEADLINE_EXCEEDED))
    with pytest.raises(openai.InternalServerError) as late:
        ask(client)
    assert late.value.response.headers["x-should-retry"] == "false"


def test_a_model_that_is_not_there_is_not_found(client: openai.OpenAI, broker: StubBroker) -> None:
    calls: list[Any] = [
        lambda: ask(client, model="none"),
        lambda: client.completions.create(model="none", prompt="x"),
        lambda: client.embeddings.create(model="none", input="x"),
        lambda: client.models.retrieve("none"),
    ]
    for call in calls:
        with pytest.raises(
            openai.NotFoundError, match="no model is called 'none'; known: chat, vectors, own"
        ) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_model_for_another_task_is_refused_before_it_is_asked(client: openai.OpenAI, broker: StubBroker) -> None:
    with broker.counting() as counted:
        with pytest.raises(openai.BadRequestError, match=r"'vectors' is for embedding, .*fit: chat") as caught:
            ask(client, model="vectors")
        with pytest.raises(openai.BadRequestError, match=r"'chat' is for text-generation, .*fit: vectors"):
            client.embeddings.create(model="chat", input="x")
    assert caught.value.param == "model"
    assert not counted


def test_a_refused_field_is_named(client: openai.OpenAI, broker: StubBroker) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as caught:
        ask(client, tools=tools)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "tools",
        "unsupported_parameter",
        "invalid_request_error",
    )


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/nothing", b"", 404, "unknown_url"),
        ("POST", "/v1/nothing", b"{}", 404, "unknown_url"),
        ("GET", "/v1", b"", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", b"", 405, "method_not_allowed"),
        ("POST", "/v1/models", b"", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", b"", 400, "bad_request"),
        ("POST", "/v1/chat/completions", b"{", 400, "bad_request"),
        ("POST", "/v1/chat/completions", b"\xff", 400, "bad_request"),
        ("POST", "/v1/chat/completions", b"[]", 400, "invalid_value"),
        ("POST", "/v1/embeddings", b"{}", 400, "invalid_value"),
        ("POST", "/v1/completions", b"x" * 100_001, 413, "too_large"),
    ],
)
def test_every_refusal_below_v1_has_the_shape_of_openai(
    front: Front, broker: StubBroker, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    answer = front.client.request(method, front.url + path, content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert error["message"]


def test_paths_beside_v1_are_refused_in_their_own_words(front: Front, broker: StubBroker) -> None:
    for path in ("/v1x", "/models/v1", "/nothing"):
        assert "error_type" in front.get(path).json()


@pytest.mark.parametrize("content_type", [None, "application/octet-stream", "text/plain"])
def test_json_is_read_whatever_its_content_type_says(
    front: Front, broker: StubBroker, content_type: str | None
) -> None:
    broker.answer_with(Answer(value=TOLD))
    headers = {} if content_type is None else {"content-type": content_type}
    body = json.dumps({"model": "chat", "messages": MESSAGES}).encode()
    answer = front.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.json()["choices"][0]["message"]["content"] == "Hi"


def test_keys_are_asked_for_on_all_routes() -> None:
    with Front(models=("chat",), api_keys=["s3cret"]) as front, StubBroker(front.run_dir, models=MODELS) as broker:
        front.wait_ready()
        broker.answer_with(Answer(value=TOLD))
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0) as stranger:
            calls: list[Any] = [lambda: ask(stranger), stranger.models.list, lambda: stranger.models.retrieve("chat")]
            for call in calls:
                with pytest.raises(openai.AuthenticationError) as caught:
                    call()
                assert caught.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="s3cret", max_retries=0) as guest:
            assert ask(guest).choices[0].message.content == "Hi"
            assert [model.id for model in guest.models.list()] == ["chat", "vectors", "own"]


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_that_breaks_off_raises(client: openai.OpenAI, broker: StubBroker) -> None:
    broker.answer_with(Piece(value={"text": "He"}), Fail(0.02, code=Code.MODEL_CRASHED, message="it died"))
    texts: list[str] = []
    chunks = ask(client, stream=True)
    with pytest.raises(openai.APIError, match="it died") as caught:
        texts.extend(chunk.choices[0].delta.content for chunk in chunks)
    assert texts == ["", "He"]
    assert caught.value.code == "model_crashed"


def test_a_stream_of_a_model_that_streams_wrong_things_raises(client: openai.OpenAI, broker: StubBroker) -> None:
    broker.answer_with(Piece(value={"text": "He"}), Piece(value=5, index=1), Answer(value=None))
    with pytest.raises(openai.APIError, match="no generated text"):
        list(ask(client, stream=True, model="own"))


def test_an_answer_in_one_piece_is_a_stream_too(client: openai.OpenAI, broker: StubBroker) -> None:
    broker.answer_with(Piece(value=TOLD), Answer(value=None))
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "Hi", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "stop"]
    assert chunks[-1].usage.total_tokens == 4


def test_of_several_answers_one_that_fails_fails_all_and_stops_the_others(
    client: openai.OpenAI, broker: StubBroker
) -> None:
    def second_fails(request: Request) -> Sequence[Step]:
        return [Fail(code=Code.MODEL_ERROR)] if request.parameters["seed"] == 8 else []

    broker.behave = second_fails
    for stream in (False, True):
        with broker.counting() as counted, pytest.raises(openai.InternalServerError):
            ask(client, n=3, seed=7, stream=stream)
        others = {request.header.id for request in counted if request.parameters["seed"] != 8}
        assert len(others) == 2
        wait_for(partial(_are_cancelled, broker, others), "the others are given up")


def _are_cancelled(broker: StubBroker, ids: set[Any]) -> bool:
    return ids <= broker.cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_up_all_of_its_answers(front: Front, broker: StubBroker, stream: bool) -> None:
    def endless(request: Request) -> Sequence[Step]:
        return [Piece(0.02, {"text": "x"}, index) for index in range(1000)] if stream else []

    broker.behave = endless
    body = json.dumps({"model": "chat", "messages": MESSAGES, "n": 2, "stream": stream}).encode()
    before = len(broker.requests)
    with front.connect() as connection:
        connection.sendall(raw_request("/v1/chat/completions", body))
        wait_for(lambda: len(broker.requests) == before + 2, "both are asked for")
        if stream:
            assert connection.recv(10)
        connection.shutdown(socket.SHUT_RDWR)
    ids = {request.header.id for request in broker.requests[before:]}
    wait_for(partial(_are_cancelled, broker, ids), "both are given up", 5)


def test_the_wire_is_events_with_one_end(front: Front, broker: StubBroker) -> None:
    broker.answer_with(Piece(value={"text": "Hi"}), Answer(value=TOLD))
    body = json.dumps({"model": "chat", "messages": MESSAGES, "stream": True}).encode()
    with front.connect() as connection:
        connection.sendall(raw_request("/v1/chat/completions", body, "Connection: close", "X-Request-Id: mine"))
        status, headers, content = read_response(connection)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert headers["x-request-id"] == "mine"
    events = [
        line.removeprefix(b"data: ") for line in content.split(b"\r\n") for line in line.split(b"\n") if b": " in line
    ]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert [delta["delta"] for delta in deltas] == [{"role": "assistant", "content": ""}, {"content": "Hi"}, {}]
    assert [delta["finish_reason"] for delta in deltas] == [None, None, "stop"]


# --- what there is ---------------------------------------------------------------------------------------------------


def test_a_class_of_the_users_own_is_asked_as_the_tasks_are(client: openai.OpenAI, broker: StubBroker) -> None:
    broker.answer_with(Answer(value={"generated_text": "Hi"}))
    answer = ask(client, model="own")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hi", "stop")
    broker.answer_with(Answer(value={"embeddings": [[0.5, -1.0]]}))
    assert client.embeddings.create(model="own", input="x").data[0].embedding == [0.5, -1.0]


def test_a_class_that_answers_something_else_has_failed(client: openai.OpenAI, broker: StubBroker) -> None:
    broker.answer_with(Answer(value={"label": "good"}))
    with pytest.raises(openai.InternalServerError, match="no generated text"):
        ask(client, model="own")
    with pytest.raises(openai.InternalServerError, match="no embedding"):
        client.embeddings.create(model="own", input="x")


def test_models_are_those_of_the_service_in_order(front: Front, client: openai.OpenAI, broker: StubBroker) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed] == ["chat", "vectors", "own"]
    assert client.models.retrieve("own") == listed[2]
    assert front.get("/v1/models").json()["data"][0].keys() == {"id", "object", "created", "owned_by"}
    assert front.client.head(f"{front.url}/v1/models").status_code == 200


def test_the_routes_are_described(front: Front, broker: StubBroker) -> None:
    paths = front.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings"} <= paths.keys()
    assert "get" in paths["/v1/models"]
    assert "get" in paths["/v1/models/{id}"]
    responses = paths["/v1/chat/completions"]["post"]["responses"]
    assert responses["404"]["content"]["application/json"]["example"]["error"]["code"] == "model_not_found"


def test_requests_are_counted_by_route_and_model(front: Front, client: openai.OpenAI, broker: StubBroker) -> None:
    broker.answer_with(Answer(value=TOLD))
    ask(client)
    counted = 'headwaiter_requests_total{code="200",model="chat",route="/v1/chat/completions"}'
    assert counted in front.get("/metrics").text

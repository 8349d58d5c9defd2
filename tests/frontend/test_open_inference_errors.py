"""The Open Inference Protocol at a front whose model server fails in every way, and has models of every name."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from shared.errors import Code
from tests.fronts import Front, raw_request, read_response
from tests.stub_broker import Answer, Fail, Request, Step, StubBroker, echo, model_state
from tests.topology import wait_for

TASKS = {
    "vectors": "embedding",
    "org/team/writer": "text-generation",
    "answers": "question-answering",
    "labels": "text-classification",
    "pictures": "image-classification",
    "documents": "document-question-answering",
    "speech": "automatic-speech-recognition",
    "tables": "table-question-answering",
    "own": "package.module:Model",
    "stuck": "fill-mask",
}
STATES = tuple(model_state(name, task=task) for name, task in TASKS.items())
BODY_BYTES_MAX = 100_000
KEY = "secret"


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with Front(models=("vectors",), body_bytes_max=BODY_BYTES_MAX, api_keys=[KEY]) as started:
        yield started


@pytest.fixture(scope="module")
def running_broker(front: Front) -> Iterator[StubBroker]:
    with StubBroker(front.run_dir, models=STATES) as started:
        front.wait_ready()
        yield started


@pytest.fixture
def broker(running_broker: StubBroker) -> Iterator[StubBroker]:
    running_broker.behave = echo
    yield running_broker
    running_broker.behave = echo


class Client:
    """Triton's client, with the key in each call."""

    def __init__(self, front: Front) -> None:
        self.triton = triton.InferenceServerClient(front.url.removeprefix("http://"))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            headers = {"Authorization": f"Bearer {KEY}", **options.pop("headers", {})}
            return getattr(self.triton, name)(*arguments, **options, headers=headers)

        return call


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[Any]:
    made = Client(front)
    yield made
    made.triton.close()


def tensor(name: str, *elements: Any, binary: bool = True) -> Any:
    made = triton.InferInput(name, [len(elements)], "BYTES")
    return made.set_data_from_numpy(np.array(elements, dtype=object), binary_data=binary)


def numbers(name: str, array: Any, datatype: str) -> Any:
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)


def post(front: Front, path: str, content: bytes, **headers: str) -> Any:
    return front.post(path, content=content, headers={"Authorization": f"Bearer {KEY}", **headers})


def outputs(answer: Any, name: str = "output") -> list[Any]:
    return [json.loads(each) for each in answer.as_numpy(name)]


# --- what reaches a model --------------------------------------------------------------------------------------------


def test_questions_and_contexts_are_paired(client: Any, broker: StubBroker) -> None:
    inputs = [tensor("context", "c", "d"), tensor("question", "q", "r", binary=False)]
    with broker.counting() as requests:
        answer = client.infer("answers", inputs, parameters={"top_k": 2})
    expected: list[object] = [{"context": "c", "question": "q"}, {"context": "d", "question": "r"}]
    assert [request.inputs for request in requests] == expected
    assert [request.parameters for request in requests] == [{"top_k": 2}] * 2
    assert [told["inputs"] for told in outputs(answer)] == expected
    with pytest.raises(InferenceServerException, match="input 'context' is missing; this model takes question, cont"):
        client.infer("answers", inputs[1:])
    with pytest.raises(InferenceServerException, match=r"equally many elements, .* question 1, context 2"):
        client.infer("answers", [tensor("question", "q"), inputs[0]])


def test_a_pair_of_texts_is_one_item(client: Any, broker: StubBroker) -> None:
    with broker.counting() as requests:
        client.infer("labels", [tensor("text", "a", "b"), tensor("text_pair", "c", "d")])
        client.infer("labels", [tensor("text", "a")])
    pairs = [{"text": "a", "text_pair": "c"}, {"text": "b", "text_pair": "d"}]
    assert [request.inputs for request in requests] == [*pairs, "a"]


def test_files_are_bytes_and_in_json_base64(client: Any, broker: StubBroker) -> None:
    with broker.counting() as requests:
        client.infer("pictures", [tensor("anything", b"\x89PNG", b"\xff")])
        client.infer("pictures", [tensor("image", "iVBORw==", binary=False)])
        client.infer("documents", [tensor("question", "What?"), tensor("image", b"\x89PNG")])
    assert [request.inputs for request in requests] == [
        b"\x89PNG",
        b"\xff",
        "iVBORw==",
        {"image": b"\x89PNG", "question": "What?"},
    ]


def test_a_recording_may_come_as_samples(client: Any, broker: StubBroker) -> None:
    samples = np.arange(4, dtype=np.float32)
    rate = numbers("sampling_rate", np.array([16_000], dtype=np.int32), "INT32")
    with broker.counting() as requests:
        for shaped in (samples, samples.reshape(1, -1)):
            client.infer("speech", [numbers("raw", shaped, "FP32"), rate])
    for request in requests:
        np.testing.assert_array_equal(request.inputs["raw"], samples)
        assert request.inputs["sampling_rate"] == 16_000
    with pytest.raises(InferenceServerException, match="one recording"):
        client.infer("speech", [numbers("raw", samples.reshape(2, -1), "FP32"), rate])
    with pytest.raises(InferenceServerException, match="'sampling_rate' must be one whole number"):
        client.infer("speech", [numbers("raw", samples, "FP32"), tensor("sampling_rate", "16000")])


def test_what_has_no_tensors_is_asked_in_json(client: Any, broker: StubBroker) -> None:
    table = {"table": {"a": ["1", "2"]}, "query": "how many?"}
    with broker.counting() as requests:
        client.infer("tables", [tensor("inputs", json.dumps(table))])
    assert [request.inputs for request in requests] == [table]
    with pytest.raises(InferenceServerException, match="no JSON as element 0"):
        client.infer("tables", [tensor("inputs", "{")])


def test_arrays_reach_a_class_under_their_names(client: Any, broker: StubBroker) -> None:
    large = np.arange(20_000, dtype=np.float32).reshape(100, 200)
    matrix = triton.InferInput("words", [1, 2], "BYTES")
    matrix.set_data_from_numpy(np.array([["a", "b"]], dtype=object))
    with broker.counting() as requests:
        client.infer("own", [numbers("x", large, "FP32"), matrix, tensor("y", "c", binary=False)])
    [request] = requests
    np.testing.assert_array_equal(request.inputs["x"], large)
    assert request.inputs["x"].dtype == np.float32
    assert (request.inputs["words"], request.inputs["y"]) == ([[b"a", b"b"]], [b"c"])


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (np.array(2.5), "output", np.array(2.5)),
        ({"s": np.zeros((2, 0), dtype=np.int8)}, "s", np.zeros((2, 0), dtype=np.int8)),
        ("text", "output", np.array([b"text"], dtype=object)),
        ({"t": ["a", b"\xff"]}, "t", np.array([b"a", b"\xff"], dtype=object)),
        ({"t": []}, "t", np.array([b"[]"], dtype=object)),
        ({"n": 3, "x": None}, "n", np.array([b"3"], dtype=object)),
        ([1.5, "a"], "output", np.array([b'[1.5,"a"]'], dtype=object)),
    ],
)
@pytest.mark.parametrize("binary", [True, False])
def test_answers_of_a_class_become_tensors(
    client: Any, broker: StubBroker, value: Any, name: str, expected: Any, binary: bool
) -> None:
    broker.answer_with(Answer(value=value))
    wanted = [triton.InferRequestedOutput(name, binary_data=binary)]
    if not binary and isinstance(value, dict) and b"\xff" in value.get("t", []):
        with pytest.raises(InferenceServerException, match="ask for binary_data"):
            client.infer("own", [tensor("x", "a")], outputs=wanted)
        return
    told = client.infer("own", [tensor("x", "a")], outputs=wanted).as_numpy(name)
    assert told.shape == expected.shape
    got = [each.encode() if isinstance(each, str) else each for each in told.reshape(-1).tolist()]
    assert got == expected.reshape(-1).tolist()


def test_numbers_that_are_none_are_null_in_json(client: Any, broker: StubBroker) -> None:
    broker.answer_with(Answer(value=np.array([np.nan, np.inf, 1.0], dtype=np.float16)))
    binary = client.infer("own", [tensor("x", "a")]).as_numpy("output")
    np.testing.assert_array_equal(binary, np.array([np.nan, np.inf, 1.0], dtype=np.float16))
    wanted = [triton.InferRequestedOutput("output", binary_data=False)]
    told = client.infer("own", [tensor("x", "a")], outputs=wanted).get_response()
    assert told["outputs"][0]["data"] == [None, None, 1.0]


def test_an_answer_that_is_none_of_the_task_is_the_models_error(client: Any, broker: StubBroker) -> None:
    broker.answer_with(Answer(value={"text": "no generated_text"}))
    with pytest.raises(InferenceServerException, match="no generated_text") as caught:
        client.infer("org/team/writer", [tensor("text", "a")])
    assert caught.value.status() == "500"


def test_deadlines_and_priorities_of_the_body_reach_the_model_server(client: Any, broker: StubBroker) -> None:
    headers = {"X-Request-Priority": "5", "X-Request-Timeout": "7", "X-Request-Id": "mine"}
    with broker.counting() as requests:
        client.infer("own", [tensor("x", "a")], timeout=30_000_000, priority=2, headers=headers)
        client.infer("own", [tensor("x", "a")], headers=headers)
    first, second = (request.header for request in requests)
    assert (first.priority, second.priority, first.request_id) == (-99, 5, "mine")
    assert 7_000 < first.remaining_ms <= 30_000
    assert second.remaining_ms <= 7_000


# --- names and versions ----------------------------------------------------------------------------------------------


def test_names_with_slashes_are_read_from_the_end_of_the_path(client: Any, broker: StubBroker) -> None:
    broker.answer_with(Answer(value={"generated_text": "hello"}))
    name = "org/team/writer"
    for version in ("", "1"):
        assert client.is_model_ready(name, version)
        assert client.get_model_metadata(name, version)["name"] == name
        assert client.get_model_config(name, version)["name"] == name
        assert client.get_inference_statistics(name, version)["model_stats"][0]["name"] == name
        answer = client.infer(name, [tensor("text", "a")], model_version=version)
        assert answer.as_numpy("text").tolist() == [b"hello"]
        assert answer.get_response()["model_name"] == name
    assert name in [entry["name"] for entry in client.get_model_repository_index()]
    with pytest.raises(InferenceServerException, match="load is not supported"):
        client.load_model(name)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.infer("org/none", [tensor("text", "a")]),
        lambda client: client.infer("vectors", [tensor("text", "a")], model_version="2"),
        lambda client: client.get_model_metadata("org/none"),
        lambda client: client.get_model_metadata("vectors", "2"),
        lambda client: client.get_model_config("org/none"),
        lambda client: client.get_inference_statistics("org/none"),
        lambda client: client.load_model("org/none"),
    ],
)
def test_models_and_versions_that_are_not_there_are_404_with_those_that_are(
    client: Any, broker: StubBroker, call: Any
) -> None:
    with pytest.raises(InferenceServerException, match=r"known: vectors, org/team|its only one is '1'") as caught:
        call(client)
    assert caught.value.status() == "404"


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.INVALID_INPUT, 400),
        (Code.OVERLOADED, 429),
        (Code.MODEL_ERROR, 500),
        (Code.MODEL_CRASHED, 502),
        (Code.MODEL_LOADING, 503),
        (Code.DEADLINE_EXCEEDED, 504),
    ],
)
def test_each_failure_is_told_in_the_clients_words(client: Any, broker: StubBroker, code: Code, status: int) -> None:
    broker.answer_with(Fail(code=code, message="it went wrong"))
    with pytest.raises(InferenceServerException) as caught:
        client.infer("vectors", [tensor("text", "a")])
    assert (caught.value.status(), caught.value.message()) == (str(status), "it went wrong")


def test_one_refused_item_fails_all_and_is_named(client: Any, broker: StubBroker) -> None:
    def one_refuses(request: Request) -> list[Step]:
        if request.inputs == "bad":
            return [Fail(code=Code.INVALID_INPUT, message="inputs is bad")]
        return [Answer(after_s=30, value={})]

    broker.behave = one_refuses
    with pytest.raises(InferenceServerException) as caught:
        client.infer("org/team/writer", [tensor("text", "a", "b", "bad", "c")])
    assert caught.value.message() == "item 2: inputs is bad"
    ids = {request.header.id for request in broker.requests[-4:] if request.inputs != "bad"}
    wait_for(lambda: ids <= broker.cancelled, "the others are given up")


def test_everything_below_v2_fails_in_the_clients_words(front: Front, broker: StubBroker) -> None:
    bearer = {"Authorization": f"Bearer {KEY}"}
    answers = [
        (404, front.get("/v2/nothing", headers=bearer)),
        (401, front.get("/v2/models/own")),
        (413, post(front, "/v2/models/own/infer", b" " * (BODY_BYTES_MAX + 1))),
        (400, post(front, "/v2/models/own/infer", b"{")),
        (405, front.client.put(f"{front.url}/v2/models/own/infer", headers=bearer)),
        (405, front.client.get(f"{front.url}/v2/models/own/infer", headers=bearer)),
        (405, front.client.get(f"{front.url}/v2/models/own/versions/1/infer", headers=bearer)),
    ]
    for status, answer in answers:
        assert answer.status_code == status
        assert list(answer.json()) == ["error"]
        assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize("content_type", [None, "application/octet-stream", "text/plain", "nonsense"])
def test_the_content_type_does_not_matter(front: Front, broker: StubBroker, content_type: str | None) -> None:
    body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}).encode()
    headers = [f"Authorization: Bearer {KEY}", *([f"Content-Type: {content_type}"] if content_type else [])]
    with front.connect() as connection:
        connection.sendall(raw_request("/v2/models/own/infer", body, *headers))
        status, told, content = read_response(connection)
    assert (status, told["content-type"]) == (200, "application/json")
    assert json.loads(content)["outputs"][1]["name"] == "inputs"


def test_keys_are_asked_for_except_by_probes(front: Front, broker: StubBroker) -> None:
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert front.get(path).status_code == 200
    closed = ["/v2", "/v2/models/own", "/v2/models/own/ready", "/v2/models/own/config", "/v2/models/stats"]
    assert [front.get(path).status_code for path in closed] == [401] * len(closed)
    posts = ["/v2/models/own/infer", "/v2/repository/index", "/v2/repository/models/own/load", "/v2/logging"]
    assert [front.post(path).status_code for path in posts] == [401] * len(posts)


def test_a_small_body_that_stands_for_a_large_one_is_too_large(front: Front, broker: StubBroker) -> None:
    bomb = gzip.compress(b" " * (BODY_BYTES_MAX + 1))
    answer = post(front, "/v2/models/own/infer", bomb, **{"Content-Encoding": "gzip"})
    assert answer.status_code == 413
    assert f"{BODY_BYTES_MAX} bytes" in answer.json()["error"]


def test_sizes_that_disagree_are_refused_and_the_connection_lives_on(front: Front, broker: StubBroker) -> None:
    tensor_of = {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor_of]}).encode()
    data = struct.pack("<2f", 1, 2)
    lengths = [len(head) + len(data) + 1, len(head) - 1, len(head) + 1, 10**11]
    for length in lengths:
        answer = post(front, "/v2/models/own/infer", head + data, **{"Inference-Header-Content-Length": str(length)})
        assert answer.status_code == 400, answer.text
    for spoilt in (data[:-1], data + b"x", b""):
        answer = post(
            front, "/v2/models/own/infer", head + spoilt, **{"Inference-Header-Content-Length": str(len(head))}
        )
        assert answer.status_code == 400, answer.text
        assert "input 'x' has" in answer.json()["error"] or "belong to no input" in answer.json()["error"]


def test_a_client_that_leaves_ends_the_work_for_it(front: Front, broker: StubBroker) -> None:
    broker.answer_with()
    body = json.dumps({"inputs": [{"name": "x", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]}).encode()
    before = len(broker.requests)
    with front.connect() as connection:
        connection.sendall(raw_request("/v2/models/stuck/infer", body, f"Authorization: Bearer {KEY}"))
        wait_for(lambda: len(broker.requests) == before + 2, "both items arrive")
    ids = {request.header.id for request in broker.requests[before:]}
    wait_for(lambda: ids <= broker.cancelled, "both are given up")


def test_requests_are_counted_by_route_and_model(front: Front, client: Any, broker: StubBroker) -> None:
    client.infer("own", [tensor("x", "a")])
    with pytest.raises(InferenceServerException):
        client.infer("x" * 40, [tensor("x", "a")])
    metrics = front.get("/metrics").text
    route = "/v2/models/{name}/infer"
    assert f'headwaiter_requests_total{{code="200",model="own",route="{route}"}}' in metrics
    assert f'headwaiter_requests_total{{code="404",model="",route="{route}"}}' in metrics
    assert "x" * 40 not in metrics


# --- models that are not ready ---------------------------------------------------------------------------------------


def test_states_of_models_are_told_with_their_reasons(front: Front, client: Any, broker: StubBroker) -> None:
    not_ready = {"replicas_ready": 0, "required": False}
    broker.models = (
        model_state("vectors", task="embedding", required=True),
        model_state("slow", state="loading", reason="loads weights", **not_ready),
        model_state("lost", state="failed", reason="no such file", **not_ready),
    )
    try:
        wait_for(lambda: len(client.get_model_repository_index()) == 3, "the front hears of them")
        index = {entry["name"]: (entry["state"], entry["reason"]) for entry in client.get_model_repository_index()}
        assert index == {
            "vectors": ("READY", ""),
            "slow": ("LOADING", "loads weights"),
            "lost": ("UNAVAILABLE", "no such file"),
        }
        ready = post(front, "/v2/repository/index", b'{"ready": true}').json()
        assert [entry["name"] for entry in ready] == ["vectors"]
        assert post(front, "/v2/repository/index", b'{"ready": 1}').status_code == 400
        assert client.is_server_ready()
        assert not client.is_model_ready("lost")
        answer = front.get("/v2/models/lost/ready", headers={"Authorization": f"Bearer {KEY}"})
        assert (answer.status_code, answer.json()["error"]) == (503, "no such file")
    finally:
        broker.models = STATES
        wait_for(lambda: len(client.get_model_repository_index()) == len(STATES), "the front hears of the others")


def test_without_a_model_server_the_front_is_alive_and_not_ready() -> None:
    with Front(models=("own",)) as front, triton.InferenceServerClient(front.url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        assert not client.is_model_ready("own")
        [entry] = client.get_model_repository_index()
        assert (entry["name"], entry["state"]) == ("own", "UNAVAILABLE")
        assert "model server was not heard" in entry["reason"]
        # The configuration is enough to know what a class of one's own takes.
        assert client.get_model_metadata("own")["inputs"] == []
        with pytest.raises(InferenceServerException, match="503"):
            client.get_inference_statistics()

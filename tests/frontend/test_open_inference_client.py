"""Triton's HTTP clients, unmodified, against a whole service with small models: each method, JSON and binary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests import tiny_models
from tests.topology import Service

TEXTS = ["The quick brown fox", "Paris is"]
NEW_TOKENS = 4
NAMES = ["vectors", "writer", "own"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("models")
    sources: dict[str, tuple[Path, str]] = {
        "vectors": (tiny_models.save(directory / "v", "BertModel"), "embedding"),
        "writer": (tiny_models.save(directory / "w", "LlamaForCausalLM"), "text-generation"),
    }
    models: list[dict[str, Any]] = [
        {"name": name, "model": path, "task": task, "device": "cpu"} for name, (path, task) in sources.items()
    ]
    models.append({"name": "own", "model": "tests.stub_models:Echo", "device": "cpu"})
    with Service(models, server={"parallel_loads": 2}) as started:
        yield started.wait_ready(150)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Any]:
    with triton.InferenceServerClient(address(service)) as made:
        yield made


def address(service: Service) -> str:
    return service.url.removeprefix("http://")


def tensor(name: str, value: Any, datatype: str = "BYTES", *, binary: bool = True) -> Any:
    array = np.array(value, dtype=object) if datatype == "BYTES" and not isinstance(value, np.ndarray) else value
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def wanted(*names: str, binary: bool = True) -> list[Any]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def native(service: Service, model: str, inputs: object, **parameters: object) -> Any:
    answer = service.ask(model, inputs, parameters=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- what there is, and how it is ------------------------------------------------------------------------------------


def test_health_and_readiness_are_told(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert all(client.is_model_ready(name) and client.is_model_ready(name, "1") for name in NAMES)
    assert not client.is_model_ready("none")
    assert not client.is_model_ready("vectors", "2")


def test_metadata_names_the_tensors_of_each_model(client: Any) -> None:
    assert client.get_server_metadata()["name"] == "headwaiter"
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    told = {name: client.get_model_metadata(name) for name in NAMES}
    assert told["vectors"] == client.get_model_metadata("vectors", "1")
    assert told["vectors"] == {
        "name": "vectors",
        "versions": ["1"],
        "platform": "headwaiter",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": "embeddings", "datatype": "FP32", "shape": [-1, -1]}],
    }
    inputs = {name: [each["name"] for each in told[name]["inputs"]] for name in NAMES}
    outputs = {name: [each["name"] for each in told[name]["outputs"]] for name in NAMES}
    assert (inputs["writer"], inputs["own"]) == (["text"], [])
    assert (outputs["writer"], outputs["own"]) == (["text", "output"], [])
    config = client.get_model_config("vectors")
    assert config["output"] == [{"name": "embeddings", "data_type": "TYPE_FP32", "dims": [-1, -1]}]


def test_the_index_lists_every_model_with_its_state(client: Any, service: Service) -> None:
    index = client.get_model_repository_index()
    assert index == [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in NAMES]
    assert service.http.post("/v2/repository/index", json={"ready": True}).json() == index


def test_what_is_not_possible_here_is_refused_in_words(client: Any) -> None:
    refused = {
        "load is not supported": lambda: client.load_model("vectors"),
        "load is not supported:": lambda: client.load_model("vectors", config="{}"),
        "unload is not supported": lambda: client.unload_model("vectors"),
        "traces are not supported": lambda: client.get_trace_settings("vectors"),
        "traces are not supported:": lambda: client.update_trace_settings(settings={}),
        "those of the configuration": client.get_log_settings,
        "shared memory is not supported": client.get_system_shared_memory_status,
        "shared memory is not supported:": lambda: client.register_system_shared_memory("a", "b", 4),
        "memory is not supported": client.get_cuda_shared_memory_status,
    }
    for words, call in refused.items():
        with pytest.raises(InferenceServerException, match=words) as caught:
            call()
        assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="no model is called 'none'"):
        client.load_model("none")


def test_statistics_count_what_was_answered(client: Any) -> None:
    def count() -> int:
        [counted] = client.get_inference_statistics("vectors")["model_stats"]
        assert counted["inference_stats"]["success"]["count"] == counted["inference_count"]
        return int(counted["inference_count"])

    before = count()
    # Both texts are one question to it.
    client.infer("vectors", [tensor("text", TEXTS)])
    assert count() == before + 1
    assert {counted["name"] for counted in client.get_inference_statistics()["model_stats"]} == set(NAMES)


# --- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_vectors_are_the_native_ones_however_they_are_sent(
    client: Any, service: Service, binary_in: bool, binary_out: bool | None
) -> None:
    outputs = None if binary_out is None else wanted("embeddings", binary=binary_out)
    answer = client.infer("vectors", [tensor("text", TEXTS, binary=binary_in)], outputs=outputs, request_id="mine")
    expected = np.array(native(service, "vectors", TEXTS), dtype=np.float32)
    np.testing.assert_array_equal(answer.as_numpy("embeddings"), expected)
    told = answer.get_response()
    assert (told["id"], told["model_name"], told["model_version"]) == ("mine", "vectors", "1")
    [output] = told["outputs"]
    assert ("data" in output) == (binary_out is False)
    assert (output["datatype"], output["shape"]) == ("FP32", [2, 16])


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize("name", ["text", "anything"])
def test_each_text_has_an_answer_of_its_own(client: Any, service: Service, shape: tuple[int, ...], name: str) -> None:
    texts = np.array([text.encode() for text in TEXTS], dtype=object).reshape(shape)
    answer = client.infer("writer", [tensor(name, texts)], parameters={"max_new_tokens": NEW_TOKENS})
    expected = [native(service, "writer", text, max_new_tokens=NEW_TOKENS) for text in TEXTS]
    assert [json.loads(each) for each in answer.as_numpy("output")] == expected


def test_written_text_comes_alone_and_as_the_whole_answer(client: Any, service: Service) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": NEW_TOKENS}
    answer = client.infer("writer", [tensor("text", TEXTS)], parameters=parameters)
    expected = [native(service, "writer", text, **parameters) for text in TEXTS]
    assert [json.loads(each) for each in answer.as_numpy("output")] == expected
    assert [each.decode() for each in answer.as_numpy("text")] == [each["generated_text"] for each in expected]
    only = client.infer("writer", [tensor("text", TEXTS)], outputs=wanted("text"), parameters=parameters)
    assert [output["name"] for output in only.get_response()["outputs"]] == ["text"]


def test_a_body_without_json_is_one_element(service: Service) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    answer = service.http.post("/v2/models/vectors/infer", content=TEXTS[0].encode(), headers=headers)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["Inference-Header-Content-Length"])
    vectors = np.frombuffer(answer.content[length:], dtype="<f4")
    np.testing.assert_array_equal(vectors, np.array(native(service, "vectors", TEXTS[0]), dtype=np.float32))
    refused = service.http.post("/v2/models/own/infer", content=b"x", headers=headers)
    assert refused.status_code == 400
    assert "send the JSON as well" in refused.json()["error"]


# --- a class of one's own --------------------------------------------------------------------------------------------

ARRAYS: dict[str, Any] = {
    "BOOL": np.array([[True, False], [False, True]]),
    "UINT8": np.arange(6, dtype=np.uint8).reshape(3, 2),
    "UINT16": np.array([2**16 - 1], dtype=np.uint16),
    "UINT32": np.array([[[2**32 - 1]]], dtype=np.uint32),
    "UINT64": np.array([2**64 - 1, 0], dtype=np.uint64),
    "INT8": np.array([-(2**7)], dtype=np.int8),
    "INT16": np.array([-(2**15), 1], dtype=np.int16),
    "INT32": np.zeros((0, 3), dtype=np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1]),
    "FP16": np.array([[0.1, -2.5]], dtype=np.float16),
    "FP32": np.array([0.1, 1e30], dtype=np.float32),
    "FP64": np.array([0.1, 1e300]),
}


@pytest.mark.parametrize("binary", [True, False])
def test_named_tensors_reach_a_class_and_come_back_as_they_were(client: Any, binary: bool) -> None:
    inputs = [tensor(name, array, name, binary=binary) for name, array in ARRAYS.items()]
    answer = client.infer("own", inputs, outputs=wanted(*reversed(ARRAYS), binary=binary))
    outputs = answer.get_response()["outputs"]
    assert [output["name"] for output in outputs] == list(reversed(ARRAYS))
    for output in outputs:
        name, array = output["name"], ARRAYS[output["name"]]
        assert output["datatype"] == name
        returned = answer.as_numpy(name)
        assert returned.dtype == array.dtype
        np.testing.assert_array_equal(returned, array)


def test_large_tensors_travel_whole(client: Any) -> None:
    large = np.random.default_rng(3).normal(size=(1000, 257)).astype(np.float32)
    answer = client.infer("own", [tensor("a", large, "FP32"), tensor("b", large.T.copy(), "FP32")])
    np.testing.assert_array_equal(answer.as_numpy("a"), large)
    np.testing.assert_array_equal(answer.as_numpy("b"), large.T)


def test_brain_floats_reach_a_class_as_the_same_numbers(client: Any) -> None:
    array = np.array([[1.5, -0.1]], dtype=ml_dtypes.bfloat16)
    answer = client.infer("own", [tensor("x", array, "BF16")])
    np.testing.assert_array_equal(answer.as_numpy("x"), array.astype(np.float32))


@pytest.mark.parametrize("binary", [True, False])
def test_bytes_reach_a_class_as_bytes(client: Any, binary: bool) -> None:
    answer = client.infer("own", [tensor("x", ["a", "", "é"], binary=binary)], outputs=wanted("x"))
    assert answer.as_numpy("x").tolist() == [b"a", b"", "é".encode()]


def test_bytes_that_are_no_text_come_back_in_binary_alone(client: Any) -> None:
    inputs = [tensor("x", [b"\xff\x00", b"a"])]
    assert client.infer("own", inputs).as_numpy("x").tolist() == [b"\xff\x00", b"a"]
    with pytest.raises(InferenceServerException, match="ask for binary_data") as caught:
        client.infer("own", inputs, outputs=wanted("x", binary=False))
    assert caught.value.status() == "400"


def test_what_is_no_tensor_comes_back_as_json(client: Any) -> None:
    # The rows of a matrix of BYTES are lists, and the class gives back what it got.
    answer = client.infer("own", [tensor("x", np.array([[b"a", b"b"]], dtype=object))])
    assert [json.loads(each) for each in answer.as_numpy("x")] == [[["YQ==", "Yg=="]]]


# --- what may be said beside the tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_read(client: Any, algorithm: str) -> None:
    array = np.arange(50_000, dtype=np.float32)
    answer = client.infer(
        "own",
        [tensor("x", array, "FP32")],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(answer.as_numpy("x"), array)


def test_a_timeout_in_microseconds_is_the_deadline(client: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("writer", [tensor("text", TEXTS[:1])], timeout=1, parameters={"max_new_tokens": 40})
    assert caught.value.status() == "504"
    with pytest.raises(InferenceServerException, match=r"more than the 600 seconds .* at most 600000000") as caught:
        client.infer("own", [tensor("x", ["a"])], timeout=600_000_001)
    assert caught.value.status() == "400"
    assert client.infer("own", [tensor("x", ["a"])], timeout=60_000_000, priority=1).as_numpy("x").tolist() == [b"a"]


def test_sequences_are_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="sequence_id is not supported: requests are independent"):
        client.infer("own", [tensor("x", ["a"])], sequence_id=7, sequence_start=True)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        ("vectors", [("text", ["fox", "fox " * 100], "BYTES")], r"inputs\[1\] is \d+ tokens long"),
        ("writer", [("text", ["fox", "fox " * 100], "BYTES")], r"item 1: inputs.*tokens"),
        ("writer", [("text", [b"\xff"], "BYTES")], "element 0 that is not UTF-8: byte 0xff at position 0"),
        ("writer", [("text", np.array([[b"a", b"b"]], dtype=object), "BYTES")], r"shape \[1, 2\]: send \[n\]"),
        ("writer", [("text", np.zeros(2, np.float32), "FP32")], "must be BYTES, text each, not FP32"),
        ("writer", [("text", ["a"], "BYTES"), ("more", ["a"], "BYTES")], "input 'more' is not one of this model's"),
        ("writer", [("text", np.array([], dtype=object), "BYTES")], "has 0 elements: send 1 to 1024"),
        ("writer", [("text", ["a"] * 1025, "BYTES")], "has 1025 elements: send 1 to 1024"),
        ("vectors", [("text", np.array([], dtype=object), "BYTES")], "has 0 elements"),
        ("vectors", [("text", ["a"] * 8193, "BYTES")], "8193"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(client: Any, model: str, inputs: Any, words: str) -> None:
    with pytest.raises(InferenceServerException, match=words) as caught:
        client.infer(model, [tensor(*each) for each in inputs])
    assert caught.value.status() == "400"


def test_a_parameter_that_the_task_does_not_know_is_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="unknown parameter 'colour'"):
        client.infer("vectors", [tensor("text", TEXTS)], parameters={"colour": "red"})


def test_outputs_that_are_not_there_are_refused_with_those_that_are(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="no output is called 'scores'; this model's: embeddings"):
        client.infer("vectors", [tensor("text", TEXTS)], outputs=wanted("scores"))
    with pytest.raises(InferenceServerException, match="no output is called 'y'; this model's: x"):
        client.infer("own", [tensor("x", ["a"])], outputs=wanted("y"))
    classes = [triton.InferRequestedOutput("embeddings", class_count=2)]
    with pytest.raises(InferenceServerException, match="classification, which is not supported"):
        client.infer("vectors", [tensor("text", TEXTS)], outputs=classes)


# --- asynchronous ----------------------------------------------------------------------------------------------------


def test_the_synchronous_client_has_requests_under_way_at_once(service: Service) -> None:
    with triton.InferenceServerClient(address(service), concurrency=4) as client:
        calls = [client.async_infer("vectors", [tensor("text", [text])]) for text in TEXTS * 4]
        vectors = [call.get_result().as_numpy("embeddings")[0] for call in calls]
    expected = np.array(native(service, "vectors", TEXTS), dtype=np.float32)
    np.testing.assert_allclose(np.array(vectors), np.concatenate([expected] * 4), atol=1e-5)


@pytest.mark.parametrize("binary", [True, False])
def test_an_asynchronous_client_does_the_same(service: Service, binary: bool) -> None:
    async def work() -> None:
        async with triton_aio.InferenceServerClient(address(service)) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("vectors")
            assert (await client.get_model_metadata("vectors"))["inputs"][0]["name"] == "text"
            assert (await client.get_model_config("vectors"))["name"] == "vectors"
            assert [entry["name"] for entry in await client.get_model_repository_index()] == NAMES
            assert (await client.get_inference_statistics("vectors"))["model_stats"]
            text, outputs = [tensor("text", TEXTS, binary=binary)], wanted("embeddings", binary=binary)
            one, other = await asyncio.gather(
                client.infer("vectors", text, outputs=outputs),
                client.infer("vectors", text, request_compression_algorithm="gzip"),
            )
            np.testing.assert_array_equal(one.as_numpy("embeddings"), other.as_numpy("embeddings"))
            for refused in (client.load_model("vectors"), client.infer("none", text), client.get_log_settings()):
                with pytest.raises(InferenceServerException):
                    await refused

    asyncio.run(work())

"""Hugging Face's clients, unmodified, against a whole service: vectors, text, and files on their way to a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

from tests import tiny_models
from tests.hugging_face import Clients, configured, native
from tests.topology import Service

TEXT = "Paris is the capital of France."
NEW_TOKENS = 8
MESSAGES: Any = [{"role": "user", "content": "Where is the fox?"}]
# The asynchronous client's own business with the library below it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NOISE = bytes(range(256))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("models")
    template = tiny_models.CHAT_TEMPLATE
    text = tiny_models.save(directory / "text", "LlamaForCausalLM", positions=256, chat_template=template, seed=3)
    models = configured(
        {
            "vectors": ("embedding", tiny_models.save(directory / "vectors", "BertModel")),
            "text": ("text-generation", text),
        }
    )
    models.append({"name": "media", "model": "tests.media_models:Witness", "device": "cpu"})
    with Service(models, server={"parallel_loads": 2}) as started:
        yield started.wait_ready(150)


@pytest.fixture(scope="module", params=["sync", "async"])
def ask(request: pytest.FixtureRequest, service: Service) -> Clients:
    return Clients(service, request.param)


# --- vectors ---------------------------------------------------------------------------------------------------------


def test_feature_extraction_gives_a_vector_for_each_text(ask: Clients, service: Service) -> None:
    for inputs in (TEXT, [TEXT, "Hello world"]):
        expected = np.array(native(service, "vectors", inputs), "float32")
        answer = ask("vectors", "feature_extraction", inputs)
        assert answer.dtype == np.float32
        np.testing.assert_array_equal(answer, expected)
    short = ask("vectors", "feature_extraction", TEXT, normalize=True, dimensions=4, encoding_format="float")
    assert short.shape == (4,)
    assert np.linalg.norm(short) == pytest.approx(1.0, abs=1e-5)
    cut = {"truncate": True, "truncation_direction": "left"}
    long = " ".join([TEXT] * 50)
    np.testing.assert_array_equal(
        ask("vectors", "feature_extraction", long, **cut),
        np.array(native(service, "vectors", long, **cut), "float32"),
    )


def test_sentence_similarity_is_the_cosine_of_the_vectors(ask: Clients, service: Service) -> None:
    sentences = [TEXT, "Hello world", "one two three"]
    source, *others = np.array(native(service, "vectors", [TEXT, *sentences]))
    expected = [other @ source / np.linalg.norm(other) / np.linalg.norm(source) for other in others]
    answer = ask("vectors", "sentence_similarity", TEXT, sentences)
    assert answer == pytest.approx(expected, abs=1e-5)
    assert answer[0] == pytest.approx(1.0)
    url = "vectors/pipeline/sentence-similarity"
    assert ask(url, "sentence_similarity", TEXT, sentences) == answer


# --- text generation -------------------------------------------------------------------------------------------------


def test_text_generation_writes_what_the_native_route_does(ask: Clients, service: Service) -> None:
    expected = native(service, "text", TEXT, max_new_tokens=NEW_TOKENS)["generated_text"]
    assert ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS) == expected
    full = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, return_full_text=True)
    assert full == TEXT + expected
    settings = {"do_sample": True, "temperature": 2.0, "top_k": 50, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.1}
    drawn = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, frequency_penalty=0.5, **settings)
    assert (
        drawn
        == native(service, "text", TEXT, max_new_tokens=NEW_TOKENS, frequency_penalty=0.5, **settings)["generated_text"]
    )
    cut = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, truncate=3)
    assert cut == native(service, "text", TEXT, max_new_tokens=NEW_TOKENS, truncate=3)["generated_text"]


def test_details_tell_each_token(ask: Clients, service: Service) -> None:
    told = native(service, "text", TEXT, max_new_tokens=NEW_TOKENS, logprobs=2, seed=5)
    answer = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, details=True, seed=5, top_n_tokens=2)
    assert answer.generated_text == told["generated_text"]
    details = answer.details
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", NEW_TOKENS, 5)
    assert [token.id for token in details.tokens] == [token["token_id"] for token in told["logprobs"]]
    logprobs = [token["logprob"] for token in told["logprobs"]]
    assert [token.logprob for token in details.tokens] == pytest.approx(logprobs, abs=1e-5)
    assert [len(likely) for likely in details.top_tokens] == [2] * NEW_TOKENS
    assert details.prefill == []
    plain = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, details=True)
    assert (plain.details.top_tokens, plain.details.seed) == (None, None)


def test_a_stream_is_the_same_text_in_pieces(ask: Clients) -> None:
    whole = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS)
    pieces = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, stream=True)
    assert "".join(pieces) == whole
    assert len(pieces) > 2


def test_a_stream_with_details_has_an_event_for_each_token(ask: Clients) -> None:
    whole = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, details=True, seed=5)
    events = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, details=True, seed=5, stream=True)
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert [event.index for event in events] == list(range(1, NEW_TOKENS + 1))
    assert "".join(event.token.text for event in events) == whole.generated_text
    assert [event.generated_text for event in events] == [None] * (NEW_TOKENS - 1) + [whole.generated_text]
    details = events[-1].details
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", NEW_TOKENS, 5)
    assert details.input_length > 0


def test_a_stop_string_and_an_end_token_are_told_apart(ask: Clients, service: Service) -> None:
    whole = native(service, "text", TEXT, max_new_tokens=NEW_TOKENS)["generated_text"]
    stop = whole[2:4]
    answer = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, stop=[stop], details=True)
    assert answer.details.finish_reason == "stop_sequence"
    assert answer.generated_text == whole[: whole.index(stop)]
    schema = {"enum": [1]}
    grammar: Any = {"type": "json", "value": schema}
    answer = ask("text", "text_generation", TEXT, max_new_tokens=NEW_TOKENS, grammar=grammar, details=True)
    assert (answer.generated_text, answer.details.finish_reason) == ("1", "eos_token")
    assert answer.details.tokens[-1].special


def test_chats_are_answered_below_the_model(ask: Clients, service: Service) -> None:
    expected = native(service, "text", MESSAGES, max_new_tokens=NEW_TOKENS)
    answer = ask("text", "chat_completion", MESSAGES, max_tokens=NEW_TOKENS)
    assert answer.choices[0].message.content == expected["generated_text"]
    assert (answer.model, answer.usage.completion_tokens) == ("text", expected["generated_tokens"])
    chunks = ask("text", "chat_completion", MESSAGES, max_tokens=NEW_TOKENS, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected["generated_text"]
    form: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": [1]}}}
    kept = ask("text", "chat_completion", MESSAGES, max_tokens=NEW_TOKENS, response_format=form)
    assert kept.choices[0].message.content == "1"


@pytest.mark.parametrize("path", ["", "/v1", "/v1/", "/models/text", "/hf/text/v1", "/hf/text/"])
def test_a_chat_finds_its_model_by_any_url(service: Service, path: str) -> None:
    client = InferenceClient(base_url=f"{service.url}{path}", api_key="none")
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=2)
    assert answer.model == "text"
    assert answer.usage.completion_tokens == 2


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["image_classification", "audio_classification", "object_detection"])
def test_bytes_and_files_arrive_as_they_are(ask: Clients, method: str, tmp_path: Path) -> None:
    for name in ("a.png", "a.flac", "a"):
        (tmp_path / name).write_bytes(NOISE)
    for content in (NOISE, tmp_path / "a.png", str(tmp_path / "a.flac"), tmp_path / "a"):
        [answer] = ask("media", method, content)
        assert (answer.label, answer.score) == (NOISE.hex(), 0)
    parameter = {"threshold": 0.5} if method == "object_detection" else {"top_k": 3}
    [answer] = ask("media", method, NOISE, **parameter)
    assert (answer.label, answer.score) == (NOISE.hex(), 1)


def test_zero_shot_image_classification_sends_labels_beside_the_picture(ask: Clients) -> None:
    [answer] = ask("media", "zero_shot_image_classification", NOISE, ["a", "b"], hypothesis_template="a {}")
    assert (answer.label, answer.score) == (NOISE.hex(), 2)


# --- errors and operations -------------------------------------------------------------------------------------------


def test_refusals_are_typed_and_name_the_cause(ask: Clients) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        ask("text", "text_generation", TEXT, temperature=-1.0)
    with pytest.raises(ValidationError, match="temperature"):
        ask("text", "text_generation", TEXT, temperature=-1.0, stream=True)
    with pytest.raises(ValidationError, match="typical_p is not supported"):
        ask("text", "text_generation", TEXT, typical_p=0.5)
    with pytest.raises(ValidationError, match="no model is called"):
        ask("nobody", "text_generation", TEXT)
    with pytest.raises(HfHubHTTPError, match="encoding_format"):
        ask("vectors", "feature_extraction", TEXT, encoding_format="base64")
    with pytest.raises(HfHubHTTPError, match="logit_bias"):
        ask("text", "chat_completion", MESSAGES, logit_bias=[1.0])


def test_health_and_info_are_told(service: Service) -> None:
    client = InferenceClient(f"{service.url}/hf/vectors", provider="hf-inference", token="none")
    assert client.health_check()
    assert client.get_endpoint_info()["model_id"] == "vectors"
    assert not client.health_check(f"{service.url}/hf/nobody")

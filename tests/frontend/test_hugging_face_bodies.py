"""What Hugging Face's dialect makes of requests and answers, without a service."""

from __future__ import annotations

import io
import json
import wave
from typing import Any

import numpy as np
import pytest

from frontend.pending import Answer
from frontend.surfaces.hugging_face import errors, forms, generation, tasks
from frontend.surfaces.hugging_face.surface import read_request
from shared.errors import Code, InvalidInput, RequestError
from shared.messages import Timings

TIMINGS = Timings(0.0, 0.0, 0.0, 0.0, 1)


def score(token_id: int, text: str, **more: Any) -> dict[str, Any]:
    return {"token": text, "token_id": token_id, "logprob": -0.5, **more}


def told(text: str, scores: list[dict[str, Any]], finish_reason: str = "stop") -> dict[str, Any]:
    return {
        "generated_text": text,
        "finish_reason": finish_reason,
        "prompt_tokens": 3,
        "generated_tokens": len(scores),
        "logprobs": scores,
    }


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix(b"data: ")) for part in data.split(b"\n\n") if part]


def streamed(details: bool, pieces: list[Any], end: object) -> list[dict[str, Any]]:
    format_ = generation.TokenEvents(generation.read({"details": details, "seed": 4}))
    return events(b"".join(map(format_.piece, pieces)) + format_.end(Answer(end, TIMINGS)))


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"best_of": 2}, "best_of is not supported"),
        ({"typical_p": 0.9}, "typical_p is not supported"),
        ({"watermark": True}, "watermark is not supported"),
        ({"adapter_id": "x"}, "adapter_id is not supported"),
        ({"decoder_input_details": True, "details": True}, "decoder_input_details is not supported"),
        ({"details": 1}, "details is a number"),
        ({"grammar": {"type": "regex", "value": "a+"}}, "'regex'"),
        ({"grammar": {"type": "json", "value": "{"}}, "no JSON schema"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        generation.read(parameters)


def test_what_changes_nothing_is_left_out() -> None:
    given = {"best_of": 1, "watermark": False, "decoder_input_details": False, "details": False, "typical_p": 1.0}
    assert generation.read({**given, "top_n_tokens": 3, "seed": None}).parameters == {}


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": {"type": "object"}},
        {"type": "json", "value": '{"type": "object"}'},
        {"type": "json_schema", "value": {"name": "x", "schema": {"type": "object"}}},
    ],
)
def test_a_grammar_is_a_schema(grammar: dict[str, object]) -> None:
    assert generation.read({"grammar": grammar}).parameters == {"json_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"[1]", "an array, not an object"),
        (b'{"parameters": {}}', "no inputs"),
        (b'{"inputs": "a", "normalize": true}', "unknown key 'normalize'"),
        (b'{"inputs": "a", "parameters": 1}', "parameters is a number"),
        (b'{"inputs": "a", "stream": 1}', "stream is a number"),
    ],
)
def test_what_is_no_request_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_request(body, tasks.task_of("text-classification"))


def test_keys_beside_the_inputs_are_parameters_of_vectors() -> None:
    body = b'{"inputs": "a", "normalize": true, "prompt_name": null, "options": {"wait_for_model": true}}'
    assert read_request(body, tasks.task_of("embedding")) == ("a", {"normalize": True}, False)


@pytest.mark.parametrize("task", ["image-classification", "automatic-speech-recognition", "module:Class"])
def test_a_body_that_is_no_json_is_the_input_itself(task: str) -> None:
    assert read_request(b"\x89PNG", tasks.task_of(task)) == (b"\x89PNG", {}, False)
    assert read_request(b' {"inputs": "aGk="}', tasks.task_of(task)) == ("aGk=", {}, False)


def form(*fields: bytes, boundary: bytes = b"xyz") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + field + b"\r\n" for field in fields) + b"--" + boundary + b"--\r\n"


def field(name: str, content: bytes, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content


def test_a_form_is_a_file_and_parameters() -> None:
    noise = bytes(range(256)) + b"\r\n--xy\r\n\r\n"
    body = form(
        field("anything", noise, '; filename="a.png"\r\nContent-Type: image/png'),
        field("parameters", b'{"top_k": 2, "a": null}'),
        field("threshold", b"0.5"),
        field("hypothesis_template", b"ein {}"),
    )
    for content_type in (b"multipart/form-data; boundary=xyz", b'Multipart/Form-Data; charset=utf-8; boundary="xyz"'):
        boundary = forms.boundary_of(content_type)
        assert boundary == b"xyz"
        inputs, parameters, _ = read_request(body, tasks.task_of("image-classification"), content_type)
        assert inputs == noise
        assert parameters == {"top_k": 2, "a": None, "threshold": 0.5, "hypothesis_template": "ein {}"}
    text = form(field("inputs", b"a text"))
    assert read_request(text, tasks.task_of("fill-mask"), b"multipart/form-data; boundary=xyz")[0] == "a text"
    assert forms.boundary_of(b"application/json") is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no whole form"),
        (b"--xyz\r\n", "no whole form"),
        (form(field("inputs", b"a"))[:-6], "no whole form"),
        (form(b"Content-Disposition: form-data\r\n\r\na"), "has no name"),
        (form(), "this one has 0"),
        (form(field("a", b"1", '; filename="a"'), field("inputs", b"b")), "this one has 2"),
        (form(field("inputs", b"\xff")), "not UTF-8"),
        (form(field("inputs", b"a"), field("parameters", b"{")), "not JSON"),
        (form(field("inputs", b"a"), field("parameters", b"[]")), "must be a JSON object"),
        (form(*[field("a", b"1")] * 80), "more than 64 fields"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        forms.read_form(body, b"xyz")


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"\x89PNG\r\n\x1a\n", b"image/png"),
        (b"RIFF\0\0\0\0WAVEfmt ", b"audio/wav"),
        (b"\0\0\0\x1cftypisom", b"video/mp4"),
        (b"", b"application/octet-stream"),
    ],
)
def test_bytes_of_a_class_of_ones_own_are_sent_as_they_are(content: bytes, media_type: bytes) -> None:
    question = tasks.task_of("module:Class").ask(b"x", {"question": "?", "image": "eA=="})
    assert question.parameters == {"question": "?"}
    assert question.read(content) == tasks.File(content, media_type)
    assert question.read([1]) == [1]


def test_features_of_tokens_are_cut_by_their_pipelines_word() -> None:
    question = tasks.task_of("feature-extraction").ask("a", {"truncate": True, "encoding_format": "float"})
    assert question.parameters == {"truncation": True}
    with pytest.raises(InvalidInput, match="task = 'embedding'"):
        tasks.task_of("feature-extraction").ask({"source_sentence": "a", "sentences": ["b"]}, {})


@pytest.mark.parametrize(
    "inputs", [{}, {"source_sentence": "a"}, {"source_sentence": "a", "sentences": []}, {"question": "a"}]
)
def test_sentences_to_compare_are_a_source_and_others(inputs: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="inputs"):
        tasks.task_of("embedding").ask(inputs, {})


def test_recognition_settings_keep_the_pipelines_name() -> None:
    question = tasks.task_of("automatic-speech-recognition").ask(b"", {"generation_parameters": {"num_beams": 2}})
    assert question.parameters == {"generate_kwargs": {"num_beams": 2}}


def test_a_path_may_name_only_what_the_model_is_for() -> None:
    for task, asked in (
        ("embedding", "sentence-similarity"),
        ("text-generation", "conversational"),
        ("text-to-audio", "text-to-speech"),
        ("token-classification", "ner"),
        ("module:Class", "fill-mask"),
    ):
        tasks.check_asked_as("m", task, asked)
    with pytest.raises(InvalidInput, match="'m' is for fill-mask, and this path asks it for 'embedding'"):
        tasks.check_asked_as("m", "fill-mask", "embedding")


# --- answers ---------------------------------------------------------------------------------------------------------


def test_speech_is_sent_as_a_wav_file() -> None:
    audio = np.array([[0.0, 0.5, -2.0]], np.float32)
    sound = tasks.task_of("text-to-audio").ask("a", {}).read({"audio": audio, "sampling_rate": 16_000})
    assert sound.media_type == b"audio/wav"
    with wave.open(io.BytesIO(sound.content)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
        assert np.frombuffer(file.readframes(3), "<i2").tolist() == [0, 16384, -32767]
    with pytest.raises(RequestError, match="no recording"):
        tasks.task_of("text-to-audio").ask("a", {}).read("silence")


def test_vectors_of_nothing_are_like_nothing() -> None:
    question = tasks.task_of("embedding").ask({"source_sentence": "a", "sentences": ["b", "c"]}, {})
    assert question.inputs == ["a", "b", "c"]
    assert question.read(np.array([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]], np.float32)) == [0.0, 1.0]
    with pytest.raises(RequestError, match="no array of 3 vectors"):
        question.read(np.zeros((2, 2), np.float32))


def test_labels_of_several_texts_are_several_lists() -> None:
    question = tasks.task_of("zero-shot-classification").ask(["a", "b"], {})
    one = {"sequence": "a", "labels": ["x"], "scores": [0.5]}
    assert question.read([one, one]) == [[{"label": "x", "score": 0.5}]] * 2


def test_a_text_of_several_tokens_comes_with_the_last_of_them() -> None:
    scores = [score(1, "\N{REPLACEMENT CHARACTER}"), score(2, "\N{REPLACEMENT CHARACTER}"), score(3, " b")]
    pieces = [{"text": "é", "logprobs": scores[:2]}, {"text": " b", "logprobs": scores[2:]}]
    got = streamed(True, pieces, told("é b", scores, "length"))
    assert [(event["index"], event["token"]["id"], event["token"]["text"]) for event in got] == [
        (1, 1, ""),
        (2, 2, "é"),
        (3, 3, " b"),
    ]
    assert got[-1]["generated_text"] == "é b"
    assert got[-1]["details"] == {"finish_reason": "length", "generated_tokens": 3, "input_length": 3, "seed": 4}


def test_without_details_each_piece_is_sent_at_once_and_the_end_is_an_event_of_its_own() -> None:
    format_ = generation.TokenEvents(generation.read({}))
    [first] = events(format_.piece({"text": "a"}))
    assert first["token"] == {"id": None, "text": "a", "logprob": None, "special": False}
    assert format_.piece({"text": ""}) == b""
    [last] = events(format_.end(Answer(told("a", []), TIMINGS)))
    assert (last["token"]["text"], last["token"]["special"], last["generated_text"]) == ("", True, "a")
    assert last["details"] is None


@pytest.mark.parametrize("details", [True, False])
def test_an_answer_in_one_piece_is_a_stream_as_well(details: bool) -> None:
    got = streamed(details, [{"generated_text": "a b", "finish_reason": "length"}], None)
    assert "".join(event["token"]["text"] for event in got) == "a b"
    assert got[-1]["generated_text"] == "a b"


def test_a_stream_that_breaks_off_keeps_its_last_token() -> None:
    format_ = generation.TokenEvents(generation.read({"details": True}))
    assert format_.piece({"text": "a", "logprobs": [score(1, "a")]}) == b""
    token, error = events(format_.error(RequestError("gone", code=Code.MODEL_CRASHED)))
    assert token["token"]["text"] == "a"
    assert error == {"error": "gone", "error_type": "incomplete_generation", "code": "model_crashed"}


def test_an_end_token_is_told_by_being_special() -> None:
    request = generation.read({"details": True})
    for scores, reason in (
        ([score(1, "a"), score(2, "</s>", special=True)], "eos_token"),
        ([score(1, "a")], "stop_sequence"),
        ([], "eos_token"),
    ):
        answer: Any = request.whole(told("a", scores))
        assert answer[0]["details"]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("code", "error_type"),
    [
        (Code.OVERLOADED, "overloaded"),
        (Code.MODEL_LOADING, "overloaded"),
        (Code.INVALID_INPUT, "validation"),
        (Code.MODEL_ERROR, "generation"),
        (Code.MODEL_CRASHED, "worker_lost"),
        (Code.DEADLINE_EXCEEDED, "timeout"),
        (Code.MODEL_FAILED, "model_failed"),
    ],
)
def test_errors_have_a_type_and_a_code(code: Code, error_type: str) -> None:
    body = json.loads(errors.body_of(RequestError("so", code=code)))
    assert body == {"error": "so", "error_type": error_type, "code": code}

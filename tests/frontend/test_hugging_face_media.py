"""Hugging Face's clients, unmodified, against a service with models that see, hear, speak and read tables.

Also the ways in which a picture may arrive: the bytes of a file, base64, a `data:` URL, a form.
"""

from __future__ import annotations

import base64
import inspect
import io
import re
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from shared import values
from tests import task_cases
from tests.hugging_face import Clients, Gallery, configured, native
from tests.media_models import Studio
from tests.task_cases import BOXES, CASES, OWN_RUNTIMES, TABLE, Case, assert_alike, loaded, picture
from tests.topology import ROOT, Service

# The asynchronous client's own business with the library below it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
]
ALL_CASES = (*OWN_RUNTIMES, *CASES)
PICTURE = picture(48, 40, 1)
RATE_HZ = 400
NAMES = {
    "cats": "image-classification-vit",
    "masks": "image-segmentation-segformer",
    "boxes": "object-detection-yolos",
    "clip": "zero-shot-image-classification-clip",
    "speech": "automatic-speech-recognition-Wav2Vec2ForCTC",
    "sounds": "audio-classification-wav2vec2",
    "document": "document-question-answering-layoutlm",
    "table": "table-question-answering-tapas",
    "voice": "text-to-audio-vits",
    "viewer": "image-text-to-text-llava",
}


@pytest.fixture(scope="module")
def service() -> Iterator[Gallery]:
    models = {case.id: (case.task, loaded(case.task, case.kind, case.labels, **case.options)) for case in ALL_CASES}
    for name, case_id in NAMES.items():
        models[name] = models[case_id]
    with Gallery({**models, "studio": ("tests.media_models:Studio", Studio())}) as started:
        yield started


@pytest.fixture(scope="module", params=["sync", "async"])
def ask(request: pytest.FixtureRequest, service: Gallery) -> Clients:
    return Clients(service, request.param)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- every task ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)
def test_every_task_answers_over_http_as_it_does_without(service: Gallery, case: Case) -> None:
    model = loaded(case.task, case.kind, case.labels, **case.options)
    expected = model.finish(model.forward([model.prepare(case.inputs[0], dict(case.parameters))])[0])
    answer = native(service, case.id, as_json(case.inputs[0]), **case.parameters)
    assert_alike(answer, as_json(values.unpack([bytes(frame) for frame in values.pack(expected)])))
    asked = service.post(f"/hf/{case.id}", json={"inputs": as_json(case.inputs[0]), "parameters": case.parameters})
    assert asked.status_code == 200, asked.text


def as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return encoded(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_json(entry) for key, entry in value.items()}
    return [as_json(entry) for entry in value] if isinstance(value, list) else value


# --- tasks of transformers -------------------------------------------------------------------------------------------


def test_image_classification_is_that_of_the_pipeline(ask: Clients, service: Gallery) -> None:
    expected = native(service, "cats", encoded(PICTURE))
    assert [(each.label, each.score) for each in ask("cats", "image_classification", PICTURE)] == [
        (each["label"], each["score"]) for each in expected
    ]
    [best] = ask("cats", "image_classification", PICTURE, top_k=1)
    assert best.label == expected[0]["label"]


def test_image_segmentation_gives_masks_of_the_pictures_size(ask: Clients, service: Gallery) -> None:
    expected = native(service, "masks", encoded(PICTURE))
    for settings in ({}, {"mask_threshold": 0.5, "overlap_mask_area_threshold": 0.5, "subtask": "semantic"}):
        answer = ask("masks", "image_segmentation", PICTURE, **settings)
        assert [each.label for each in answer] == [each["label"] for each in expected]
        for each, other in zip(answer, expected, strict=True):
            assert each.mask.size == (48, 40)
            assert each.mask.tobytes() == Image.open(io.BytesIO(base64.b64decode(other["mask"]))).tobytes()


def test_labels_of_pictures_and_sounds_are_those_of_the_pipelines(ask: Clients, service: Gallery) -> None:
    labels = {"candidate_labels": ["fox", "sea"]}
    for name, method, content, parameters in (
        ("boxes", "object_detection", PICTURE, {"threshold": 0.2}),
        ("clip", "zero_shot_image_classification", PICTURE, labels),
        ("sounds", "audio_classification", sound(900), {}),
        ("sounds", "audio_classification", sound(900), {"top_k": 1, "function_to_apply": "sigmoid"}),
    ):
        expected = native(service, name, encoded(content), **parameters)
        answer = ask(name, method, content, **parameters)
        assert [(each.label, each.score) for each in answer] == [(each["label"], each["score"]) for each in expected]
        assert answer


def sound(count: int) -> bytes:
    """A WAV file of 16 bits, 400 Hz."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((np.array(task_cases.samples(count)) * 10_000).astype("<i2").tobytes())
    return stream.getvalue()


def test_document_question_answering_takes_words_beside_the_picture(ask: Clients, service: Gallery) -> None:
    settings = {"top_k": 2, "max_answer_len": 3, "doc_stride": 8, "max_seq_len": 60, "handle_impossible_answer": True}
    for more in ({}, settings):
        expected = native(
            service, "document", {"image": encoded(PICTURE), "question": "What is it?", "word_boxes": BOXES}, **more
        )
        answer = ask("document", "document_question_answering", PICTURE, "What is it?", word_boxes=BOXES, **more)
        assert [(each.answer, each.score, each.start, each.end) for each in answer] == [
            tuple(each[key] for key in ("answer", "score", "start", "end")) for each in expected
        ]
    with pytest.raises(HfHubHTTPError, match=r"word_boxes|[Tt]esseract"):
        ask("document", "document_question_answering", PICTURE, "What is it?")
    with pytest.raises(HfHubHTTPError, match="lang must be the names of languages"):
        ask("document", "document_question_answering", PICTURE, "What?", lang="../x", word_boxes=BOXES)


def test_table_question_answering_names_cells(ask: Clients, service: Gallery) -> None:
    expected = native(service, "table", {"table": TABLE, "query": "Who is old?"})
    for settings in ({}, {"sequential": True, "padding": "longest"}):
        answer = ask("table", "table_question_answering", TABLE, "Who is old?", **settings)
        assert (answer.answer, answer.cells) == (expected["answer"], expected["cells"])
        assert answer.coordinates == expected["coordinates"]


def test_text_to_speech_is_a_wav_file(ask: Clients, service: Gallery) -> None:
    expected = native(service, "voice", "one two")
    with wave.open(io.BytesIO(ask("voice", "text_to_speech", "one two"))) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, expected["sampling_rate"])
        heard = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    np.testing.assert_allclose(heard / 32767, np.clip(expected["audio"], -1, 1), atol=1e-3)


def test_pictures_are_described_and_asked_about(ask: Clients, service: Gallery) -> None:
    service_options = {"return_full_text": False}
    part = {"type": "image", "image": encoded(PICTURE)}
    [expected] = native(service, "viewer", [{"role": "user", "content": [part]}], **service_options)
    assert ask("viewer", "image_to_text", PICTURE).generated_text == expected["generated_text"]
    content = [part, {"type": "text", "text": "What is it?"}]
    [expected] = native(service, "viewer", [{"role": "user", "content": content}], **service_options)
    for more in ({}, {"top_k": 1}):
        [answer] = ask("viewer", "visual_question_answering", PICTURE, "What is it?", **more)
        assert (answer.answer, answer.score) == (expected["generated_text"], None)
    with pytest.raises(HfHubHTTPError, match="top_k must be 1"):
        ask("viewer", "visual_question_answering", PICTURE, "What is it?", top_k=2)


def test_speech_is_recognised_in_wav_bytes_and_files(ask: Clients, service: Gallery, tmp_path: Path) -> None:
    samples = (np.sin(np.arange(2 * RATE_HZ) / 3.0) * 20_000).astype("<i2")
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes(samples.tobytes())
    expected = native(service, "speech", {"raw": (samples / 32768).tolist(), "sampling_rate": RATE_HZ})
    assert ask("speech", "automatic_speech_recognition", path.read_bytes()).text == expected["text"]
    assert ask("speech", "automatic_speech_recognition", path).text == expected["text"]
    flac = io.BytesIO()
    soundfile.write(flac, samples, RATE_HZ, format="FLAC", subtype="PCM_16")
    assert ask("speech", "automatic_speech_recognition", flac.getvalue()).text == expected["text"]
    for content in (path.read_bytes(), flac.getvalue()):
        form = service.post("/hf/speech", files={"file": ("a", content)}, data={"return_timestamps": "char"})
        assert form.json()["text"] == expected["text"]
        assert form.json()["chunks"]
    for hostile in (b"RIFF", flac.getvalue()[:50], b"#EXTM3U\nfile:///etc/passwd\n"):
        with pytest.raises(HfHubHTTPError, match="recording"):
            ask("speech", "automatic_speech_recognition", hostile)
    timed = ask("speech", "automatic_speech_recognition", path, extra_body={"return_timestamps": "char"})
    assert timed.text == expected["text"]
    assert all(len(chunk.timestamp) == 2 for chunk in timed.chunks)


# --- classes of one's own --------------------------------------------------------------------------------------------


def test_a_class_of_ones_own_makes_pictures_sounds_and_texts(ask: Clients) -> None:
    assert ask("studio", "text_to_image", "a fox").size == (16, 8)
    assert ask("studio", "image_to_image", PICTURE, prompt="a fox").size == (16, 8)
    assert ask("studio", "image_to_text", PICTURE).generated_text == f"{len(PICTURE)} bytes"
    [answer] = ask("studio", "visual_question_answering", PICTURE, "What is it?", top_k=1)
    assert (answer.answer, answer.score) == ("What is it?", 1.0)
    [heard] = ask("studio", "audio_to_audio", sound(100))
    assert heard.blob == sound(100)
    assert ask("studio", "tabular_classification", {"a": ["1", "2"]}) == ["1", "1"]


# --- ways in ---------------------------------------------------------------------------------------------------------


def test_a_picture_may_come_in_five_ways(service: Gallery) -> None:
    expected = native(service, "cats", encoded(PICTURE), top_k=2)
    data_url = f"data:image/png;base64,{encoded(PICTURE)}"
    assert native(service, "cats", data_url, top_k=2) == expected
    post, parameters = service.post, {"top_k": 2}
    answers = [
        post("/hf/cats", json={"inputs": encoded(PICTURE), "parameters": parameters}),
        post("/hf/cats", json={"inputs": data_url, "parameters": parameters}),
        post("/hf/cats", files={"inputs": ("a.png", PICTURE, "image/png")}, data={"top_k": "2"}),
        post("/hf/cats", files={"file": ("a", PICTURE)}, data={"parameters": '{"top_k": 2}'}),
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json() == expected
    whole = post("/hf/cats", content=PICTURE, headers={"content-type": "image/png"})
    assert whole.json()[:2] == expected


def test_bad_pictures_cost_their_senders_alone() -> None:
    """With all that there is between a client and a model."""
    with Service(configured({"cats": ("image-classification", task_cases.directory("vit"))})) as service:
        service.wait_ready(150)
        check_bad_pictures(service)


def check_bad_pictures(service: Service) -> None:
    expected = native(service, "cats", encoded(PICTURE))
    hostile = [b"hello", PICTURE[:100], b"%!PS-Adobe-3.0 EPSF-3.0\n", b"GIF89a\xff\xff\xff\xff\0\0\0"]
    names = ["http://127.0.0.1:9/a.png", "file:///etc/passwd", "/etc/passwd"]
    pids = service.model_pids()
    bad = [service.ask_later("cats", encoded(data)) for data in hostile] + [
        service.ask_later("cats", name) for name in names
    ]
    good = [service.ask_later("cats", encoded(PICTURE)) for _ in range(8)]
    assert [each.result().status_code for each in bad] == [422] * len(bad)
    for each in bad:
        assert each.result().json()["error_type"] == "invalid_input"
    for each in good:
        assert [label["label"] for label in each.result().json()] == [label["label"] for label in expected]
        np.testing.assert_allclose(
            [label["score"] for label in each.result().json()], [label["score"] for label in expected], atol=1e-4
        )
    assert service.model_pids() == pids


# --- the table of methods --------------------------------------------------------------------------------------------


def test_the_document_has_every_method_and_counts_them() -> None:
    text = (ROOT / "docs" / "hugging-face.md").read_text()
    section = text[text.index("## Methods") : text.index("## Text generation")]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    told: dict[str, str] = {}
    for names, outcome, _ in rows:
        for name in re.findall(r"`(\w+)`", names):
            told[name] = outcome.strip()
    methods = {
        name
        for name, _ in inspect.getmembers(InferenceClient, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    }
    assert set(told) == methods
    outcomes: list[Any] = [list(told.values()).count(word) for word in ("passes", "own class", "not applicable")]
    assert sum(outcomes) == len(methods)
    assert f"Of {len(methods)} methods {outcomes[0]} pass, {outcomes[1]} pass with" in section
    assert f"{outcomes[2]} are not applicable" in section

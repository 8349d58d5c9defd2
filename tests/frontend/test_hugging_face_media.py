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
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from tests import task_cases
from tests.hugging_face import Clients, configured, native
from tests.task_cases import BOXES, TABLE, picture
from tests.topology import ROOT, Service

# The asynchronous client's own business with the library below it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
PICTURE = picture(48, 40, 1)
SOUND = task_cases.samples(900)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    models = configured(
        {
            "cats": ("image-classification", task_cases.directory("vit")),
            "masks": ("image-segmentation", task_cases.directory("segformer")),
            "document": ("document-question-answering", task_cases.directory("layoutlm")),
            "table": ("table-question-answering", task_cases.directory("tapas")),
            "voice": ("text-to-speech", task_cases.directory("vits")),
        }
    )
    models.append({"name": "studio", "model": "tests.media_models:Studio", "device": "cpu"})
    with Service(models, server={"parallel_loads": 2}) as started:
        yield started.wait_ready(150)


@pytest.fixture(scope="module", params=["sync", "async"])
def ask(request: pytest.FixtureRequest, service: Service) -> Clients:
    return Clients(service, request.param)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- tasks of transformers -------------------------------------------------------------------------------------------


def test_image_classification_is_that_of_the_pipeline(ask: Clients, service: Service) -> None:
    expected = native(service, "cats", encoded(PICTURE))
    assert [(each.label, each.score) for each in ask("cats", "image_classification", PICTURE)] == [
        (each["label"], each["score"]) for each in expected
    ]
    [best] = ask("cats", "image_classification", PICTURE, top_k=1)
    assert best.label == expected[0]["label"]


def test_image_segmentation_gives_masks_of_the_pictures_size(ask: Clients, service: Service) -> None:
    expected = native(service, "masks", encoded(PICTURE))
    for settings in ({}, {"mask_threshold": 0.5, "overlap_mask_area_threshold": 0.5, "subtask": "semantic"}):
        answer = ask("masks", "image_segmentation", PICTURE, **settings)
        assert [each.label for each in answer] == [each["label"] for each in expected]
        for each, other in zip(answer, expected, strict=True):
            assert each.mask.size == (48, 40)
            assert each.mask.tobytes() == Image.open(io.BytesIO(base64.b64decode(other["mask"]))).tobytes()


def test_document_question_answering_takes_words_beside_the_picture(ask: Clients, service: Service) -> None:
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


def test_table_question_answering_names_cells(ask: Clients, service: Service) -> None:
    expected = native(service, "table", {"table": TABLE, "query": "Who is old?"})
    for settings in ({}, {"sequential": True, "padding": "longest"}):
        answer = ask("table", "table_question_answering", TABLE, "Who is old?", **settings)
        assert (answer.answer, answer.cells) == (expected["answer"], expected["cells"])
        assert answer.coordinates == expected["coordinates"]


def test_text_to_speech_is_a_wav_file(ask: Clients, service: Service) -> None:
    expected = native(service, "voice", "one two")
    with wave.open(io.BytesIO(ask("voice", "text_to_speech", "one two"))) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, expected["sampling_rate"])
        heard = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    np.testing.assert_allclose(heard / 32767, np.clip(expected["audio"], -1, 1), atol=1e-3)


# --- classes of one's own --------------------------------------------------------------------------------------------


def test_a_class_of_ones_own_makes_pictures_sounds_and_texts(ask: Clients) -> None:
    assert ask("studio", "text_to_image", "a fox").size == (16, 8)
    assert ask("studio", "image_to_image", PICTURE, prompt="a fox").size == (16, 8)
    assert ask("studio", "image_to_text", PICTURE).generated_text == f"{len(PICTURE)} bytes"
    [answer] = ask("studio", "visual_question_answering", PICTURE, "What is it?", top_k=1)
    assert (answer.answer, answer.score) == ("What is it?", 1.0)
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(400)
        file.writeframes(bytes(100))
    [sound] = ask("studio", "audio_to_audio", stream.getvalue())
    assert sound.blob == stream.getvalue()
    assert ask("studio", "tabular_classification", {"a": ["1", "2"]}) == ["1", "1"]


# --- ways in ---------------------------------------------------------------------------------------------------------


def test_a_picture_may_come_in_five_ways(service: Service) -> None:
    expected = native(service, "cats", encoded(PICTURE), top_k=2)
    data_url = f"data:image/png;base64,{encoded(PICTURE)}"
    assert native(service, "cats", data_url, top_k=2) == expected
    post, parameters = service.http.post, {"top_k": 2}
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


def test_bad_pictures_cost_their_senders_alone(service: Service) -> None:
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

"""A case for each task of transformers' pipelines: a tiny model, requests, and the library's own answers to them.

Owns what the tests of the tasks and the table in `docs/tasks.md` have in common, and `UNTRIED`: why a task has no case.
"""

from __future__ import annotations

import functools
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from model_worker.runtimes import registry
from model_worker.runtimes.base import Model
from model_worker.specs import RuntimeSpec
from tests import tiny_media_models, tiny_models

TEXT = "Paris is the capital of France."
PNG_MAGIC = b"\x89PNG"


@functools.cache
def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of large coloured squares: noise would look the same to a model that scales it down."""
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(squares).resize((width, height), Image.Resampling.BICUBIC).save(stream, "PNG")
    return stream.getvalue()


def samples(count: int, seed: int = 0) -> list[float]:
    values: list[float] = np.random.default_rng(seed).normal(scale=0.3, size=count).astype(np.float32).tolist()
    return values


@functools.cache
def film(pictures: int = 8, width: int = 48, height: int = 40, seed: int = 0) -> bytes:
    """A film in an MP4 file."""
    import av

    colours = np.random.default_rng(seed).integers(0, 255, (pictures, 4, 4, 3), dtype=np.uint8)
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        track: Any = container.add_stream("mpeg4", rate=10)
        track.width, track.height, track.pix_fmt = width, height, "yuv420p"
        for colour in colours:
            pixels = np.ascontiguousarray(colour.repeat(height // 4, axis=0).repeat(width // 4, axis=1))
            container.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(track.encode())
    return stream.getvalue()


@dataclass(frozen=True)
class Case:
    """Requests of one task, for one model."""

    task: str
    kind: str
    """Of `tiny_media_models`, or a class of `tiny_models`."""
    inputs: Sequence[Any]
    """As a client sends them; pictures and films as bytes."""
    parameters: dict[str, Any] = field(default_factory=dict)
    batches: bool = True
    """Whether requests share a forward."""
    model: str = ""
    """What the table calls it."""
    labels: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.task}-{self.kind}"


def recording(count: int, rate_hz: int, seed: int = 0) -> dict[str, Any]:
    return {"raw": samples(count, seed), "sampling_rate": rate_hz}


A, B, C = picture(48, 40, 1), picture(64, 64, 2), picture(40, 80, 3)
BOXES = [["fox", [0, 0, 10, 10]], ["sea", [10, 10, 300, 40]], ["one", [5, 50, 1000, 1000]]]
TABLE = {"animal": ["fox", "sea dog"], "age": ["56", "45"]}
CHAT = [{"role": "user", "content": [{"type": "image", "image": A}, {"type": "text", "text": "fox?"}]}]
SPOKEN_CHAT = [{"role": "user", "content": [{"type": "audio", "audio": samples(8000)}, {"type": "text", "text": "?"}]}]
DECISION = {
    "state": "The fox jumps.",
    "questions": {
        "jumps": {"type": "noul", "instructions": "Does it jump?"},
        "who": {"type": "choice", "instructions": "Who?", "criteria": {"fox": "a fox", "dog": "a dog"}},
    },
}
_NEW_TOKENS = {"max_new_tokens": 4}

CASES = [
    Case(
        "text-classification", "BertForSequenceClassification", [TEXT, "fox"], labels=("good", "bad"),
        model="BERT, RoBERTa, GPT-2, GPT-Neo",
    ),
    Case(
        "token-classification", "BertForTokenClassification", [TEXT, "fox"], labels=("O", "B-X"),
        model="BERT, RoBERTa",
    ),
    Case("fill-mask", "BertForMaskedLM", [f"{TEXT} [MASK]", "fox [MASK]"], {"top_k": 2}, model="BERT, RoBERTa"),
    Case(
        "zero-shot-classification", "BertForSequenceClassification", [TEXT, "fox"],
        {"candidate_labels": ["travel", "food"]}, labels=("contradiction", "entailment"), model="BERT, RoBERTa, GPT-2",
    ),
    Case("feature-extraction", "BertModel", [TEXT, "fox"], model="BERT, RoBERTa, GPT-2"),
    Case("table-question-answering", "tapas", [{"table": TABLE, "query": "Who is old?"}], batches=False, model="TAPAS"),
    Case("decision", "gpt2-decision", [DECISION], batches=False, model="GPT-2"),
    Case("audio-classification", "wav2vec2", [recording(900, 400), recording(900, 400, 1)], model="wav2vec 2.0"),
    Case(
        "automatic-speech-recognition", "Wav2Vec2ForCTC", [recording(900, 400), recording(900, 400, 1)],
        model="wav2vec 2.0",
    ),
    Case(
        "automatic-speech-recognition", "whisper", [recording(16_000, 16_000)], _NEW_TOKENS, batches=False,
        model="Whisper",
    ),
    Case(
        "zero-shot-audio-classification", "clap", [recording(1600, 16_000), recording(1600, 16_000, 1)],
        {"candidate_labels": ["fox", "sea"]}, model="CLAP",
    ),
    Case("text-to-audio", "vits", ["one two", "the fox"], batches=False, model="VITS"),
    Case("image-classification", "vit", [A, B, C], {"top_k": 2}, model="ViT"),
    Case("image-feature-extraction", "vit-body", [A, B, C], {"pool": True}, model="ViT"),
    Case("image-segmentation", "segformer", [A, B, C], model="SegFormer"),
    Case("depth-estimation", "glpn", [A, picture(48, 40, 4), C], model="GLPN"),
    Case("object-detection", "yolos", [A, B, C], {"threshold": 0.2}, model="YOLOS"),
    Case("zero-shot-image-classification", "clip", [A, B, C], {"candidate_labels": ["fox", "sea"]}, model="CLIP"),
    Case(
        "zero-shot-object-detection", "owlvit",
        [{"image": A, "candidate_labels": ["fox", "sea shells"]}, {"image": C, "candidate_labels": ["one", "waiter"]}],
        {"threshold": 0.5}, model="OWL-ViT",
    ),
    Case("keypoint-matching", "superglue", [[A, B], [B, C]], batches=False, model="SuperGlue"),
    Case("video-classification", "videomae", [film(), film(seed=1)], {"top_k": 2}, batches=False, model="VideoMAE"),
    Case(
        "document-question-answering", "layoutlm",
        [{"question": "What is it?", "word_boxes": BOXES}, {"question": "fox", "image": A, "word_boxes": BOXES[:2]}],
        batches=False, model="LayoutLM",
    ),
    Case(
        "document-question-answering", "donut", [{"question": "fox", "image": A}], _NEW_TOKENS, batches=False,
        model="Donut",
    ),
    Case(
        "image-text-to-text", "llava", [{"images": A, "text": "<image> fox"}, CHAT], _NEW_TOKENS, batches=False,
        model="LLaVA",
    ),
    Case(
        "any-to-any", "qwen2-audio", [{"text": "<|AUDIO|> fox", "audio": samples(8000)}, SPOKEN_CHAT], _NEW_TOKENS,
        batches=False, model="Qwen2-Audio",
    ),
]  # fmt: skip

UNTRIED = {"mask-generation": "needs torchvision, which the tests run without; refused at the load where it is not"}
"""By task: why no case is here."""
# With runtimes and tests of their own; the library has a pipeline for one of them.
OWN_RUNTIMES = [
    Case("embedding", "BertModel", [TEXT], {"normalize": True}, model="BERT, RoBERTa, all-MiniLM-L6-v2"),
    Case(
        "question-answering", "BertForQuestionAnswering", [{"question": "Where is Paris?", "context": TEXT}],
        model="BERT, RoBERTa, DistilBERT, ALBERT, XLNet, GPT-2, Llama",
    ),
    Case(
        "text-generation", "GPT2LMHeadModel", [TEXT], {"max_new_tokens": 4},
        model="GPT-2, GPT-Neo, GPT-J, Llama, Mamba, SmolLM2 (GGUF)", options={"continuous_batching": False},
    ),
    *(
        Case(task, "BartForConditionalGeneration", [TEXT], {"max_new_tokens": 4}, model="BART, T5")
        for task in ("summarization", "text2text-generation", "translation")
    ),
]  # fmt: skip
ELSEWHERE = frozenset({"text-generation"})


@functools.cache
def directory(kind: str, labels: tuple[str, ...] = ()) -> Path:
    """Where the model of this kind is; made when asked for, kept until this process ends."""
    path = Path(_directories().name) / f"{kind}-{len(labels)}"
    if path.exists():
        return path
    if kind == "Wav2Vec2ForCTC":
        return tiny_models.save_speech(path)
    if kind == "clap":
        return tiny_models.save_sound_and_text(path)
    if kind == "BartForConditionalGeneration":
        return tiny_models.save_translator(path, kind)
    if kind in tiny_media_models.KINDS:
        return tiny_media_models.save(path, kind)
    return tiny_models.save(path, kind, labels=labels or None)


@functools.cache
def _directories() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hw-models-")


@functools.cache
def loaded(task: str, kind: str, labels: tuple[str, ...] = (), **options: object) -> Model:
    model = registry.build(RuntimeSpec("tiny", str(directory(kind, labels)), task, options=options))
    model.load("cpu")
    return model


def pipeline_answers(case: Case) -> list[Any]:
    """What `transformers.pipeline` says to each input, as PIL images and arrays: it takes no bytes."""
    make: Any = transformers.pipeline
    pipeline = make(case.task, model=str(directory(case.kind, case.labels)), dtype=torch.float32, device="cpu")
    return [pipeline(_for_library(each, case.kind), **case.parameters) for each in case.inputs]


def _for_library(value: Any, kind: str, key: str = "") -> Any:
    if isinstance(value, bytes):
        from PIL import Image

        if value.startswith(PNG_MAGIC):
            return Image.open(io.BytesIO(value))
        path = Path(_directories().name) / f"{hash(value)}.mp4"
        path.write_bytes(value)
        return str(path)
    if isinstance(value, list):
        if key in ("raw", "audio"):
            return np.array(value, np.float32)
        return [_for_library(each, kind) for each in value]
    if isinstance(value, dict):
        if kind == "clap":
            return np.array(value["raw"], np.float32)
        return {name: _for_library(each, kind, name) for name, each in value.items()}
    return value


def assert_alike(got: Any, expected: Any, tolerance: float = 1e-4, *, is_exact: bool = False) -> None:
    """Equal within `tolerance`; unless `is_exact`, whole numbers up to one and pictures up to single pixels, which
    rounding may move."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_alike(got[key], expected[key], tolerance, is_exact=is_exact)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_alike(one, other, tolerance, is_exact=is_exact)
    elif (is_exact and isinstance(expected, (int, bytes))) or isinstance(expected, (bool, str, type(None))):
        assert got == expected
    elif isinstance(expected, (int, np.integer)):
        assert abs(got - expected) <= 1
    elif isinstance(expected, bytes) or hasattr(expected, "getbands"):
        assert_same_picture(got, expected)
    else:
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), atol=tolerance, rtol=tolerance)


def assert_same_picture(got: bytes, expected: Any) -> None:
    from PIL import Image

    one = np.asarray(Image.open(io.BytesIO(got)), np.int16)
    other = np.asarray(Image.open(io.BytesIO(expected)) if isinstance(expected, bytes) else expected, np.int16)
    assert one.shape == other.shape
    assert (abs(one - other) > 1).mean() < 0.01

"""What shares a batch changes no answer: random requests in random batches beside each of them computed alone.

One model for each kind of runtime. The requests go the way they go in a model process: prepared, split by cost and
group, computed, finished.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.sentiment import Sentiment
from model_worker.replica import returns
from model_worker.replica.calibration import calibrate
from model_worker.replica.host_stages import Limits
from model_worker.runtimes import batching, registry
from model_worker.runtimes.base import Model
from model_worker.specs import RuntimeSpec
from tests import task_cases, tiny_media_models, tiny_models
from tests.task_cases import assert_alike

pytestmark = [
    pytest.mark.filterwarnings("ignore:Tokenizer does not support real words:UserWarning"),
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
]
TOLERANCE = 1e-4
POSITIONS = 128
LABELS = ["contradiction", "entailment", "O"]
WORDS = " ".join(tiny_models.TEXTS).split()

Request = tuple[Any, dict[str, Any]]


def text(chooser: random.Random, longest: int = 14) -> str:
    # Mostly short, as texts are; sometimes as long as may be.
    return " ".join(chooser.choices(WORDS, k=min(longest, int(chooser.lognormvariate(1.8, 1.0)) + 1)))


def texts(chooser: random.Random) -> Any:
    return text(chooser) if chooser.random() < 0.8 else [text(chooser) for _ in range(chooser.randint(1, 4))]


def question(chooser: random.Random) -> Any:
    return {"question": text(chooser, 6), "context": text(chooser) + " " + text(chooser, 60)}


def recording(chooser: random.Random) -> Any:
    return {"raw": [chooser.uniform(-1, 1) for _ in range(chooser.choice((500, 800, 1200)))], "sampling_rate": 400}


def seen(chooser: random.Random) -> bytes:
    return task_cases.picture(*chooser.choice(((48, 40), (64, 64), (40, 80))), chooser.randrange(20))


def sounds(chooser: random.Random) -> Any:
    return task_cases.recording(1600, 16_000, chooser.randrange(20))


Kind = tuple[str, str, Callable[[random.Random], Any], Sequence[dict[str, Any]]]
KINDS: dict[str, Kind] = {
    "embedding": ("embedding", "BertModel", texts, [{}, {"normalize": True}, {"dimensions": 5}]),
    "text-classification": (
        "text-classification", "RobertaForSequenceClassification", text, [{}, {"top_k": None}, {"top_k": 2}],
    ),
    "token-classification": (
        "token-classification", "BertForTokenClassification", text, [{}, {"aggregation_strategy": "simple"}],
    ),
    "fill-mask": ("fill-mask", "BertForMaskedLM", lambda chooser: text(chooser) + " [MASK]", [{}, {"top_k": 2}]),
    "zero-shot-classification": (
        "zero-shot-classification", "GPT2ForSequenceClassification", text,
        [{"candidate_labels": "fox, one"}, {"candidate_labels": ["sea", "paris", "one"], "multi_label": True}],
    ),
    "feature-extraction": ("feature-extraction", "GPT2Model", text, [{}]),
    "automatic-speech-recognition": ("automatic-speech-recognition", "Wav2Vec2ForCTC", recording, [{}]),
    "audio-classification": ("audio-classification", "wav2vec2", recording, [{}, {"top_k": 1}]),
    "zero-shot-audio-classification": (
        "zero-shot-audio-classification", "clap", sounds,
        [{"candidate_labels": ["fox", "sea"]}, {"candidate_labels": ["sea", "the waiter", "one"]}],
    ),
    "image-classification": (
        "image-classification", "vit", lambda chooser: seen(chooser) if chooser.random() < 0.8 else [seen(chooser)],
        [{}, {"top_k": 1}, {"function_to_apply": "sigmoid"}],
    ),
    "image-feature-extraction": ("image-feature-extraction", "vit-body", seen, [{}, {"pool": True}]),
    "image-segmentation": ("image-segmentation", "segformer", seen, [{}, {"subtask": "semantic"}]),
    "object-detection": ("object-detection", "yolos", seen, [{"threshold": 0.2}, {"threshold": 0.5}]),
    "depth-estimation": ("depth-estimation", "glpn", seen, [{}]),
    "zero-shot-image-classification": (
        "zero-shot-image-classification", "clip", seen,
        [{"candidate_labels": ["fox", "sea"]}, {"candidate_labels": ["fox", "the quick waiter", "one"]}],
    ),
    "zero-shot-object-detection": (
        "zero-shot-object-detection", "owlvit", seen,
        [{"candidate_labels": ["fox"], "threshold": 0.5}, {"candidate_labels": ["sea shells", "one"], "top_k": 3}],
    ),
    "question-answering": (
        "question-answering", "BertForQuestionAnswering", question, [{}, {"max_seq_len": 40, "doc_stride": 5}],
    ),
    "text-generation, whole batches": (
        "text-generation", "GPT2LMHeadModel", text, [{"max_new_tokens": 3}, {"max_new_tokens": 6}],
    ),
    "a class of one's own": ("", "", lambda chooser: text(chooser) + " good fine", [{}]),
}  # fmt: skip


# Their masks, and the places they tell, are rounded.
SEEN = frozenset(kind for kind, (_, _, make, _) in KINDS.items() if make is seen)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @functools.cache
    def load(kind: str) -> Model:
        task, class_name, _, _ = KINDS[kind]
        if not task:
            own = Sentiment()
            own.load("cpu")
            return own
        directory = tmp_path_factory.mktemp("model")
        save(directory, class_name)
        options: dict[str, object] = {"continuous_batching": False} if task == "text-generation" else {}
        model = registry.build(RuntimeSpec("tiny", str(directory), task, options=options))
        model.load("cpu")
        return model

    return load


def save(directory: Path, class_name: str) -> None:
    if class_name == "Wav2Vec2ForCTC":
        tiny_models.save_speech(directory)
        return
    if class_name == "clap":
        tiny_models.save_sound_and_text(directory)
        return
    if class_name in tiny_media_models.KINDS:
        tiny_media_models.save(directory, class_name)
        return
    labels = LABELS if "Classification" in class_name else None
    tiny_models.save(directory, class_name, positions=POSITIONS, labels=labels)


def computed(model: Model, requests: Sequence[Request], max_batch_cost: int) -> tuple[list[Any], int]:
    """The answers, and how many requests the fullest batch had."""
    items = [model.prepare(*request) for request in requests]
    batches = batching.split(
        [returns.cost_of(model, item) for item in items],
        [returns.group_of(model, item) for item in items],
        max_batch_cost=max_batch_cost,
        max_batch_size=8,
    )
    answers: dict[int, Any] = {}
    for positions in batches:
        outputs = returns.one_output_per_item(model, [items[position] for position in positions])
        answers.update(zip(positions, map(model.finish, outputs), strict=True))
    return [answers[position] for position in range(len(items))], max(map(len, batches))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_mix_is_answered_as_each_request_alone(load: Callable[[str], Model], kind: str, seed: int) -> None:
    model = load(kind)
    _, _, make, parameters = KINDS[kind]
    chooser = random.Random(seed)
    requests = [(make(chooser), chooser.choice(parameters)) for _ in range(16)]
    together, fullest = computed(model, requests, chooser.choice((100, 200, 400)))
    assert fullest > 1
    for answer, request in zip(together, requests, strict=True):
        [alone], _ = computed(model, [request], 0)
        assert_alike(answer, alone, TOLERANCE, is_exact=kind not in SEEN)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_batched_and_found_a_cost_for(load: Callable[[str], Model], kind: str) -> None:
    model = load(kind)
    own_cost = model.max_batch_cost
    # Each forward takes one tick.
    found = calibrate(model, Limits(own_cost, 8), load_s=1.0, clock=functools.partial(next, itertools.count(0.0, 1e-3)))
    offers = kind not in ("text-generation, whole batches", "a class of one's own")
    assert bool(found.speeds) is offers, found.text
    assert (found.max_batch_cost > 0) is offers
    assert model.max_batch_cost == own_cost

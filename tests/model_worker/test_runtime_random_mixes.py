"""What shares a batch changes no answer: random requests in random batches beside each of them computed alone.

One model for each kind of runtime. The requests go the way they go in a model process: prepared, split by cost and
group, computed, finished.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.sentiment import Sentiment
from model_worker.replica import returns
from model_worker.replica.calibration import calibrate
from model_worker.replica.host_stages import Limits
from model_worker.runtimes import batching, registry
from model_worker.runtimes.base import Model
from model_worker.specs import RuntimeSpec
from tests import tiny_models

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
    "question-answering": (
        "question-answering", "BertForQuestionAnswering", question, [{}, {"max_seq_len": 40, "doc_stride": 5}],
    ),
    "text-generation, whole batches": (
        "text-generation", "GPT2LMHeadModel", text, [{"max_new_tokens": 3}, {"max_new_tokens": 6}],
    ),
    "a class of one's own": ("", "", lambda chooser: text(chooser) + " good fine", [{}]),
}  # fmt: skip


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


def numbers_and_words(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield key
            yield from numbers_and_words(value[key])
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for entry in value:
            yield from numbers_and_words(entry)
    else:
        yield value


def assert_same(got: Any, expected: Any) -> None:
    for one, other in zip(numbers_and_words(got), numbers_and_words(expected), strict=True):
        if isinstance(other, (float, np.floating, np.ndarray)):
            np.testing.assert_allclose(one, other, atol=TOLERANCE, rtol=TOLERANCE)
        else:
            assert one == other


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words:UserWarning")
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
        assert_same(answer, alone)


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

"""Every pipeline task through the runtime, compared with the library's own pipeline called for one input at a time."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from model_worker.runtimes import media, registry
from model_worker.runtimes.base import Model
from model_worker.specs import RuntimeSpec
from shared import values
from shared.errors import Code, InvalidInput, LoadError, RequestError
from tests import tiny_models

TEXTS = [
    "Paris is the capital of France, and Berlin is the capital of Germany.",
    "fox",
    "She sells sea shells by the sea shore!",
    "Hello world",
    "The quick brown fox jumps over the lazy dog. Nobody expects the waiter.",
]
POSITIONS = 64
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by the name of their class, made when asked for."""

    class Directories(dict[str, Path]):
        def __missing__(self, class_name: str) -> Path:
            directory = tmp_path_factory.mktemp(class_name)
            if class_name == "Wav2Vec2ForCTC":
                self[class_name] = tiny_models.save_speech(directory)
                return self[class_name]
            labels = ["contradiction", "entailment", "O"] if "Classification" in class_name else None
            self[class_name] = tiny_models.save(directory, class_name, positions=POSITIONS, labels=labels)
            return self[class_name]

    return Directories()


@functools.cache
def loaded(task: str, directory: Path) -> Any:
    return load(task, directory)


def load(task: str, directory: Path, **options: object) -> Any:
    model = registry.build(RuntimeSpec("tiny", str(directory), task, options=dict(options)))
    model.load("cpu")
    return model


def library_pipeline(task: str, directory: Path) -> Any:
    make: Any = transformers.pipeline
    return make(task, model=str(directory), dtype=torch.float32, device="cpu")


def answer(model: Model, *requests: tuple[Any, dict[str, Any]]) -> list[Any]:
    """All requests in as few forwards as their groups allow, each stage on a thread of its own, packed and unpacked."""
    items = on_thread(lambda: [model.prepare(*request) for request in requests])
    outputs: dict[int, Any] = {}
    for group in {model.group(item) for item in items}:
        members = [index for index, item in enumerate(items) if model.group(item) == group]
        computed = model.forward([items[index] for index in members])
        outputs.update(zip(members, computed, strict=True))
    results = on_thread(lambda: [model.finish(outputs[index]) for index in range(len(items))])
    return [values.unpack([bytes(frame) for frame in values.pack(result)]) for result in results]


def on_thread(work: Any) -> Any:
    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, (float, np.floating, np.ndarray)):
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
    elif isinstance(expected, torch.Tensor):
        np.testing.assert_allclose(np.asarray(got), expected.numpy(), atol=TOLERANCE, rtol=TOLERANCE)
    else:
        assert got == expected


LABELS = ["fox", "the capital", "one"]
CASES: list[tuple[str, str, Sequence[Any], dict[str, Any]]] = [
    ("text-classification", "BertForSequenceClassification", TEXTS, {}),
    ("text-classification", "BertForSequenceClassification", TEXTS, {"top_k": None}),
    ("text-classification", "RobertaForSequenceClassification", TEXTS, {"top_k": 2, "function_to_apply": "sigmoid"}),
    ("text-classification", "GPT2ForSequenceClassification", TEXTS, {"top_k": 1}),
    ("text-classification", "GPTNeoForSequenceClassification", TEXTS, {"function_to_apply": "none"}),
    ("text-classification", "BertForSequenceClassification", [TEXTS, TEXTS[:1], TEXTS[1]], {"top_k": None}),
    (
        "text-classification",
        "BertForSequenceClassification",
        [{"text": TEXTS[0], "text_pair": TEXTS[1]}, {"text": TEXTS[2], "text_pair": TEXTS[3]}, TEXTS[4]],
        {},
    ),
    ("sentiment-analysis", "BertForSequenceClassification", TEXTS, {"truncation": True, "max_length": 6}),
    ("token-classification", "BertForTokenClassification", TEXTS, {}),
    ("token-classification", "RobertaForTokenClassification", TEXTS, {"ignore_labels": []}),
    *(
        ("ner", "BertForTokenClassification", TEXTS, {"aggregation_strategy": strategy})
        for strategy in ("none", "simple", "first", "average", "max")
    ),
    ("token-classification", "RobertaForTokenClassification", TEXTS, {"aggregation_strategy": "max"}),
    (
        "token-classification",
        "BertForTokenClassification",
        [TEXTS[0].split(), TEXTS[1].split()],
        {"is_split_into_words": True, "aggregation_strategy": "simple"},
    ),
    ("fill-mask", "BertForMaskedLM", [f"{text} [MASK]" for text in TEXTS], {}),
    ("fill-mask", "RobertaForMaskedLM", [f"<mask> {text}" for text in TEXTS], {"top_k": 3}),
    ("fill-mask", "BertForMaskedLM", ["[MASK] is the [MASK] of France", "fox [MASK]"], {}),
    ("fill-mask", "BertForMaskedLM", ["[MASK] is", ["the [MASK]"], ["a [MASK]", "the [MASK] fox"]], {}),
    ("fill-mask", "BertForMaskedLM", [f"{text} [MASK]" for text in TEXTS], {"targets": ["the", "fox"], "top_k": 1}),
    ("zero-shot-classification", "BertForSequenceClassification", TEXTS, {"candidate_labels": LABELS}),
    (
        "zero-shot-classification",
        "RobertaForSequenceClassification",
        TEXTS,
        {"candidate_labels": "fox, one", "multi_label": True, "hypothesis_template": "It is {}."},
    ),
    ("zero-shot-classification", "GPT2ForSequenceClassification", TEXTS, {"candidate_labels": LABELS}),
    ("zero-shot-classification", "BertForSequenceClassification", [TEXTS, TEXTS[0]], {"candidate_labels": ["fox"]}),
    ("feature-extraction", "BertModel", TEXTS, {}),
    ("feature-extraction", "RobertaModel", TEXTS, {"return_tensors": True}),
    ("feature-extraction", "GPT2Model", TEXTS, {}),
    ("feature-extraction", "BertForMaskedLM", [TEXTS, TEXTS[1]], {"truncation": True}),
]


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words:UserWarning")
@pytest.mark.parametrize(("task", "class_name", "inputs", "parameters"), CASES)
def test_a_mixed_batch_is_answered_as_the_pipeline_answers_each_alone(
    directories: dict[str, Path], task: str, class_name: str, inputs: Sequence[Any], parameters: dict[str, Any]
) -> None:
    directory = directories[class_name]
    model = loaded(task, directory)
    assert model.describe()["batching"] == "on"
    pipeline = library_pipeline(task, directory)
    if pipeline.tokenizer.pad_token is None:
        pipeline.tokenizer.pad_token = pipeline.tokenizer.eos_token
    for got, text in zip(answer(model, *((text, parameters) for text in inputs)), inputs, strict=True):
        assert_same(got, pipeline(text, **parameters))


def test_text_that_ends_like_padding_is_read_to_its_end_in_a_batch(directories: dict[str, Path]) -> None:
    directory = directories["GPT2ForSequenceClassification"]
    model = loaded("text-classification", directory)
    assert model.describe()["batching"] == "on"
    pipeline = library_pipeline("text-classification", directory)
    texts = ["fox<|endoftext|>", "<|endoftext|><|endoftext|>", "fox", TEXTS[0], "a<|endoftext|>!"]
    expected = [pipeline(text) for text in texts]
    assert_same(answer(model, *((text, {}) for text in texts)), expected)
    assert_same([answer(model, (text, {}))[0] for text in texts], expected)


def test_do_not_truncate_does_not(directories: dict[str, Path]) -> None:
    model = loaded("text-classification", directories["BertForSequenceClassification"])
    for truncation in (False, "do_not_truncate"):
        with pytest.raises(InvalidInput, match="tokens long"):
            model.prepare(" ".join(TEXTS * 3), {"truncation": truncation})
    model.prepare(" ".join(TEXTS * 3), {"truncation": "longest_first"})


def test_numbers_that_are_none_fail_their_own_request_only(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("text-classification", directories["BertForSequenceClassification"])
    forward = model._pipeline.forward

    def spoil(inputs: Any, **parameters: Any) -> Any:
        output = forward(inputs, **parameters)
        output["logits"][0, 0] = float("nan")
        return output

    monkeypatch.setattr(model._pipeline, "forward", spoil)
    broken, fine = model.forward([model.prepare("fox", {}), model.prepare("one", {})])
    with pytest.raises(RequestError, match="not finite") as caught:
        model.finish(broken)
    assert caught.value.code is Code.MODEL_ERROR
    assert model.finish(fine)


@pytest.mark.parametrize(
    ("task", "class_name"),
    [
        ("text-classification", "BertForSequenceClassification"),
        ("embedding", "BertModel"),
        ("text-generation", "GPT2LMHeadModel"),
    ],
)
def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path, task: str, class_name: str) -> None:
    directory = tiny_models.save(tmp_path / "tiny", class_name, labels=["a", "b"] if "Class" in class_name else None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["newword"])
    tokenizer.save_pretrained(directory)
    model = load(task, directory)
    with pytest.raises(InvalidInput, match=rf"inputs holds the token {len(tokenizer) - 1}, which the tokenizer makes"):
        model.prepare("fox newword", {})
    assert answer(model, ("fox", {}))


def test_requests_with_different_parameters_share_a_forward(directories: dict[str, Path]) -> None:
    model = loaded("text-classification", directories["BertForSequenceClassification"])
    items = [model.prepare("fox", {"top_k": None}), model.prepare(TEXTS[0], {"function_to_apply": "none"})]
    assert model.group(items[0]) == model.group(items[1])
    everything, raw = answer(model, ("fox", {"top_k": None}), (TEXTS[0], {"function_to_apply": "none"}))
    assert len(everything) == 3
    assert raw[0].keys() == {"label", "score"}


def test_long_text_is_read_in_windows_with_stride(directories: dict[str, Path]) -> None:
    directory = directories["BertForTokenClassification"]
    model = loaded("token-classification", directory)
    pipeline = library_pipeline("token-classification", directory)
    pipeline.tokenizer.model_max_length = POSITIONS
    long = " ".join(TEXTS * 3)
    parameters = {"stride": 8, "aggregation_strategy": "simple"}
    assert len(pipeline.tokenizer(long)["input_ids"]) > 2 * POSITIONS
    got = answer(model, (long, parameters), ("fox", parameters))
    assert_same(got, [pipeline(long, **parameters), pipeline("fox", **parameters)])


def test_more_sequences_than_a_batch_holds_are_computed_in_several(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("zero-shot-classification", directories["BertForSequenceClassification"])
    request = (TEXTS[0], {"candidate_labels": LABELS})
    whole = answer(model, request)
    monkeypatch.setattr(model, "max_batch_cost", 70)
    steps: list[None] = []
    monkeypatch.setattr(model, "report_step", lambda: steps.append(None))
    assert_same(answer(model, request, request), [*whole, *whole])
    assert len(steps) > 1


@pytest.mark.parametrize(
    ("task", "class_name", "parameters"),
    [
        ("text-classification", "BertForSequenceClassification", {}),
        ("text-classification", "RobertaForSequenceClassification", {}),
        ("token-classification", "BertForTokenClassification", {}),
        ("zero-shot-classification", "BertForSequenceClassification", {"candidate_labels": LABELS}),
        ("feature-extraction", "GPT2Model", {}),
    ],
)
def test_text_longer_than_the_model_is_refused_with_both_numbers(
    directories: dict[str, Path],
    task: str,
    class_name: str,
    parameters: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = loaded(task, directories[class_name])
    long = " ".join(TEXTS * 3)
    with pytest.raises(
        InvalidInput, match=rf"inputs is \d+ tokens long, the model takes at most {POSITIONS}"
    ) as caught:
        model.prepare(long, parameters)
    assert caught.value.detail["limit_tokens"] == POSITIONS
    with pytest.raises(InvalidInput, match=r"inputs\[1\] is"):
        model.prepare(["fox", long], parameters)
    assert caplog.messages == [], "whoever sent it is told, and nobody else"
    cut = answer(model, (long, {**parameters, "truncation": True}), ("fox", parameters))
    assert_same(cut[1:], answer(model, ("fox", parameters)))


def test_text_of_exactly_the_limit_is_taken(directories: dict[str, Path]) -> None:
    model = loaded("text-classification", directories["RobertaForSequenceClassification"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(directories["RobertaForSequenceClassification"])
    text = " ".join(["fox"] * (POSITIONS - 2))
    while len(tokenizer(text)["input_ids"]) > POSITIONS:
        text = text[:-1]
    assert len(tokenizer(text)["input_ids"]) == POSITIONS
    assert answer(model, (text, {}), ("fox", {}))


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        (5, {}, "inputs must be a string"),
        (None, {}, "inputs must be a string"),
        ([], {}, "inputs is an empty list"),
        (["fox", 5], {}, r"inputs\[1\] must be a string"),
        (["fox", ["fox"]], {}, r'inputs\[1\] must be a string, or an object {"text", "text_pair"}, got \['),
        ({"text": "a", "other": "b"}, {}, 'inputs must have "text"'),
        ({"text": 5}, {}, "inputs.text must be a string, got 5"),
        ("fox", {"topk": 1}, "unknown parameter 'topk'; known parameters: .*top_k"),
        ("fox", {"use_multiprocessing": False}, "unknown parameter 'use_multiprocessing'"),
        ("fox", {"return_tensors": "np"}, "unknown parameter 'return_tensors'"),
        ("fox", {"top_k": 0}, "top_k must be at least 1, got 0"),
        ("fox", {"top_k": "x"}, "top_k must be a whole number, got 'x'"),
        ("fox", {"top_k": True}, "top_k must be a whole number, got true"),
        ("fox", {"function_to_apply": "tanh"}, "function_to_apply must be one of sigmoid, softmax, none, got 'tanh'"),
        ("fox", {"truncation": 1}, "truncation must be true or false, got 1"),
        ("fox", {"truncation": "yes"}, "truncation must be one of longest_first, .*got 'yes'"),
        ("fox", {"padding": 5}, "padding must be true or false, got 5"),
        ("fox", {"padding": "max"}, "padding must be one of longest, max_length, do_not_pad, got 'max'"),
        ("fox", {"add_special_tokens": "no"}, "add_special_tokens must be true or false, got 'no'"),
        ("fox", {"max_length": 10**9}, "max_length must be at most 64"),
    ],
)
def test_bad_requests_are_refused_by_name(
    directories: dict[str, Path], inputs: Any, parameters: dict[str, Any], message: str
) -> None:
    model = loaded("text-classification", directories["BertForSequenceClassification"])
    with pytest.raises(InvalidInput, match=message):
        model.prepare(inputs, parameters)


@pytest.mark.parametrize(
    ("task", "class_name", "inputs", "parameters", "message"),
    [
        ("fill-mask", "BertForMaskedLM", "no mask here", {}, "No mask_token"),
        ("fill-mask", "BertForMaskedLM", "[MASK]", {"targets": []}, "targets is an empty list"),
        ("fill-mask", "BertForMaskedLM", "[MASK]", {"tokenizer_kwargs": {"return_tensors": "np"}}, "unknown 'return"),
        ("zero-shot-classification", "BertForSequenceClassification", "fox", {}, "candidate_labels|len"),
        ("zero-shot-classification", "BertForSequenceClassification", "fox", {"candidate_labels": []}, "empty list"),
        (
            "zero-shot-classification",
            "BertForSequenceClassification",
            "fox",
            {"candidate_labels": ["a"], "hypothesis_template": "{:>999999999}"},
            "hypothesis_template must hold {} where",
        ),
        ("token-classification", "BertForTokenClassification", "fox", {"stride": 63}, "stride must be at most 61"),
        ("token-classification", "BertForTokenClassification", "fox", {"aggregation_strategy": "sum"}, "one of none"),
        ("token-classification", "BertForTokenClassification", "fox", {"is_split_into_words": True}, "inputs"),
        ("feature-extraction", "GPT2Model", "", {}, "inputs holds no tokens"),
        ("feature-extraction", "GPT2Model", "fox", {"normalize": True}, "unknown parameter 'normalize'"),
        ("feature-extraction", "GPT2Model", "fox", {"max_length": 3}, "unknown parameter 'max_length'"),
        (
            "feature-extraction",
            "GPT2Model",
            "fox",
            {"tokenize_kwargs": {"padding": 1}},
            r"tokenize_kwargs\.padding must",
        ),
        ("fill-mask", "BertForMaskedLM", "[MASK]", {"targets": [""]}, "targets holds an empty string"),
        ("token-classification", "BertForTokenClassification", "fox", {"delimiter": 5}, "delimiter must be a string"),
        ("token-classification", "BertForTokenClassification", "fox", {"offset_mapping": [1]}, "unknown parameter"),
        (
            "token-classification",
            "BertForTokenClassification",
            "fox",
            {"truncation": "only_first"},
            "truncation must be",
        ),
        (
            "token-classification",
            "BertForTokenClassification",
            "fox",
            {"stride": 1, "aggregation_strategy": "none"},
            r"\(parameters: aggregation_strategy, stride\)",
        ),
    ],
)
def test_bad_requests_of_other_tasks_are_refused_by_name(
    directories: dict[str, Path], task: str, class_name: str, inputs: Any, parameters: dict[str, Any], message: str
) -> None:
    model = loaded(task, directories[class_name])
    with pytest.raises(InvalidInput, match=message):
        answer(model, (inputs, parameters))


def test_a_parameter_that_fails_only_after_the_forward_is_the_callers(directories: dict[str, Path]) -> None:
    model = loaded("fill-mask", directories["BertForMaskedLM"])
    with pytest.raises(InvalidInput, match="these parameters do not fit: top_k: "):
        answer(model, ("[MASK]", {"top_k": 10**6}))
    assert answer(model, ("[MASK]", {}))


def test_options_are_default_parameters(directories: dict[str, Path]) -> None:
    model = load("text-classification", directories["BertForSequenceClassification"], top_k=None)
    everything, best = answer(model, ("fox", {}), ("fox", {"top_k": 1}))
    assert (len(everything), len(best)) == (3, 1)
    with pytest.raises(LoadError, match="options of model 'tiny': unknown parameter 'topk'") as caught:
        load("text-classification", directories["BertForSequenceClassification"], topk=1)
    assert caught.value.permanent


def test_one_forward_serves_a_whole_batch(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("text-classification", directories["BertForSequenceClassification"])
    batch_sizes: list[int] = []
    run = type(model)._run

    def counted(self: Any, chunks: Sequence[Any], parameters: dict[str, Any]) -> Any:
        batch_sizes.append(len(chunks))
        return run(self, chunks, parameters)

    monkeypatch.setattr(type(model), "_run", counted)
    answer(model, *((text, {}) for text in TEXTS[1:4]))
    assert batch_sizes == [3]


def test_the_cost_of_a_request_is_its_tokens(directories: dict[str, Path]) -> None:
    model = loaded("zero-shot-classification", directories["BertForSequenceClassification"])
    one = model.cost(model.prepare("fox", {"candidate_labels": ["fox"]}))
    assert model.cost(model.prepare("fox", {"candidate_labels": ["fox", "fox"]})) == 2 * one


def test_warm_up_requests_are_answered_and_begin_with_the_longest(directories: dict[str, Path]) -> None:
    for task, class_name in {(task, class_name) for task, class_name, _, _ in CASES}:
        model = loaded(task, directories[class_name])
        examples = list(model.examples())
        costs = [model.cost(model.prepare(*example)) for example in examples]
        assert costs[0] == max(costs) > POSITIONS // 2
        answer(model, *examples)


def test_speech_is_recognised_from_samples_and_chunks(directories: dict[str, Path]) -> None:
    directory = directories["Wav2Vec2ForCTC"]
    model = loaded("automatic-speech-recognition", directory)
    pipeline = library_pipeline("automatic-speech-recognition", directory)
    noise = np.random.default_rng(0).normal(size=1200).astype(np.float32)
    # Two of one length share a batch; the others would hear the padding.
    recordings = [noise, noise[:500], noise[200:1000], noise[400:1200]]
    assert model.describe()["batching"] == "on"
    for parameters in ({}, {"chunk_length_s": 1.0, "stride_length_s": 0.2}, {"return_timestamps": "char"}):
        requests = [({"raw": noise.tolist(), "sampling_rate": 400}, parameters) for noise in recordings]
        got = answer(model, *requests)
        expected = [pipeline({"raw": noise, "sampling_rate": 400}, **parameters) for noise in recordings]
        assert_same(got, expected)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("/etc/passwd", "URLs and file names are not read"),
        ("http://127.0.0.1:9/sound.wav", "URLs and file names are not read"),
        ({"path": "/etc/passwd"}, "inputs.path is not read"),
        ({"raw": "x", "sampling_rate": 400}, "inputs.raw must be a list of numbers"),
        ({"raw": [[1.0]], "sampling_rate": 400}, "in one dimension"),
    ],
)
def test_files_and_addresses_are_never_read_for_a_caller(
    directories: dict[str, Path], inputs: Any, message: str
) -> None:
    model = loaded("automatic-speech-recognition", directories["Wav2Vec2ForCTC"])
    with pytest.raises(InvalidInput, match=message):
        model.prepare(inputs, {})


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning")
def test_recordings_with_other_labels_do_not_share_a_batch(tmp_path: Path) -> None:
    directory = tiny_models.save_sound_and_text(tmp_path / "clap")
    model = load("zero-shot-audio-classification", directory)
    assert model.describe()["batching"] == "on"
    pipeline = library_pipeline("zero-shot-audio-classification", directory)
    noises = np.random.default_rng(0).normal(size=(4, 1600)).astype(np.float32)
    label_sets = [["fox", "sea"], ["the waiter runs", "Paris", "one"], ["fox", "sea"], ["sea", "fox"]]
    requests = [
        ({"raw": noise.tolist(), "sampling_rate": 16_000}, {"candidate_labels": labels})
        for noise, labels in zip(noises, label_sets, strict=True)
    ]
    groups = [model.group(model.prepare(*request)) for request in requests]
    assert groups[0] == groups[2]
    assert len(set(groups)) == 3
    expected = [pipeline(noise, candidate_labels=labels) for noise, labels in zip(noises, label_sets, strict=True)]
    assert_same(answer(model, *requests), expected)
    assert_same(
        [model.finish(output) for output in model.forward([model.prepare(*each) for each in requests])], expected
    )
    with pytest.raises(InvalidInput, match=r"inputs\.sampling_rate must be 16000, got 8000"):
        model.prepare({"raw": [0.0] * 1600, "sampling_rate": 8000}, {"candidate_labels": ["fox"]})


def test_a_recording_too_short_for_the_model_is_refused_with_both_lengths(directories: dict[str, Path]) -> None:
    model = loaded("automatic-speech-recognition", directories["Wav2Vec2ForCTC"])
    # Kernels of 10 and 3, strides of 5 and 2: two frames of ten, five apart, and five more make one of three.
    for count in (1, 9, 10, 19):
        with pytest.raises(
            InvalidInput, match=f"inputs is {count} samples long, the model takes no less than 20"
        ) as caught:
            model.prepare({"raw": [0.1] * count, "sampling_rate": 400}, {})
        assert caught.value.detail == {"length_samples": count, "limit_samples": 20}
    [shortest] = answer(model, ({"raw": [0.1] * 20, "sampling_rate": 400}, {}))
    assert isinstance(shortest["text"], str)
    with pytest.raises(InvalidInput, match="a piece of inputs is 10 samples long"):
        model.prepare({"raw": [0.1] * 410, "sampling_rate": 400}, {"chunk_length_s": 1.0, "stride_length_s": 0.0})


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (torch.nn.Conv1d(1, 1, 10), (1, 1, 5)),
        (torch.nn.Conv2d(1, 1, 8), (1, 1, 4, 4)),
        (torch.nn.MaxPool2d(4), (1, 1, 2, 2)),
        (torch.nn.ReflectionPad1d(5), (1, 1, 3)),
        (torch.nn.BatchNorm1d(1), (1, 1, 1)),
    ],
)
def test_a_forward_that_fails_for_the_size_of_its_input_refuses_the_input(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    model = load("automatic-speech-recognition", directories["Wav2Vec2ForCTC"])
    item = model.prepare({"raw": [0.1] * 40, "sampling_rate": 400}, {})

    def too_small(*arguments: Any, **keywords: Any) -> Any:
        return layer(torch.zeros(shape))

    monkeypatch.setattr(model._pipeline, "forward", too_small)
    with pytest.raises(InvalidInput, match=r"inputs of the size \(40,\) do not fit this model: "):
        model.forward([item])
    # Which of several it is shows when each is alone.
    with pytest.raises((RuntimeError, ValueError)):
        model.forward([item, item])


def test_a_forward_that_fails_for_another_reason_is_the_models_error(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("automatic-speech-recognition", directories["Wav2Vec2ForCTC"])
    item = model.prepare({"raw": [0.1] * 40, "sampling_rate": 400}, {})
    monkeypatch.setattr(model._pipeline, "forward", lambda *_, **__: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        model.forward([item])


def test_a_recording_of_another_rate_is_refused_where_nothing_resamples(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("automatic-speech-recognition", directories["Wav2Vec2ForCTC"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"inputs\.sampling_rate must be 400, got 8000"):
        model.prepare({"raw": [0.0] * 500, "sampling_rate": 8000}, {})


@pytest.mark.parametrize(
    ("task", "inputs"),
    [
        ("video-classification", "/etc/passwd"),
        ("video-classification", ["http://127.0.0.1:9/film.mp4"]),
        ("decision", {"state": "", "questions": {}, "assets": {"a": "/etc/passwd"}}),
        ("decision", {"state": "", "questions": {}, "assets": {"a": {"data_base64": "http://127.0.0.1:9/a.png"}}}),
        ("decision", '{"state": "", "questions": {}, "assets": {"a": "/etc/passwd"}}'),
        ("image-classification", "/etc/passwd"),
        ("any-to-any", {"text": "", "images": ["http://127.0.0.1:9/a.png"]}),
        ("any-to-any", [{"role": "user", "content": [{"type": "image", "url": "http://127.0.0.1:9/a.png"}]}]),
        ("text-to-audio", [{"role": "user", "content": [{"type": "audio", "path": "/etc/passwd"}]}]),
    ],
)
def test_no_task_reads_files_or_addresses_for_a_caller(task: str, inputs: Any) -> None:
    with pytest.raises(InvalidInput, match="not read"):
        media.decode(inputs, task)


def test_what_is_no_medium_is_left_as_it_is() -> None:
    table = {"query": "which?", "table": {"url": ["http://a"], "image": ["x"], "path": ["/etc"]}}
    assert media.decode(table, "table-question-answering") == table
    request = {"state": {"url": "http://a", "image": "x"}, "questions": {}}
    assert media.decode(request, "decision") == request
    assert media.decode(json.dumps(request), "decision") == request
    # Decoders would take a text for the name of a file.
    assert media.decode("L2V0Yy9wYXNzd2Q=", "video-classification").data == b"/etc/passwd"


def test_what_generating_refuses_is_told_to_the_caller(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("automatic-speech-recognition", directories["Wav2Vec2ForCTC"])
    request = {"raw": [0.0] * 500, "sampling_rate": 400}

    def refuse(*arguments: object) -> None:
        raise ValueError("num_beams must divide")

    monkeypatch.setattr(model, "_generates", lambda: True)
    monkeypatch.setattr(model, "_run", refuse)
    with pytest.raises(InvalidInput, match="these parameters do not fit: chunk_length_s: ValueError: num_beams must"):
        model.forward([model.prepare(request, {"chunk_length_s": 1.0})])
    with pytest.raises(ValueError, match="num_beams"):
        model.forward([model.prepare(request, {})])


def test_a_pipeline_that_generates_is_bounded_and_runs_no_code_of_the_callers(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from model_worker.runtimes.pipeline_parameters import PipelineParameters

    pipeline = library_pipeline("automatic-speech-recognition", directories["Wav2Vec2ForCTC"])
    assert pipeline._pipeline_calls_generate
    # This one does not generate: what only generating knows would be ignored.
    assert PipelineParameters(pipeline, None).known == {
        *("chunk_length_s", "ignore_warning", "return_language", "return_timestamps", "stride_length_s")
    }
    monkeypatch.setattr(pipeline.model, "can_generate", lambda: True)
    parameters = PipelineParameters(pipeline, None)
    arguments, _ = parameters.check({"max_new_tokens": 5, "generate_kwargs": {"num_beams": 2}})
    assert arguments == {"max_new_tokens": 5, "generate_kwargs": {"num_beams": 2}}
    with pytest.raises(InvalidInput, match=r"generate_kwargs\.max_new_tokens must be at most 32768"):
        parameters.check({"generate_kwargs": {"max_new_tokens": 10**9}})
    with pytest.raises(InvalidInput, match="num_beams must be at most 64"):
        parameters.check({"num_beams": 10**9})
    for name in ("custom_generate", "assistant_model", "cache_implementation"):
        with pytest.raises(InvalidInput, match=f"unknown parameter '{name}'"):
            parameters.check({name: "org/code"})
        with pytest.raises(InvalidInput, match=f"generate_kwargs: unknown '{name}'"):
            parameters.check({"generate_kwargs": {name: "org/code"}})


def test_a_task_that_transformers_lacks_is_named(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.pipelines import PIPELINE_REGISTRY

    monkeypatch.delitem(PIPELINE_REGISTRY.supported_tasks, "keypoint-matching")
    with pytest.raises(LoadError, match="'keypoint-matching' is not in transformers"):
        load("keypoint-matching", directories["BertModel"])

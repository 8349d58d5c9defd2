"""Question answering: the pipeline's recorded answers, the library's own cutting into windows, and what is refused.

The two trained models and what transformers 4.57 answered with them are in `tests/question_answering/`.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from model_worker.runtimes import loading, question_answering, registry
from model_worker.runtimes.answer_spans import best_answers, best_spans
from model_worker.runtimes.question_windows import WindowCutter
from model_worker.specs import RuntimeSpec
from shared.errors import Code, InvalidInput, LoadError, RequestError
from tests import tiny_models
from tests.topology import ROOT, Service

TRAINED = ROOT / "tests" / "question_answering"
NAME = "What is my name?"
ME = "My name is Tomi. I live in Oslo. I work as a baker."
LONG = "We had soup. " * 40 + "My name is Zoravi. " + "The road is long. " * 40
TINY = {
    "bert": "BertForQuestionAnswering",
    "distilbert": "DistilBertForQuestionAnswering",
    "albert": "AlbertForQuestionAnswering",
    "xlnet": "XLNetForQuestionAnsweringSimple",
    "roberta": "RobertaForQuestionAnswering",
    "gpt2": "GPT2ForQuestionAnswering",
    "llama": "LlamaForQuestionAnswering",
}
WORDS = "the cat sits outside a man is playing guitar paris capital of france"


def load(source: str | Path, **options: object) -> Any:
    model = registry.build(RuntimeSpec("qa", str(source), "question-answering", options=dict(options)))
    model.load("cpu")
    return model


@functools.cache
def trained(family: str) -> Any:
    return load(TRAINED / family)


@functools.cache
def recorded(family: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((TRAINED / family / "answers.json").read_text())["cases"]
    return cases


@pytest.fixture(scope="module", params=sorted(TINY))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and 64 positions; `xlnet` pads on the left, as the real one does."""
    directory = tmp_path_factory.mktemp(request.param)
    return tiny_models.save(
        directory, TINY[request.param], padding_side="left" if request.param == "xlnet" else "right"
    )


def asked(question: Any = NAME, context: Any = ME) -> dict[str, Any]:
    return {"question": question, "context": context}


def answers(model: Any, *requests: tuple[Any, dict[str, Any]]) -> list[Any]:
    """Of requests that share one forward."""
    items = [model.prepare(*request) for request in requests]
    return [model.finish(output) for output in model.forward(items)]


def answer(model: Any, inputs: Any, **parameters: Any) -> Any:
    return answers(model, (inputs, parameters))[0]


def assert_same(got: Any, wanted: Any, tolerance: float = 1e-3) -> None:
    """Equal but for rounding; rows of equal score in any order."""
    if isinstance(wanted, dict):
        assert isinstance(got, dict), (got, wanted)
        wanted, got = [wanted], [got]
    assert isinstance(got, list)
    assert len(got) == len(wanted), (got, wanted)
    if not all(isinstance(row, dict) for row in wanted):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other, tolerance)
        return
    assert [row["score"] for row in got] == pytest.approx([row["score"] for row in wanted], rel=tolerance, abs=1e-12)
    left = list(got)
    for row in wanted:
        twin = next((each for each in left if is_twin(each, row, tolerance)), None)
        assert twin is not None, (row, got)
        left.remove(twin)


def is_twin(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> bool:
    close = math.isclose(one["score"], other["score"], rel_tol=tolerance, abs_tol=1e-12)
    return close and all(one[key] == other[key] for key in ("answer", "start", "end"))


# --- the pipeline's answers ---


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_every_recorded_answer_of_the_pipeline_is_given_again(family: str) -> None:
    model = trained(family)
    computed = [case for case in recorded(family) if "error" not in case]
    assert len(computed) > 150
    for case in computed:
        try:
            assert_same(answer(model, case["inputs"], **case["parameters"]), case["answer"])
        except AssertionError as error:
            raise AssertionError(f"{case['name']}: {error}") from None


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_what_the_pipeline_could_not_do_is_refused_by_name(family: str) -> None:
    failed = [case for case in recorded(family) if "error" in case]
    assert len(failed) > 20
    assert any("PanicException" in case["error"] for case in failed)
    for case in failed:
        with pytest.raises(InvalidInput) as caught:
            trained(family).prepare(case["inputs"], case["parameters"])
        named = ("inputs", "top_k", "topk", "max_answer_len", "max_seq_len", "doc_stride")
        assert caught.value.message.startswith(named), case["name"]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_trained_models_find_what_the_text_says(family: str) -> None:
    found = answer(trained(family), asked(NAME, LONG), max_seq_len=64, doc_stride=16)
    assert found["answer"] == "Zoravi"
    assert LONG[found["start"] : found["end"]] == "Zoravi"
    off_topic = asked("What is my name?", "The road is long. We had soup; it was cold.")
    assert answer(trained(family), off_topic, handle_impossible_answer=True)["answer"] == ""


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_requests_that_share_a_forward_are_answered_as_alone(family: str) -> None:
    model = trained(family)
    requests = [
        (case["inputs"], case["parameters"])
        for case in recorded(family)
        if "error" not in case and isinstance(case["answer"], (dict, list))
    ]
    requests = requests[::3]
    for together, request in zip(answers(model, *requests), requests, strict=True):
        assert_same(together, answer(model, request[0], **request[1]), 1e-4)


# --- the library's own way, with other models ---


def reference(directory: Path, question: str, context: str, size: int, overlap: int, longest: int) -> list[Any]:
    """Every span with its score, best first: windows as the tokenizer cuts them, the model alone, no numpy tricks."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForQuestionAnswering.from_pretrained(directory)
    question_first = tokenizer.padding_side == "right"
    assert question_first != isinstance(model, transformers.XLNetPreTrainedModel)
    windows = tokenizer(
        *((question, context) if question_first else (context, question)),
        truncation="only_second" if question_first else "only_first",
        max_length=size,
        stride=overlap,
        return_overflowing_tokens=True,
    )
    totals: dict[str, list[Any]] = {}
    for index in range(len(windows["input_ids"])):
        names = [name for name in tokenizer.model_input_names if name in windows]
        with torch.inference_mode():
            output = model(**{name: torch.tensor([windows[name][index]]) for name in names})
        encoding = windows[index]
        allowed = [
            sequence == (1 if question_first else 0) or token == tokenizer.cls_token_id
            for sequence, token in zip(encoding.sequence_ids, encoding.ids, strict=True)
        ]
        start, end = (
            torch.where(torch.tensor(allowed), logits[0], -10_000.0).softmax(0).tolist()
            for logits in (output.start_logits, output.end_logits)
        )
        spans = [
            (start[first] * end[last], first, last)
            for first in range(1, len(allowed))
            for last in range(first, min(first + longest, len(allowed)))
            if allowed[first] and allowed[last]
        ]
        # As many as are looked at for one answer.
        for score, first, last in sorted(spans, reverse=True)[:12]:
            begin, stop = encoding.offsets[first][0], encoding.offsets[last][1]
            if encoding.word_ids[first] is not None and encoding.word_ids[last] is not None:
                sequence = 1 if question_first else 0
                begin = encoding.word_to_chars(encoding.word_ids[first], sequence)[0]
                stop = encoding.word_to_chars(encoding.word_ids[last], sequence)[1]
            row = totals.setdefault(context[begin:stop].lower(), [0.0, begin, stop])
            row[0] += score
    return sorted(totals.values(), key=lambda row: -row[0])


def test_windows_and_scores_are_those_of_the_librarys_own_classes(tiny: Path) -> None:
    model = load(tiny)
    assert model.describe()["batching"] == "on"
    for text in (WORDS, WORDS * 8, "Päris é " * 30 + WORDS):
        for size, overlap, longest in ((64, 32, 15), (40, 11, 4), (33, 0, 15)):
            parameters = {"max_seq_len": size, "doc_stride": overlap, "max_answer_len": longest}
            got = answer(model, asked("where is the cat", text), **parameters)
            score, begin, stop = reference(tiny, "where is the cat", text, size, overlap, longest)[0]
            assert got["score"] == pytest.approx(score, rel=1e-4)
            assert (got["start"], got["end"], got["answer"]) == (begin, stop, text[begin:stop])


def test_mixed_lengths_and_parameters_of_any_architecture_share_a_forward(tiny: Path) -> None:
    model = load(tiny)
    assert model.mixes_parameters
    requests: list[tuple[Any, dict[str, Any]]] = [
        (asked("where", WORDS), {}),
        (asked("where", WORDS * 9), {"max_seq_len": 30, "doc_stride": 3, "top_k": 4}),
        (asked(["who", "what is playing"], "a cat"), {"align_to_words": False, "handle_impossible_answer": True}),
        (asked("where", WORDS * 3), {"max_answer_len": 2, "top_k": 2}),
    ]
    for together, request in zip(answers(model, *requests), requests, strict=True):
        assert_same(together, answer(model, request[0], **request[1]), 1e-4)


def test_a_tokenizer_that_cuts_from_the_left_has_its_windows_counted_from_the_end(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, "BertForQuestionAnswering", truncation_side="left")
    model = load(directory)
    (encoded,) = model.prepare(asked("where", WORDS * 3), {"max_seq_len": 40, "doc_stride": 7}).pairs
    item = model.prepare(asked("where", WORDS * 3), {"max_seq_len": 40, "doc_stride": 7})
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.truncation_side == "left"
    wanted = tokenizer(
        "where", WORDS * 3, truncation="only_second", max_length=40, stride=7, return_overflowing_tokens=True
    )["input_ids"]
    assert [encoded.of_window(encoded.ids, window) for window in item.windows[0]] == wanted


@pytest.mark.parametrize(
    ("model_max_length", "positions", "tokens"), [(10**30, 2_048, 384), (10**30, 160, 160), (100, 2_048, 100)]
)
def test_windows_have_384_tokens_where_neither_tokenizer_nor_model_takes_less(
    model_max_length: int, positions: int, tokens: int
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TRAINED / "bert")
    tokenizer.model_max_length = model_max_length
    assert WindowCutter(tokenizer, positions).default_window_tokens == tokens


def test_nothing_of_the_question_is_an_answer() -> None:
    model = trained("bert")
    question, context = "wwwwwwwwwwwwwww my name", "I am Tomi"
    found = answer(model, asked(question, context), top_k=1_000, align_to_words=False)
    (encoded,) = model.prepare(asked(question, context), {}).pairs
    (start, stop) = encoded.context_tokens
    of_context = set(encoded.offsets[start:stop, 0].tolist())
    assert {row["start"] for row in found} <= {0, *of_context}


def test_large_logits_are_numbers_like_others() -> None:
    model = trained("bert")
    item = model.prepare(asked(NAME, ME), {})
    logits = np.full((2, len(item.rows[0].ids)), -500, dtype=np.float32)
    logits[:, -3] = 500
    found = best_answers(item.pairs[0], item.windows[0], [logits], item.parameters)
    assert isinstance(found, dict)
    assert found["score"] == 1


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_windows_are_those_of_the_tokenizer_at_every_border(family: str) -> None:
    model = trained(family)
    tokenizer: Any = AutoTokenizer.from_pretrained(TRAINED / family)
    pair = ("who is it", "My name is Tomi. I live")
    whole = tokenizer(*pair)["input_ids"]
    special = tokenizer.num_special_tokens_to_add(pair=True)
    room_needs = len(tokenizer(pair[0], add_special_tokens=False)["input_ids"]) + special
    for size in range(1, len(whole) + 2):
        for overlap in range(size + 2):
            try:
                rows = [
                    row.ids for row in model.prepare(asked(*pair), {"max_seq_len": size, "doc_stride": overlap}).rows
                ]
            except InvalidInput:
                # It would not move on, or share more than there is; the tokenizer panics at most of these.
                assert overlap > size - 2 or (special < size < len(whole) and overlap >= max(0, size - room_needs))
                continue
            if size <= special:
                wanted = [whole]
            else:
                wanted = tokenizer(
                    *pair, truncation="only_second", max_length=size, stride=overlap, return_overflowing_tokens=True
                )["input_ids"]
            assert rows == wanted, (size, overlap)


def test_a_model_with_one_kind_of_token_is_given_no_kinds(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, "BertForQuestionAnswering", type_vocab_size=1)
    assert answer(load(directory), asked("where is the cat", WORDS))["answer"] in WORDS


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_the_best_spans_are_those_of_a_full_table(scale: float) -> None:
    chance = np.random.default_rng(5)
    for tokens, width, count in ((7, 3, 4), (30, 15, 12), (30, 1_000, 40), (5, 15, 100)):
        # At the largest scale most products underflow to 0.
        start, end = (np.exp(-scale * chance.random(tokens)).astype(np.float32) for _ in range(2))
        firsts, lasts, scores = best_spans(start, end, count, width)
        table = np.tril(np.triu(np.outer(start, end)), width - 1)
        wanted = np.sort(table.ravel())[::-1][:count]
        np.testing.assert_array_equal(scores, wanted)
        np.testing.assert_array_equal(table[firsts, lasts], scores)


def test_the_spans_of_a_long_window_take_no_full_table() -> None:
    tokens, width, count = 6_000, 4, 500
    start, end = np.zeros((2, tokens), dtype=np.float32)
    start[[7, 5_999]], end[[8, 5_999]] = 0.5, 0.5
    tracemalloc.start()
    try:
        firsts, lasts, scores = best_spans(start, end, count, width)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < tokens * tokens
    assert set(zip(firsts[:2].tolist(), lasts[:2].tolist(), strict=True)) == {(7, 8), (5_999, 5_999)}
    np.testing.assert_array_equal(scores, start[firsts] * end[lasts])
    assert (firsts <= lasts).all()
    assert (lasts - firsts < width).all()
    assert 2 < len(scores) <= count


# --- windows as rows of batches ---


def test_a_request_of_hundreds_of_windows_stays_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(TRAINED / "bert")
    text = LONG * 6
    parameters = {"max_seq_len": 32, "doc_stride": 8}
    expected = answer(model, asked(NAME, text), **parameters)
    batches: list[list[int]] = []
    compute = type(model)._compute

    def recorded_compute(self: Any, rows: Sequence[Any]) -> Any:
        batches.append([len(row.ids) for row in rows])
        return compute(self, rows)

    monkeypatch.setattr(type(model), "_compute", recorded_compute)
    monkeypatch.setattr(model, "max_batch_cost", 200)
    steps: list[int] = []
    monkeypatch.setattr(model, "report_step", lambda: steps.append(len(batches)))
    item = model.prepare(asked(NAME, text), parameters)
    windows = len(item.windows[0])
    assert windows > 100
    assert model.cost(item) == sum(len(row.ids) for row in item.rows) <= windows * 32
    (output,) = model.forward([item])
    assert_same(model.finish(output), expected, 1e-4)
    assert all(sum(lengths) <= 200 for lengths in batches)
    assert sum(map(len, batches)) == windows
    # A long request shows after each part that it goes on.
    assert steps == [*range(1, len(batches) + 1)]


def test_windows_that_nobody_waits_for_are_not_computed_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(TRAINED / "bert")
    monkeypatch.setattr(model, "max_batch_cost", 200)
    kept = model.prepare(asked(NAME, ME), {})
    left = model.prepare(asked(NAME, LONG), {"max_seq_len": 32, "doc_stride": 8})
    rows: list[int] = []
    compute = type(model)._compute

    def recorded_compute(self: Any, batch: Sequence[Any]) -> Any:
        rows.append(sum(row in left.rows for row in batch))
        return compute(self, batch)

    monkeypatch.setattr(type(model), "_compute", recorded_compute)
    monkeypatch.setattr(model, "is_wanted", lambda item: item is kept or len(rows) < 3)
    gone, fine = model.forward([left, kept])
    assert isinstance(gone, RequestError)
    assert gone.code is Code.CANCELLED
    assert 0 < sum(rows) < len(left.windows[0])
    assert_same(model.finish(fine), answer(load(TRAINED / "bert"), asked()))


def test_one_copy_brings_the_logits_of_a_batch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(TRAINED / "bert")
    items = [model.prepare(asked(NAME, text), {}) for text in (ME, "soup", LONG[:200])]
    copies: list[torch.Size] = []
    original = torch.Tensor.cpu

    def cpu(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        copies.append(self.shape)
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    model.forward(items)
    assert len(copies) == 1


def test_numbers_that_are_none_fail_their_own_request_only() -> None:
    model = load(TRAINED / "bert")
    items = [model.prepare(asked(NAME, text), {}) for text in ("I am Tomi", "soup")]
    tokenizer: Any = AutoTokenizer.from_pretrained(TRAINED / "bert")
    (poisoned, *_) = tokenizer("soup", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model._model.bert.embeddings.word_embeddings.weight[poisoned] = float("nan")
    fine, failed = model.forward(items)
    assert model.finish(fine)["score"] > 0
    with pytest.raises(RequestError, match="not finite") as caught:
        model.finish(failed)
    assert caught.value.code is Code.MODEL_ERROR


def test_a_model_that_padding_changes_is_computed_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(trained("bert"), asked(NAME, LONG), max_seq_len=32, doc_stride=8)
    forward = transformers.BertForQuestionAnswering.forward

    def careless(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **keywords: Any) -> Any:
        return forward(self, input_ids=input_ids, attention_mask=torch.ones_like(attention_mask), **keywords)

    careless.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(transformers.BertForQuestionAnswering, "forward", careless)
    model = load(TRAINED / "bert")
    assert model.describe()["batching"] == "one by one: padding changes the results"
    rows: list[int] = []
    compute = type(model)._compute

    def recorded_compute(self: Any, batch: Sequence[Any]) -> Any:
        rows.append(len(batch))
        return compute(self, batch)

    monkeypatch.setattr(type(model), "_compute", recorded_compute)
    assert_same(answer(model, asked(NAME, LONG), max_seq_len=32, doc_stride=8), expected)
    assert set(rows) == {1}


def test_logits_of_fewer_tokens_than_were_asked_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(TRAINED / "bert")
    forward = type(model._model).forward

    def short(self: Any, **keywords: Any) -> Any:
        output = forward(self, **keywords)
        output.start_logits, output.end_logits = output.start_logits[:, :-1], output.end_logits[:, :-1]
        return output

    monkeypatch.setattr(type(model._model), "forward", short)
    with pytest.raises(ValueError, match=r"it made outputs for \d+ tokens out of \d+"):
        answer(model, asked())


# --- what is refused ---


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        (asked(), {"max_answer_length": 3}, "unknown parameter 'max_answer_length'; known parameters: align_to_words"),
        (asked(), {"align_to_words": "yes"}, "align_to_words must be true or false, got 'yes'"),
        (asked(), {"handle_impossible_answer": 1}, "handle_impossible_answer must be true or false"),
        (asked(), {"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        (asked(), {"topk": 0}, "topk must be at least 1"),
        (asked(), {"max_question_len": 0}, "max_question_len must be at least 1"),
        (asked(), {"padding": "nonsense"}, "padding must be one of longest, max_length, do_not_pad"),
        (asked(), {"batch_size": 0}, "batch_size must be at least 1"),
        ({**asked(), "title": ""}, {}, 'inputs has an unknown key \'title\': it has "question" and "context"'),
        ({"question": NAME}, {}, "inputs has no 'context'"),
        (asked(NAME, [ME]), {}, "inputs.context is a list and inputs.question is not"),
        (asked([NAME], [ME, ME]), {}, "inputs.question is a list of 1 and inputs.context one of 2"),
        (asked([NAME, 5], ME), {}, r"inputs\.question\[1\] must be a string, got 5"),
        ([asked(), asked("", ME)], {}, r"inputs\[1\]\.question is empty: give some text"),
        ("a question", {}, 'inputs must be an object {"question", "context"}, or a list of them'),
        (asked("soup " * 200), {}, r"inputs\.question is \d+ tokens long, which leaves no room .* shorter one$"),
        (asked(NAME, LONG), {"max_seq_len": 8}, r"leaves no room .* or a larger max_seq_len \(at most 160\)"),
        (
            asked(NAME, LONG),
            {"max_seq_len": 40, "doc_stride": 36},
            r"doc_stride = 36 does not fit: .* have room for \d+ beside inputs.question: set doc_stride to at most",
        ),
        (asked(), {"max_seq_len": 40, "doc_stride": 41}, "doc_stride = 41 is larger than max_seq_len = 40 allows"),
        (asked(NAME, LONG * 100), {"max_seq_len": 50, "doc_stride": 39}, r"inputs\.context makes \d+ windows of 50"),
        (asked([NAME] * 60, LONG * 20), {}, "inputs are more than 524288 tokens, which one request may have"),
        (asked([NAME] * 60, LONG), {"top_k": 10**6}, "top_k = 1000000 makes more than 1000000 candidates"),
        (asked(NAME, "soup " * 900_000), {}, r"inputs\.context has 4500000 characters; .* shorten it"),
        (asked("soup " * 900_000, ME), {}, r"inputs\.question has 4500000 characters; .* shorten it"),
    ],
)
def test_bad_requests_are_refused_by_name(inputs: Any, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        trained("bert").prepare(inputs, parameters)


def test_a_huge_top_k_of_a_short_text_gives_all_there_is() -> None:
    assert len(answer(trained("bert"), asked(), top_k=10**30)) > 20


def test_spans_of_all_windows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("bert")
    item = model.prepare(asked(NAME, LONG), {"max_answer_len": 1_000})
    lengths = [len(row.ids) for row in item.rows]
    assert len(lengths) > 2
    monkeypatch.setattr(question_answering, "_SPANS_MAX", sum(length**2 for length in lengths))
    model.prepare(asked(NAME, LONG), {"max_answer_len": 1_000})
    monkeypatch.setattr(question_answering, "_SPANS_MAX", sum(length**2 for length in lengths) - 1)
    with pytest.raises(InvalidInput, match=r"max_answer_len = 1000 makes more than \d+ spans over all windows"):
        model.prepare(asked(NAME, LONG), {"max_answer_len": 1_000})
    model.prepare(asked(NAME, LONG), {})


def test_a_pair_without_a_single_token_is_refused(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, "BertForQuestionAnswering")
    tokenizer_file = directory / "tokenizer.json"
    tokenizer_file.write_text(json.dumps({**json.loads(tokenizer_file.read_text()), "post_processor": None}))
    model = load(directory)
    with pytest.raises(InvalidInput, match=r"inputs\[1\]\.question and inputs\[1\]\.context hold no tokens"):
        model.prepare([asked("where", WORDS), asked(" ", " ")], {})


def test_a_window_is_never_longer_than_the_model_reads() -> None:
    model = trained("bert")
    item = model.prepare(asked(NAME, LONG), {"max_seq_len": 10_000})
    assert max(len(row.ids) for row in item.rows) == 160
    assert answer(model, asked(NAME, LONG), max_seq_len=10_000)["answer"] == "Zoravi"


def test_a_panic_of_the_tokenizer_costs_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """Named as the one of the Rust bindings, which cannot be imported."""

    def panic(*arguments: Any, **keywords: Any) -> Any:
        raise PanicException("index out of bounds")

    model = load(TRAINED / "bert")
    panic.padding_side = "right"  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "_tokenizer", panic)
    with pytest.raises(InvalidInput, match="the tokenizer cannot process this: index out of bounds"):
        model.prepare(asked(), {})


def test_options_are_default_parameters() -> None:
    model = load(TRAINED / "bert", top_k=2)
    assert len(answer(model, asked())) == 2
    assert load(TRAINED / "bert", max_seq_len=5).describe()["batching"] == "on"
    assert isinstance(answer(model, asked(), top_k=1), dict)
    with pytest.raises(LoadError, match="options of model 'qa': unknown parameter 'topp'"):
        load(TRAINED / "bert", topp=2)


def test_weights_and_tokenizers_that_cannot_answer_are_told_at_the_load(tmp_path: Path) -> None:
    other = tiny_models.save(tmp_path / "classifier", "BertForSequenceClassification")
    with pytest.raises(
        LoadError, match=r"wrong task for the weights: .* tasks that fit: text-classification"
    ) as caught:
        load(other)
    assert caught.value.permanent
    with pytest.raises(LoadError, match=r"wrong task for the weights: .* tasks that fit: question-answering"):
        registry.build(RuntimeSpec("c", str(TRAINED / "bert"), "text-classification")).load("cpu")
    headless = tiny_models.save(tmp_path / "headless", "BertModel")
    with pytest.raises(LoadError, match=r"lacks 2 of the weights .* \(qa_outputs.bias, qa_outputs.weight\)"):
        load(headless)


def test_a_tokenizer_without_offsets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        is_fast = False

    monkeypatch.setattr(loading.Checkpoint, "load_tokenizer", lambda self: Slow())
    with pytest.raises(LoadError, match="its tokenizer, Slow, cannot tell where in the text a token stands"):
        load(TRAINED / "bert")


def test_a_model_that_reads_more_than_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any, attention_mask: Any, bbox: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(transformers.BertForQuestionAnswering, "forward", forward)
    with pytest.raises(LoadError, match="BertForQuestionAnswering does not answer a question about a text: TypeError"):
        load(TRAINED / "bert")


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, "BertForQuestionAnswering")
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["zoravi"])
    tokenizer.save_pretrained(directory)
    with pytest.raises(InvalidInput, match=r"holds the token .* which the tokenizer makes and the model does not know"):
        load(directory).prepare(asked("where", "zoravi"), {})


def test_warm_up_requests_are_answered_and_begin_with_the_longest() -> None:
    model = trained("roberta")
    requests = model.examples()
    costs = [model.cost(model.prepare(*request)) for request in requests]
    assert costs[0] == max(costs) > 60
    assert all(isinstance(each, dict) for each in answers(model, *requests))


def test_finishing_touches_no_device_and_runs_beside_a_forward() -> None:
    model = trained("bert")
    outputs = model.forward([model.prepare(asked(), {})])
    found: list[Any] = []
    finish = threading.Thread(target=lambda: found.extend(map(model.finish, outputs)))
    finish.start()
    finish.join(30)
    assert found[0]["answer"] == "Tomi"
    assert all(isinstance(each, np.ndarray) for each in outputs[0].logits)


# --- over HTTP ---


def test_questions_are_answered_over_http_alone_and_at_once() -> None:
    model = {"name": "qa", "model": str(TRAINED / "roberta"), "task": "question-answering", "device": "cpu"}
    cases = [
        case
        for case in recorded("roberta")
        if case["name"].startswith(("plain", "top_k-3", "shape", "unicode", "error", "window-late"))
    ]
    with Service([model]) as service:
        service.wait_ready()
        asking = [service.ask_later("qa", case["inputs"], parameters=case["parameters"]) for case in cases]
        for case, response in zip(cases, (future.result(60) for future in asking), strict=True):
            if "error" in case:
                assert response.status_code == 422, case["name"]
            else:
                assert response.status_code == 200, (case["name"], response.text)
                assert_same(response.json(), case["answer"])
        assert {slot["restarts"] for slot in service.slots().values()} == {0}

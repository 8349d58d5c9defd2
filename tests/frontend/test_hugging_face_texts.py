"""Hugging Face's clients, unmodified, against models that read: labels, words, answers, summaries, translations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError

from tests import tiny_models
from tests.hugging_face import Clients, Gallery, loaded, native

TEXT = "Paris is the capital of France."
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    directory = tmp_path_factory.mktemp("models")
    labels = ["good", "bad", "neutral"]
    implied = ["contradiction", "neutral", "entailment"]
    save = tiny_models.save
    translator = tiny_models.save_translator(directory / "translator", "BartForConditionalGeneration")
    models = {
        "sentiment": ("sentiment-analysis", save(directory / "a", "BertForSequenceClassification", labels=labels)),
        "names": ("token-classification", save(directory / "b", "BertForTokenClassification", labels=["O", "B-X"])),
        "qa": ("question-answering", save(directory / "c", "BertForQuestionAnswering")),
        "mask": ("fill-mask", save(directory / "d", "BertForMaskedLM")),
        "kinds": ("zero-shot-classification", save(directory / "e", "BertForSequenceClassification", labels=implied)),
        "summary": ("summarization", translator),
        "german": ("translation", translator),
    }
    with Gallery({name: (task, loaded(task, path)) for name, (task, path) in models.items()}) as started:
        yield started


@pytest.fixture(scope="module", params=["sync", "async"])
def ask(request: pytest.FixtureRequest, service: Gallery) -> Clients:
    return Clients(service, request.param)


def test_text_classification_gives_every_label_or_the_best(ask: Clients, service: Gallery) -> None:
    [expected] = native(service, "sentiment", [TEXT], top_k=None)
    assert ask("sentiment", "text_classification", TEXT) == expected
    assert len(expected) == 3
    assert ask("sentiment", "text_classification", TEXT, top_k=1) == expected[:1]
    expected = native(service, "sentiment", [TEXT], top_k=None, function_to_apply="sigmoid")
    assert [ask("sentiment", "text_classification", TEXT, function_to_apply="sigmoid")] == expected


def test_token_classification_joins_words_unless_told_otherwise(ask: Clients, service: Gallery) -> None:
    joined = ask("names", "token_classification", TEXT)
    expected = native(service, "names", TEXT, aggregation_strategy="simple")
    assert [each.entity_group for each in joined] == [each["entity_group"] for each in expected]
    assert [(each.word, each.start, each.end) for each in joined] == [
        (each["word"], each["start"], each["end"]) for each in expected
    ]
    single = ask("names", "token_classification", TEXT, aggregation_strategy="none", ignore_labels=["X"])
    assert [each.entity for each in single] == [
        each["entity"] for each in native(service, "names", TEXT, ignore_labels=["X"])
    ]
    assert len(single) > len(joined) > 0


def test_question_answering_gives_one_answer_or_several(ask: Clients, service: Gallery) -> None:
    question = {"question": "What is Paris?", "context": TEXT}
    one = ask("qa", "question_answering", **question)
    expected = native(service, "qa", question)
    assert (one.answer, one.score, one.start, one.end) == tuple(
        expected[key] for key in ("answer", "score", "start", "end")
    )
    settings = {"top_k": 3, "max_answer_len": 4, "doc_stride": 4, "max_seq_len": 32, "align_to_words": False}
    several = ask("qa", "question_answering", **question, **settings, handle_impossible_answer=True)
    assert [each.answer for each in several] == [
        each["answer"] for each in native(service, "qa", question, **settings, handle_impossible_answer=True)
    ]
    assert len(several) == 3


def test_fill_mask_gives_sentences(ask: Clients, service: Gallery) -> None:
    text = "Paris is the [MASK] of France."
    assert [each.sequence for each in ask("mask", "fill_mask", text, top_k=2)] == [
        each["sequence"] for each in native(service, "mask", text, top_k=2)
    ]
    [only] = ask("mask", "fill_mask", text, targets=["a"])
    assert only.token_str == "a"
    assert len(ask("mask", "fill_mask", text)) == 5


def test_zero_shot_classification_gives_pairs(ask: Clients, service: Gallery) -> None:
    labels = ["travel", "food"]
    expected = native(service, "kinds", TEXT, candidate_labels=labels, multi_label=False)
    answer = ask("kinds", "zero_shot_classification", TEXT, labels)
    assert [(each.label, each.score) for each in answer] == list(
        zip(expected["labels"], expected["scores"], strict=True)
    )
    template = {"multi_label": True, "hypothesis_template": "It is {}."}
    expected = native(service, "kinds", TEXT, candidate_labels=labels, **template)
    answer = ask("kinds", "zero_shot_classification", TEXT, labels, **template)
    assert [each.score for each in answer] == expected["scores"]


def test_summaries_and_translations_are_one_text(ask: Clients, service: Gallery) -> None:
    settings: Any = {"max_new_tokens": NEW_TOKENS, "num_beams": 2}
    [expected] = native(service, "summary", TEXT, **settings)
    assert ask("summary", "summarization", TEXT, generate_parameters=settings) == expected
    cut = ask("summary", "summarization", " ".join([TEXT] * 50), truncation="longest_first")
    assert cut.summary_text == native(service, "summary", " ".join([TEXT] * 50), truncation=True)[0]["summary_text"]
    answer = ask("german", "translation", TEXT, generate_parameters=settings, clean_up_tokenization_spaces=True)
    assert answer.translation_text == expected["summary_text"]
    with pytest.raises(HfHubHTTPError, match="one pair alone"):
        ask("german", "translation", TEXT, src_lang="en", tgt_lang="de")


def test_refusals_name_the_cause(ask: Clients) -> None:
    with pytest.raises(HfHubHTTPError, match=r"no model is called 'nobody'.*sentiment") as raised:
        ask("nobody", "text_classification", TEXT)
    assert raised.value.response.status_code == 404
    with pytest.raises(HfHubHTTPError, match="top_k"):
        ask("sentiment", "text_classification", TEXT, top_k=0)
    with pytest.raises(HfHubHTTPError, match="truncation"):
        ask("sentiment", "text_classification", " ".join([TEXT] * 50))
    with pytest.raises(HfHubHTTPError, match="is for text-classification"):
        ask("sentiment", "chat_completion", [{"role": "user", "content": TEXT}])
    with pytest.raises(HfHubHTTPError, match="asks it for 'fill-mask'"):
        ask("sentiment/pipeline/fill-mask", "fill_mask", TEXT)

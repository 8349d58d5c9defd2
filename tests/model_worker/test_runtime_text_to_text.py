"""Summaries and translations: what they say is what the model's own `generate` writes for the text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from model_worker.runtimes import registry
from model_worker.runtimes.base import Model
from model_worker.specs import RuntimeSpec
from shared.errors import InvalidInput, LoadError, RequestError
from tests import tiny_models

TEXTS = ["Paris is the capital of France.", "Hello world", "one two three four five six seven"]
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_translator(tmp_path_factory.mktemp("bart"), "BartForConditionalGeneration")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With prefixes and settings of its own, as the well known one has."""
    directory = tiny_models.save_translator(tmp_path_factory.mktemp("t5"), "T5ForConditionalGeneration")
    file = directory / "config.json"
    own = {
        "summarization": {"prefix": "summarize: ", "num_beams": 2, "max_length": 9},
        "translation_en_to_de": {"prefix": "translate English to German: "},
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_specific_params": own}))
    return directory


def build(directory: Path, task: str, **options: object) -> Model:
    model = registry.build(RuntimeSpec("tiny", str(directory), task, options=options))
    model.load("cpu")
    return model


def ask(model: Model, *requests: tuple[Any, dict[str, Any]]) -> list[Any]:
    items = [model.prepare(*request) for request in requests]
    return [model.finish(output) for output in model.forward(items)]


def written_alone(directory: Path, text: str, **settings: Any) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    [ids] = model.generate(**tokenizer(text, return_tensors="pt"), **settings)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("summarization", "summary_text"),
        ("translation", "translation_text"),
        ("text2text-generation", "generated_text"),
    ],
)
def test_a_batch_writes_what_generate_writes_for_each_text_alone(bart: Path, task: str, key: str) -> None:
    model = build(bart, task)
    answers = ask(model, *((text, {"max_new_tokens": NEW_TOKENS}) for text in TEXTS))
    assert answers == [[{key: written_alone(bart, text, max_new_tokens=NEW_TOKENS)}] for text in TEXTS]
    assert len({answer[0][key] for answer in answers}) > 1
    [together] = ask(model, (TEXTS, {"max_new_tokens": NEW_TOKENS}))
    assert together == [answer[0] for answer in answers]


def test_beams_and_nested_parameters_reach_generate(bart: Path) -> None:
    model = build(bart, "summarization")
    settings = {"num_beams": 3, "max_length": 12, "min_length": 5, "no_repeat_ngram_size": 2}
    [answer] = ask(model, (TEXTS[0], {"generate_parameters": settings, "clean_up_tokenization_spaces": True}))
    assert answer == [{"summary_text": written_alone(bart, TEXTS[0], **settings)}]


def test_only_requests_with_the_same_settings_share_a_batch(bart: Path) -> None:
    model = build(bart, "summarization")
    groups = [
        model.group(model.prepare("a", parameters))
        for parameters in ({"num_beams": 2}, {"generate_parameters": {"num_beams": 2}}, {"num_beams": 3}, {})
    ]
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3
    drawn = [model.prepare("a", {"do_sample": True}) for _ in range(2)]
    assert len({model.group(item) for item in drawn}) == 2


def test_a_models_own_settings_and_prefix_for_the_task_hold(t5: Path) -> None:
    [answer] = ask(build(t5, "summarization"), (TEXTS[0], {}))
    expected = written_alone(t5, f"summarize: {TEXTS[0]}", num_beams=2, max_length=9)
    assert answer == [{"summary_text": expected}]


def test_languages_choose_the_prefix(t5: Path) -> None:
    model = build(t5, "translation")
    languages = {"src_lang": "en", "tgt_lang": "de"}
    [answer] = ask(model, (TEXTS[0], {**languages, "max_new_tokens": NEW_TOKENS}))
    expected = written_alone(t5, f"translate English to German: {TEXTS[0]}", max_new_tokens=NEW_TOKENS)
    assert answer == [{"translation_text": expected}]
    for parameters in ({}, {"src_lang": "en"}):
        with pytest.raises(InvalidInput, match="must both be given: this model has several languages: en_to_de"):
            model.prepare(TEXTS[0], parameters)
    with pytest.raises(InvalidInput, match="'en_to_fr'; this model has en_to_de"):
        model.prepare(TEXTS[0], {**languages, "tgt_lang": "fr"})
    assert build(t5, "translation", **languages).prepare(TEXTS[0], {})


def test_a_tokenizer_of_many_languages_says_how_the_answer_starts(bart: Path) -> None:
    model: Any = build(bart, "translation")
    starts = {"de": 7, "xx": model._tokenizer.unk_token_id}

    def build_inputs(text: str, return_tensors: None, src_lang: str, tgt_lang: str, **cut: object) -> dict[str, Any]:
        return {**model._tokenizer(text, **cut), "forced_bos_token_id": starts[tgt_lang]}

    model._tokenizer._build_translation_inputs = build_inputs
    languages = {"src_lang": "en", "tgt_lang": "de"}
    [answer] = ask(model, (TEXTS[0], {**languages, "max_new_tokens": NEW_TOKENS}))
    expected = written_alone(bart, TEXTS[0], max_new_tokens=NEW_TOKENS, forced_bos_token_id=7)
    assert answer == [{"translation_text": expected}]
    assert expected != written_alone(bart, TEXTS[0], max_new_tokens=NEW_TOKENS)
    assert model.examples() == ()
    for unknown in ("xx", "yy"):
        with pytest.raises(InvalidInput, match="not known to this model"):
            model.prepare(TEXTS[0], {**languages, "tgt_lang": unknown})


@pytest.mark.parametrize(
    ("inputs", "parameters", "words"),
    [
        (1, {}, "inputs must be a string"),
        ("a", {"beams": 1}, "unknown parameter 'beams'"),
        ("a", {"generate_parameters": {"custom_generate": "x"}}, "unknown parameter 'custom_generate'"),
        ("a", {"generate_parameters": []}, "generate_parameters must be an object"),
        ("a", {"num_beams": 65}, "num_beams must be at most 64"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ("a", {"max_length": 10**6}, "max_length must be at most 64"),
        ("a", {"temperature": 0}, "temperature must be a number"),
        ("a", {"truncation": "some"}, "truncation must be one of"),
        ("a", {"src_lang": "en"}, "unknown parameter 'src_lang'"),
        (" ".join(TEXTS * 10), {}, "set truncation to true"),
    ],
)
def test_what_cannot_be_meant_is_refused(bart: Path, inputs: Any, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        build(bart, "summarization").prepare(inputs, parameters)


@pytest.mark.parametrize("truncation", [True, "longest_first"])
def test_long_text_is_cut_where_that_is_asked_for(bart: Path, truncation: object) -> None:
    item: Any = build(bart, "summarization").prepare(" ".join(TEXTS * 10), {"truncation": truncation})
    assert len(item.rows[0]) == 64


def test_numbers_that_are_none_fail_the_request(bart: Path) -> None:
    model: Any = build(bart, "summarization")
    with torch.no_grad():
        model._model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(RequestError, match="not finite"):
        ask(model, ("a", {"max_new_tokens": 2}))


def test_options_are_checked_when_the_model_is_loaded(bart: Path) -> None:
    with pytest.raises(LoadError, match="options of model 'tiny': num_beams must be at least 1"):
        build(bart, "summarization", num_beams=0)


def test_it_warms_up_and_describes_itself(bart: Path) -> None:
    model = build(bart, "summarization")
    assert all(len(answer) == 1 for answer in ask(model, *model.examples()))
    assert model.describe()["limit_tokens"] == 64

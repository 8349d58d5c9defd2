"""Prepacked linear layers compute what ordinary ones do, hold nothing twice, and are ordinary where they cannot be."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from model_worker.runtimes import linear_layers, registry
from model_worker.runtimes.linear_layers import PrepackedConv1D, PrepackedLinear, prepack, rows_with_kernels
from model_worker.specs import RuntimeSpec
from tests import tiny_models

INPUTS, OUTPUTS = 40, 24
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

REFUSED = linear_layers.refusal(torch.float32)
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=REFUSED or "they can be prepacked")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def ordinary(kind: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    layers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(INPUTS, OUTPUTS),
        "linear without a bias": lambda: nn.Linear(INPUTS, OUTPUTS, bias=False),
        "one output": lambda: nn.Linear(INPUTS, 1),
        "no output": lambda: nn.Linear(INPUTS, 0),
        "of GPT-2": lambda: Conv1D(OUTPUTS, INPUTS),
    }
    return nn.Sequential(layers[kind]()).to(dtype).eval()


def prepacked(model: nn.Module) -> Any:
    twin = copy.deepcopy(model)
    prepack(twin)
    return twin


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["linear", "linear without a bias", "one output", "of GPT-2"])
def test_they_compute_what_ordinary_layers_do(kind: str, dtype: torch.dtype) -> None:
    model = ordinary(kind, dtype)
    twin = prepacked(model)
    assert isinstance(twin[0], (PrepackedLinear, PrepackedConv1D))
    chooser = random.Random(1)
    shapes = [(1,), (3, 7), (2, 5, 11), (33,), (65,), (257,), (0,), (2, 0), (1000,), *((n,) for n in range(1, 34))]
    shapes += [(chooser.randint(1, 700),) for _ in range(40)]
    for shape in shapes:
        inputs = torch.randn(*shape, INPUTS).to(dtype)
        torch.testing.assert_close(twin(inputs), model(inputs), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_inputs_may_lie_in_memory_in_any_way() -> None:
    model = ordinary("linear")
    twin = prepacked(model)
    for inputs in (
        torch.randn(INPUTS),
        torch.randn(INPUTS, 50).t(),
        torch.randn(1, 1, INPUTS).expand(3, 15, INPUTS),
        torch.randn(4, 9, 2 * INPUTS)[:, :, ::2],
        torch.randn(5, 70, INPUTS).transpose(0, 1),
    ):
        torch.testing.assert_close(twin(inputs), model(inputs), rtol=1e-5, atol=1e-5)


def test_inputs_that_do_not_fit_are_refused() -> None:
    twin = prepacked(ordinary("linear"))
    for inputs in (
        torch.randn(3, INPUTS - 1),
        torch.randn(3, INPUTS, dtype=torch.float64),
        torch.ones(3, INPUTS).int(),
    ):
        with pytest.raises(RuntimeError):
            twin(inputs)


def test_a_number_that_is_none_stays_in_its_row() -> None:
    twin = prepacked(ordinary("linear"))
    inputs = torch.randn(50, INPUTS)
    inputs[7, 3] = float("nan")
    bad = twin(inputs).isnan().any(1)
    assert bad.nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("kind", ["linear", "of GPT-2"])
def test_a_layer_whose_weight_is_asked_for_is_an_ordinary_one_again(kind: str) -> None:
    model = ordinary(kind)
    twin = prepacked(model)
    inputs = torch.randn(9, INPUTS)
    assert "0.weight" not in dict(twin.named_parameters())
    assert torch.equal(twin[0].get_parameter("weight"), model[0].get_parameter("weight"))
    assert type(twin[0]) is type(model[0])
    assert torch.equal(twin(inputs), model(inputs))
    assert dict(twin.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert linear_layers.weights(twin) == []


class Tied(nn.Module):
    """An output layer that has its weight in common with the input's embedding, and two that share one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(OUTPUTS, INPUTS)
        self.head = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.head.weight = self.embedding.weight
        self.first, self.second = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.second.weight = self.first.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.second(self.first(self.embedding(ids))))
        return output


def test_a_weight_in_common_with_an_embedding_is_left_to_that() -> None:
    model = Tied().eval()
    twin = prepacked(model)
    ids = torch.arange(OUTPUTS)
    assert isinstance(twin.head, PrepackedLinear)
    assert torch.equal(twin.embedding.weight, model.embedding.weight)
    assert type(twin.first) is type(twin.second) is nn.Linear
    assert twin.first.weight is twin.second.weight
    torch.testing.assert_close(twin(ids), model(ids), rtol=1e-5, atol=1e-5)
    assert linear_layers.described(twin) == "1 of 3"


class Doubled(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_of_another_kind_stay_as_they_are() -> None:
    replaced = nn.Linear(INPUTS, INPUTS)
    replaced.forward = torch.neg  # type: ignore[method-assign]
    half, nothing = nn.Linear(INPUTS, INPUTS).half(), ordinary("no output")[0]
    model = nn.Sequential(Doubled(INPUTS, INPUTS), replaced, half, nothing)
    prepack(model)
    assert [type(layer) for layer in model] == [Doubled, nn.Linear, nn.Linear, nn.Linear]
    assert nothing(torch.randn(3, INPUTS)).shape == (3, 0)


def test_where_the_operators_fail_a_model_stays_as_it_was_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("this torch has no such operator\nsecond line")

    directory = tiny_models.save(tmp_path, "BertModel")
    linear_layers.refusal.cache_clear()
    monkeypatch.setattr(linear_layers, "_pack", fail)
    try:
        model: Any = registry.build(RuntimeSpec("tiny", str(directory), "embedding"))
        model.load("cpu")
        described = model.describe()["prepacked_linear_layers"]
    finally:
        linear_layers.refusal.cache_clear()
    assert re.fullmatch(r"0 of \d+: NotImplementedError: this torch has no such operator", str(described))
    assert not any(isinstance(module, PrepackedLinear) for module in model._model.modules())


def test_each_type_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN lacks bfloat16 on many processors that have float32."""
    right = linear_layers._pack

    def pack(weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype is torch.bfloat16:
            raise RuntimeError("no bfloat16 on this processor")
        return right(weight)

    linear_layers.refusal.cache_clear()
    monkeypatch.setattr(linear_layers, "_pack", pack)
    try:
        model = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS).bfloat16())
        prepack(model)
        assert [type(layer) for layer in model] == [PrepackedLinear, nn.Linear]
        assert linear_layers.described(model) == "1 of 2: RuntimeError: no bfloat16 on this processor"
    finally:
        linear_layers.refusal.cache_clear()


def test_an_operator_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear_layers._product
    linear_layers.refusal.cache_clear()
    monkeypatch.setattr(linear_layers, "_product", lambda *arguments: right(*arguments) * 1.001)
    try:
        model = ordinary("linear")
        prepack(model)
        assert linear_layers.described(model) == "0 of 1: oneDNN computes something else than torch"
    finally:
        linear_layers.refusal.cache_clear()


def test_few_numbers_of_rows_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    right, seen = linear_layers._product, set()

    def record(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.add(inputs.shape[:-1].numel())
        return right(inputs, packed, bias)

    twin = prepacked(ordinary("linear"))
    monkeypatch.setattr(linear_layers, "_product", record)
    for rows in range(1, 2049):
        assert twin(torch.zeros(rows, INPUTS)).shape == (rows, OUTPUTS)
    # Each takes memory for every size of layer; those that are a multiple of 32 share most of it.
    assert len([rows for rows in seen if rows % 32]) < 50
    assert len(seen) < 110


def test_little_is_computed_in_vain() -> None:
    sizes = {rows: rows_with_kernels(rows) for rows in range(1, 5000)}
    assert all(size == rows for rows, size in sizes.items() if rows <= 32)
    assert all(rows <= size < 1.25 * rows for rows, size in sizes.items())
    assert rows_with_kernels(0) == 0


@pytest.mark.parametrize(
    ("class_name", "task"),
    [
        ("BertModel", "embedding"),
        ("RobertaForQuestionAnswering", "question-answering"),
        ("GPT2LMHeadModel", "text-generation"),
        ("LlamaForCausalLM", "text-generation"),
    ],
)
def test_a_loaded_model_does_not_hold_the_file_that_it_came_from(class_name: str, task: str, tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, class_name)
    model: Any = registry.build(RuntimeSpec("tiny", str(directory), task))
    model.load("cpu")
    prepacked_count, all_count = map(int, model.describe()["prepacked_linear_layers"].split(" of "))
    assert prepacked_count == all_count > 0
    assert str(directory) not in Path("/proc/self/maps").read_text()
    files = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert model.describe()["weights_bytes"] > 0.9 * files

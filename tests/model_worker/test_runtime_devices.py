"""What the built-in runtimes do for the device: compiled models, and the way of tensors to it.

There is no GPU here: what a copy to one must look like is asked of a tensor that only notes what is asked of it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_worker.runtimes import compiling, embedding, registry, transfer
from model_worker.runtimes.continuous import dense, sampling
from model_worker.runtimes.transfer import to_device
from model_worker.specs import RuntimeSpec
from shared.config import Config
from shared.errors import LoadError
from tests import tiny_models


def load(directory: Path, task: str, **values: Any) -> Any:
    model = registry.build(RuntimeSpec("tiny", str(directory), task, **values))
    model.load("cpu")
    return model


class Noting:
    """In a tensor's place."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def pin_memory(self) -> Noting:
        self.calls.append(("pin_memory", None))
        return self

    def to(self, device: object, non_blocking: bool = False) -> Noting:
        self.calls.append((f"to {device}", non_blocking))
        return self


def test_a_copy_to_a_gpu_is_made_from_pinned_memory_and_nobody_waits_for_it() -> None:
    tensor: Any = Noting()
    to_device(tensor, "cuda:0")
    assert tensor.calls == [("pin_memory", None), ("to cuda:0", True)]


def test_no_memory_is_pinned_for_other_devices() -> None:
    tensor: Any = Noting()
    to_device(tensor, torch.device("cpu"))
    assert tensor.calls == [("to cpu", False)]


def test_the_vectors_of_a_batch_come_back_in_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny_models.save(tmp_path, "BertModel"), "embedding")
    items = [model.prepare(text, {}) for text in ("fox", "one", "sea")]
    copied: list[tuple[int, ...]] = []
    pool = embedding.EmbeddingModel._pool

    class Counting(torch.Tensor):
        def cpu(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            copied.append(tuple(self.shape))
            return self.as_subclass(torch.Tensor)

    def counted(self: Any, work: Any) -> Any:
        order, vectors = pool(self, work)
        return order, vectors.as_subclass(Counting)

    monkeypatch.setattr(embedding.EmbeddingModel, "_pool", counted)
    assert len(model.forward(items)) == 3
    assert copied == [(3, 16)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weights_have_the_type_that_was_asked_for_and_vectors_are_float32(tmp_path: Path, dtype: str) -> None:
    model = load(tiny_models.save(tmp_path, "BertModel"), "embedding", dtype=dtype)
    assert model.describe()["dtype"] == dtype
    [output] = model.forward([model.prepare("fox", {})])
    assert model.finish(output).dtype == np.float32


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_answers_as_the_plain_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced and called as for the usual backend, which takes a minute to compile on a busy machine.
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    directory = tiny_models.save(tmp_path, "BertModel", num_hidden_layers=1)
    plain, compiled = load(directory, "embedding"), load(directory, "embedding", compile=True)
    assert (plain.describe()["compiled"], compiled.describe()["compiled"]) == (False, True)
    assert str(compiled.describe()["prepacked_linear_layers"]).startswith("0 of ")
    requests = ["fox", "one two three", "She sells sea shells by the sea shore!"]
    answers = [
        [model.finish(output) for output in model.forward([model.prepare(text, {}) for text in requests])]
        for model in (plain, compiled)
    ]
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_without_a_compiler_a_model_that_is_to_be_compiled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/nonexistent/compiler"))
    directory = tiny_models.save(tmp_path, "BertModel")
    with pytest.raises(LoadError, match=r"compile = true is not possible here: there is no C\+\+ compiler") as caught:
        load(directory, "embedding", compile=True)
    assert caught.value.permanent


def test_what_would_be_compiled_with_every_step_is_refused(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, "GPT2LMHeadModel")
    with pytest.raises(LoadError, match="each step would be compiled anew") as caught:
        load(directory, "text-generation", compile=True)
    assert caught.value.permanent


def test_a_class_of_ones_own_compiles_itself() -> None:
    with pytest.raises(ValueError, match=r"call torch\.compile in its load"):
        Config(models=({"name": "own", "model": "mine:Own", "compile": True},))


def test_what_steps_of_text_send_to_the_device_goes_from_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_models.save(tmp_path, "GPT2LMHeadModel"), "text-generation")
    sent: list[torch.Tensor] = []
    made = torch.tensor

    def noted(tensor: torch.Tensor, device: object) -> torch.Tensor:
        sent.append(tensor)
        return to_device(tensor, "cpu")

    def unsent(*values: Any, **keywords: Any) -> torch.Tensor:
        if str(sys._getframe(1).f_globals["__name__"]).startswith("model_worker."):
            assert "device" not in keywords, "made on the device: the host waits until it is there"
        return made(*values, **keywords)

    for module in (transfer, dense, sampling):
        monkeypatch.setattr(module, "to_device", noted)
    monkeypatch.setattr(torch, "tensor", unsent)
    parameters: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9, "seed": 1},
        {"presence_penalty": 1.0, "logprobs": 2},
        {"temperature": 0.7},
    ]
    items = [model.prepare("fox", {**own, "max_new_tokens": 4}) for own in parameters]
    for item in items:
        model.join(item)
    ended: list[object] = []
    while len(ended) < len(items):
        ended += [progress for progress in model.step() if progress.ended]
    # At least: the prompts, the last tokens of each step but the first, and what is drawn in each.
    assert len(sent) >= 1 + 3 + 4

"""Sequences laid end to end are computed as each of them alone, or they are padded and the model says why."""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from model_worker.runtimes import encoder, packing, registry
from model_worker.runtimes.encoder import Encoder
from model_worker.specs import RuntimeSpec
from tests import tiny_models

POSITIONS = 64
PADDED = "to the longest of a batch"
ALIKE = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.03}

# ModernBERT has a layer in which a token sees its neighbours alone, Llama one in which it sees what is before it.
PACKED = ("BertModel", "RobertaModel", "DistilBertModel", "AlbertModel", "ModernBertModel", "LlamaModel")
REFUSED = {
    "MPNetModel": "its attention is not one of those that transformers lets others replace",
    "DebertaV2Model": "its attention is not one of those that transformers lets others replace",
    "XLNetModel": "it takes no position_ids",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: tiny_models.save(tmp_path_factory.mktemp(name), name, positions=POSITIONS))


def load(directory: Path, dtype: str = "float32") -> Any:
    model = registry.build(RuntimeSpec("tiny", str(directory), "embedding", dtype=dtype))
    model.load("cpu")
    return model


def sequences_of(model: Any, seed: int, count: int = 12) -> list[list[int]]:
    """Of any length, with some of one length among them, and one of a single token."""
    chooser = random.Random(seed)
    lengths = [1, 9, 9, 9, POSITIONS, *(chooser.randint(1, POSITIONS) for _ in range(count - 5))]
    chooser.shuffle(lengths)
    known = len(model._tokenizer)
    return [[chooser.randrange(known) for _ in range(length)] for length in lengths]


def outputs(blocks: Sequence[packing.Block]) -> list[torch.Tensor]:
    return encoder._each(blocks)


def alone(directory: Path, sequences: Sequence[list[int]], dtype: str = "float32") -> list[torch.Tensor]:
    """What the library's own model makes of each."""
    model: Any = transformers.AutoModel.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        return [model(torch.tensor([sequence]))[0][0].float() for sequence in sequences]


def assert_alike(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float = 1e-4) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=tolerance, rtol=tolerance)


def computed_shapes(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[tuple[int, ...]]:
    """Of the token ids of every forward from now on."""
    shapes: list[tuple[int, ...]] = []
    forward = model._model.forward

    def recorded(**keywords: Any) -> Any:
        shapes.append(tuple(keywords["input_ids"].shape))
        return forward(**keywords)

    monkeypatch.setattr(model._model, "forward", recorded)
    return shapes


@pytest.mark.parametrize("name", PACKED)
def test_every_token_in_a_row_comes_out_as_alone(
    saved: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved(name))
    assert (model.describe()["padding"], model.pads) == ("none", False)
    shapes = computed_shapes(monkeypatch, model)
    for seed in (1, 2):
        sequences = sequences_of(model, seed)
        with torch.inference_mode():
            got = outputs(model._encoder.compute(sequences))
        assert_alike(got, alone(saved(name), sequences))
        # Longer than any sequence that the model reads, and without a token of padding.
        assert shapes.pop() == (1, sum(map(len, sequences)))
        assert sum(map(len, sequences)) > POSITIONS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_needs_no_padding_either(saved: Callable[[str], Path], dtype: str) -> None:
    model = load(saved("BertModel"), dtype)
    assert model.describe()["padding"] == "none"
    sequences = sequences_of(model, 1)
    with torch.inference_mode():
        got = outputs(model._encoder.compute(sequences))
    assert_alike(got, alone(saved("BertModel"), sequences, dtype), ALIKE[dtype])


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_with_an_attention_of_its_own_is_padded_and_says_so(
    saved: Callable[[str], Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=encoder.__name__):
        model = load(saved(name))
    assert (model.describe()["padding"], model.pads) == (f"{PADDED}: {REFUSED[name]}", True)
    [record] = [record for record in caplog.records if record.name == encoder.__name__]
    assert record.getMessage() == "sequences_padded"
    assert record.__dict__["event_fields"] == {"model": "tiny", "reason": REFUSED[name]}
    sequences = sequences_of(model, 1)
    with torch.inference_mode():
        got = outputs(model._encoder.compute(sequences))
    assert_alike(got, alone(saved(name), sequences), 1e-3)


def careless(change: Callable[[dict[str, Any]], None]) -> Any:
    """A forward of BERT that changes what it was given before it computes."""
    forward = transformers.BertModel.forward

    def changed(self: Any, **keywords: Any) -> Any:
        change(keywords)
        return forward(self, **keywords)

    changed.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return changed


def forget_positions(keywords: dict[str, Any]) -> None:
    if "position_ids" in keywords:
        # As far as there are any, so that nothing is raised.
        keywords["position_ids"] = torch.arange(keywords["input_ids"].shape[1]).remainder(POSITIONS).unsqueeze(0)


def forget_kinds(keywords: dict[str, Any]) -> None:
    keywords.pop("packed_row", None)


def see_neighbours(keywords: dict[str, Any]) -> None:
    row = keywords.get("packed_row")
    if row is not None:
        first, second = row.runs[:2]
        row.runs[:2] = [packing._Run(1, first.length + second.length * second.count)]
        row.tokens[:2] = [row.runs[0].length]


def be_offended(keywords: dict[str, Any]) -> None:
    if keywords["input_ids"].shape[1] > POSITIONS:
        raise IndexError(f"more than {POSITIONS} tokens\nin all")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (forget_positions, "without it the results would differ"),
        (see_neighbours, "without it the results would differ"),
        (forget_kinds, "it does not hand to its attention what its forward is given"),
        (be_offended, f"without it, IndexError: more than {POSITIONS} tokens"),
    ],
)
def test_a_model_for_which_a_row_is_not_right_is_served_padded_and_says_why(
    saved: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], None],
    reason: str,
) -> None:
    monkeypatch.setattr(transformers.BertModel, "forward", careless(change))
    model = load(saved("BertModel"))
    assert (model.describe()["padding"], model.pads) == (f"{PADDED}: {reason}", True)
    monkeypatch.undo()
    # With its own attention again: there is nothing left of the attempt.
    assert model._model.config._attn_implementation == "sdpa"
    sequences = sequences_of(model, 1)
    shapes = computed_shapes(monkeypatch, model)
    with torch.inference_mode():
        got = outputs(model._encoder.compute(sequences))
    assert shapes == [(len(sequences), POSITIONS)]
    assert_alike(got, alone(saved("BertModel"), sequences))


def test_padding_ids_within_a_text_are_not_counted_where_the_model_does_not(saved: Callable[[str], Path]) -> None:
    model = load(saved("RobertaModel"))
    pad = model._tokenizer.pad_token_id
    sequences = [[0, 7, 8, pad, 9, 10, 2], [0, pad, pad, 30, 31, 32, 2], [0, 50, 2]]
    with torch.inference_mode():
        got = outputs(model._encoder.compute(sequences))
    assert_alike(got, alone(saved("RobertaModel"), sequences))


def test_kinds_of_tokens_stay_with_their_tokens(saved: Callable[[str], Path]) -> None:
    model = load(saved("BertModel"))
    sequences = sequences_of(model, 3)
    kinds = [[int(place > len(sequence) // 2) for place in range(len(sequence))] for sequence in sequences]
    own: Any = transformers.AutoModel.from_pretrained(saved("BertModel"))
    with torch.inference_mode():
        got = outputs(model._encoder.compute(sequences, kinds))
        wanted = [
            own(torch.tensor([sequence]), token_type_ids=torch.tensor([types]))[0][0]
            for sequence, types in zip(sequences, kinds, strict=True)
        ]
    assert_alike(got, wanted)


def test_a_tokenizer_that_knows_no_kinds_of_tokens_gives_none(saved: Callable[[str], Path]) -> None:
    model = load(saved("BertModel"))
    without = Encoder(model._model, lambda output: output[0], pad_token_id=0, takes_token_types=False)
    model._encoder._packed.undo()
    without.stop_padding("tiny", model._tokenizer)
    assert not without.pads
    sequences = sequences_of(model, 4)
    with torch.inference_mode():
        assert_alike(outputs(without.compute(sequences)), alone(saved("BertModel"), sequences))


def test_a_row_gets_no_longer_than_it_was_tried(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_TRIED_POSITIONS_MAX", POSITIONS - 1)
    monkeypatch.setattr(encoder, "_TRIED_SHORT_TOKENS", (1, 2))
    monkeypatch.setattr(encoder, "_TRIED_LONG_TOKENS", 20)
    model = load(saved("BertModel"))
    shapes = computed_shapes(monkeypatch, model)
    sequences = sequences_of(model, 5)
    with torch.inference_mode():
        got = outputs(model._encoder.compute(sequences))
    assert_alike(got, alone(saved("BertModel"), sequences))
    assert sum(tokens for _, tokens in shapes) == sum(map(len, sequences))
    assert {rows for rows, _ in shapes} == {1}
    assert max(tokens for _, tokens in shapes) <= POSITIONS < sum(map(len, sequences))


def test_a_compiled_model_stays_padded(saved: Callable[[str], Path]) -> None:
    model = load(saved("BertModel"))
    model._encoder._packed.undo()
    model._model.compile(backend="eager")
    again = Encoder(model._model, lambda output: output[0], pad_token_id=0, takes_token_types=True)
    again.stop_padding("tiny", model._tokenizer)
    assert again.pads
    assert again.padding == f"{PADDED}: a compiled model would be compiled anew for each mix of lengths"


def test_an_accelerator_stays_padded(saved: Callable[[str], Path]) -> None:
    model = load(saved("BertModel"))
    elsewhere = Encoder(model._model.to("meta"), lambda output: output[0], pad_token_id=0, takes_token_types=True)
    elsewhere.stop_padding("tiny", model._tokenizer)
    assert (elsewhere.padding, elsewhere.pads) == (f"{PADDED}: without padding on a CPU only", True)


def test_questions_cost_what_their_windows_cost_together(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, "BertForQuestionAnswering", positions=POSITIONS)
    model: Any = registry.build(RuntimeSpec("tiny", str(directory), "question-answering"))
    model.load("cpu")
    assert (model.describe()["padding"], model.pads) == ("none", False)
    pairs = [{"question": "Who?", "context": " ".join(tiny_models.TEXTS[:count])} for count in (1, 3)]
    item = model.prepare(pairs, {"max_seq_len": 40, "doc_stride": 5})
    lengths = [len(row.ids) for row in item.rows]
    assert len(set(lengths)) > 1
    assert model.cost(item) == sum(lengths)
    with torch.inference_mode():
        together = model._compute(item.rows)
        alone = [model._compute([row])[0] for row in item.rows]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_vectors_are_those_of_padded_sequences_whatever_the_pooling(saved: Callable[[str], Path]) -> None:
    modes = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
    spec = RuntimeSpec("tiny", str(saved("RobertaModel")), "embedding", options={"pooling": modes, "normalize": True})
    model: Any = registry.build(spec)
    model.load("cpu")
    padded: Any = registry.build(spec)
    padded.load("cpu")
    padded._encoder._packed.undo()
    padded._encoder._packed = None
    items = [model.prepare(texts, {}) for texts in (tiny_models.TEXTS, "fox", ["one", "fox"], tiny_models.TEXTS[0])]
    for one, other in zip(model.forward(items), padded.forward(items), strict=True):
        np.testing.assert_allclose(model.finish(one), padded.finish(other), atol=1e-5)

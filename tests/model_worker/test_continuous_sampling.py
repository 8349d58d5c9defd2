"""Sampling for many rows at once: the same distributions as transformers' processors, one row at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model_worker.runtimes.continuous import sampling
from model_worker.runtimes.continuous.sampling import Draw, SamplingPlan
from model_worker.runtimes.continuous.sequences import Sampling

VOCABULARY = 1000
CPU = torch.device("cpu")


class Scripted(random.Random):
    """Gives the numbers that a test wants."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.numbers = numbers

    def random(self) -> float:
        return self.numbers.pop(0)


def scores(rows: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def reference(settings: Sampling, prompt: list[int], row: torch.Tensor) -> torch.Tensor:
    """Probabilities [vocabulary] by transformers' own processors, in the order in which it applies them."""
    processors = LogitsProcessorList()
    if settings.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    processors.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        processors.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p > 0.0:
        processors.append(MinPLogitsWarper(settings.min_p))
    ids: Any = torch.tensor([prompt])
    probabilities: torch.Tensor = processors(ids, row.clone()[None]).softmax(-1)[0]
    return probabilities


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, min_p=0.05),
    Sampling(temperature=0.7, top_k=40),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.5, top_p=0.9),
    Sampling(temperature=9.0, top_p=0.97),  # needs more than the first guess
    Sampling(temperature=0.8, top_k=50, top_p=0.8, min_p=0.02),
    Sampling(temperature=1.2, top_k=5000, top_p=0.99),
    Sampling(temperature=1.0, repetition_penalty=1.4, top_p=0.7),
    Sampling(),
]


def test_every_row_draws_from_the_distribution_that_transformers_gives_it_alone() -> None:
    """Points laid evenly over 0 to 1 draw each token as often as it is likely, to within one."""
    count = 400
    logits = scores(len(SETTINGS), 0)
    prompts = [[index, 3, 7, 7] for index in range(len(SETTINGS))]
    draws = []
    for settings, prompt in zip(SETTINGS, prompts, strict=True):
        draw = Draw(settings, prompt)
        draw.random = Scripted([(index + 0.5) / count for index in range(count)])
        draws.append(draw)
    found = torch.zeros(len(SETTINGS), VOCABULARY)
    for _ in range(count):
        # A new plan each time, so that no penalty builds up.
        for draw in draws:
            draw.seen = draw.counts = None
        chosen = SamplingPlan(draws, VOCABULARY, CPU).choose(logits)
        assert all(chosen.is_finite)
        found[torch.arange(len(SETTINGS)), torch.tensor(chosen.token_ids)] += 1
    for index, settings in enumerate(SETTINGS):
        if settings.is_drawn:
            expected = reference(settings, prompts[index], logits[index]) * count
            assert float((found[index] - expected).abs().max()) <= 1.01, settings
            assert not (found[index] * (expected == 0)).any(), settings
        else:
            assert found[index].argmax() == logits[index].argmax()
            assert found[index].max() == count


def test_the_ends_of_the_range_draw_tokens_that_are_possible() -> None:
    for point in (0.0, 1.0 - 2.0**-53):
        draws = [Draw(settings, [3]) for settings in SETTINGS]
        for draw in draws:
            draw.random = Scripted([point])
        logits = scores(len(SETTINGS), 1)
        # Ruled out by the model, at the very end of the vocabulary.
        logits[:, -500:] = -torch.inf
        token_ids = SamplingPlan(draws, VOCABULARY, CPU).choose(logits).token_ids
        for settings, token_id, row in zip(SETTINGS, token_ids, logits, strict=True):
            if settings.is_drawn:
                assert reference(settings, [3], row)[token_id] > 0


def test_what_a_row_draws_does_not_depend_on_its_neighbours() -> None:
    logits = scores(len(SETTINGS), 2)
    seeded = [Sampling(**{**_fields(one), "seed": 11}) for one in SETTINGS]
    together = [Draw(one, [1]) for one in seeded]
    plan = SamplingPlan(together, VOCABULARY, CPU)
    both = [plan.choose(logits).token_ids for _ in range(20)]
    for index, one in enumerate(seeded):
        alone = SamplingPlan([Draw(one, [1])], VOCABULARY, CPU)
        row = [alone.choose(logits[index : index + 1]).token_ids[0] for _ in range(20)]
        assert row == [token_ids[index] for token_ids in both]


def _fields(settings: Sampling) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Sampling.__dataclass_fields__}


def test_penalties_follow_the_published_formulas_and_survive_a_change_of_rows() -> None:
    settings = Sampling(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3)
    draw, other = Draw(settings, [2, 5]), Draw(Sampling(frequency_penalty=1.0), [1])
    logits = scores(1, 3)
    answer: list[int] = []
    for step in range(30):
        expected = logits[0].clone()
        for token in {2, 5, *answer}:
            expected[token] = expected[token] * 1.5 if expected[token] < 0 else expected[token] / 1.5
        for token in set(answer):
            expected[token] -= 0.4 * answer.count(token) + 0.3
        rows = [draw] if step % 3 else [other, Draw(Sampling(), [9]), draw]
        before = logits.clone()
        chosen = SamplingPlan(rows, VOCABULARY, CPU).choose(logits.expand(len(rows), -1))
        assert torch.equal(logits, before)
        assert chosen.token_ids[-1] == int(expected.argmax())
        answer.append(chosen.token_ids[-1])
    assert len(set(answer)) > 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_numbers_are_told_apart(bad: float) -> None:
    logits = scores(len(SETTINGS), 4)
    logits[::2, 77] = bad
    chosen = SamplingPlan([Draw(one, [1]) for one in SETTINGS], VOCABULARY, CPU).choose(logits)
    assert chosen.is_finite == [index % 2 == 1 for index in range(len(SETTINGS))]
    ruled_out = torch.full((1, VOCABULARY), -torch.inf)
    assert SamplingPlan([Draw(SETTINGS[0], [1])], VOCABULARY, CPU).choose(ruled_out).is_finite == [False]


def test_half_precision_scores_are_widened_first() -> None:
    logits = scores(2, 5).to(torch.bfloat16)
    settings = Sampling(temperature=0.5, top_p=0.9, seed=1, logprobs=2)
    chosen = SamplingPlan([Draw(settings, [1]), Draw(Sampling(), [1])], VOCABULARY, CPU).choose(logits)
    assert chosen.scores[0] is not None
    expected = logits[0].float().log_softmax(-1)
    assert chosen.scores[0].logprob == pytest.approx(float(expected[chosen.token_ids[0]]), abs=1e-6)


def test_more_tokens_are_looked_at_only_for_rows_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    draw_from_few = sampling._draw_from_few

    def noted(rows: torch.Tensor, truncation: Any, points: torch.Tensor) -> torch.Tensor:
        looks.append((len(rows), truncation.candidates))
        return draw_from_few(rows, truncation, points)

    monkeypatch.setattr(sampling, "_draw_from_few", noted)
    flat, peaked = Sampling(temperature=50.0, top_p=0.99), Sampling(temperature=0.5, top_p=0.9)
    SamplingPlan([Draw(one, [1]) for one in (peaked, flat, peaked)], VOCABULARY, CPU).choose(scores(3, 6))
    assert looks == [(3, 256), (1, 4096), (2, 256)]

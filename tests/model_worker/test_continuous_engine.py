"""Continuous batching: who shares a batch, and since when, changes nobody's answer; cells are bounded and come back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from model_worker.runtimes.continuous import engines, grid
from model_worker.runtimes.continuous.causal_forward import CausalForward
from model_worker.runtimes.continuous.dense import DenseEngine, Limits
from model_worker.runtimes.continuous.prefixes import Prefixes
from model_worker.runtimes.continuous.sequences import Progress, Sampling, Sequence
from shared.errors import Code, RequestError
from tests import tiny_models

CLASSES = ["GPTNeoForCausalLM", "GPTJForCausalLM", "GPT2LMHeadModel", "LlamaForCausalLM"]
POSITIONS = 64
LIMITS = Limits(cache_tokens=512, rows_max=6, prefill_tokens=12)
PREFIXED = dataclasses.replace(LIMITS, prefix_tokens=100)
TINY = {"vocab_size": 300, "hidden_size": 16}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Models and tokenizers by class name; GPT-Neo's local window is 8 tokens."""

    @functools.cache
    def loaded(name: str) -> tuple[Any, Any]:
        directory = tiny_models.save(tmp_path_factory.mktemp(name), name, positions=POSITIONS)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model.generation_config = GenerationConfig()
        return model, AutoTokenizer.from_pretrained(directory)

    return loaded


def engine_of(loaded: tuple[Any, Any], limits: Limits = LIMITS, end_ids: Iterable[int] = ()) -> DenseEngine:
    return DenseEngine(*loaded, limits, end_ids=frozenset(end_ids))


def solo(model: Any, sequence: Sequence, **settings: Any) -> list[int]:
    """The library's own answer to one prompt alone."""
    ids = torch.tensor([sequence.prompt_ids])
    keywords = {"max_new_tokens": sequence.max_new_tokens, "do_sample": False, "pad_token_id": 0, **settings}
    answer: list[int] = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keywords)[0].tolist()
    return answer[len(sequence.prompt_ids) :]


def some_sequences(count: int, seed: int) -> list[Sequence]:
    """Prompts shorter and longer than a window of 8 and than what one step reads, answers short and long."""
    chance = random.Random(seed)
    return [
        Sequence(
            [chance.randrange(3, 290) for _ in range(chance.choice([1, 2, 5, 9, 17, 33]))],
            chance.choice([1, 2, 6, 13, 25]),
        )
        for _ in range(count)
    ]


def run(engine: DenseEngine, sequences: Iterable[Sequence], seed: int | None = None) -> dict[Sequence, list[Progress]]:
    """Steps until all have ended; they join as soon as there is room, or at random with a `seed`."""
    waiting = list(sequences)
    chance = random.Random(seed)
    events: dict[Sequence, list[Progress]] = {sequence: [] for sequence in waiting}
    while waiting or engine.running:
        while waiting and engine.can_join(waiting[0]) and (seed is None or chance.random() < 0.6):
            engine.join(waiting.pop(0))
        for event in engine.step():
            assert not (events[event.sequence] and events[event.sequence][-1].ending), "an event after the last"
            events[event.sequence].append(event)
    return events


def tokens(events: list[Progress]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def text(events: list[Progress]) -> str:
    return "".join(event.text for event in events)


def compared(model: Any, events: dict[Sequence, list[Progress]]) -> list[bool]:
    return [tokens(own) == solo(model, sequence) for sequence, own in events.items()]


@pytest.mark.parametrize("name", CLASSES)
def test_greedy_answers_of_staggered_arrivals_are_those_computed_alone(
    load: Callable[[str], tuple[Any, Any]], name: str
) -> None:
    model, tokenizer = load(name)
    for seed in range(2):
        events = run(engine_of((model, tokenizer)), some_sequences(14, seed), seed)
        assert all(compared(model, events))
        assert {own[-1].ending for own in events.values()} == {"length"}


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        ("MistralForCausalLM", {"sliding_window": 8, "num_key_value_heads": 1, "num_attention_heads": 2}),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 8, "num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 8}
            | {"layer_types": ["sliding_attention", "full_attention"]},
        ),
        ("OPTForCausalLM", {"word_embed_proj_dim": 16, "ffn_dim": 32, "num_attention_heads": 2, "init_std": 0.25}),
        ("BloomForCausalLM", {"n_head": 2, "n_layer": 2}),
        ("MptForCausalLM", {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": POSITIONS}),
        ("FalconForCausalLM", {"num_attention_heads": 2}),
        ("GPTNeoXForCausalLM", {"num_attention_heads": 2}),
    ],
)
def test_other_families_too(load: Callable[[str], tuple[Any, Any]], model_class: str, config: dict[str, Any]) -> None:
    made: Any = getattr(transformers, model_class)
    common = {**TINY, "num_hidden_layers": 2, "intermediate_size": 32, "initializer_range": tiny_models.INITIAL_STD}
    accepted = common if "d_model" not in config else {"vocab_size": 300, "initializer_range": tiny_models.INITIAL_STD}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = made(made.config_class(**accepted, **config)).eval()
    model.generation_config = GenerationConfig()
    _, tokenizer = load("GPT2LMHeadModel")
    assert all(compared(model, run(engine_of((model, tokenizer)), some_sequences(10, 3), 3)))
    assert all(compared(model, run(engine_of((model, tokenizer), PREFIXED), some_with_common_beginnings(8, 3), 3)))


@pytest.mark.parametrize("name", CLASSES)
def test_positions_counted_by_column_are_noticed(
    load: Callable[[str], tuple[Any, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of these models are drawn so widely that the comparison above would see the likeliest mistake."""

    def by_column(self: grid.Grid, columns: int) -> torch.Tensor:
        return torch.arange(self.width, self.width + columns).expand(self.rows, columns)

    model, tokenizer = load(name)
    monkeypatch.setattr(grid.Grid, "positions", by_column)
    assert not all(compared(model, run(engine_of((model, tokenizer)), some_sequences(14, 0), 0)))


def some_with_common_beginnings(count: int, seed: int) -> list[Sequence]:
    """Prompts that begin with one of two texts, or with a part of one, and go on differently."""
    chance = random.Random(seed)
    beginnings = [[chance.randrange(3, 290) for _ in range(40)] for _ in range(2)]
    return [
        Sequence(
            [
                *chance.choice(beginnings)[: chance.choice([34, 40])],
                *(chance.randrange(3, 290) for _ in range(chance.choice([1, 2, 5, 9]))),
            ],
            chance.choice([1, 6, 13]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_a_common_beginning_is_read_once_and_changes_no_answer(
    load: Callable[[str], tuple[Any, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    forward = CausalForward.__call__

    def counted(self: CausalForward, ids: torch.Tensor, into: grid.Grid) -> torch.Tensor:
        read.append(ids.numel())
        return forward(self, ids, into)

    monkeypatch.setattr(CausalForward, "__call__", counted)
    model, tokenizer = load(name)
    costs = []
    for limits in (LIMITS, PREFIXED):
        read.clear()
        events = run(engine_of((model, tokenizer), limits), some_with_common_beginnings(14, 0), 0)
        costs.append(sum(read))
        assert all(compared(model, events))
    # Most of what there is to compute is the beginnings.
    assert costs[1] < costs[0] / 2


@pytest.mark.parametrize("name", CLASSES)
def test_a_beginning_in_the_wrong_place_is_noticed(
    load: Callable[[str], tuple[Any, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above: the comparison would see the likeliest mistake."""
    cells_of = grid.Grid.cells_of
    monkeypatch.setattr(grid.Grid, "cells_of", lambda self, row: [own.roll(1, 1) for own in cells_of(self, row)])
    model, tokenizer = load(name)
    events = run(engine_of((model, tokenizer), PREFIXED), some_with_common_beginnings(14, 0), 0)
    assert not all(compared(model, events))


def test_a_beginning_is_kept_when_it_comes_again_and_the_oldest_makes_room() -> None:
    chance = random.Random(0)
    shape = grid.LayerShape((1, 1), (1, 2), torch.float32)
    prefixes = Prefixes([shape], 90, torch.device("cpu"))
    beginnings = [[chance.randrange(1000) for _ in range(chance.randrange(33, 60))] for _ in range(6)]

    def cells(ids: list[int]) -> list[torch.Tensor]:
        values = torch.tensor([ids], dtype=torch.float32).unsqueeze(-1)
        return [values, values.expand(1, len(ids), 2)]

    known = 0
    for _ in range(300):
        prompt = [*chance.choice(beginnings), *(chance.randrange(1000) for _ in range(chance.randrange(3)))]
        found = prefixes.find(prompt)
        assert found.tokens < len(prompt)
        known += found.tokens > 0
        for own, expected in zip(found.cells, cells(prompt[: found.tokens]), strict=False):
            assert torch.equal(own, expected)
        prefixes.note(prompt, cells(prompt))
    assert 30 < known < 300
    # A beginning longer than there is room is kept in part.
    longest = [chance.randrange(1000) for _ in range(200)]
    for _ in range(2):
        prefixes.note(longest, cells(longest))
    assert prefixes.find(longest).tokens == 90


def test_prompts_with_nothing_or_little_in_common_and_no_room_are_read_whole() -> None:
    shape = grid.LayerShape((1, 1), (1, 1), torch.float32)
    for tokens, shared in ((0, 100), (100, 31)):
        prefixes = Prefixes([shape], tokens, torch.device("cpu"))
        for last in range(3):
            prompt = [*range(shared), 1000 + last]
            assert prefixes.find(prompt).tokens == 0
            prefixes.note(prompt, [torch.zeros(1, len(prompt), 1)] * 2)


def test_a_burst_is_read_before_the_others_go_on_and_a_long_wait_is_nobodys(
    load: Callable[[str], tuple[Any, Any]],
) -> None:
    model, tokenizer = load("GPT2LMHeadModel")
    engine = engine_of((model, tokenizer))
    first, *burst = (Sequence(list(range(3 + 5 * index, 3 + 5 * index + 9)), 7) for index in range(4))
    engine.join(first)
    events: dict[Sequence, list[Progress]] = {sequence: [] for sequence in (first, *burst)}
    told = []
    for step in range(12):
        if step == 1:
            for sequence in burst:
                engine.join(sequence)
        moved = engine.step()
        told.append([event.sequence for event in moved])
        for event in moved:
            events[event.sequence].append(event)
    # Three wait beside one, then two beside two: from there on all go on while the rest is read.
    assert told[:3] == [[first], [burst[0]], [first, burst[0], burst[1]]]
    assert all(compared(model, events))
    # Two prompts of 33 tokens take 6 steps of 12 tokens: too long for the one that runs.
    engine.join(first)
    engine.step()
    for start in (3, 50):
        engine.join(Sequence(list(range(start, start + 33)), 2))
    assert [event.sequence for event in engine.step()] == [first]


def test_state_space_models_have_no_engine_and_a_reason(load: Callable[[str], tuple[Any, Any]]) -> None:
    config = transformers.MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2, state_size=4)
    model, tokenizer = transformers.MambaForCausalLM(config).eval(), load("GPT2LMHeadModel")[1]
    choice = engines.build(model, tokenizer, LIMITS, end_ids=frozenset(), pad_token_id=0, prompts=[[1, 2, 3], [4]])
    assert choice.engine is None
    assert str(choice.describe()["batching"]).startswith("static: MambaForCausalLM")


@pytest.mark.parametrize("name", CLASSES)
def test_an_engine_is_tried_before_it_is_used(load: Callable[[str], tuple[Any, Any]], name: str) -> None:
    model, tokenizer = load(name)
    own = model.generation_config
    choice = engines.build(model, tokenizer, LIMITS, end_ids=frozenset(), pad_token_id=0, prompts=[[5, 6, 7], [8]])
    assert choice.engine is not None
    assert choice.engine.running == 0
    assert choice.describe()["cache_tokens"] == 512
    assert model.generation_config is own


def test_a_model_that_steps_change_has_no_engine(
    load: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load("GPTJForCausalLM")
    monkeypatch.setattr(grid.Grid, "positions", lambda self, columns: torch.zeros(self.rows, columns).long())
    prompts = [list(range(3, 40)), list(range(50, 60))]
    choice = engines.build(model, tokenizer, LIMITS, end_ids=frozenset(), pad_token_id=0, prompts=prompts)
    assert choice.engine is None
    assert choice.reason == "answers computed step by step differ from those computed alone"


def test_a_sequence_that_leaves_is_gone_at_once_and_changes_nobody(load: Callable[[str], tuple[Any, Any]]) -> None:
    model, tokenizer = load("GPTNeoForCausalLM")
    engine = engine_of((model, tokenizer))
    stays, runs, reads, waits = (Sequence(list(range(3, 3 + length)), 20) for length in (5, 4, 30, 6))
    free = engine.room.cells
    engine.join(runs)
    engine.join(stays)
    engine.step()
    engine.join(reads)
    engine.step()
    engine.join(waits)
    assert engine.sequences() == [runs, stays, reads, waits]
    for sequence in (runs, reads, waits):
        assert engine.leave(sequence)
        assert not engine.leave(sequence)
    assert engine.sequences() == [stays]
    events = [event for _ in range(18) for event in engine.step()]
    assert [event.sequence for event in events] == [stays] * 18
    assert tokens(events) == solo(model, stays)[2:]
    assert engine.running == 0
    assert engine.room.cells == free


def test_what_nobody_waits_for_ends_before_the_next_step(load: Callable[[str], tuple[Any, Any]]) -> None:
    engine = engine_of(load("GPT2LMHeadModel"))
    left, stays = Sequence([5, 6, 7], 9), Sequence([8, 9], 9)
    engine.join(left)
    engine.join(stays)
    engine.step()
    engine.is_wanted = lambda sequence: sequence is stays
    ended, went_on = engine.step()
    assert isinstance(ended.ending, RequestError)
    assert ended.ending.code is Code.CANCELLED
    assert (ended.sequence, ended.token_ids, went_on.sequence) == (left, (), stays)


def test_cells_stay_within_the_budget_and_all_come_back(
    load: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load("LlamaForCausalLM")
    cells = []
    write = grid.Grid.write

    def measured(self: grid.Grid, layer: int, keys: Any, values: Any) -> Any:
        cells.append(self.rows * (self.width + keys.shape[-2]))
        return write(self, layer, keys, values)

    monkeypatch.setattr(grid.Grid, "write", measured)
    limits = Limits(cache_tokens=150, rows_max=32, prefill_tokens=1000)
    for seed in range(2):
        engine = engine_of((model, tokenizer), limits)
        events = run(engine, some_sequences(14, seed), seed)
        assert all(compared(model, events))
        assert engine.room.cells == 150
    assert 100 < max(cells) <= 150


def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers(load: Callable[[str], tuple[Any, Any]]) -> None:
    engine = engine_of(load("GPT2LMHeadModel"), Limits(cache_tokens=40, rows_max=4, prefill_tokens=8))
    assert engine.refusal(20, 20) is None
    fits = Sequence([5] * 20, 18)
    assert engine.can_join(fits)
    refused = engine.refusal(20, 21)
    assert refused is not None
    assert "max_new_tokens = 21 and a prompt of 20 tokens do not fit: the cache holds 40 tokens, so at most 20" in str(
        refused
    )
    engine.join(fits)
    assert not engine.can_join(fits)
    with pytest.raises(ValueError, match="no room for a sequence of 20"):
        engine.join(fits)


def test_a_step_reads_no_more_of_prompts_than_it_may_and_the_others_go_on(
    load: Callable[[str], tuple[Any, Any]],
) -> None:
    model, tokenizer = load("GPT2LMHeadModel")
    engine = engine_of((model, tokenizer))
    runs, long = Sequence([5, 6], 30), Sequence(list(range(3, 43)), 3)
    engine.join(runs)
    engine.step()
    engine.join(long)
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda _, __, keywords: shapes.append(tuple(keywords["input_ids"].shape)), with_kwargs=True
    )
    try:
        served = [[event.sequence for event in engine.step()] for _ in range(5)]
    finally:
        hook.remove()
    # 40 tokens in parts of 12, each beside a step of the other one.
    assert shapes == [(1, 1), (1, 12)] * 3 + [(1, 1), (1, 4), (2, 1)]
    assert served == [[runs], [runs], [runs], [runs, long], [runs, long]]


def test_short_prompts_are_read_together(load: Callable[[str], tuple[Any, Any]]) -> None:
    model, tokenizer = load("GPT2LMHeadModel")
    engine = engine_of((model, tokenizer))
    for length in (3, 30, 4, 2):
        engine.join(Sequence([7] * length, 2))
    assert len(engine.step()) == 3


def test_a_prompt_that_cannot_be_read_fails_alone(load: Callable[[str], tuple[Any, Any]]) -> None:
    model, tokenizer = load("GPT2LMHeadModel")
    good, bad, other = Sequence([5, 6, 7], 4), Sequence([5, 10**6], 4), Sequence([8, 9], 4)
    events = run(engine_of((model, tokenizer)), [good, bad, other])
    assert isinstance(events[bad][-1].ending, IndexError)
    assert tokens(events[good]) == solo(model, good)
    assert tokens(events[other]) == solo(model, other)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9, seed=1)])
def test_rows_that_are_not_numbers_end_alone_and_leave_no_trace(
    load: Callable[[str], tuple[Any, Any]], sampling: Sampling
) -> None:
    healthy_model, tokenizer = load("GPT2LMHeadModel")
    model = copy.deepcopy(healthy_model)
    poison = 299
    with torch.no_grad():
        # The output layer shares this table, so the poison goes in behind it.
        table = model.transformer.wte.weight.clone()
        table[poison] = float("nan")
        model.transformer.wte.weight = torch.nn.Parameter(table)
    engine = engine_of((model, tokenizer))
    healthy = [sequence for sequence in some_sequences(8, 5) if poison not in solo(healthy_model, sequence)]
    poisoned = [Sequence([poison] * length, 5, sampling) for length in (1, 20, 3)]
    events = run(engine, [*poisoned, *healthy])
    for sequence in poisoned:
        (event,) = events[sequence]
        assert isinstance(event.ending, RequestError)
        assert event.ending.code is Code.MODEL_ERROR
        assert "not finite" in event.ending.message
    assert all(tokens(events[sequence]) == solo(healthy_model, sequence) for sequence in healthy)


def test_a_seed_gives_the_same_text_whatever_shares_the_batch(load: Callable[[str], tuple[Any, Any]]) -> None:
    loaded = load("LlamaForCausalLM")
    settings = Sampling(temperature=1.3, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, seed=7)

    def seeded(seed: int) -> Sequence:
        return Sequence([5, 6, 7, 8], 20, Sampling(**{**_fields(settings), "seed": seed}))

    first = seeded(7)
    alone = tokens(run(engine_of(loaded), [first])[first])
    others = [Sequence(one.prompt_ids, one.max_new_tokens, Sampling(temperature=2.0)) for one in some_sequences(9, 1)]
    again, third = seeded(7), seeded(8)
    events = run(engine_of(loaded), [*others[:4], again, *others[4:], third], 2)
    assert tokens(events[again]) == alone != tokens(events[third])
    unseeded = [Sequence([5, 6], 12, Sampling(temperature=2.0)) for _ in range(4)]
    assert len({tuple(tokens(own)) for own in run(engine_of(loaded), unseeded).values()}) > 1


def _fields(settings: Sampling) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Sampling.__dataclass_fields__}


def test_penalties_are_the_librarys_and_each_rows_own(load: Callable[[str], tuple[Any, Any]]) -> None:
    model, tokenizer = load("GPT2LMHeadModel")
    penalised = [Sequence([5, 6, 7] * 3, 25, Sampling(repetition_penalty=penalty)) for penalty in (1.8, 1.1)]
    plain = Sequence([5, 6, 7] * 3, 25)
    events = run(engine_of((model, tokenizer)), [plain, *penalised], 4)
    for sequence in penalised:
        expected = solo(model, sequence, repetition_penalty=sequence.sampling.repetition_penalty)
        assert tokens(events[sequence]) == expected
    assert tokens(events[plain]) == solo(model, plain) != tokens(events[penalised[0]])


def test_an_end_token_ends_its_own_row(load: Callable[[str], tuple[Any, Any]]) -> None:
    model, tokenizer = load("GPT2LMHeadModel")
    first, own, none = Sequence([5, 6, 7], 12), Sequence([5, 6, 7], 12), Sequence([5, 6, 7], 12)
    expected = solo(model, first)
    own.end_ids, none.end_ids = frozenset({expected[6]}), frozenset()
    events = run(engine_of((model, tokenizer), end_ids={expected[3]}), [first, own, none])
    for sequence, end in ((first, expected[3]), (own, expected[6])):
        assert tokens(events[sequence]) == expected[: expected.index(end) + 1]
        assert events[sequence][-1].ending == "stop"
    assert (tokens(events[none]), events[none][-1].ending) == (expected, "length")


def test_a_stop_string_across_tokens_is_never_shown(load: Callable[[str], tuple[Any, Any]]) -> None:
    model, tokenizer = load("GPTJForCausalLM")
    prompt = tokenizer("one two three")["input_ids"]
    whole = Sequence(prompt, 16, skip_special_tokens=False)
    told = text(run(engine_of((model, tokenizer)), [whole])[whole])
    for begin in range(1, len(told) - 4):
        stop = told[begin : begin + 4]
        stopped = Sequence(prompt, 16, stop=("no such text", stop), skip_special_tokens=False)
        events = run(engine_of((model, tokenizer)), [stopped])[stopped]
        assert text(events) == told[: told.index(stop)]
        assert events[-1].ending == "stop"
        assert len(tokens(events)) <= 16


def test_scores_are_the_models_own(load: Callable[[str], tuple[Any, Any]]) -> None:
    model, tokenizer = load("LlamaForCausalLM")
    asks = Sequence([5, 6, 7], 4, Sampling(logprobs=3, temperature=0.8, seed=3, frequency_penalty=0.5))
    chosen_only = Sequence([5, 6, 7], 4, Sampling(logprobs=0))
    silent = Sequence([9, 8], 4)
    events = run(engine_of((model, tokenizer)), [silent, asks, chosen_only])
    ids = list(asks.prompt_ids)
    for event in events[asks]:
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        (score,) = event.scores
        assert score.token_id == event.token_ids[0]
        assert score.logprob == pytest.approx(float(expected[score.token_id]), abs=1e-4)
        values, indices = expected.topk(3)
        assert [token for token, _ in score.top] == indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-4)
        ids.append(score.token_id)
    assert all(event.scores[0].top == () for event in events[chosen_only])
    assert all(event.scores == () for event in events[silent])

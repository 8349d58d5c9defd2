"""Thousands of worlds with seeded troubles: every promise is kept in each, each can be run again, and made smaller.

A seed that fails is looked at with `python -m tests.simulation --seed N --shrink`, and what it shows becomes a
scripted history in `tests/model_worker/test_broker_*.py`: those say what they are about, and survive changes of what a
seed means.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import soak
from tests.simulation.__main__ import main
from tests.simulation.faults import Fault
from tests.simulation.promises import Promise
from tests.simulation.recipe import Recipe
from tests.simulation.shrink import fail, shrink
from tests.simulation.test_planted_bugs import does_not_isolate_suspects
from tests.simulation.world import World

SEEDS = 1500
SEEDS_PER_TEST = 50


@pytest.mark.parametrize("first_seed", range(0, SEEDS, SEEDS_PER_TEST))
def test_every_promise_is_kept_in_every_world(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        try:
            World(seed).run()
        except Exception as error:
            error.add_note(f"replay: python -m tests.simulation --seed {seed} --shrink")
            raise


def test_the_worlds_know_the_troubles_they_are_about() -> None:
    ended: set[str] = set()
    rejected: set[str] = set()
    replaced: set[str] = set()
    struck: Counter[str] = Counter()
    fenced = relayed = 0
    for seed in range(120):
        world = World(seed, validate=False)
        world.run()
        for totals in world.broker.counters():
            ended.update(totals.ended)
            rejected.update(totals.rejected)
            replaced.update(totals.restarts)
        struck.update(world.faults.by_kind())
        fenced += world.broker.fenced
        relayed += world.checker.relays
    assert {"ok", "cancelled", "deadline_exceeded", "model_loading", "model_crashed", "poison_input"} <= ended
    assert {"overloaded", "draining", "poison_input", "deadline_exceeded", "too_large"} <= rejected
    assert {"crashed", "hung", "load_failed", "spawn_failed", "stopped"} <= replaced
    assert set(struck) == {fault.value for fault in Fault}
    assert fenced > 100
    assert relayed > 2 * fenced


# --- the same again ----------------------------------------------------------------------------------------------


def trace_of(recipe: Recipe) -> list[str]:
    trace: list[str] = []
    World(recipe, trace.append).run()
    return trace


def test_a_world_is_the_same_when_it_is_run_again() -> None:
    trace = trace_of(Recipe(3))
    assert len(trace) > 100
    assert trace == trace_of(Recipe(3))


def test_what_is_left_out_changes_nothing_else_that_was_drawn() -> None:
    seed, number = 3, 7
    whole, without = World(Recipe(seed)), World(Recipe(seed, skipped=frozenset({number})))
    whole.run()
    without.run()
    assert whole.natures.keys() == without.natures.keys()
    sent = [{key for key in world.checker.ended if key[8:] != number.to_bytes(8, "big")} for world in (whole, without)]
    assert len(whole.checker.ended) == len(sent[0]) + 1
    assert sent[0] == sent[1]


def test_a_world_can_be_replayed_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--trace"]) == 0
    printed = capsys.readouterr().out
    assert "SpawnReplica(slot=" in printed
    assert printed.endswith("0 broken\n")


# --- smaller -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _shares_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that takes two requests and one fault to show."""
    does_not_isolate_suspects(monkeypatch)


@pytest.mark.usefixtures("_shares_after_a_death")
def test_a_failing_world_is_made_as_small_as_its_bug() -> None:
    # Not the first that fails: there it takes the eleventh crash of a process, and so the requests before that.
    seed = next(seed for seed in range(20, 50) if fail(Recipe(seed)) is not None)
    recipe, failure = shrink(Recipe(seed))
    assert len(failure.requests) <= 3
    assert len(failure.faults) <= 2
    again = fail(recipe)
    assert again is not None
    assert str(again.error) == str(failure.error)


@pytest.mark.usefixtures("_shares_after_a_death")
def test_a_failing_seed_is_told_with_the_trace_of_the_smallest_world(capsys: pytest.CaptureFixture[str]) -> None:
    seed = next(seed for seed in range(50) if fail(Recipe(seed)) is not None)
    assert main(["--seed", str(seed), "--shrink"]) == 1
    printed = capsys.readouterr().out
    assert f"seed {seed}, at most" in printed
    assert "SendBatch(slot=" in printed
    assert "faults [" in printed


def test_a_sound_world_is_not_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--shrink"]) == 0
    assert "keeps all its promises" in capsys.readouterr().out
    with pytest.raises(ValueError, match="keeps all its promises"):
        shrink(Recipe(3))


# --- for as long as told -----------------------------------------------------------------------------------------


def test_a_soak_counts_what_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "0.02", "--seed", "0", "--processes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "faults by kind:" in printed
    assert "no promise broken" in printed


def test_a_soak_that_meets_a_failing_seed_ends_with_its_smallest_world(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*arguments: object) -> tuple[soak.Tally, int | None]:
        return soak.Tally(), 3

    monkeypatch.setattr("tests.simulation.__main__.soak", failed)
    assert main(["--minutes", "1", "--seed", "0"]) == 1
    assert "seed 3 breaks a promise" in capsys.readouterr().out


def test_promises_are_told_apart() -> None:
    assert len({promise.value for promise in Promise}) == len(Promise)

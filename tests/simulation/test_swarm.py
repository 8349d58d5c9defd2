"""Some hundred worlds with seeded troubles: every promise is kept in each, and each can be run again.

A seed that fails is looked at with `python -m tests.simulation --seed N --trace`, and becomes a scripted history in
`tests/model_worker/test_broker_*.py`.
"""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import main
from tests.simulation.world import World

SEEDS_PER_TEST = 20


@pytest.mark.parametrize("first_seed", range(0, 200, SEEDS_PER_TEST))
def test_every_promise_is_kept_in_every_world(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        try:
            World(seed).run()
        except AssertionError as error:
            error.add_note(f"replay: python -m tests.simulation --seed {seed} --trace")
            raise


def test_a_world_is_the_same_when_it_is_run_again() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        World(3, trace.append).run()
    assert len(traces[0]) > 100
    assert traces[0] == traces[1]


def test_a_world_can_be_replayed_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--trace"]) == 0
    printed = capsys.readouterr().out
    assert "SpawnReplica(slot=" in printed
    assert printed.endswith("0 broken\n")


def test_the_worlds_know_the_troubles_they_are_about() -> None:
    ended: set[str] = set()
    rejected: set[str] = set()
    replaced: set[str] = set()
    fenced = 0
    for seed in range(60):
        world = World(seed, validate=False)
        world.run()
        for totals in world.broker.counters():
            ended.update(totals.ended)
            rejected.update(totals.rejected)
            replaced.update(totals.restarts)
        fenced += world.broker.fenced
    assert {"ok", "cancelled", "deadline_exceeded", "model_loading", "model_crashed", "poison_input"} <= ended
    assert {"overloaded", "draining", "poison_input"} <= rejected
    assert {"crashed", "hung", "load_failed"} <= replaced
    assert fenced > 100

"""How a model's best batch is found: on models whose forwards take exactly as long as their curve says.

The clock is the model's own, so every figure here is a fact about the search and none about this machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from model_worker.replica import calibration
from model_worker.replica.calibration import Calibration, calibrate
from model_worker.replica.host_stages import Limits
from model_worker.runtimes.base import Model
from shared.messages import Phase
from tests.replica_bench import replica
from tests.stub_models import OutOfMemoryError

Curve = Callable[[int], float]
"""Seconds of a forward of so many padded units."""


class Curved(Model):
    """A forward takes as long as `curve` says, on a clock that nothing else moves."""

    def __init__(self, curve: Curve, *, lengths: Sequence[int] = (64, 256), own_cost: int = 0) -> None:
        self.curve = curve
        self.lengths = lengths
        self.max_batch_cost = own_cost
        self.now_s = 0.0
        self.forwards: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now_s

    def samples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        return [(length, {}) for length in self.lengths]

    def cost(self, item: int) -> int:
        return item

    def forward(self, items: Sequence[int]) -> Sequence[int]:
        assert self.max_batch_cost == 0, "a limit of the model's own would cut what is measured"
        self.forwards.append((max(items), len(items)))
        self.now_s += self.curve(max(items) * len(items))
        return items

    def find(self, *, max_batch_size: int = 0, load_s: float = 1.0) -> Calibration:
        return calibrate(self, Limits(self.max_batch_cost, max_batch_size), load_s, clock=self.clock)


def with_price(price_s: float, unit_s: float, cache_units: int = 0) -> Curve:
    """Each forward has a price; beyond the cache each further unit costs twice as much."""

    def curve(units: int) -> float:
        beyond = max(0, units - cache_units) if cache_units else 0
        return price_s + unit_s * (units + beyond)

    return curve


def test_the_least_cost_that_is_about_as_fast_as_any_is_found() -> None:
    # 1 ms a forward and 10 µs a unit: 1,024 units at once have 92 % of the speed of 8,192, and 2,048 have 97 %.
    assert Curved(with_price(1e-3, 1e-5)).find().max_batch_cost == 2048


@pytest.mark.parametrize("best", [1024, 4096])
def test_a_batch_that_fits_into_the_cache_is_preferred(best: int) -> None:
    assert Curved(with_price(5e-3, 1e-5, cache_units=best)).find().max_batch_cost == best


def test_where_a_forward_has_no_price_a_batch_still_has_room_for_some_items() -> None:
    assert Curved(with_price(0.0, 1e-5)).find().max_batch_cost == 4 * 256
    assert Curved(with_price(0.0, 1e-5), lengths=(16, 64)).find().max_batch_cost == 4 * 64


@pytest.mark.parametrize("best", [256, 512])
def test_there_is_no_more_room_where_that_would_be_slower(best: int) -> None:
    assert Curved(with_price(0.0, 1e-5, cache_units=best)).find().max_batch_cost == best


def test_one_look_is_not_enough_and_the_least_of_several_counts() -> None:
    """Every third forward is disturbed."""
    disturbances = itertools.cycle([0.05, 0.0, 0.0])
    smooth = with_price(5e-3, 1e-5, cache_units=1024)
    disturbed = Curved(lambda units: smooth(units) + next(disturbances))
    assert disturbed.find().max_batch_cost == 1024


def test_it_ends_within_its_budget_whatever_the_model_takes() -> None:
    for unit_s in (1e-6, 1e-5, 1e-4, 3e-4, 1e-3):
        model = Curved(with_price(0.0, unit_s))
        model.find()
        assert model.now_s <= calibration.BUDGET_S


def test_a_fast_model_takes_a_fraction_of_the_budget() -> None:
    model = Curved(with_price(1e-4, 1e-7, cache_units=1024))
    model.find()
    assert model.now_s < calibration.BUDGET_S / 20


def test_a_model_too_slow_to_compare_keeps_its_own_limit_after_two_forwards() -> None:
    model = Curved(with_price(0.0, 0.01), own_cost=1024)
    found = model.find()
    assert (found.max_batch_cost, model.forwards) == (0, [(64, 1)] * 2)
    assert model.max_batch_cost == 1024
    assert "no time" in found.text


def test_a_limit_that_was_not_tried_for_lack_of_time_is_kept() -> None:
    """However fast smaller batches seem to be."""
    assert Curved(with_price(0.0, 1e-3), own_cost=1024).find().max_batch_cost == 0


def test_a_machine_that_is_busy_with_something_else_is_not_measured() -> None:
    chooser = random.Random(1)
    smooth = with_price(2e-3, 1e-6, cache_units=1024)
    found = Curved(lambda units: smooth(units) * chooser.uniform(1, 9), own_cost=1024).find()
    assert found.max_batch_cost == 0
    assert "busy" in found.text


def test_a_slow_load_is_not_made_slower() -> None:
    model = Curved(with_price(1e-3, 1e-5))
    found = model.find(load_s=calibration.SLOW_LOAD_S + 1)
    assert (found.max_batch_cost, model.forwards) == (0, [])
    assert "61 s" in found.text


def test_no_forward_holds_more_than_max_batch_size() -> None:
    model = Curved(with_price(1e-3, 1e-7))
    model.find(max_batch_size=4)
    assert max(count for _, count in model.forwards) == 4


def test_where_the_largest_batch_allowed_is_the_fastest_a_larger_limit_of_the_model_stays() -> None:
    rising = with_price(1.0e-2, 1e-6)
    assert Curved(rising, own_cost=65_536).find(max_batch_size=8).max_batch_cost == 65_536
    assert Curved(rising, own_cost=512).find(max_batch_size=8).max_batch_cost == 8 * 256


def test_lack_of_memory_ends_the_search_at_half_as_much() -> None:
    rising = with_price(1.0e-2, 1e-6)

    def curve(units: int) -> float:
        if units > 1024:
            raise OutOfMemoryError("Tried to allocate 2.00 GiB")
        return rising(units)

    model = Curved(curve, own_cost=65_536)
    assert model.find().max_batch_cost == 1024
    assert model.max_batch_cost == 65_536


def test_memory_that_runs_short_later_takes_the_batch_out_of_the_search() -> None:
    rising = with_price(1.0e-2, 1e-6)
    tries: list[int] = []

    def curve(units: int) -> float:
        tries.append(units)
        if units == 2048 and tries.count(units) > 4:
            raise OutOfMemoryError("Tried to allocate 2.00 GiB")
        return rising(units)

    assert Curved(curve).find(max_batch_size=32).max_batch_cost == 1024


def test_a_model_without_memory_for_anything_is_left_to_the_warm_up() -> None:
    def curve(units: int) -> float:
        raise OutOfMemoryError("Tried to allocate 2.00 GiB")

    assert Curved(curve, own_cost=1024).find().max_batch_cost == 0


def test_other_failures_are_not_hidden() -> None:
    def curve(units: int) -> float:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        Curved(curve).find()


def test_samples_of_one_cost_and_of_none_are_taken_as_one() -> None:
    model = Curved(with_price(1e-3, 1e-5), lengths=(0, 8, 8))
    model.find(max_batch_size=8)
    assert {length for length, _ in model.forwards} == {0, 8}


# --- in a model process -----------------------------------------------------------------------------------------------


def test_what_was_measured_is_the_limit_that_ready_reports_and_the_model_sees() -> None:
    with replica("Sampled", lengths=[4, 16]) as bench:
        ready = bench.wait_phase(Phase.READY)
        assert ready.max_batch_cost == ready.choices["max_batch_cost"]
        assert ready.max_batch_cost >= 16
        assert str(ready.choices["max_batch_cost_origin"]).startswith("measured in")
        bench.ask("x" * 16)
        assert bench.journal("forwarded")[-1]["budget"] == ready.max_batch_cost


def test_a_configured_cost_wins_and_nothing_is_measured() -> None:
    with replica("Sampled", lengths=[4, 16], max_batch_cost=48) as bench:
        ready = bench.wait_phase(Phase.READY)
        assert (ready.max_batch_cost, ready.choices["max_batch_cost_origin"]) == (48, "configured")
        assert bench.forwards() == []


def test_a_model_without_samples_says_so() -> None:
    with replica("Echo", cost_limit=10) as bench:
        ready = bench.wait_phase(Phase.READY)
        assert (ready.max_batch_cost, ready.choices["max_batch_cost"]) == (10, 10)
        assert ready.choices["max_batch_cost_origin"] == "not measured: the model offers no samples"


def test_a_sample_that_fails_is_a_failed_load() -> None:
    with replica("Sampled", until=Phase.FAILED, lengths=[4, 16], fails=True) as bench:
        assert "calibration failed: ValueError" in bench.wait_phase(Phase.FAILED).detail

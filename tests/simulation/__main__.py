"""Runs worlds again, makes failing ones smaller, and runs as many as fit into a time:

python -m tests.simulation --seed 7 --trace         one world, with every fact and order
python -m tests.simulation --seed 7 --shrink        the smallest world that still fails, with its trace
python -m tests.simulation --seed 0 --count 10000   many worlds
python -m tests.simulation --minutes 10             worlds on all cores (`make soak`)
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from tests.simulation.recipe import Recipe
from tests.simulation.shrink import fail, shrink
from tests.simulation.soak import soak, summary
from tests.simulation.world import Trace, World

TRACE_LINES_MAX = 400


def main(command_line: Sequence[str] | None = None) -> int:
    """0 if every world kept its promises, 1 otherwise."""
    arguments = _parse(command_line)
    if arguments.minutes is not None:
        return _soak(arguments.minutes, arguments.seed, arguments.processes)
    if arguments.seed is None:
        print("--seed says which world, --minutes how long to run one after the other", file=sys.stderr)
        return 2
    if arguments.shrink:
        return _shrink(arguments.seed)
    failures = events = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        world = World(seed, print if arguments.trace else None)
        try:
            world.run()
        except Exception as error:
            failures += 1
            print(f"seed {seed} at {world.clock.now_s:.4f} s: {_told(error)}", file=sys.stderr)
        events += world.events
    print(f"{arguments.count} worlds, {events} events, {failures} broken")
    return 1 if failures else 0


def _parse(command_line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="the (first) world")
    parser.add_argument("--count", type=int, default=1, help="how many worlds, seed by seed (default: 1)")
    parser.add_argument("--trace", action="store_true", help="print every fact, and every order that it led to")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller world that fails in the same way")
    parser.add_argument("--minutes", type=float, help="run worlds for so long, from --seed on, or from a fresh one")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="of a run with --minutes (default: cores)"
    )
    return parser.parse_args(command_line)


def _shrink(seed: int) -> int:
    if fail(Recipe(seed)) is None:
        print(f"seed {seed} keeps all its promises: there is nothing to shrink")
        return 0
    recipe, failure = shrink(Recipe(seed))
    lines: list[str] = []
    _run_to_its_failure(recipe, lines.append)
    for line in lines[-TRACE_LINES_MAX:]:
        print(line)
    if len(lines) > TRACE_LINES_MAX:
        print(f"(the last {TRACE_LINES_MAX} of {len(lines)} lines)")
    print(f"\n{recipe}:\n  requests {list(failure.requests)}\n  faults {list(failure.faults)}")
    print(f"at {failure.at_s:.4f} s: {_told(failure.error)}")
    return 1


def _run_to_its_failure(recipe: Recipe, trace: Trace) -> None:
    try:
        World(recipe, trace).run()
    except Exception:
        return
    raise RuntimeError(f"{recipe} failed once, and does not fail again: something in it is not drawn from the seed")


def _soak(minutes: float, seed: int | None, processes: int) -> int:
    first_seed = int(time.time()) * 1000 if seed is None else seed
    print(f"worlds from seed {first_seed} on, for {minutes:g} minutes, on {processes} processes", flush=True)
    started_s = time.monotonic()
    tally, failed_seed = soak(minutes, first_seed, processes, lambda line: print(line, flush=True))
    if failed_seed is not None:
        print(f"seed {failed_seed} breaks a promise; a smaller world that does:\n", flush=True)
        _shrink(failed_seed)
        print(f"\nagain: python -m tests.simulation --seed {failed_seed} --shrink")
        return 1
    print("\nfaults by kind:")
    for kind, count in tally.faults.most_common():
        print(f"  {kind:<20} {count:>12,}")
    print(summary(tally, time.monotonic() - started_s))
    return 0


def _told(error: Exception) -> str:
    name = type(error).__name__
    promise = getattr(error, "promise", None)
    return f"{name}: {error}" + (f" ({promise.value})" if promise is not None else "")


if __name__ == "__main__":
    sys.exit(main())

"""Runs worlds again: `python -m tests.simulation --seed 7 --trace`, or many: `--seed 0 --count 10000`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.simulation.world import World


def main(command_line: Sequence[str] | None = None) -> int:
    """0 if every world kept its promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the (first) world")
    parser.add_argument("--count", type=int, default=1, help="how many worlds, seed by seed (default: 1)")
    parser.add_argument("--trace", action="store_true", help="print every fact, and every order that it led to")
    arguments = parser.parse_args(command_line)
    failures = turns = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        world = World(seed, print if arguments.trace else None)
        try:
            world.run()
        except AssertionError as violation:
            failures += 1
            print(f"seed {seed} at {world.clock.now_s:.4f} s: {violation}", file=sys.stderr)
        turns += world.turns
    print(f"{arguments.count} worlds, {turns} events, {failures} broken")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures headwaiter and its peers in turn, in one run: `python -m benchmarks`, or `make bench`.

A complete run writes `benchmarks/results/results.json` and what `docs/performance.md` shows; one with `--only` or
`--quick` writes to `.bench/results.json` and leaves the documents alone. Samples are on disk as soon as they are
taken, and `--resume` goes on with the first load that was not measured to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import time
from pathlib import Path

from benchmarks import machine, report
from benchmarks.chart import draw
from benchmarks.load_generator import generator_name
from benchmarks.run import Run
from benchmarks.summary import Results
from benchmarks.systems import BENCH_DIRECTORY, ENVIRONMENTS, ON_DEMAND
from tests.topology import ROOT

LOADS = ("echo", "embedding", "answering", "generation", "payload", "core", "memory", "start", "growth")
"""Modules of `benchmarks.loads`, in the order they are measured."""
BESIDE = {"embedding": ("livez", "fairness"), "generation": ("streams", "leaving", "overhead")}
"""What is measured together with a load, under names of its own."""

PUBLISHED = ROOT / "benchmarks" / "results" / "results.json"
DOCUMENT = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "performance.svg"


def main() -> None:
    options = _options()
    if options.publish:
        publish(Results.load(PUBLISHED))
        return
    complete = not options.quick and not options.only
    file = options.output or (PUBLISHED if complete else BENCH_DIRECTORY / "results.json")
    results = Results.load(file) if options.resume and file.exists() else Results()
    peers = frozenset(set(ENVIRONMENTS) - set(ON_DEMAND) | set(options.with_peers))
    run = Run(results, file, options.rounds, options.quick, peers)
    results.about |= {
        **machine.describe(),
        "taken": time.strftime("%Y-%m-%d"),
        "rounds": options.rounds,
        "quick": options.quick,
        "generator": generator_name(),
        "peers": {name: list(ENVIRONMENTS[name]) for name in sorted(peers)},
    }
    if not options.only:
        # All at once, and before anything is measured; some loads alone need some of them.
        for name in sorted(peers):
            run.install(name)
    for load in options.only or LOADS:
        if load in results.done:
            run.say(f"{load}: measured before")
            continue
        for name in (load, *BESIDE.get(load, ())):
            results.forget(name)
        run.say(f"{load}: begins")
        importlib.import_module(f"benchmarks.loads.{load}").measure(run)
        results.done.append(load)
        results.save(file)
    print("\n" + report.render(results))
    run.say(f"samples are in {file}")
    if complete and file == PUBLISHED:
        # As they stand in the file, which rounds them: whoever publishes them again writes the same.
        publish(Results.load(file))
        run.say(f"{DOCUMENT.relative_to(ROOT)} and its chart are up to date")


def publish(results: Results) -> None:
    """Puts the figures into the document, and draws its chart."""
    DOCUMENT.write_text(report.placed(DOCUMENT.read_text(), report.render(results)))
    CHART.write_text(draw(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=LOADS, metavar="LOAD", help=f"some of: {', '.join(LOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each load, interleaved (default 3)")
    parser.add_argument("--quick", action="store_true", help="short windows, to see that everything works")
    parser.add_argument(
        "--with", dest="with_peers", nargs="+", choices=ON_DEMAND, default=(), metavar="PEER",
        help=f"peers that are not measured by default: {', '.join(ON_DEMAND)}",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on where an earlier run was ended")
    parser.add_argument("--output", type=Path, help="the file of results")
    parser.add_argument("--publish", action="store_true", help="only write the document from the committed results")
    return parser.parse_args()


def _end(number: int, frame: object) -> None:
    """SIGTERM ends a run as Ctrl-C does: with everything that it started."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    with contextlib.suppress(KeyboardInterrupt):
        main()

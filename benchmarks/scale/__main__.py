"""Studies large clusters by simulation: `python -m benchmarks.scale`.

Writes `benchmarks/results/scale.json` and what `docs/scale.md` shows. Takes a few minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.report import placed
from benchmarks.scale import hops, study
from benchmarks.scale.figures import draw, render
from tests.topology import ROOT

PUBLISHED = ROOT / "benchmarks" / "results" / "scale.json"
DOCUMENT = ROOT / "docs" / "scale.md"
CHART = ROOT / "docs" / "scale.svg"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--publish", action="store_true", help="only write the document from the committed results")
    if not parser.parse_args().publish:
        described = machine.describe()
        about = {key: described[key] for key in ("processor", "cores", "python")}
        results = {"about": {**about, "taken": time.strftime("%Y-%m-%d")}, "hops": hops.measure(), **study.run(_say)}
        save(results, PUBLISHED)
    publish(json.loads(PUBLISHED.read_text()))


def save(results: dict[str, object], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.5g}"))
    file.write_text(json.dumps(rounded, indent=1) + "\n")


def publish(results: dict[str, object]) -> None:
    """Puts the figures into the document, and draws its chart."""
    text = render(results)
    DOCUMENT.write_text(placed(DOCUMENT.read_text(), text))
    CHART.write_text(draw(results))
    print(text)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    main()

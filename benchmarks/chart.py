"""The chart of `docs/performance.md`: bars, one panel for each load, readable on light and dark pages. Pure.

Each panel has a scale of its own, in ratios. Whiskers go from the lowest to the highest round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.summary import Figure, Results
from benchmarks.targets import OFFLINE, OURS, OURS_2, RAW, STATIC

WIDTH = 920
LABELS = 300
BARS = WIDTH - LABELS - 120
ROW = 26
HEAD = 54
GAP = 22

STYLE = """
    .bar { fill: #8c959f }
    .ours { fill: #0969da }
    .limit { fill: none; stroke: #57606a; stroke-dasharray: 5 4 }
    .whisker { stroke: #1f2328; stroke-width: 1.4 }
    .axis { stroke: #8c959f; stroke-width: 1 }
    text { fill: #1f2328 }
    .title { font-weight: 600 }
    .small { font-size: 12px; fill: #57606a }
    @media (prefers-color-scheme: dark) {
      .bar { fill: #6e7681 }
      .ours { fill: #58a6ff }
      .limit { fill: none; stroke: #9da7b3 }
      .whisker { stroke: #e6edf3 }
      .axis { stroke: #6e7681 }
      text { fill: #e6edf3 }
      .small { fill: #9da7b3 }
    }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    note: str
    load: str
    case: str
    value: str
    reference: str
    limits: tuple[str, ...]
    """Systems that are no servers, or have no hop: drawn as outlines."""


PANELS = (
    Panel("Echo, 64 connections", "requests per second; headwaiter with 2 fronts is 1", "echo", "c=64",
          "requests_per_s", OURS_2, (RAW,)),
    Panel("Embeddings of mixed lengths, 64 connections", "requests per second; the offline limit is 1", "embedding",
          "c=64", "requests_per_s", OFFLINE, (OFFLINE,)),
    Panel("Text generation, SmolLM2, 16 connections", "generated tokens per second; a static batch offline is 1",
          "generation", "SmolLM2 c=16", "tokens_per_s", STATIC, (STATIC,)),
    Panel("Text generation, GPT-J's shape, 16 connections", "generated tokens per second; a static batch offline is 1",
          "generation", "GPT-J c=16", "tokens_per_s", STATIC, (STATIC,)),
    Panel("Memory, 4 web workers and one encoder", "PSS of all processes; headwaiter is 1", "memory", "fronts=4",
          "all_mib", OURS, ()),
)  # fmt: skip


def draw(results: Results) -> str:
    """The whole SVG; panels of loads that were not measured are left out."""
    parts: list[str] = []
    top = 0
    for panel in PANELS:
        bars = _bars(results, panel)
        if bars:
            parts.append(_panel(panel, bars, top))
            top += HEAD + ROW * len(bars) + GAP
    label = "Throughput and memory of headwaiter and its peers, as ratios"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {max(top, ROW)}" '
        f'font-family="system-ui, sans-serif" font-size="14" role="img" aria-label="{label}">\n'
        f"  <style>{STYLE}  </style>\n" + "".join(parts) + "</svg>\n"
    )


def _bars(results: Results, panel: Panel) -> list[tuple[str, Figure]]:
    """Systems and their ratios, the largest first."""
    found = []
    for system in results.systems(panel.load):
        ratio = results.ratio(panel.load, panel.case, panel.value, system, panel.reference)
        if ratio is not None:
            found.append((system, ratio))
    return sorted(found, key=lambda bar: -bar[1].median)


def _panel(panel: Panel, bars: Sequence[tuple[str, Figure]], top: int) -> str:
    scale = BARS / max(figure.high for _, figure in bars)
    end = top + HEAD + ROW * len(bars)
    lines = [
        f'  <text class="title" x="12" y="{top + 22}">{escape(panel.title)}</text>',
        f'  <text class="small" x="12" y="{top + 40}">{escape(panel.note)}</text>',
        f'  <line class="axis" x1="{LABELS}" y1="{top + HEAD - 4}" x2="{LABELS}" y2="{end}"/>',
    ]
    for row, (system, figure) in enumerate(bars):
        y = top + HEAD + ROW * row
        style = "bar limit" if system in panel.limits else "bar ours" if system.startswith(OURS) else "bar"
        right = LABELS + figure.median * scale
        low, high = LABELS + figure.low * scale, LABELS + figure.high * scale
        lines += [
            f'  <text x="{LABELS - 10}" y="{y + 16}" text-anchor="end">{escape(system)}</text>',
            f'  <rect class="{style}" x="{LABELS}" y="{y + 3}" width="{right - LABELS:.1f}" height="18" rx="2"/>',
            f'  <line class="whisker" x1="{low:.1f}" y1="{y + 12}" x2="{high:.1f}" y2="{y + 12}"/>',
            f'  <text class="small" x="{max(right, high) + 8:.1f}" y="{y + 16}">{figure.median:.2f}</text>',
        ]
    return "\n".join(lines) + "\n"

"""The results of the scale study as text and as a chart. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.chart import STYLE
from benchmarks.report import number, rows
from benchmarks.scale.study import AFTER_S, BEFORE_S, FACTOR, FAILING_S, LARGE, RATES, SHARED_LOAD, STREAMING, WRITING

Stored = Mapping[str, Any]

# Between a front and the model server, and between that and a model process, in both directions.
KINDS = {
    "submits": "front worker to model server",
    "batches": "model server to model process",
    "results": "model process to model server",
    "replies": "model server to front worker",
    "chunks": "model process to model server, pieces of streams",
}
# More than this of the one core that the loop has is no steady state.
BUSY_MAX = 0.7


@dataclass(frozen=True, slots=True)
class Need:
    """What one workload needs of the model server, as measured."""

    name: str
    requests_per_s_and_gpu: float
    core_us: float
    """For each request."""
    hops_us: float
    messages: float
    """For each request, sent and received."""

    @property
    def requests_per_s_max(self) -> float:
        return BUSY_MAX * 1e6 / (self.core_us + self.hops_us)

    @property
    def gpus_max(self) -> float:
        return self.requests_per_s_max / self.requests_per_s_and_gpu


def needs(results: Stored) -> list[Need]:
    """In the order they were measured. A streamed answer costs what a whole one does, and its pieces."""
    found: dict[str, Need] = {}
    for name, held in results["large"].items():
        facts, measured = held["facts"], held["measured"]
        if name == STREAMING.name:
            whole = found[WRITING.name]
            pieces = STREAMING.run_s * STREAMING.pieces_per_s
            share = pieces / facts["pieces"]
            hops_us = share * _hops_us(results["hops"], facts["messages"], {"chunks": 2 * facts["pieces"]})
            need = Need(
                name,
                facts["requests_per_s_and_gpu"],
                whole.core_us + pieces * measured["piece_us"],
                whole.hops_us + hops_us,
                whole.messages + share * sum(facts["messages"].values()),
            )
        else:
            requests = facts["requests"]
            records = dict.fromkeys(("submits", "batches", "results", "replies"), requests)
            hops_us = _hops_us(results["hops"], facts["messages"], records)
            need = Need(
                name,
                facts["requests_per_s_and_gpu"],
                measured["core_us"] / requests,
                hops_us / requests,
                sum(facts["messages"].values()) / requests,
            )
        found[name] = need
    return list(found.values())


def _hops_us(hops: Stored, messages: Mapping[str, int], records: Mapping[str, int]) -> float:
    whole = sum(count * hops[kind]["message_us"] for kind, count in messages.items())
    return float(whole + sum(count * hops[kind]["record_us"] for kind, count in records.items()))


def render(results: Stored) -> str:
    return "\n\n".join((_about(results), _capacity(results), _hops(results), _failures(results), _shards(results)))


def _about(results: Stored) -> str:
    about = results["about"]
    return (
        f"Taken on {about['taken']}: {about['processor']}, Python {about['python']}. Times are processor times; "
        "counts are the same on every machine."
    )


def _capacity(results: Stored) -> str:
    lines = [
        (
            need.name,
            number(need.requests_per_s_and_gpu),
            number(need.core_us),
            f"{need.messages:.1f}",
            number(need.hops_us),
            number(need.requests_per_s_max),
            f"{need.gpus_max:,.0f}",
        )
        for need in needs(results)
    ]
    header = (
        f"{LARGE.gpus:,} GPUs, {LARGE.fronts} fronts, {LARGE.queued:,} queued",
        "requests/s of one GPU",
        "core, µs each",
        "messages each",
        "sockets and codec, µs each",
        "requests/s of one model server",
        "GPUs it keeps busy",
    )
    return f"### Where one model server is full, at {BUSY_MAX:.0%} of its one core\n\n" + rows(header, lines)


def _hops(results: Stored) -> str:
    lines = [
        (way, number(results["hops"][kind]["message_us"]), number(results["hops"][kind]["record_us"]))
        for kind, way in KINDS.items()
    ]
    return "### A hop\n\n" + rows(("", "a message, µs", "each record in it, µs"), lines)


def _failures(results: Stored) -> str:
    calm, rough = results["failing"]["0.0"]["facts"], results["failing"][str(FACTOR)]["facts"]
    lines = []
    for name, facts in (("nothing fails", calm), (f"failures {FACTOR:g} times as often", rough)):
        ended = facts["ended"]
        others = ", ".join(f"{count} {code}" for code, count in ended.items() if code not in ("ok", "cancelled"))
        lines.append(
            (
                name,
                f"{facts['processes_died']}",
                f"{facts['fronts_died']}",
                f"{ended['ok']:,}",
                f"{ended['ok'] / calm['ended']['ok']:.1%}",
                f"{facts['sent_again']:,}",
                others or "0",
                f"{facts['lost']}",
            )
        )
    header = (
        f"{FAILING_S:g} s",
        "processes died",
        "fronts died",
        "answered",
        "of the calm",
        "run again",
        "errors",
        "lost",
    )
    text = (
        f"### Failures: {LARGE.gpus:,} GPUs write, {LARGE.queued:,} requests wait\n\n"
        f"A process dies every {1 / RATES.process_deaths_per_gpu_hour:g} hours of a GPU, a front worker once in "
        f"{1 / RATES.front_deaths_per_hour:g} hours, one request in {1 / RATES.poison_share:,.0f} is poison, and all "
        f"that {FACTOR:g} times as often, so that {FAILING_S:g} s hold {FACTOR * FAILING_S / 60:g} minutes of it. A "
        f"process is ready {LARGE.load_s:g} s after its start.\n\n" + rows(header, lines)
    )
    after = [
        (gpus, f"{held['facts']['kept']:.0%}", f"{held['facts']['worst']:.0%}")
        for gpus, held in results["deaths"].items()
    ]
    return text + (
        f"\n\nOne death, after {BEFORE_S:g} s under full load, with {WRITING.concurrency} requests inside, which each "
        "run alone now:\n\n" + rows(("GPUs", f"answers in the {AFTER_S:g} s after", "in the worst 5 s"), after)
    )


def _shards(results: Stored) -> str:
    lines = []
    for count, held in results["shards"].items():
        facts = held["facts"]
        lines.append(
            (
                count,
                f"{LARGE.gpus // int(count):,}",
                f"{facts['waited_share']:.1%}",
                f"{facts['p50_s']:.2f}",
                f"{facts['p99_s']:.2f}",
            )
        )
    header = ("model servers", "GPUs each", "requests that wait", "median wait, s", "99th percentile, s")
    return (
        f"### Several model servers: {LARGE.gpus:,} GPUs write at {SHARED_LOAD:.0%} of what they can, dealt at random"
        "\n\n" + rows(header, lines)
    )


# --- chart -------------------------------------------------------------------------------------------------------

WIDTH, LABELS, ROW, HEAD = 920, 210, 34, 58
DECADES = (10, 100, 1_000, 10_000)


def draw(results: Stored) -> str:
    """How many GPUs one model server keeps busy, by workload, on a scale of decades."""
    found = needs(results)
    end = HEAD + ROW * len(found)
    lines = [
        '  <text class="title" x="12" y="22">GPUs that one model server keeps busy</text>',
        f'  <text class="small" x="12" y="41">at {BUSY_MAX:.0%} of one core, by what is asked of them; '
        "each line is ten times the one before</text>",
    ]
    for decade in DECADES:
        x = _x(decade)
        lines += [
            f'  <line class="axis" x1="{x:.1f}" y1="{HEAD - 4}" x2="{x:.1f}" y2="{end}"/>',
            f'  <text class="small" x="{x:.1f}" y="{end + 18}" text-anchor="middle">{decade:,}</text>',
        ]
    for row, need in enumerate(found):
        y, right = HEAD + ROW * row, _x(need.gpus_max)
        lines += [
            f'  <text x="{LABELS - 10}" y="{y + 19}" text-anchor="end">{escape(need.name)}</text>',
            f'  <rect class="bar ours" x="{LABELS}" y="{y + 5}" width="{right - LABELS:.1f}" height="20" rx="2"/>',
            f'  <text x="{right + 8:.1f}" y="{y + 20}">{need.gpus_max:,.0f}</text>',
        ]
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + 28}" '
        'font-family="system-ui, sans-serif" font-size="14" role="img" '
        'aria-label="How many GPUs one model server keeps busy, by workload">\n'
        f"  <style>{STYLE}  </style>\n{body}\n</svg>\n"
    )


def _x(gpus: float) -> float:
    low, high = math.log10(DECADES[0]), math.log10(DECADES[-1]) + 0.3
    share = (math.log10(max(gpus, DECADES[0])) - low) / (high - low)
    return LABELS + share * (WIDTH - LABELS - 70)

"""Results as text: Markdown tables of ratios, the table of goals, and the part of a document that shows them. Pure.

Ratios, because absolute figures say more about the machine than about the program. What `1.00x` stands for is printed
above each table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.summary import Figure, Results
from benchmarks.targets import OURS, OURS_2, verdicts

BEGIN = "<!-- figures: printed by the benchmarks, not by hand -->"
END = "<!-- end of figures -->"


@dataclass(frozen=True, slots=True)
class Table:
    """One load: systems down, cases across, each cell the ratio of a value to that of the reference system."""

    title: str
    load: str
    value: str
    unit: str
    reference: str
    cases: tuple[str, ...] = ()
    """All that were measured, where there are none here."""


SMOLLM2 = ("SmolLM2 c=1", "SmolLM2 c=8", "SmolLM2 c=16", "SmolLM2 c=32")
GPT_J = ("GPT-J c=1", "GPT-J c=8", "GPT-J c=16", "GPT-J c=32")
TABLES = (
    Table("Echo: requests per second", "echo", "requests_per_s", "/s", OURS_2),
    Table("Echo: median latency", "echo", "p50_ms", "ms", OURS_2),
    Table("Echo: processor time per request, all processes", "echo", "cpu_all_us", "µs", OURS_2, ("c=64",)),
    Table("Embeddings, mixed lengths: requests per second", "embedding", "requests_per_s", "/s", OURS),
    Table("Embeddings, mixed lengths: median latency", "embedding", "p50_ms", "ms", OURS),
    Table("Embeddings, mixed lengths: 99th percentile of latency", "embedding", "p99_ms", "ms", OURS, ("c=64",)),
    Table("Health path while 64 connections ask for embeddings: 99th percentile", "livez", "p99_ms", "ms", OURS),
    Table("The longest text among short ones: 99th percentile", "fairness", "long_p99_ms", "ms", OURS),
    Table("The longest text among short ones: its median", "fairness", "long_p50_ms", "ms", OURS),
    Table("Question answering: requests per second", "answering", "requests_per_s", "/s", OURS),
    Table("Text generation, SmolLM2: generated tokens per second", "generation", "tokens_per_s", "/s", OURS, SMOLLM2),
    Table(
        "Text generation, GPT-J's shape: generated tokens per second", "generation", "tokens_per_s", "/s", OURS, GPT_J
    ),
    Table("Text streams: median until the first token", "streams", "first_p50_ms", "ms", OURS),
    Table("Text streams: 99th percentile until the first token", "streams", "first_p99_ms", "ms", OURS),
    Table("Text streams: median between two tokens", "streams", "between_p50_ms", "ms", OURS),
    Table("Text streams: 99th percentile between two tokens", "streams", "between_p99_ms", "ms", OURS),
    Table("Memory of everything that serves one encoder", "memory", "all_mib", "MiB", OURS),
    Table("From start to the first answer", "start", "start_s", "s", OURS),
    Table("Large payloads: median", "payload", "p50_ms", "ms", "bare ZeroMQ through a relay"),
)


def render(results: Results) -> str:
    """Everything, as Markdown."""
    parts = [_about(results), _targets(results)]
    parts += [text for table in TABLES if (text := _table(results, table))]
    others = (_processes(results), _overhead(results), _core(results), _growth(results), _notes(results))
    parts += [text for text in others if text]
    return "\n\n".join(parts)


def placed(document: str, figures: str) -> str:
    """The document with everything between its two marks replaced.

    Raises:
        ValueError: it has no marks, or has them twice.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the document needs the lines {BEGIN} and {END}, once each")
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{figures.strip()}\n\n{END}{after}"


def rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with the numbers on the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def number(value: float) -> str:
    """Three digits that mean something, without an exponent."""
    if value >= 10_000:
        return f"{value / 1000:.1f}k"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(figure: Figure, unit: str = "") -> str:
    """`1.73x (1.70–1.80)`; without the bracket where there was one round only."""
    text = f"{number(figure.median)}{unit}"
    if figure.low == figure.high:
        return text
    return f"{text} ({number(figure.low)}–{number(figure.high)})"


def _about(results: Results) -> str:
    about = results.about
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return (
        f"One run on {about.get('taken', 'an unknown day')}: {about.get('cores', '?')} cores of "
        f"{about.get('processor', 'an unknown processor')}, {about.get('memory_gib', '?')} GiB, Python "
        f"{about.get('python', '?')}, {versions}. {about.get('rounds', '?')} rounds, interleaved; load from "
        f"{about.get('generator', '?')}, on the same cores. Each figure is the median of the rounds, with the "
        "lowest and the highest in brackets."
    )


def _targets(results: Results) -> str:
    lines = [
        (
            verdict.target.what,
            f"{verdict.target.bound} {verdict.target.goal:g} {verdict.target.unit}",
            "–" if verdict.figure is None else spread(verdict.figure),
            verdict.text,
        )
        for verdict in verdicts(results)
    ]
    return "### Goals\n\n" + rows(("what", "goal", "measured", ""), lines)


def _table(results: Results, table: Table) -> str:
    measured = [case for case in results.cases(table.load) if not table.cases or case in table.cases]
    cases, scale = [], []
    for case in measured:
        figure = results.figure(table.load, case, table.reference, table.value)
        if figure is not None:
            cases.append(case)
            scale.append(f"{case}: {number(figure.median)} {table.unit}")
    if not cases:
        return ""
    lines = []
    for system in results.systems(table.load):
        ratios = [results.ratio(table.load, case, table.value, system, table.reference) for case in cases]
        if any(ratios):
            lines.append((system, *("–" if ratio is None else spread(ratio, "x") for ratio in ratios)))
    return f"### {table.title}\n\n1.00x is {table.reference}; here {', '.join(scale)}.\n\n" + rows(("", *cases), lines)


def _processes(results: Results) -> str:
    """Where the processor time of an echo goes, in ours."""
    lines = []
    for case in results.cases("echo"):
        cells = [results.figure("echo", case, OURS_2, f"cpu_{role}_us") for role in ("front", "server", "model")]
        lines.append((case, *("–" if figure is None else spread(figure) for figure in cells)))
    if not lines:
        return ""
    header = ("echo, 2 fronts", "front workers", "model server", "model process")
    return "### Processor time of one echo, by process, in µs\n\n" + rows(header, lines)


def _overhead(results: Results) -> str:
    """What it costs that a token is sent by itself, beside what it costs anyway."""
    lines = []
    for case in results.cases("overhead"):
        names = ("cpu_front_us", "cpu_server_us", "cpu_model_us", "cpu_all_us", "whole_us")
        cells = [results.figure("overhead", case, OURS, name) for name in names]
        lines.append((case, *("–" if figure is None else spread(figure) for figure in cells)))
    if not lines:
        return ""
    header = ("streams", "front workers", "model server", "model process", "all", "a token that is not streamed")
    return "### Processor time that streaming adds to a token, in µs\n\n" + rows(header, lines)


def _core(results: Results) -> str:
    lines = []
    for case in results.cases("core"):
        whole = results.figure("core", case, "broker core", "cpu_us")
        single = results.figure("core", case, "broker core", "cpu_single_us")
        if whole and single:
            queued, replicas = (part.partition("=")[2] for part in case.split())
            lines.append((f"{int(queued):,}", f"{int(replicas):,}", spread(whole), spread(single)))
    if not lines:
        return ""
    header = ("queued", "replicas", "batches of up to 32", "batches of 1")
    return "### Broker core: processor time from arrival to end of one request, in µs\n\n" + rows(header, lines)


def _growth(results: Results) -> str:
    lines = []
    for case in results.cases("growth"):
        cells = [results.figure("growth", case, OURS, f"{role}_mib_per_1000") for role in ("front", "server", "model")]
        lines.append((case, *("–" if figure is None else f"{figure.median:.3f}" for figure in cells)))
    if not lines:
        return ""
    header = ("requests to", "front workers", "model server", "model process")
    return "### Memory growth, MiB for each 1,000 requests of random length\n\n" + rows(header, lines)


def _notes(results: Results) -> str:
    return "Left out:\n\n" + "\n".join(f"- {note}" for note in results.notes) if results.notes else ""

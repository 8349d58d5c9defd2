"""Writes the table of tasks into `docs/tasks.md`: `python -m tests.task_table`. A test compares what is there.

Owns the table's shape. Requests are those of the tests, and answers what tiny models say to them, so neither can drift
from the program.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model_worker.runtimes import registry, tasks
from shared import values
from tests.task_cases import CASES, OWN_RUNTIMES, UNTRIED, Case, loaded
from tests.topology import ROOT

DOCUMENT = ROOT / "docs" / "tasks.md"
BEGIN = "<!-- Written by `python -m tests.task_table`, from the tests' own requests and their answers. -->"
END = "<!-- The end of what is written. -->"
# As it may stand in a cell.
BAR = "\\|"
_NUMBERS_SHOWN = 2


def table() -> str:
    """All lines between the two marks."""
    lines = [
        "| task | `inputs` | `parameters` | answer | runtime | batches | models tried | through |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_task: dict[str, list[Case]] = {}
    for case in (*OWN_RUNTIMES, *CASES):
        by_task.setdefault(case.task, []).append(case)
    lines += [_row(by_task[task]) for task in sorted(by_task)]
    lines += [f"| `{task}` | – | – | – | {_runtime(task)} | – | no: {why} | – |" for task, why in UNTRIED.items()]
    return "\n".join(lines)


def _row(cases: list[Case]) -> str:
    first = cases[0]
    inputs = first.inputs[0]
    answer = answer_to(first)
    cells = [
        f"`{first.task}`",
        f"`{json.dumps(_shortened(inputs), ensure_ascii=False)}`",
        f"`{json.dumps(first.parameters)}`" if first.parameters else "",
        f"`{json.dumps(shape(answer), ensure_ascii=False)}`",
        _runtime(first.task),
        "yes" if any(case.batches for case in cases) else "no",
        ", ".join(dict.fromkeys(case.model for case in cases)),
        "native, `/hf`" if _is_asked_by_clients(first.task) else "native",
    ]
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def answer_to(case: Case) -> Any:
    """What a service answers, before it becomes JSON."""
    model = loaded(case.task, case.kind, case.labels, **case.options)
    item = model.prepare(case.inputs[0], dict(case.parameters))
    answer = model.finish(model.forward([item])[0])
    return values.unpack([bytes(frame) for frame in values.pack(answer)])


def shape(value: Any) -> Any:
    """The same with a word for each value, and one entry of each list."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        value = value.tolist()
    match value:
        case dict():
            return {key: shape(entry) for key, entry in value.items()}
        case []:
            return []
        case [first, *rest]:
            return [shape(first), *(["…"] if rest else [])]
        case bytes():
            return "base64"
        case bool() | None:
            return value
        case int() | float():
            return "number"
    return "text"


def _shortened(value: Any) -> Any:
    match value:
        case dict():
            return {key: _shortened(entry) for key, entry in value.items()}
        case [float(), *_]:
            return [*(round(entry, 2) for entry in value[:_NUMBERS_SHOWN]), "…"]
        case list():
            return [_shortened(entry) for entry in value]
        case bytes():
            return "base64"
    return value


def _runtime(task: str) -> str:
    module = registry.RUNTIMES[task].partition(":")[0]
    return f"`{module.rpartition('.')[2]}`"


def _is_asked_by_clients(task: str) -> bool:
    """Whether the tests with Hugging Face's clients have such a model."""
    names = [task, *(alias for alias, name in tasks.ALIASES.items() if name == task)]
    files = [ROOT / "tests" / "frontend" / f"test_hugging_face_{name}.py" for name in ("client", "media", "texts")]
    text = "".join(file.read_text() for file in files)
    return any(re.search(rf'\(\s*"{name}"\s*,|: "{name}-\w+",', text) for name in names)


def written(document: Path = DOCUMENT) -> str:
    """The document with the table as it has to be."""
    text = document.read_text()
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(written())

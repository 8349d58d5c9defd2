"""The real command as a process: `python -P -m headwaiter`, with none of the surrounding `HEADWAITER_…` variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.topology import ROOT, toml_value

COMMAND = (sys.executable, "-P", "-m", "headwaiter")
ECHO: dict[str, Any] = {"name": "echo", "model": "tests.obedient_model:Obedient", "device": "cpu"}


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAITER_")}
    return inherited | {"COLUMNS": "200"} | dict(extra or {})


def headwaiter(
    *arguments: str | Path, cwd: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def write_config(directory: Path, *models: Mapping[str, Any], **sections: Mapping[str, Any]) -> Path:
    """A `headwaiter.toml` in `directory`, with the run directory beside it unless `top` says otherwise."""
    top = {"run_dir": directory / "run", "python_path": [ROOT], **sections.pop("top", {})}
    lines = [f"{key} = {toml_value(value)}" for key, value in top.items()]
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in values.items())]
    for model in models:
        lines += ["[[models]]", *(f"{key} = {toml_value(value)}" for key, value in model.items())]
    file = directory / "headwaiter.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def only_line(text: str) -> str:
    """The one line that `text` is."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


def document(completed: subprocess.CompletedProcess[str]) -> Any:
    """Its standard output as JSON."""
    return json.loads(completed.stdout)

"""What several of the fronts' tests start from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """The path of a run directory, which whoever listens there makes."""
    # Not pytest's tmp_path: a socket's path has room for 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="hw-") as directory:
        yield Path(directory) / "run"

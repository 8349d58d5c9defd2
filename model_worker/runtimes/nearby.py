"""Which directory or file on this machine may be meant by a path that is not there.

Owns the search, which is short whatever lies around, and its wording. A guess goes into messages alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from shared.suggestions import closest

# In a directory with more entries the guess may miss; the search must not be what a command waits for.
_ENTRIES_MAX = 2000


def nearest(missing: Path) -> Path | None:
    """The directory or `.gguf` file most like `missing`, beside or one level below the last directory that is there."""
    above = next((parent for parent in missing.parents if parent.is_dir()), None)
    if above is None:
        return None
    found = list(islice(_candidates(above), _ENTRIES_MAX))
    by_path = {str(path.relative_to(above)): path for path in found}
    if near := closest(str(missing.relative_to(above)), by_path):
        return by_path[near]
    # The first of a name is the highest.
    by_name = {path.name: path for path in reversed(found)}
    near = closest(missing.name, by_name)
    return by_name[near] if near else None


def did_you_mean(missing: Path, start: Path | None = None) -> str:
    """To be put behind the path in a message, relative to `start` if it is below that; empty if nothing is near."""
    path = nearest(missing)
    if path is None:
        return ""
    shown = f"./{path.relative_to(start)}" if start and path.is_relative_to(start) else str(path)
    return f" (did you mean {shown!r}?)"


def _candidates(directory: Path) -> Iterator[Path]:
    """Those in the directory, and then those in the directories in it."""
    level = list(_models_in(directory))
    yield from level
    for path in level:
        if path.suffix != ".gguf":
            yield from _models_in(path)


def _models_in(directory: Path) -> Iterator[Path]:
    try:
        entries = list(islice(os.scandir(directory), _ENTRIES_MAX))
    except OSError:
        # What this user may not read is no guess.
        return
    for entry in sorted(entries, key=lambda entry: entry.name):
        if not entry.name.startswith(".") and (entry.is_dir() or entry.name.endswith(".gguf")):
            yield Path(entry.path)

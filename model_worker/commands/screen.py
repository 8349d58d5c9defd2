"""How the commands write to the terminal: one console, as wide as its reader can bear."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from rich.console import Console, RenderableType
from typing_extensions import Buffer

# A pipe or a file has no width: each row of a table is one line there, whatever its length.
WIDTH_WITHOUT_TERMINAL = 100_000


def console(stderr: bool = False) -> Console:
    """A console on standard output. Markup is off: names and reasons may contain brackets."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def show(out: Console, renderable: RenderableType) -> None:
    """Prints it; without the blanks that fill up a table's lines, where they would only be in a reader's way."""
    if out.is_terminal:
        out.print(renderable)
        return
    with out.capture() as captured:
        out.print(renderable)
    out.file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def counted(count: int, one: str, several: str) -> str:
    """
    >>> counted(1, "model", "models"), counted(2, "model", "models")
    ('1 model', '2 models')
    """
    return f"{count} {one if count == 1 else several}"


def outlive_readers() -> None:
    """From now on, what cannot be written to standard output or error is lost, and nothing else is.

    For a command that goes on for weeks: a full disk under its log, a log reader that ended or a closed terminal must
    not end what it is there for.
    """
    sys.stdout = _lossy(sys.stdout)
    sys.stderr = _lossy(sys.stderr)


def _lossy(stream: TextIO) -> TextIO:
    stream.flush()
    raw = _LossyFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", write_through=True)


class _LossyFile(io.FileIO):
    """A file that takes everything, also what the system refuses."""

    def write(self, data: Buffer, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        # None: refused, or a terminal that somebody has made non-blocking is full.
        return memoryview(data).nbytes if written is None else written

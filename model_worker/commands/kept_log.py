"""What the programs have written of late: two files in the run directory, `service.log` and the one before it.

Owns their size, their turn, and their lines. `serve`, which all of those lines pass, is the only writer; anybody of the
same user may read. Nothing depends on them: where they cannot be written, lines are lost and the service goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NAME = "service.log"


def older(file: Path) -> Path:
    return file.with_name(file.name + ".1")


class KeptLog:
    """The writer. For one thread."""

    def __init__(self, run_directory: Path, bytes_max: int) -> None:
        """Both files together have at most `bytes_max` bytes; with 0 there are none."""
        self._file = run_directory / NAME
        self._file_bytes_max = bytes_max // 2
        self._descriptor: int | None = None
        self._size_bytes = 0
        if not bytes_max:
            for file in (self._file, older(self._file)):
                file.unlink(missing_ok=True)

    def write(self, line: bytes) -> None:
        """Appends one line, or loses it."""
        if len(line) > self._file_bytes_max:
            return
        with contextlib.suppress(OSError):
            self._make_room(len(line))
            if self._descriptor is not None:
                self._size_bytes += os.write(self._descriptor, line)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _make_room(self, line_bytes: int) -> None:
        if self._descriptor is not None and not _is_same(self._file, self._descriptor):
            # Deleted, with the whole run directory perhaps, which the model server makes again.
            self.close()
        if self._descriptor is not None and self._size_bytes + line_bytes > self._file_bytes_max:
            self.close()
            self._file.replace(older(self._file))
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self._file, flags, 0o600)
            self._size_bytes = os.fstat(self._descriptor).st_size


class LogReader:
    """Reads what is kept, and then what comes."""

    def __init__(self, run_directory: Path) -> None:
        self._file = run_directory / NAME
        self._open: BinaryIO | None = None
        self._rest = b""

    @property
    def is_there(self) -> bool:
        return self._file.exists()

    def kept(self) -> Iterator[bytes]:
        """All whole lines there are, the oldest first."""
        # Opened first, so that a turn in between loses nothing, and the older file is then perhaps this one.
        self._open_file()
        with contextlib.suppress(FileNotFoundError), older(self._file).open("rb") as before:
            if self._open is None or not os.path.samestat(os.fstat(before.fileno()), os.fstat(self._open.fileno())):
                yield from before
        yield from self.news()

    def news(self) -> Iterator[bytes]:
        """The whole lines that were written since the last call."""
        while (opened := self._open_file()) is not None:
            # Asked before it is read: what is written until it gives way to another file is read below.
            is_current = _is_same(self._file, opened.fileno())
            *lines, self._rest = (self._rest + opened.read()).split(b"\n")
            yield from (line + b"\n" for line in lines)
            if is_current:
                return
            self.close()

    def _open_file(self) -> BinaryIO | None:
        if self._open is None:
            with contextlib.suppress(FileNotFoundError):
                self._open = self._file.open("rb")
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
        self._rest = b""


def _is_same(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except OSError:
        return False

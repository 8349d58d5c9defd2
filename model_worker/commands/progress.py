"""What a command shows while it waits for model processes: `serve`, and the orders of an operator.

Owns the terminal meanwhile. On a terminal a small table stays at the bottom until the end; in a pipe or a file each
change is one line. For `serve` there are also the programs' own lines, as they come: those go to standard error, what a
command itself says to standard output. May be used from two threads.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from model_worker.commands.addresses import base_url, curl_line
from model_worker.commands.screen import console
from model_worker.commands.status import STYLES, state_words
from model_worker.commands.supervision import CONTROL_SOCKET, PASSWORD, USER
from shared.config import Config
from shared.messages import ModelState, Snapshot

# Nothing is to be seen of these.
QUIET_STATES = ("ready", "vacant")
STEP = 0.1
"""In a pipe, progress is worth a line each time it has grown by this much."""


class Progress:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._out = console()
        self._lock = threading.Lock()
        self._live = Live(console=self._out, auto_refresh=False, transient=True) if self._out.is_terminal else None
        self._changes = Changes()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_live()

    def update(self, snapshot: Snapshot) -> None:
        """Shows what changed since the last call."""
        with self._lock:
            if self._live is not None:
                self._live.update(progress_table(snapshot, max(2, self._out.height - 1)), refresh=True)
                return
        for line in self._changes.since(snapshot):
            self.say(line)

    def begin(self, snapshot: Snapshot) -> None:
        """Takes this for known, so that only what changes from here on is told."""
        self._changes.since(snapshot)

    def serving(self, models: tuple[ModelState, ...]) -> None:
        """The service is up: where it is, and a request to try."""
        self._end_live()
        failed = [model for model in models if model.state == "failed"]
        for model in failed:
            self.complain(f"{model.name} cannot be served: {model.reason}")
        keep = [model for model in models if model not in failed]
        missed = [model.name for model in failed if model.required]
        # "Ready" is what /readyz says too.
        line = f"{'Serving' if missed else 'Ready'} on {base_url(self._config)}"
        if failed:
            line += f" with {len(keep)} of {len(models)} models"
        self.say(line + (f"; not ready without {', '.join(missed)}, which is required" if missed else ""))
        if keep:
            self.say(f"Try:      {curl_line(self._config, keep[0])}")
        self.say(f"Look:     {base_url(self._config)}/dashboard")
        control = self._config.run_directory / CONTROL_SOCKET
        self.say(f"Control:  supervisorctl -s unix://{control} -u {USER} -p {PASSWORD} status")

    def say(self, text: str) -> None:
        with self._lock:
            self._out.print(Text(text), soft_wrap=True)
            self._out.file.flush()

    def complain(self, text: str) -> None:
        """One line on standard error."""
        self._write_error(f"headwaiter: {text}\n".encode())

    def copy(self, line: bytes) -> None:
        """Passes on one line of a program."""
        self._write_error(line if line.endswith(b"\n") else line + b"\n")

    def _write_error(self, line: bytes) -> None:
        with self._lock:
            if self._live is not None:
                # Above the table, which is drawn again below it.
                self._out.print(Text.from_ansi(line.decode(errors="replace").rstrip("\n")), soft_wrap=True)
            else:
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def _end_live(self) -> None:
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None


class Changes:
    """Of slots, for those who read lines."""

    def __init__(self) -> None:
        self._seen: dict[str, object] = {}

    def since(self, snapshot: Snapshot) -> list[str]:
        """One line for each slot that is not as it was at the last call."""
        lines = []
        for slot in snapshot.slots:
            # Where it is known how far a load is, its words, which may count bytes, are worth no line of their own.
            how_far = int(slot.progress / STEP) if slot.progress > 0 else slot.reason
            seen = (slot.incarnation, slot.state, how_far)
            if self._seen.get(slot.slot) != seen:
                self._seen[slot.slot] = seen
                reason = f": {slot.reason}" if slot.reason else ""
                lines.append(f"{slot.slot} on {slot.device}: {state_words(slot)}{reason}")
        for name in self._seen.keys() - {slot.slot for slot in snapshot.slots}:
            del self._seen[name]
            lines.append(f"{name}: gone")
        return lines


def progress_table(snapshot: Snapshot, rows_max: int) -> Table:
    """All slots, or, where there are too many to be seen, those where something happens and a count of the rest."""
    table = Table(box=None, pad_edge=False, show_header=False)
    shown, rest = list(snapshot.slots), []
    if len(shown) > rows_max:
        shown = [slot for slot in shown if slot.state not in QUIET_STATES][: rows_max - 1]
        rest = [slot for slot in snapshot.slots if slot not in shown]
    for slot in shown:
        style = STYLES.get(slot.state, "yellow")
        table.add_row(slot.slot, slot.device, Text(state_words(slot), style), Text(slot.reason, overflow="ellipsis"))
    if rest:
        counts = Counter(slot.state for slot in rest)
        table.add_row(f"{len(rest)} more", "", ", ".join(f"{count} {state}" for state, count in counts.items()))
    return table

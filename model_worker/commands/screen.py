"""How the commands write to the terminal: one console, as wide as its reader can bear."""

from __future__ import annotations

import sys

from rich.console import Console

# A pipe or a file has no width; cutting a table to 80 columns there would lose what it is read for.
WIDTH_WITHOUT_TERMINAL = 200


def console(stderr: bool = False) -> Console:
    """A console on standard output. Markup is off: names and reasons may contain brackets."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)

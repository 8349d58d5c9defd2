"""What the exit of `headwaiter` says. Follows sysexits.h where that has a word for it; `--help` lists these."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    """The service ended although nobody asked for it, or had to be ended at once."""
    USAGE = 2
    """The command line cannot be understood."""
    UNAVAILABLE = 69
    """No model server answers."""
    NOT_READY = 75
    """The model server answers, but a model is not ready."""
    CONFIGURATION = 78
    """The configuration, or the machine it is used on, does not allow it."""

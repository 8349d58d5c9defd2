"""What a model process's exit code says.

Owns the names. Signals are not here: the kernel's negative numbers speak for themselves.
"""

from __future__ import annotations

from enum import IntEnum


class ReplicaExit(IntEnum):
    """Clear of 1 and 2, which Python itself uses, and of the shell's 126 and above."""

    STOPPED = 0
    """It was told to stop."""
    LOAD_FAILED = 70
    """Loading or warming failed; its last STATE message carries the cause."""
    DEVICE_FAULT = 71
    """The accelerator failed in a way that only a new process can recover from."""
    MODEL_EXITED = 72
    """The model's own code asked the process to end."""
    INTERNAL_ERROR = 73
    """An error outside any item: a bug of headwaiter's, described in the log."""

"""What a process of ours does about its parent, and about what its parent has left out.

Owns the parent-death signal for the two programs that a supervisor starts, the standard streams that a program may be
started without, and the number of files it may have open. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import resource
import signal
import sys
from pathlib import Path

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1


def set_parent_death_signal(number: signal.Signals) -> None:
    """Asks the kernel to send `number` to this process when the thread that started it ends.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def open_standard_streams() -> None:
    """Puts `/dev/null` in the place of each standard stream that this process was started without.

    Otherwise the next socket or file opened gets its number, and what any library, or a child, writes to standard
    error goes in there. For the first lines of a main program, before anything else is opened.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        # Python has looked at its start, and sets to None what was not open.
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            assert descriptor == number, f"{name} was closed, and its number {number} is taken already"
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8"))  # noqa: SIM115 - for the life of the process


def raise_open_files_limit() -> tuple[int, int]:
    """Lets this process, and those it starts, have as many files and connections open as the system allows it.

    Shells and service managers keep the soft limit at 1024, for old programs that cannot use more; each connection of
    a client takes one. Returns the limit before and now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def described(pid: int) -> str:
    """The process for an error message; where it belongs to a `headwaiter serve`, with that, which is what to stop."""
    # Not above: a front worker never needs it.
    import psutil

    with contextlib.suppress(psutil.Error):
        for ancestor in psutil.Process(pid).parents():
            words = [Path(word).name for word in ancestor.cmdline()]
            if ("headwaiter", "serve") in itertools.pairwise(words):
                return f"process {pid} of headwaiter serve, process {ancestor.pid}"
    return f"process {pid}"


def stop_with_parent(parent_pid: int) -> None:
    """SIGTERM for this process when its parent ends, however that happens, or at once if it has ended already.

    The parent has to say who it is: a parent that ended while this process was being started has been replaced by
    another one, which cannot be told from the real one.
    """
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)

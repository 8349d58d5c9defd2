"""What a process of ours does about its parent, and about what its parent has left out.

Owns the parent-death signal for the two programs that a supervisor starts, and the standard streams that a program may
be started without. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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


def stop_with_parent(parent_pid: int) -> None:
    """SIGTERM for this process when its parent ends, however that happens, or at once if it has ended already.

    The parent has to say who it is: a parent that ended while this process was being started has been replaced by
    another one, which cannot be told from the real one.
    """
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)

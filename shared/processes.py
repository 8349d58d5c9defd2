"""What a process of ours does about its parent.

Owns the parent-death signal for the two programs that a supervisor starts. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal

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


def stop_with_parent(parent_pid: int) -> None:
    """SIGTERM for this process when its parent ends, however that happens, or at once if it has ended already.

    The parent has to say who it is: a parent that ended while this process was being started has been replaced by
    another one, which cannot be told from the real one.
    """
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)

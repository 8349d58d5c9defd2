"""How many connections a front worker takes, worked out from how many files it may have open.

Owns the arithmetic alone. A connection that comes when no file is left to open is closed by the event loop without a
word, before any of our code sees it; so some are kept, for those that come at once and for everything else.
"""

from __future__ import annotations

import resource
from functools import cache

# The process's own: sockets, counters, modules, and what a library opens for a moment.
FILES_KEPT = 64
# Connections that were refused stay for a moment, until their clients have read why; but no more of them than this.
REFUSED_KEPT = 24
# Connections that the kernel holds while no worker is free to accept them. A worker that comes to it accepts all of
# them before it can refuse one.
BACKLOG_MAX = 2048
BACKLOG_MIN = 16


def backlog() -> int:
    """How many connections may wait to be accepted."""
    return max(BACKLOG_MIN, min(BACKLOG_MAX, _open_files_max() // 8))


def connections_max() -> int:
    """How many connections this process may have open at once, before it refuses the next one."""
    return max(1, _open_files_max() - FILES_KEPT - REFUSED_KEPT - backlog())


@cache
def _open_files_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20

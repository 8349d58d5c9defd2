"""What Linux says about processes and the machine: memory, processor time, families.

Owns the reading of /proc. Starts and ends nothing.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tests.topology import children

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def pss_mib(pid: int) -> float:
    """Memory of one process, shared pages counted in proportion."""
    match = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert match
    return int(match.group(1)) / 1024


def family(pid: int) -> list[int]:
    """The process and all that came from it and still runs."""
    return [pid, *(member for child in children(pid) for member in family(child))]


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time that these processes have used, in user and system mode together."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S


def describe() -> dict[str, object]:
    """What a reader has to know to place the figures."""
    information = Path("/proc/cpuinfo").read_text()
    names = re.findall(r"^model name\s*:\s*(.+)$", information, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.group(1)) / 2**20) if memory else 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "fastapi", "uvicorn", "pyzmq")},
    }

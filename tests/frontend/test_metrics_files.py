"""The files behind /metrics on a disk that has no room for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.topology import ROOT

# In a process of its own: the library's files are the whole process's.
COUNTING = """
import logging, resource, sys
from pathlib import Path
from frontend.metrics import FILE_BYTES_MIN, FrontMetrics
from shared import logs
from shared.sockets import RunDirectory

logs.configure("info", "console", program="front")
run_directory = RunDirectory(sys.argv[1])
run_directory.prepare()
metrics = FrontMetrics(run_directory)

def count(models):
    for number in models:
        metrics.request_began()
        metrics.request_ended(f"model-{number}", "/models/{name}", 200, 0.1, 10)

def counted():
    families = {family.name: family for family in metrics.families()}
    return len(families["headwaiter_requests"].samples), sum(s.value for s in families["headwaiter_requests"].samples)

"""


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COUNTING + code, str(directory / "run")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)


def test_no_file_has_memory_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    """Writing to such memory on a full disk ends the process with SIGBUS."""
    done = run(
        "count(range(300))\n"
        "for file in run_directory.path.rglob('*.db'):\n"
        "    found = file.stat()\n"
        "    print(found.st_size, found.st_blocks * 512 >= found.st_size)\n",
        tmp_path,
    )
    told = [line.split() for line in done.stdout.splitlines()]
    assert len(told) == 3
    assert max(int(size_bytes) for size_bytes, _ in told) > 64 * 1024, "one of them has grown"
    assert {is_whole for _, is_whole in told} == {"True"}


def test_full_disk_is_told_once_and_what_is_known_is_counted_on(tmp_path: Path) -> None:
    # A limit of the size of files is told in the same place as a full disk, and needs no disk to fill.
    done = run(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MIN, resource.RLIM_INFINITY))\n"
        "count(range(600))\n"
        "print(*counted())\n"
        "count([0] * 7)\n"
        "print(*counted())\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "count([599])\n"
        "print(*counted())\n",
        tmp_path,
    )
    full, later, with_room = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert 0 < full[0] < 600
    assert later == (full[0], full[1] + 7)
    assert with_room == (full[0] + 1, full[1] + 8)
    assert done.stderr.count("metrics_full") == 1

"""How much of the machine the control groups of this process let it use.

Owns reading `/proc/self/cgroup` and the files it points at, version 1 and 2, hybrids included. Changes no group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Limits:
    """The tightest limits on the way from this process's group up to the root; None: no limit."""

    cpus: float | None = None
    """CPU time per time, such as 1.5; the kernel stops the whole group for the rest of a period when it is used up."""
    memory_bytes: int | None = None


def read_limits(proc: Path = Path("/proc/self")) -> Limits:
    """The limits that hold for the process whose `/proc` directory this is; no limits where there are no groups."""
    cpus: list[float] = []
    memory_bytes: list[int] = []
    for directory in _directories(proc):
        cpus += _cpus(directory)
        memory_bytes += _memory_bytes(directory)
    return Limits(min(cpus, default=None), min(memory_bytes, default=None))


def _directories(proc: Path) -> Iterator[Path]:
    """Every group directory that this process is in, with those above it: a parent's limit holds for its children."""
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except FileNotFoundError:
        return
    # A line is "id:controllers:path"; version 2 has no controllers, version 1 mounts each set of them by itself.
    groups = {tuple(sorted(line.split(":", 2)[1].split(","))): line.split(":", 2)[2] for line in memberships}
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        root, mount_point = (field.encode().decode("unicode_escape") for field in before.split()[3:5])
        kind, _, options = after.split()[:3]
        for controllers, path in groups.items():
            matches = kind == "cgroup2" if controllers == ("",) else kind == "cgroup"
            if matches and set(controllers) <= {"", *options.split(",")}:
                yield from _with_parents(Path(mount_point), PurePosixPath(root), PurePosixPath(path))


def _with_parents(mount_point: Path, root: PurePosixPath, path: PurePosixPath) -> Iterator[Path]:
    # Inside a container without a namespace of its own the path is the host's, and the mount shows the part of the
    # tree below `root` only; a path outside that part means that the mount's top is the nearest group visible.
    below = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
    for part in (below, *below.parents):
        yield mount_point / part


def _cpus(directory: Path) -> Iterator[float]:
    if version_2 := _read(directory / "cpu.max"):
        quota, _, period = version_2.partition(" ")
    else:
        quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
    if quota not in ("", "max", "-1"):
        yield int(quota) / int(period)


def _memory_bytes(directory: Path) -> Iterator[int]:
    limit = _read(directory / "memory.max") or _read(directory / "memory.limit_in_bytes")
    # Version 1 says "no limit" with a number near 2**63, which the caller's own comparison with the machine absorbs.
    if limit not in ("", "max"):
        yield int(limit)


def _read(file: Path) -> str:
    # A group has only the files of its controllers, and the root group has no limits at all.
    try:
        return file.read_text().strip()
    except OSError:
        return ""

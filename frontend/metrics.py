"""What a front worker counts, kept so that a scrape of any worker shows the totals of all of them.

Owns the metric families of the HTTP side and the files behind them. Each master process (uvicorn's, or the only one)
has a directory below the run directory, and each of its workers holds a numbered place in it. A worker that takes
over a dead one's place goes on from its numbers, so totals never jump back and files never pile up. Places are held
by `flock`, which ends with its holder, however that ends.
"""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import shutil
from functools import cache
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.multiprocess import MultiProcessCollector

from shared.errors import ConfigurationError

METRICS_DIRECTORY = "metrics"
# What the library reads the directory from.
DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# From a cached embedding to a long generation.
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


class FrontMetrics:
    """The counters of this worker, and the totals of all workers of its master. For one thread.

    Raises:
        ConfigurationError: nothing can be written below the run directory.
    """

    def __init__(self, run_directory: Path) -> None:
        parent = run_directory / METRICS_DIRECTORY
        try:
            self._directory = _claim_directory(parent)
            self._place, self._lock = _claim_place(self._directory)
        except OSError as error:
            raise ConfigurationError(f"cannot keep totals in {parent}: {error.strerror}; check run_dir") from None
        os.environ[DIRECTORY_VARIABLE] = str(self._directory)
        # The library's way to name the files by something else than the pid. Pids are used again by the system, and
        # a new one for each restart would leave a file behind each time.
        values.ValueClass = values.MultiProcessValue(lambda: self._place)  # type: ignore[no-untyped-call]
        self._requests = Counter(
            "headwaiter_requests",
            "Requests that ended, by model, route and HTTP status; 499 is a client that left.",
            ("model", "route", "code"),
            registry=None,
        )
        self._seconds = Histogram(
            "headwaiter_request_duration_seconds",
            "Time from a request's first header to the end of its response.",
            ("model", "route"),
            buckets=SECONDS_BUCKETS,
            registry=None,
        )
        self._body_bytes = Counter(
            "headwaiter_request_body_bytes",
            "Bytes of request bodies that were read completely.",
            ("model", "route"),
            registry=None,
        )
        self._inflight = Gauge(
            "headwaiter_inflight_requests",
            "Requests that have begun and not ended, in all front workers.",
            multiprocess_mode="livesum",
            registry=None,
        )
        # Looking a child up by its labels costs more than counting.
        self._requests_of = cache(self._requests.labels)
        self._seconds_of = cache(self._seconds.labels)
        self._body_bytes_of = cache(self._body_bytes.labels)

    def request_began(self) -> None:
        self._inflight.inc()

    def request_ended(self, model: str, route: str, status: int, duration_s: float, body_bytes: int) -> None:
        self._inflight.dec()
        self._requests_of(model, route, status).inc()
        self._seconds_of(model, route).observe(duration_s)
        self._body_bytes_of(model, route).inc(body_bytes)

    def registry(self) -> CollectorRegistry:
        """The families, with the totals of all workers at this moment. Reads a few small files."""
        self._forget_dead_gauges()
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self._directory))  # type: ignore[no-untyped-call]
        return registry

    def close(self) -> None:
        """Leaves the place to the next worker. Nothing may be counted afterwards."""
        values.ValueClass.close_all_files()
        os.close(self._lock)

    def _forget_dead_gauges(self) -> None:
        """What a dead worker had under way is not under way any more; what it has counted stays counted."""
        for file in self._directory.glob("gauge_live*_*.db"):
            place = int(file.stem.rpartition("_")[2])
            lock = None if place == self._place else _try_lock(_lock_file(self._directory, place))
            if lock is not None:
                # As long as this is held nobody can take the place over, and write to the file that goes.
                file.unlink(missing_ok=True)
                os.close(lock)


def _claim_directory(parent: Path) -> Path:
    """This master's directory, made by the first of its workers; what dead masters have left is removed."""
    master = multiprocessing.parent_process()
    pid = master.pid if master is not None and master.pid is not None else os.getpid()
    directory = parent / _process_name(pid)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in parent.iterdir():
        if not _is_alive(other.name):
            # Two workers may do so at once; what one of them trips over, the other removes.
            shutil.rmtree(other, ignore_errors=True)
    return directory


def _process_name(pid: int) -> str:
    """A name that no other process ever has: the pid, and when the process was started."""
    return f"{pid}-{_start_ticks(pid)}"


def _is_alive(process_name: str) -> bool:
    pid, _, ticks = process_name.partition("-")
    return pid.isdigit() and ticks == str(_start_ticks(int(pid)))


def _start_ticks(pid: int) -> int:
    """The start time of a process, in clock ticks since boot (proc(5), `starttime`); 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The second field is the program's name in brackets, which may contain spaces and brackets itself.
    return int(stat.rpartition(")")[2].split()[19])


def _claim_place(directory: Path) -> tuple[int, int]:
    """The lowest place that nobody holds, and the descriptor whose lock holds it."""
    for place in itertools.count():
        lock = _try_lock(_lock_file(directory, place))
        if lock is not None:
            for gauge in directory.glob(f"gauge_live*_{place}.db"):
                gauge.unlink()
            return place, lock
    raise AssertionError("unreachable")


def _lock_file(directory: Path, place: int) -> Path:
    return directory / f"{place}.lock"


def _try_lock(file: Path) -> int | None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor

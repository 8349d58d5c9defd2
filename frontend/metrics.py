"""What a front worker counts, kept so that a scrape of any worker shows the totals of all of them.

Owns the metric families of the HTTP side and the files behind them. Each master process (uvicorn's, or the only one)
has a directory below the run directory, and each of its workers holds a numbered place in it. A worker that takes
over a dead one's place goes on from its numbers, so totals never jump back and files never pile up. Places are held
by `flock`, which ends with its holder, however that ends.

The files are written through memory, where a full disk would end the process (SIGBUS) and not only a write. So their
space is taken when they are made. A worker that finds none then counts in memory, and `keep` makes them later.

The files may be deleted at any time, with the whole run directory. Counting goes on in them all the same, because all
are open from the start; `keep` puts copies where they were, and goes on in those.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import multiprocessing
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, values
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from shared.errors import ConfigurationError
from shared.logs import log_event
from shared.sockets import RunDirectory

logger = logging.getLogger("frontend")

METRICS_DIRECTORY = "metrics"
# What the library reads the directory from.
DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# The library's files of one worker: a kind of metric, and for gauges how they are added up. The place follows.
FILE_KINDS = ("counter", "histogram", "gauge_livesum")
# A file of the library's that holds nothing: how many bytes of it are used, and padding.
EMPTY_FILE = struct.pack("=ii", 8, 0)
# What the library makes of a new file. It writes to the file's memory, and where the disk has no room for a page, the
# write ends the process (SIGBUS); so each file gets its room beforehand, and a full disk is an error.
FILE_BYTES_MIN = 64 * 1024
# Where a worker counts for which there is no room in the run directory: in memory on every Linux (shm_overview(7)).
MEMORY_DIRECTORY = "/dev/shm"
# A family that is never shown.
PLACEHOLDER = "headwaiter_placeholder"
# From a cached embedding to a long generation.
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


class FrontMetrics:
    """The counters of this worker, and the totals of all workers of its master. For one thread.

    Raises:
        ConfigurationError: the files cannot be made, for another reason than a full disk.
    """

    def __init__(self, run_directory: RunDirectory) -> None:
        self._run_directory = run_directory
        self._parent = run_directory.path / METRICS_DIRECTORY
        lost = self._claim()
        self._name_directory()
        # The library's way to name the files by something else than the pid. Pids are used again by the system, and
        # a new one for each restart would leave a file behind each time. When the name changes, the library goes on
        # in the files of the new name, from the numbers in them.
        values.ValueClass = _value_class(lambda: self._place)
        values.MmapedDict = _AllocatedFile  # type: ignore[attr-defined]
        for kind in ("counter", "histogram"):
            # Otherwise the library would open a file only with the first value in it, in the middle of a request.
            values.ValueClass(kind, PLACEHOLDER, PLACEHOLDER, (), (), "")
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
        self._tokens = Counter(
            "headwaiter_tokens",
            "Tokens of answers that tell them: of their prompts (in), and made for them (out).",
            ("model", "direction"),
            registry=None,
        )
        self._first_piece_seconds = Histogram(
            "headwaiter_time_to_first_token_seconds",
            "Time from the first header of a request that streams to the first piece of its answer.",
            ("model",),
            buckets=SECONDS_BUCKETS,
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
        self._tokens_of = cache(self._tokens.labels)
        self._first_piece_seconds_of = cache(self._first_piece_seconds.labels)
        # Whether the log says already that they cannot be put back.
        self._are_files_lost = False
        # Whether the log says already that something new could not be counted.
        self._is_full = False
        if lost is not None:
            # The library has them open by now; from here on they are files that somebody has deleted.
            shutil.rmtree(self._directory)
            self._tell_lost(lost)

    def _claim(self) -> OSError | None:
        """Takes a place and opens its files; in memory if there is no room for them, and then returns why."""
        try:
            self._open_place(_claim_directory(self._parent))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                text = f"cannot keep totals in {self._parent}: {error.strerror}; check run_dir"
                raise ConfigurationError(text) from None
            self._open_place(Path(tempfile.mkdtemp(prefix="headwaiter-", dir=MEMORY_DIRECTORY)))
            return error
        return None

    def _name_directory(self) -> None:
        os.environ[DIRECTORY_VARIABLE] = str(self._directory)

    def _open_place(self, directory: Path) -> None:
        self._directory = directory
        self._place, self._lock = _claim_place(directory)
        self._files = self._open_files()

    def _tell_lost(self, error: Exception) -> None:
        if not self._are_files_lost:
            remedy = "/metrics lacks the totals of requests until the directory can be made"
            fields = {"directory": str(self._parent), "reason": str(error), "remedy": remedy}
            log_event(logger, "error", "metrics_lost", **fields)
        self._are_files_lost = True

    def request_began(self) -> None:
        self._inflight.inc()

    def request_ended(self, model: str, route: str, status: int, duration_s: float, body_bytes: int) -> None:
        self._inflight.dec()
        try:
            self._requests_of(model, route, status).inc()
            self._seconds_of(model, route).observe(duration_s)
            self._body_bytes_of(model, route).inc(body_bytes)
        except OSError as error:
            self._tell_full(error)

    def stream_began(self, model: str, waited_s: float) -> None:
        """The first piece of a streamed answer is there."""
        try:
            self._first_piece_seconds_of(model).observe(waited_s)
        except OSError as error:
            self._tell_full(error)

    def tokens_told(self, model: str, prompt_tokens: int, generated_tokens: int) -> None:
        """An answer has told how many tokens it has taken."""
        try:
            self._tokens_of(model, "in").inc(prompt_tokens)
            self._tokens_of(model, "out").inc(generated_tokens)
        except OSError as error:
            self._tell_full(error)

    def _tell_full(self, error: OSError) -> None:
        """Only what was never counted before needs room. Its request was answered all the same."""
        if not self._is_full:
            remedy = "make room there; /metrics lacks some requests until then"
            fields = {"directory": str(self._directory), "reason": error.strerror, "remedy": remedy}
            log_event(logger, "error", "metrics_full", **fields)
        self._is_full = True

    def families(self) -> list[Metric]:
        """The totals of all workers at this moment; nothing while the files are gone. Reads a few small files, and may
        run on any thread."""
        try:
            self._forget_dead_gauges()
            files = [str(file) for file in self._directory.glob("*.db")]
            families = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [family for family in families if family.name != PLACEHOLDER]

    def keep(self) -> None:
        """Puts the files back, with everything counted so far, if somebody has deleted them. To be called now and
        then; does hardly anything as long as they are there."""
        if self._are_files_there():
            return
        try:
            self._move()
        except (OSError, ConfigurationError) as error:
            self._tell_lost(error)
        else:
            log_event(logger, "warning", "metrics_restored", directory=str(self._directory))
            self._are_files_lost = False

    def close(self) -> None:
        """Leaves the place to the next worker. Nothing may be counted afterwards."""
        values.ValueClass.close_all_files()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in (*self._files.values(), self._lock):
            os.close(descriptor)

    def _open_files(self) -> dict[Path, int]:
        """A descriptor of each file at this worker's place, through which it can be read after it was deleted. Makes
        those that are not there."""
        opened = {}
        for kind in FILE_KINDS:
            file = _file(self._directory, kind, self._place)
            if not file.exists():
                _write(file, EMPTY_FILE)
            opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return opened

    def _are_files_there(self) -> bool:
        return all(_is_same(file, descriptor) for file, descriptor in self._files.items())

    def _move(self) -> None:
        """Goes on in copies of the files, at a place that nobody has used."""
        self._run_directory.prepare()
        directory = _claim_directory(self._parent)
        place, lock = _claim_place(directory, moving_from=self._place)
        try:
            for kind, (file, descriptor) in zip(FILE_KINDS, self._files.items(), strict=True):
                content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                if _is_same(file, descriptor):
                    # Only some were deleted; what is in this one would be counted twice.
                    file.unlink()
                _write(_file(directory, kind, place), content)
        except OSError:
            for kind in FILE_KINDS:
                _file(directory, kind, place).unlink(missing_ok=True)
            os.close(lock)
            raise
        self._close_descriptors()
        self._directory, self._place, self._lock = directory, place, lock
        self._files = self._open_files()
        self._name_directory()
        # The library looks at its place when it reads a value, and goes on with all of them in the new one.
        self._inflight._value.get()

    def _forget_dead_gauges(self) -> None:
        """What a dead worker had under way is not under way any more; what it has counted stays counted."""
        for file in self._directory.glob("gauge_live*.db"):
            place = int(file.stem.rpartition("_")[2])
            lock = None if place == self._place else _try_lock(_lock_file(self._directory, place))
            if lock is not None:
                # As long as this is held nobody can take the place over, and write to the file.
                _empty(file)
                os.close(lock)


def _value_class(place: Callable[[], int]) -> type:
    """The library's class of a number in a file, at the place that is asked for, and to be counted up by one thread.

    Of its lock, and of its look at the place with each number, three dozen calls a request would be left.
    """
    shared_value: Any = values.MultiProcessValue(place)  # type: ignore[no-untyped-call]

    class Value(shared_value):  # type: ignore[misc]
        def inc(self, amount: float) -> None:
            self._value += amount
            self._file.write_value(self._key, self._value, 0.0)

    return Value


class _AllocatedFile(MmapedDict):
    """The library's file of values, which takes no more memory of a file than the disk has room for.

    A new value raises OSError where there is none.
    """

    def _init_value(self, key: str) -> None:
        # A value has its key, up to 8 bytes of padding, a length and two doubles.
        needed_bytes = self._used + len(key.encode()) + 28
        capacity_bytes = self._capacity
        while capacity_bytes < needed_bytes:
            capacity_bytes *= 2
        if capacity_bytes > self._capacity:
            os.posix_fallocate(self._f.fileno(), 0, capacity_bytes)
        super()._init_value(key)  # type: ignore[no-untyped-call]


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


def _claim_place(directory: Path, *, moving_from: int | None = None) -> tuple[int, int]:
    """The lowest place that nobody holds, and the descriptor whose lock holds it; for a worker that moves, another
    place than its last one, and one without files, because it brings its own."""
    for place in itertools.count():
        is_used = place == moving_from or any(_file(directory, kind, place).exists() for kind in FILE_KINDS)
        if moving_from is not None and is_used:
            continue
        lock = _try_lock(_lock_file(directory, place))
        if lock is not None:
            # What a dead worker had under way is not under way any more.
            _empty(_file(directory, "gauge_livesum", place))
            return place, lock
    raise AssertionError("unreachable")


def _lock_file(directory: Path, place: int) -> Path:
    return directory / f"{place}.lock"


def _file(directory: Path, kind: str, place: int) -> Path:
    return directory / f"{kind}_{place}.db"


def _is_same(file: Path, descriptor: int) -> bool:
    """Whether the name still leads to the open file."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _write(file: Path, content: bytes) -> None:
    """Makes a file that a scrape finds whole, or not at all."""
    unfinished = file.with_suffix(".new")
    try:
        with unfinished.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.posix_fallocate(stream.fileno(), 0, max(FILE_BYTES_MIN, len(content)))
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.rename(file)


def _empty(file: Path) -> None:
    """Forgets what is in the file, and keeps its space: another one might take that before a successor does."""
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as stream:
        stream.write(EMPTY_FILE)


def _try_lock(file: Path) -> int | None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor

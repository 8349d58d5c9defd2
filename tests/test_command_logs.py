"""What is kept of the log, and which of its lines belong to whom."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from model_worker.commands.exits import Exit
from model_worker.commands.kept_log import NAME, KeptLog, LogReader, older
from model_worker.commands.logs import Origin, Sorter, Wanted, origin_of
from tests.command_line import ECHO, headwaiter, only_line, write_config
from tests.serving import short_directory

TIME = "2026-01-31 10:00:00.123"
LINES = f"""\
{TIME} INFO model_worker server_started epoch=7 pid=12
{TIME} INFO qa/0 model_ready slot=qa/0 seconds=1.5
{TIME} WARNING qa/0 forward_failed request_id="of mine" error="told slot=b/0 request_id=other"
    Traceback (most recent call last):
    RuntimeError: no
downloaded 40 % of it
{TIME} WARNING model_worker replica_exited slot=qa/0 model=qa signal=9
{TIME} INFO model_worker request_poisoned request_id=5f model=qa-large
{TIME} INFO frontend client_gone request_id=5f model=qa status=499
2026-01-31 10:00:00,123 WARN exited: frontend (terminated by SIGKILL; not expected)
"""


def picked(about: str = "", request_id: str = "") -> list[int]:
    """The numbers of the lines."""
    lines = LINES.encode().splitlines(keepends=True)
    found = list(Sorter(Wanted(about, request_id)).fitting(lines))
    numbers = [number for number, line in enumerate(lines) if line in found]
    assert [lines[number] for number in numbers] == found
    return numbers


def test_each_line_belongs_to_whom_it_names_and_a_traceback_to_the_line_above_it() -> None:
    assert picked() == list(range(10))
    assert picked("qa/0") == [1, 2, 3, 4, 6]
    assert picked("qa") == [1, 2, 3, 4, 6, 8]
    assert picked("qa-large") == [7]
    assert picked("model_worker") == [0, 6, 7]
    assert picked("frontend") == [8, 9]
    assert picked("supervisord") == [9]


def test_a_request_is_followed_through_all_processes() -> None:
    assert picked(request_id="5f") == [7, 8]
    assert picked(request_id="of mine") == [2, 3, 4]
    assert picked("frontend", "5f") == [8]
    # What stands inside of a value is no field.
    assert picked(request_id="other") == picked("b/0") == []


def test_lines_for_machines_are_read_as_well_and_anything_else_names_nobody() -> None:
    line = {"time": "x", "program": "qa/0", "event": "e", "slot": "qa/0", "model": "qa", "request_id": "5f"}
    assert origin_of(json.dumps(line).encode()) == Origin(frozenset({"qa/0", "qa"}), "5f")
    for other in (b"{not json\n", b"[]\n", b'{"a": 1}\n', b"\xff\xfe\n", b"\n", b"{}\n"):
        assert origin_of(other) == Origin()


# --- what is kept ----------------------------------------------------------------------------------------------------


class Both:
    """The two ends of a log."""

    def __init__(self, directory: Path, bytes_max: int = 1000) -> None:
        self._log = KeptLog(directory, bytes_max)
        self._reader = LogReader(directory)
        self.write, self.kept, self.news = self._log.write, self._reader.kept, self._reader.news

    def close(self) -> None:
        self._log.close()
        self._reader.close()


@pytest.fixture
def ends() -> Iterator[Callable[..., Both]]:
    with ExitStack() as cleanup:
        yield lambda *arguments: cleanup.enter_context(closing(Both(*arguments)))


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"line %04d\n" % number for number in range(start, start + count)]


def test_the_newest_lines_are_kept_within_the_bound(tmp_path: Path, ends: Callable[..., Both]) -> None:
    log = ends(tmp_path)
    for line in numbered(500):
        log.write(line)
        files = [file for file in (tmp_path / NAME, older(tmp_path / NAME)) if file.exists()]
        assert sum(file.stat().st_size for file in files) <= 1000
    kept = list(log.kept())
    assert len(kept) >= 50
    assert kept == numbered(500)[-len(kept) :]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    # Another service goes on where the last one ended.
    log = ends(tmp_path)
    log.write(b"another\n")
    assert list(log.kept())[-2:] == [numbered(500)[-1], b"another\n"]


def test_who_follows_misses_nothing_and_sees_nothing_twice(tmp_path: Path, ends: Callable[..., Both]) -> None:
    log = ends(tmp_path, 2000)
    log.write(b"line 0000\n")
    seen = list(log.kept())
    for number in range(1, 700):
        log.write(b"line %04d\n" % number)
        if number % 70 == 0:
            seen += log.news()
    assert seen + list(log.news()) == numbered(700)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path, ends: Callable[..., Both]) -> None:
    log = ends(tmp_path)
    log.write(b"one\nhal")
    assert list(log.kept()) == [b"one\n"]
    log.write(b"f\n")
    assert list(log.news()) == [b"half\n"]


def test_a_deleted_directory_loses_lines_and_nothing_else(tmp_path: Path, ends: Callable[..., Both]) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    log = ends(directory)
    log.write(b"one\n")
    assert list(log.kept()) == [b"one\n"]
    shutil.rmtree(directory)
    log.write(b"lost\n")
    assert list(log.news()) == []
    directory.mkdir()
    log.write(b"three\n")
    assert list(log.news()) == [b"three\n"]


def test_nothing_is_kept_where_nothing_may_be(tmp_path: Path, ends: Callable[..., Both]) -> None:
    ends(tmp_path).write(b"old\n")
    ends(tmp_path, 0).write(b"new\n")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_its_place_is_not_followed(tmp_path: Path, ends: Callable[..., Both]) -> None:
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    ends(tmp_path).write(b"one\n")
    assert not (tmp_path / "elsewhere").exists()


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with short_directory() as made:
        write_config(made, {**ECHO, "name": "qa"}, {**ECHO, "name": "qa-large", "replicas": 2})
        (made / "run").mkdir(mode=0o700)
        with closing(KeptLog(made / "run", 10_000)) as log:
            for line in LINES.encode().splitlines(keepends=True):
                log.write(line)
        yield made


def test_the_last_lines_are_shown_without_a_service(directory: Path) -> None:
    shown = headwaiter("logs", "qa", "--lines", "2", cwd=directory)
    assert (shown.returncode, shown.stderr) == (Exit.OK, "")
    assert shown.stdout.splitlines() == [LINES.splitlines()[6], LINES.splitlines()[8]]


def test_a_mistyped_name_is_told_with_those_there_are(directory: Path) -> None:
    shown = headwaiter("logs", "qa-lrage", cwd=directory)
    assert (shown.returncode, shown.stdout) == (Exit.USAGE, "")
    said = only_line(shown.stderr)
    assert "did you mean 'qa-large'?" in said
    assert "known: frontend, model_worker, supervisord, qa, qa-large, qa/0, qa-large/0, qa-large/1" in said


def test_where_no_log_is_kept_it_says_where_to_look(directory: Path) -> None:
    nowhere = {"HEADWAITER_RUN_DIR": str(directory / "nowhere")}
    shown = headwaiter("logs", cwd=directory, variables=nowhere)
    assert shown.returncode == Exit.UNAVAILABLE
    assert "journalctl" in only_line(shown.stderr)
    off = nowhere | {"HEADWAITER_LOGGING__KEPT_BYTES_MAX": "0"}
    assert "logging.kept_bytes_max is 0" in only_line(headwaiter("logs", cwd=directory, variables=off).stderr)

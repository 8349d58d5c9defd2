"""One instance per run directory, for one user, at a path that sockets can have."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shared.errors import ConfigurationError
from shared.sockets import SOCKET_PATH_BYTES_MAX, RunDirectory, bind_again, bind_router, connect_dealer, send

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from shared.sockets import RunDirectory
directory = RunDirectory(sys.argv[1])
directory.prepare()
directory.lock()
directory.clean()
print("locked", flush=True)
sys.stdin.readline()
directory.release()
print("released", flush=True)
"""


@contextlib.contextmanager
def other_instance(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A second process that holds the directory until its stdin says otherwise."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def prepared(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    directory.prepare()
    return directory


def leave_socket(path: Path) -> None:
    """A socket file of a process that did not clean up."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


def test_everything_that_is_made_is_private(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        prepared(tmp_path / "made" / "run").lock()
    finally:
        os.umask(previous)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("made", "made/run", "made/run/lock")}
    assert modes == {"made": 0o700, "made/run": 0o700, "made/run/lock": 0o600}


def test_a_directory_can_be_prepared_again(tmp_path: Path) -> None:
    prepared(tmp_path / "run")
    prepared(tmp_path / "run")


def test_endpoints_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDirectory("run").front_endpoint == f"ipc://{tmp_path}/run/front.sock"
    assert RunDirectory("run").model_endpoint == f"ipc://{tmp_path}/run/model.sock"


# --- the lock ----------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with other_instance(path) as other:
        with pytest.raises(ConfigurationError, match=f"in use by process {other.pid}: .*HEADWAITER_(NAME|RUN_DIR)"):
            prepared(path).lock()
        with pytest.raises(ConfigurationError, match=f"process {other.pid}:"):
            prepared(path).lock()


def test_a_second_process_is_refused_even_if_the_lock_file_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with other_instance(path):
        (path / "lock").unlink()
        with pytest.raises(ConfigurationError, match="in use by another process"):
            prepared(path).lock()


def test_the_lock_is_free_after_release(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with other_instance(path) as other:
        assert other.stdin
        assert other.stdout
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "released\n"
        second = prepared(path)
        second.lock()
        assert (path / "lock").read_text() == f"{os.getpid()}\n"
        second.release()
        assert (path / "lock").read_text() == ""


def test_the_lock_is_free_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with other_instance(path) as other:
        other.kill()
        other.wait(30)
        second = prepared(path)
        second.lock()
        second.release()


def test_the_lock_is_not_inherited_by_children(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    directory.lock()
    with subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE) as child:
        directory.release()
        try:
            second = prepared(tmp_path / "run")
            second.lock()
            second.release()
        finally:
            child.kill()


def test_releasing_without_the_lock_removes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with other_instance(path):
        leave_socket(path / "front.sock")
        prepared(path).release()
        assert (path / "front.sock").exists()
        with pytest.raises(AssertionError):
            prepared(path).clean()


# --- socket files ------------------------------------------------------------------------------------------------


def test_stale_sockets_are_removed_and_nothing_else(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    for name in ("front.sock", "model.sock", "other.sock"):
        leave_socket(directory.path / name)
    directory.lock()
    directory.clean()
    assert sorted(entry.name for entry in directory.path.iterdir()) == ["lock", "other.sock"]
    directory.release()


def test_no_socket_file_is_left_at_the_end(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    directory.lock()
    with zmq.Context() as context:
        routers = [bind_router(context, endpoint) for endpoint in (directory.front_endpoint, directory.model_endpoint)]
        assert {entry.name for entry in directory.path.iterdir()} == {"front.sock", "model.sock", "lock"}
        for router in routers:
            router.close()
    directory.release()
    assert [entry.name for entry in directory.path.iterdir()] == ["lock"]


# --- paths that cannot be used -----------------------------------------------------------------------------------


def test_a_deleted_directory_is_noticed_and_made_again_unless_another_instance_has_it(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    directory.lock()
    for name in ("front.sock", "model.sock"):
        leave_socket(directory.path / name)
    assert directory.is_intact
    shutil.rmtree(directory.path)
    assert not directory.is_intact
    directory.restore()
    with pytest.raises(ConfigurationError, match=str(os.getpid())):
        RunDirectory(directory.path).lock()
    shutil.rmtree(directory.path)
    with other_instance(directory.path), pytest.raises(ConfigurationError, match="in use"):
        directory.restore()


def test_listening_again_leaves_connections_as_they_are(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    with zmq.Context() as context:
        router = bind_router(context, directory.front_endpoint)
        sockets = [router]
        for name in (b"\x01early", b"\x01late"):
            sockets.append(connect_dealer(context, directory.front_endpoint, name))
            send(sockets[-1], [b"hello"])
            assert router.recv_multipart() == [name, b"hello"]
            (directory.path / "front.sock").unlink()
            bind_again(router, directory.front_endpoint)
            for dealer, sender in zip(sockets[1:], (b"\x01early", b"\x01late"), strict=False):
                assert send(router, [sender, b"answer"])
                assert dealer.recv_multipart() == [b"answer"]
        for opened in sockets:
            opened.close(linger=0)


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 150)
    with pytest.raises(ConfigurationError, match=r"a socket's path may have 107: set run_dir to a path of at most 96"):
        RunDirectory(path).prepare()
    with pytest.raises(ConfigurationError, match="107"):
        assert RunDirectory(path).front_endpoint
    assert not path.exists()


def test_the_longest_allowed_path_can_be_bound(tmp_path: Path) -> None:
    length = SOCKET_PATH_BYTES_MAX - len(os.fsencode(tmp_path)) - len("/" + "/front.sock")
    directory = prepared(tmp_path / ("x" * length))
    with zmq.Context() as context, bind_router(context, directory.front_endpoint):
        assert len(os.fsencode(directory.path / "front.sock")) == SOCKET_PATH_BYTES_MAX
    with pytest.raises(ConfigurationError, match="107"):
        RunDirectory(f"{directory.path}y").prepare()


def test_bytes_count_not_characters(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="107"):
        RunDirectory(tmp_path / ("é" * 45)).prepare()


@pytest.mark.parametrize("below", ["run", "deeper/run"])
def test_a_path_below_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="Not a directory; set run_dir"):
        RunDirectory(tmp_path / "file" / below).prepare()


def left_by(code: str, path: Path) -> list[str]:
    """What is there, below the directory above `path`, when a process that ran `code` has ended."""
    program = f"import sys; from pathlib import Path\nfrom shared.sockets import RunDirectory\n{code}"
    subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=True, timeout=30)
    return sorted(str(found.relative_to(path.parent)) for found in path.parent.rglob("*"))


PREPARE = "directory = RunDirectory(sys.argv[1]); directory.prepare()\n"
LOCK = "directory.lock(); directory.clean()\n"


@pytest.mark.parametrize("name", ["run", "lock"])
@pytest.mark.parametrize("code", [PREPARE, PREPARE + LOCK + "directory.release()"], ids=["prepared", "released"])
def test_whoever_has_made_the_directory_removes_it_if_nothing_is_in_it(tmp_path: Path, code: str, name: str) -> None:
    assert left_by(code, tmp_path / "made" / "too" / name) == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_used_or_was_there_before_stays(tmp_path: Path) -> None:
    used = PREPARE + "Path(sys.argv[1], 'metrics').mkdir()"
    assert left_by(used, tmp_path / "one" / "run") == ["run", "run/metrics"]
    (tmp_path / "two" / "run").mkdir(mode=0o700, parents=True)
    assert left_by(PREPARE + LOCK, tmp_path / "two" / "run") == ["run", "run/lock"]


def test_a_directory_that_another_process_has_locked_stays(tmp_path: Path) -> None:
    path = tmp_path / "one" / "run"
    code = f"""{PREPARE}
import subprocess
holder = subprocess.Popen([sys.executable, "-c", {HOLDER!r}, sys.argv[1]], stdin=-1, stdout=-1)
assert holder.stdout.readline() == b"locked\\n"
print(holder.pid, flush=True)
sys.stdin.readline()
"""
    program = f"import sys; from shared.sockets import RunDirectory\n{code}"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as maker:
        assert maker.stdout
        holder = int(maker.stdout.readline())
        maker.communicate("end\n", timeout=30)
    assert (maker.returncode, path.exists()) == (0, True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(holder, signal.SIGKILL)


def test_a_directory_that_is_removed_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    directory.path.rmdir()
    directory.lock()
    assert directory.path.is_dir()
    directory.release()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigurationError, match="is not a directory"):
        RunDirectory(tmp_path / "run").prepare()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigurationError, match="is not a directory"):
        RunDirectory(tmp_path / "run").prepare()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777, 0o1777])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(
        ConfigurationError, match=rf"mode {mode:04o}\).*set run_dir to a directory of your own"
    ) as refused:
        RunDirectory(path).prepare()
    # Not for one that everybody is meant to write to: who followed that for /tmp would take it from them all.
    assert (f"chmod 700 {path}" in str(refused.value)) == (mode in (0o750, 0o701))


def test_a_parent_that_everybody_can_write_to_is_refused_unless_sticky(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(ConfigurationError, match="writable for everybody"):
        RunDirectory(parent / "run").prepare()
    parent.chmod(0o1777)
    prepared(parent / "run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_directories_of_other_users_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "parent" / "run"
    prepared(path)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigurationError, match="belongs to user 12345, not to 0"):
        RunDirectory(path).prepare()
    os.chown(path, 0, -1)
    os.chown(path.parent, 12345, -1)
    with pytest.raises(ConfigurationError, match="belongs to user 12345, who could replace"):
        RunDirectory(path).prepare()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o500)
    with pytest.raises(ConfigurationError, match="is not writable"):
        RunDirectory(path).prepare()

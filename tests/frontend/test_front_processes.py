"""The front as processes: starting, stopping, dying and being replaced, with real signals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from frontend import __main__ as front_main
from frontend.__main__ import ExitCode, listen, uvicorn_settings
from shared.config import Config
from tests.fronts import Front, raw_request, read_response
from tests.stub_broker import Answer, Piece, Request, Step, StubBroker, silent
from tests.topology import ROOT, alive, free_port, wait_for


@contextmanager
def unstarted(**options: object) -> Iterator[Front]:
    front = Front(**options)  # type: ignore[arg-type]
    try:
        yield front
    except BaseException as error:
        front.__exit__(type(error), error, None)
        raise
    else:
        front.__exit__(None, None, None)


def answer_later(request: Request) -> Sequence[Step]:
    return [Answer(1.0, request.inputs)]


# --- starting --------------------------------------------------------------------------------------------------------


def test_front_is_small_quick_to_import_and_free_of_model_libraries() -> None:
    code = (
        "import frontend.app, frontend.__main__, uvicorn, uvloop, httptools, sys;"
        "frontend.app.create_app;"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numpy', 'model_worker'} & set(sys.modules)));"
        "print(next(line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('Pss:')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    heavy, kilobytes = out.splitlines()
    assert heavy == "[]"
    assert int(kilobytes) < 80_000


def test_running_worker_stays_under_80_megabytes() -> None:
    with Front(workers=2) as front, StubBroker(front.run_dir):
        front.wait_ready()
        assert front.ask("x").status_code == 200
        for pid in front.workers():
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            pss_kb = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            assert pss_kb < 80_000


def test_port_in_use_is_one_clear_line_and_nothing_that_a_restart_mends() -> None:
    with socket.socket() as taken, unstarted() as front:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = front.spawn([sys.executable, "-P", "-m", "frontend", "--port", str(port)])
        assert process.wait(20) == ExitCode.CONFIGURATION
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in front.log()
        assert len(front.log().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--config", "/nowhere/headwaiter.toml"], "/nowhere/headwaiter.toml"),
        (["--workers", "0"], "--workers"),
        (["--port", "70000"], "--port"),
    ],
)
def test_configuration_that_cannot_be_used_is_one_clear_line(flags: list[str], text: str) -> None:
    with unstarted() as front:
        process = front.spawn([sys.executable, "-P", "-m", "frontend", *flags])
        assert process.wait(20) == ExitCode.CONFIGURATION
        assert text in front.log()
        assert len(front.log().splitlines()) == 1


def test_host_that_has_no_address_cannot_be_listened_on() -> None:
    with unstarted() as front:
        process = front.spawn([sys.executable, "-P", "-m", "frontend", "--host", "203.0.113.1"])
        assert process.wait(20) == ExitCode.CONFIGURATION
        assert "203.0.113.1" in front.log()


def test_start_without_standard_streams_and_with_few_files_is_mended() -> None:
    with unstarted() as front:
        port = free_port()
        command = f"ulimit -S -n 64 && exec {sys.executable} -P -m frontend --port {port} <&- >&- 2>&-"
        master = front.spawn(["/bin/sh", "-c", command])
        front.url = f"http://127.0.0.1:{port}"
        front.wait_live()
        for pid in (master.pid, *front.workers()):
            limits = Path(f"/proc/{pid}/limits").read_text()
            (soft, hard) = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
            assert soft == hard
            assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)] == ["/dev/null"] * 2
        front.signal(signal.SIGTERM)
        assert front.wait() == ExitCode.OK


def test_flags_reach_the_workers() -> None:
    with unstarted(workers=1) as front:
        front.start("--workers", "3")
        wait_for(lambda: len(front.workers()) == 3, "three workers")


def test_front_lives_without_a_model_server() -> None:
    with Front() as front:
        assert front.probe("/livez") == 200
        assert front.probe("/readyz") == front.probe("/startupz") == front.probe("/status") == 503
        refused = front.ask("x", headers={"X-Request-Timeout": "0.3"})
        assert (refused.status_code, refused.json()["error_type"]) == (503, "server_unavailable")
        assert "retry-after" in refused.headers
        assert "headwaiter_model_server_up 0.0" in front.get("/metrics").text
        unknown = front.ask("x", model="none")
        assert unknown.status_code == 404
        assert "known: echo" in unknown.json()["error"]


def test_bare_uvicorn_serves_the_same_application() -> None:
    with unstarted() as front, StubBroker(front.run_dir):
        front.start_bare_uvicorn("--workers", "2").wait_ready()
        assert front.ask("x").status_code == 200
        assert front.post("/", json={"inputs": 1}).status_code == 200
        wait_for(lambda: front.get("/metrics").text.count("headwaiter_requests_total{") == 2, "both are counted")


def test_bare_uvicorn_refuses_a_bad_configuration_and_stops() -> None:
    with unstarted() as front:
        front.config_file.write_text("[http]\nprot = 1\n")
        process = front.spawn([sys.executable, "-m", "uvicorn", "frontend.app:app", "--port", "0"])
        assert process.wait(20) == 3
        assert "'prot'" in front.log()
        assert "Traceback" not in front.log()


# --- keys ------------------------------------------------------------------------------------------------------------


def test_key_opens_the_models_and_probes_need_none() -> None:
    with Front(api_keys=["s3cret-key", "other-key"]) as front, StubBroker(front.run_dir):
        front.wait_ready()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret-key"}):
            refused = front.ask("x", headers=headers)
            assert (refused.status_code, refused.json()["error_type"]) == (401, "unauthorized")
            assert refused.headers["www-authenticate"] == "Bearer"
        assert front.probe("/status") == 401
        for key in ("s3cret-key", "other-key"):
            headers = {"Authorization": f"Bearer {key}"}
            assert front.ask("x", headers=headers).status_code == 200
            assert front.get("/status", headers=headers).status_code == 200
        for path in ("/livez", "/readyz", "/startupz", "/metrics", "/openapi.json"):
            assert front.probe(path) == 200
        assert front.get("/openapi.json").json()["paths"]["/models/echo"]["post"]["security"]
        assert "s3cret-key" not in front.log()
        for pid in front.workers():
            assert b"s3cret-key" not in Path(f"/proc/{pid}/cmdline").read_bytes()


# --- totals ----------------------------------------------------------------------------------------------------------


def total(front: Front, family: str = "headwaiter_requests_total") -> float:
    """The sum of a family over its labels, as a scrape on a connection of its own finds it."""
    text = front.get_once("/metrics")[2].decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(family) and line[len(family)] in "{ "
    )


def one_shot(front: Front, count: int) -> None:
    """Each on a connection of its own, so that all workers get some."""
    body = raw_request("/models/echo", b'{"inputs": 1}', "Connection: close")

    def ask(_: int) -> int:
        with front.connect() as connection:
            connection.sendall(body)
            return read_response(connection)[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(count))) == [200] * count


def kill_one(front: Front) -> None:
    """Kills a worker and waits for its replacement."""
    before = front.workers()
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: set(front.workers()) - set(before) and len(front.workers()) == len(before), "it is replaced")


def test_totals_are_exact_over_workers_and_survive_any_of_them() -> None:
    with Front(workers=4) as front, StubBroker(front.run_dir):
        front.wait_ready()
        wait_for(lambda: len(front.workers()) == 4, "four workers")
        one_shot(front, 100)
        assert [total(front) for _ in range(20)] == [100.0] * 20
        assert total(front, "headwaiter_request_duration_seconds_count") == 100
        assert total(front, "headwaiter_request_body_bytes_total") == 100 * len(b'{"inputs": 1}')
        for expected in (100.0, 110.0):
            kill_one(front)
            assert total(front) == expected
            one_shot(front, 10)
            assert [total(front) for _ in range(5)] == [expected + 10] * 5
        (directory,) = (front.run_dir / "metrics").iterdir()
        assert len(list(directory.glob("counter_*.db"))) <= 4, "a replacement goes on where the dead one stopped"


def test_work_of_a_killed_worker_is_not_in_flight_any_more() -> None:
    with Front(workers=1) as front, StubBroker(front.run_dir, behave=silent) as broker:
        front.wait_ready()
        with front.connect() as connection:
            connection.sendall(raw_request("/models/echo", b'{"inputs": 1}'))
            wait_for(lambda: broker.requests, "it waits")
            assert total(front, "headwaiter_inflight_requests") == 1
            (victim,) = front.workers()
            os.kill(victim, signal.SIGKILL)
        wait_for(lambda: front.workers() not in ([], [victim]), "a new worker")
        front.wait_live()
        assert total(front, "headwaiter_inflight_requests") == 0


def test_new_front_removes_what_a_dead_one_counted() -> None:
    with Front() as front, StubBroker(front.run_dir):
        front.wait_ready()
        one_shot(front, 3)
        (first,) = (front.run_dir / "metrics").iterdir()
        front.signal(signal.SIGTERM)
        front.wait()
        front.log_file.unlink()
        front.start().wait_ready()
        assert total(front) == 0
        assert first not in (front.run_dir / "metrics").iterdir()


def test_deleted_counters_come_back_with_everything_that_was_counted() -> None:
    with Front(workers=3) as front, StubBroker(front.run_dir):
        front.wait_ready()
        wait_for(lambda: front.log().count("front_started") == 3, "three workers")
        one_shot(front, 30)

        def is_complete(expected: float) -> Callable[[], bool]:
            return lambda: total(front) == expected

        for expected in (40.0, 50.0):
            shutil.rmtree(front.run_dir / "metrics")
            # A model that nobody has asked before: the files of its numbers would be made now.
            one_shot(front, 10)
            assert front.get_once("/metrics")[0] == 200
            wait_for(is_complete(expected), "all is there again")
            assert [total(front) for _ in range(10)] == [expected] * 10
            assert total(front, "headwaiter_request_duration_seconds_count") == expected
            assert total(front, "headwaiter_inflight_requests") == 0
        next(front.run_dir.glob("metrics/*/counter_*.db")).unlink()
        wait_for(lambda: total(front) == 50, "nothing is counted twice")
        kill_one(front)
        assert total(front) == 50
        assert "WARNING frontend metrics_restored" in front.log()


def test_worker_that_has_counted_nothing_answers_without_its_run_directory() -> None:
    with Front() as front, StubBroker(front.run_dir):
        front.wait_ready()
        parent = front.run_dir / "metrics"
        shutil.rmtree(parent)
        # It cannot be made again, as on a file system that has become read-only.
        parent.write_text("in the way")
        one_shot(front, 5)
        wait_for(lambda: "metrics_lost" in front.log(), "the log says so")
        text = front.get("/metrics").text
        assert "headwaiter_model_server_up 1.0" in text
        assert "headwaiter_requests_total" not in text
        parent.unlink()
        wait_for(lambda: total(front) == 5, "what was counted meanwhile is there")
        assert front.log().count("metrics_lost") == 1
        one_shot(front, 1)
        assert total(front) == 6


def test_run_directory_that_is_made_again_is_private() -> None:
    with Front() as front:
        shutil.rmtree(front.run_dir)
        wait_for(lambda: (front.run_dir / "metrics").exists(), "it is made again")
        assert stat.S_IMODE(front.run_dir.stat().st_mode) == 0o700
        assert total(front) == 0


def test_model_servers_numbers_are_rendered_with_help() -> None:
    with Front() as front, StubBroker(front.run_dir):
        front.wait_ready()
        text = front.get("/metrics").text
        for line in (
            "headwaiter_model_server_up 1.0",
            'headwaiter_queue_depth{model="echo"} 0.0',
            'headwaiter_worker_up{device="cpu",model="echo",slot="echo/0"} 1.0',
            'headwaiter_worker_heartbeat_age_seconds{model="echo",slot="echo/0"} 0.25',
            'headwaiter_worker_restarts_total{model="echo",reason="exited"} 1.0',
            'headwaiter_rejected_total{model="echo",reason="overloaded"} 2.0',
            'headwaiter_batch_size_bucket{le="2",model="echo"} 2.0',
            'headwaiter_batch_size_count{model="echo"} 3.0',
            'headwaiter_queue_wait_seconds_sum{model="echo"} 0.5',
            'headwaiter_inference_duration_seconds_count{model="echo"} 5.0',
        ):
            assert line in text
        families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(families) == len(set(families)) == text.count("# HELP")
        assert all(family.startswith("headwaiter_") for family in families)


# --- stopping, dying, being replaced ---------------------------------------------------------------------------------


def test_open_request_is_answered_before_a_stop() -> None:
    with Front(workers=2) as front, StubBroker(front.run_dir, behave=answer_later) as broker:
        front.wait_ready()
        with front.connect() as connection:
            connection.sendall(raw_request("/models/echo", b'{"inputs": "late"}'))
            wait_for(lambda: broker.requests, "it is under way")
            front.signal(signal.SIGTERM)
            status, _, body = read_response(connection)
        assert (status, json.loads(body)) == (200, "late")
        assert front.wait() == ExitCode.OK
        assert "Traceback" not in front.log()


def test_new_connection_is_refused_at_once_while_an_open_request_finishes() -> None:
    with Front(workers=2) as front, StubBroker(front.run_dir, behave=lambda request: []) as broker:
        front.wait_ready()
        with front.connect() as connection:
            connection.sendall(raw_request("/models/echo", b'{"inputs": 1}'))
            wait_for(lambda: broker.requests, "it is under way")
            front.signal(signal.SIGTERM)
            wait_for(lambda: refuses(front), "new connections are refused")
            connection.setblocking(False)
            # Neither answered nor cut off: it is still being worked on.
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def refuses(front: Front) -> bool:
    try:
        front.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_stop_whose_grace_is_over_answers_what_is_left() -> None:
    def half(request: Request) -> Sequence[Step]:
        return [Piece(value="a")] if request.header.stream else []

    with Front(grace_s=1) as front, StubBroker(front.run_dir, behave=half) as broker:
        front.wait_ready()
        with front.connect() as waiting, front.connect() as streaming:
            waiting.sendall(raw_request("/models/echo", b'{"inputs": 1}'))
            streaming.sendall(raw_request("/models/echo", b'{"inputs": 1, "stream": true}'))
            wait_for(lambda: len(broker.requests) == 2, "both are under way")
            front.signal(signal.SIGTERM)
            status, headers, body = read_response(waiting)
            assert (status, json.loads(body)["error_type"]) == (503, "draining")
            assert "retry-after" in headers
            assert b'event: error\ndata: {"error":' in read_response(streaming)[2]
        assert front.wait() == ExitCode.OK
        wait_for(lambda: len(broker.cancelled) == 2, "the server is told")
        assert "Traceback" not in front.log()


def test_stop_does_not_wait_for_a_model_server_that_is_not_there() -> None:
    with Front(grace_s=600, request_timeout_s=500) as front:
        with front.connect() as waiting:
            waiting.sendall(raw_request("/models/echo", b'{"inputs": 1}'))
            wait_for(lambda: "headwaiter_inflight_requests 1.0" in front.get("/metrics").text, "it is held")
            front.signal(signal.SIGTERM)
            status, headers, body = read_response(waiting)
            assert (status, json.loads(body)["error_type"]) == (503, "server_unavailable")
            assert "retry-after" in headers
        assert front.wait() == ExitCode.OK


def test_port_that_is_none_is_refused_under_the_name_of_the_flag_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="hw-") as directory, socket.create_server(("127.0.0.1", 0)) as taken:
        variables = os.environ | {"HEADWAITER_RUN_DIR": f"{directory}/made/run"}
        for port, words in (("99999", "--port must be"), (str(taken.getsockname()[1]), "cannot listen on")):
            command = [sys.executable, "-P", "-m", "frontend", "--host", "127.0.0.1", "--port", port]
            done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
            assert done.returncode == ExitCode.CONFIGURATION
            assert words in done.stderr
            assert os.listdir(directory) == []


def test_hangup_replaces_every_worker_and_loses_no_request() -> None:
    with Front(workers=2) as front, StubBroker(front.run_dir):
        front.wait_ready()
        before = set(front.workers())
        assert len(before) == 2
        stop = threading.Event()
        codes: list[int] = []

        def ask() -> None:
            while not stop.is_set():
                codes.append(front.ask("x", headers={"Connection": "close"}).status_code)

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            front.signal(signal.SIGHUP)
            wait_for(lambda: len(front.workers()) == 2 and not before & set(front.workers()), "all are new")
            stop.set()
            asking.result(20)
        assert set(codes) == {200}


def test_signals_add_and_remove_a_worker_even_from_one() -> None:
    with Front(workers=1) as front:
        front.signal(signal.SIGTTIN)
        wait_for(lambda: len(front.workers()) == 2, "one more")
        front.signal(signal.SIGTTOU)
        wait_for(lambda: len(front.workers()) == 1, "one less")
        assert front.probe("/livez") == 200


@pytest.mark.parametrize("bare", [False, True])
def test_workers_follow_a_killed_master_and_free_the_port(bare: bool) -> None:
    with unstarted(workers=2) as front:
        if bare:
            front.start_bare_uvicorn("--workers", "2")
        else:
            front.start()
        workers = wait_for(lambda: front.workers() if len(front.workers()) == 2 else [], "two workers")
        wait_for(lambda: front.log().count("front_started") == 2, "both have started")
        front.signal(signal.SIGKILL)
        front.wait()
        wait_for(lambda: not any(alive(pid) for pid in workers), "they are gone")
        assert "front_master_died" in front.log()
        assert front.probe("/livez") == 0


def test_front_stops_with_the_process_that_started_it() -> None:
    with unstarted() as front:
        starter = (
            "import os, subprocess, sys, time\n"
            "flags = ['--exit-with-parent', str(os.getpid())]\n"
            "child = subprocess.Popen([sys.executable, '-P', '-m', 'frontend', *flags])\n"
            "print('front', child.pid, flush=True)\n"
            "time.sleep(600)\n"
        )
        process = front.spawn([sys.executable, "-c", starter])
        wait_for(lambda: "front_started" in front.log(), "the front has started")
        pid = int(next(line.split()[1] for line in front.log().splitlines() if line.startswith("front ")))
        process.kill()
        process.wait()
        wait_for(lambda: not alive(pid), "it is gone")
        assert "front_stopped" in front.log()


def test_worker_that_cannot_start_ends_the_front_with_a_code() -> None:
    with unstarted() as front:
        front.run_dir.mkdir(mode=0o700)
        (front.run_dir / "metrics").write_text("in the way")
        process = front.spawn([sys.executable, "-P", "-m", "frontend"])
        assert process.wait(30) == ExitCode.WORKERS_FAILED
        assert "metrics" in front.log()


def test_source_changes_restart_the_worker_only_below_the_front_and_shared() -> None:
    config = Config.model_validate({"http": {"reload": True}})
    assert {path.name for path in uvicorn_settings(config).reload_dirs} == {"frontend", "shared"}


def test_reloading_front_serves_and_stops() -> None:
    with unstarted() as front, StubBroker(front.run_dir):
        front.start("--reload").wait_ready()
        assert front.ask("x").status_code == 200
        front.signal(signal.SIGTERM)
        assert front.wait() == ExitCode.OK


def test_listening_socket_names_its_protocol() -> None:
    """asyncio turns Nagle's algorithm off only where it does: 44 ms an answer on connections that are kept."""
    for host in ("127.0.0.1", "localhost"):
        with listen(host, 0) as listener:
            assert listener.proto == socket.IPPROTO_TCP
            assert listener.getsockname()[1] > 0


def test_answer_that_is_not_read_does_not_stay_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_main, "UNREAD_TIMEOUT_S", 1)
    with listen("127.0.0.1", 0) as listener, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(listener.getsockname())
        connection, _ = listener.accept()
        connection.settimeout(30)
        with connection, pytest.raises(TimeoutError) as caught:
            connection.sendall(b"x" * 64 * 2**20)
    assert caught.value.errno == errno.ETIMEDOUT, "the kernel gave it up, not this test"

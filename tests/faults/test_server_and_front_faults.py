"""Deaths, stops and storms around the model process: the model server, the front workers, the clients, the wire."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from shared.errors import ConfigurationError
from shared.sockets import RunDirectory
from tests.faults.test_model_process_faults import count, obedient
from tests.topology import ROOT, Service, alive, children, stop, wait_for


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_no_process_that_speaks_http_and_not_the_server_ever_holds_torch(journal: Path) -> None:
    with Service([obedient(journal)], workers=2) as service:
        service.wait_ready()
        assert service.ask("m", {"do": "echo", "value": 1}).status_code == 200
        assert service.server
        assert service.front
        for pid in (service.server.pid, service.front.pid, *service.front_workers()):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "libtorch" not in maps
            assert "tokenizers" not in maps
            assert "libcuda" not in maps


def test_number_of_model_processes_is_the_number_of_slots_whatever_the_fronts(journal: Path) -> None:
    with Service([obedient(journal, replicas=2)], workers=4) as service:
        service.wait_ready()
        for _ in range(20):
            assert service.ask("m", {"do": "echo", "value": 1}).status_code == 200
        assert count(journal, "load_started") == 2
        assert len(set(service.model_pids().values())) == 2


def test_killed_front_worker_is_replaced_and_no_model_notices(journal: Path) -> None:
    with Service([obedient(journal)], workers=2) as service:
        pids = service.wait_ready().model_pids()
        victim = service.front_workers()[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(service.front_workers()) == 2 and victim not in service.front_workers(), "a new worker")
        wait_for(lambda: service.probe("/readyz") == 200, "ready")
        assert service.model_pids() == pids
        assert count(journal, "load_started") == 1


@pytest.mark.parametrize("phase", ["loading", "idle", "running"])
def test_nothing_outlives_a_killed_model_server(journal: Path, phase: str) -> None:
    options = {"load_seconds": 600.0, "load_holds_gil": True} if phase == "loading" else {}
    with Service([obedient(journal, options=options)]) as service:
        assert service.server
        helpers: list[int] = []
        if phase == "loading":
            wait_for(lambda: count(journal, "load_started"), "the load started")
        else:
            service.wait_ready()
            helpers = service.ask("m", {"do": "helpers"}).json()
        if phase == "running":
            service.ask_later("m", {"do": "hold_gil", "seconds": 600, "label": "held"}, timeout_s=1)
            wait_for(lambda: count(journal, "forwarded", "held"), "the forward started")
        family = children(service.server.pid)
        assert family
        os.kill(service.server.pid, signal.SIGKILL)
        service.server.wait()
        wait_for(lambda: not any(alive(pid) for pid in [*family, *helpers]), "all of them are gone", 10)


def test_request_outlives_the_model_server_that_took_it(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        assert service.server
        held = service.ask_later("m", {"do": "sleep", "seconds": 1.0, "label": "held"})
        wait_for(lambda: count(journal, "forwarded", "held"), "the forward started")
        os.kill(service.server.pid, signal.SIGKILL)
        service.server.wait()
        assert service.probe("/livez") == 200
        wait_for(lambda: service.probe("/readyz") == 503, "/readyz says 503")
        service.start_server()
        assert held.result(40).status_code == 200
        assert count(journal, "forwarded", "held") == 2


def test_request_without_a_server_gets_503_at_its_deadline(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        assert service.server
        os.kill(service.server.pid, signal.SIGKILL)
        service.server.wait()
        refused = service.ask("m", {"do": "echo"}, timeout_s=1.0)
        assert (refused.status_code, refused.json()["error_type"]) == (503, "server_unavailable")


def test_sigterm_finishes_what_was_admitted_and_refuses_the_rest(journal: Path) -> None:
    with Service([obedient(journal, max_batch_size=1)]) as service:
        service.wait_ready()
        assert service.server
        service.ask("m", {"do": "semaphore"})
        admitted = [
            service.ask_later("m", {"do": "sleep", "seconds": 0.5, "label": f"n{number}"}) for number in range(5)
        ]
        wait_for(lambda: _waiting(service) + service.slots()["m/0"]["held"] == 5, "the server has admitted all of them")
        service.server.send_signal(signal.SIGTERM)
        wait_for(lambda: service.probe("/readyz") == 503, "/readyz says 503")
        refused = service.ask("m", {"do": "echo"})
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        assert [answer.result(30).status_code for answer in admitted] == [200] * 5
        assert service.server.wait(30) == 0
        assert not list((service.directory / "run").glob("*.sock"))
        assert "resource_tracker" not in service.log("server.log")


def test_second_server_on_the_same_run_directory_is_refused(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        second = subprocess.run(
            [sys.executable, "-P", "-m", "model_worker", "--config", str(service.config_file)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert second.returncode != 0
        assert service.server
        assert str(service.server.pid) in second.stderr
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        assert count(journal, "load_started") == 1


def test_server_starts_over_the_remains_of_a_killed_one(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        assert service.server
        os.kill(service.server.pid, signal.SIGKILL)
        service.server.wait()
        assert list((service.directory / "run").glob("*.sock"))
        service.start_server()
        wait_for(lambda: count(journal, "load_ended") == 2, "loaded again")
        service.wait_ready()
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1


def test_deleted_sockets_come_back_and_cost_nobody_an_answer(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        before = service.wait_ready().slots()["m/0"]
        running = service.ask_later("m", {"do": "sleep", "seconds": 3})
        wait_for(lambda: count(journal, "forwarded") == 1, "the request runs")
        run_directory = service.directory / "run"
        for name in ("front.sock", "model.sock", "lock"):
            (run_directory / name).unlink()
        wait_for(lambda: "run_directory_restored" in service.log("server.log"), "the sockets are back")
        assert not running.done()
        assert running.result().status_code == 200
        assert service.slots()["m/0"]["pid"] == before["pid"]
        # Who comes later finds the server as well, and a second server is still kept out.
        os.kill(before["pid"], signal.SIGKILL)
        wait_for(lambda: count(journal, "load_ended") == 2, "a new process has loaded")
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        with pytest.raises(ConfigurationError, match="in use"):
            RunDirectory(run_directory).lock()


def test_full_queue_is_refused_at_once_and_the_limit_holds_across_fronts(journal: Path) -> None:
    with Service([obedient(journal, max_batch_size=1, queue_size_max=4)], workers=2) as service:
        service.wait_ready()
        first = service.ask_later("m", {"do": "sleep", "seconds": 2.0, "label": "first"})
        wait_for(lambda: count(journal, "forwarded", "first"), "the first one runs")
        others = [service.ask_later("m", {"do": "sleep", "seconds": 0.05}) for _ in range(49)]
        answers = [first.result(30), *(other.result(30) for other in others)]
        codes = [answer.status_code for answer in answers]
        assert codes.count(200) == 5
        assert codes.count(429) == 45
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status_code == 429)


def test_expired_work_never_reaches_the_model(journal: Path) -> None:
    with Service([obedient(journal, max_batch_size=1)]) as service:
        service.wait_ready()
        running = service.ask_later("m", {"do": "sleep", "seconds": 1.5, "label": "running"})
        wait_for(lambda: count(journal, "forwarded", "running"), "the first one runs")
        late = service.ask("m", {"do": "echo", "label": "late"}, timeout_s=0.3)
        assert (late.status_code, late.json()["error_type"]) == (504, "deadline_exceeded")
        assert running.result(30).status_code == 200
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        assert count(journal, "forwarded", "late") == 0


def test_work_of_a_client_that_left_is_not_done(journal: Path) -> None:
    with Service([obedient(journal, max_batch_size=1)]) as service:
        service.wait_ready()
        running = service.ask_later("m", {"do": "sleep", "seconds": 1.5, "label": "running"})
        wait_for(lambda: count(journal, "forwarded", "running"), "the first one runs")
        body = b'{"inputs": {"do": "echo", "label": "gone"}}'
        with socket.create_connection(("127.0.0.1", service.port)) as client:
            head = f"POST /models/m HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_for(lambda: _waiting(service) == 1, "it waits")
        wait_for(lambda: _waiting(service) == 0, "it left the queue with its client")
        assert running.result(30).status_code == 200
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        assert count(journal, "forwarded", "gone") == 0


def _waiting(service: Service) -> int:
    return int(service.status()["models"][0]["queued"])


def test_a_service_that_has_ended_is_not_waited_for(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = obedient(journal) | {"options": {"load_error": "no such weights"}}
    with (
        pytest.raises(AssertionError, match="ended with 70"),
        Service([broken], server={"load_attempts_max": 1}) as service,
    ):
        service.wait_ready()
    # What both programs had to say is part of the failure.
    printed = capsys.readouterr().out
    assert "no such weights" in printed
    assert "--- front.log" in printed


def test_livez_answers_while_a_forward_runs(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        running = service.ask_later("m", {"do": "hold_gil", "seconds": 3, "label": "long"})
        wait_for(lambda: count(journal, "forwarded", "long"), "the forward started")
        codes = [service.probe("/livez") for _ in range(200)]
        assert codes == [200] * 200
        assert not running.done(), "all 200 probes were answered while the forward was running"
        assert running.result(30).status_code == 200


def test_garbage_on_the_sockets_is_counted_and_dropped(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        before = service.status()["malformed"]
        hostile = [
            [b""],
            [b"\x01"],
            [b"\x01\x02", b"\xc1"],
            [b"\x09\x02", b"\x90"],
            [b"\x01\x02", pickle.dumps({"run": "me"})],
            [b"\x01\x22", b"\x90"],
            [b"\x01\x02", b"\xdd\xff\xff\xff\xff"],
            [os.urandom(64), os.urandom(64), os.urandom(64)],
        ]
        with zmq.Context() as context:
            for name in ("front.sock", "model.sock"):
                with context.socket(zmq.DEALER) as stranger:
                    stranger.linger = 1000
                    stranger.connect(f"ipc://{service.directory / 'run' / name}")
                    for parts in hostile:
                        stranger.send_multipart(parts)
        wait_for(lambda: service.status()["malformed"] >= before + 2 * len(hostile), "all of it is counted")
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        assert service.slots()["m/0"]["incarnation"] == 1


def test_sockets_are_private(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        run_directory = service.directory / "run"
        assert run_directory.stat().st_mode & 0o777 == 0o700
        for name in ("front.sock", "model.sock"):
            assert (run_directory / name).stat().st_mode & 0o777 == 0o600
        # Also those that come back.
        (run_directory / "front.sock").unlink()
        wait_for((run_directory / "front.sock").exists, "it is back")
        wait_for(lambda: (run_directory / "front.sock").stat().st_mode & 0o777 == 0o600, "it is private")


def test_totals_are_exact_over_all_fronts_and_survive_one(journal: Path) -> None:
    with Service([obedient(journal)], workers=4) as service:
        service.wait_ready()
        for _ in range(100):
            assert service.ask("m", {"do": "echo", "value": 1}).status_code == 200
        totals = [_requests_total(service) for _ in range(20)]
        assert totals == [100] * 20
        victim = service.front_workers()[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(service.front_workers()) == 4 and victim not in service.front_workers(), "a new worker")
        assert [_requests_total(service) for _ in range(20)] == [100] * 20


def _requests_total(service: Service) -> int:
    lines = service.http.get("/metrics", headers={"Connection": "close"}).text.splitlines()
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith("headwaiter_requests_total{") and 'model="m"' in line
    )


def test_front_stops_cleanly_after_its_open_requests(journal: Path) -> None:
    with Service([obedient(journal)], workers=2) as service:
        pids = service.wait_ready().model_pids()
        assert service.front
        open_request = service.ask_later("m", {"do": "sleep", "seconds": 1.0, "label": "open"})
        wait_for(lambda: count(journal, "forwarded", "open"), "it runs")
        workers = service.front_workers()
        assert stop(service.front) == 0
        assert open_request.result(5).status_code == 200
        assert not any(alive(pid) for pid in workers)
        service.start_front()
        service.wait_ready()
        assert service.model_pids() == pids
        assert count(journal, "load_started") == 1


@pytest.mark.parametrize("program", ["model_worker", "frontend"])
def test_program_whose_parent_ended_before_it_could_look_does_not_start(journal: Path, program: str) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    orphan = subprocess.run(
        [sys.executable, "-P", "-m", program, "--exit-with-parent", str(ended.pid)],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert orphan.returncode == -signal.SIGTERM

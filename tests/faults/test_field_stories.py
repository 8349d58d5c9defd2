"""What people report about models behind web workers, told again with headwaiter in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.faults.test_model_process_faults import count, obedient
from tests.local_server import served_by
from tests.story_models import JOURNAL_VARIABLE, WAYS, noted
from tests.topology import Service, wait_for


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "journal"
    monkeypatch.setenv(JOURNAL_VARIABLE, str(file))
    return file


def story(class_name: str, **settings: object) -> dict[str, Any]:
    return {"name": "m", "model": f"tests.story_models:{class_name}", "device": "cpu", **settings}


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_started_in_each_call_stop_no_server_and_reload_no_model(journal: Path, workers: int) -> None:
    with Service([story("Restless")], workers=workers) as service:
        pids = service.wait_ready().model_pids()
        fronts = service.front_workers()
        for way in WAYS:
            answers = [service.ask("m", way, timeout_s=10) for _ in range(3)]
            assert [answer.text for answer in answers] == ["3"] * 3, way
        assert service.model_pids() == pids
        assert service.front_workers() == fronts
        assert noted(journal, "imported") == noted(journal, "loaded") == [pids["m/0"]]


def test_code_of_the_users_runs_in_the_model_processes_only_and_these_share_the_work_evenly(journal: Path) -> None:
    with Service([story("Eager", replicas=2)], workers=3) as service:
        service.wait_ready()
        wait_for(lambda: all(slot["state"] == "ready" for slot in service.slots().values()), "both are ready")
        # Each over a connection of its own, to whichever front takes it.
        asked = Counter(service.ask("m", "who").json() for _ in range(100))
        pids = sorted(service.model_pids().values())
        assert sorted(asked) == pids
        assert all(45 <= number <= 55 for number in asked.values()), asked
        for what in ("imported", "asked_for_cuda", "loaded"):
            assert sorted(noted(journal, what)) == pids, what


def test_each_process_sees_the_device_that_was_named_for_it_as_text(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,MIG-b,GPU-c")
    with Service([obedient(journal, device=["GPU-c", "MIG-b"])]) as service:
        service.wait_ready()
        wait_for(lambda: all(slot["state"] == "ready" for slot in service.slots().values()), "both are ready")
        slots = service.slots()
        reports = [service.ask("m", {"do": "report", "names": names}).json() for _ in range(10)]
        seen = {report["pid"]: report["environment"]["CUDA_VISIBLE_DEVICES"] for report in reports}
        assert seen == {slots["m/0"]["pid"]: "GPU-c", slots["m/1"]["pid"]: "MIG-b"}
        for pid, pin in seen.items():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"CUDA_VISIBLE_DEVICES={pin}".encode() in environment
            assert b"CUDA_DEVICE_ORDER=PCI_BUS_ID" in environment


def test_process_killed_while_it_loads_is_told_as_killed_and_not_as_silence(journal: Path) -> None:
    with Service([obedient(journal, options={"load_seconds": 600.0})]) as service:
        wait_for(lambda: count(journal, "load_started"), "the load started")
        os.kill(service.model_pids()["m/0"], signal.SIGKILL)
        wait_for(lambda: service.slots()["m/0"]["incarnation"] == 2, "it is started again")
        said = "killed by signal 9, probably out of memory while it loaded"
        wait_for(lambda: said in service.http.get("/readyz").text, "/readyz says why", 5)
        assert said in service.slots()["m/0"]["reason"]
        assert said in service.log("server.log")


def test_requests_made_before_the_model_is_there_wait_for_one_load(journal: Path) -> None:
    with Service([obedient(journal, options={"load_seconds": 1.0})], workers=2) as service:
        answers = [service.ask_later("m", {"do": "echo", "value": number}) for number in range(20)]
        assert [answer.result(30).json() for answer in answers] == list(range(20))
        assert count(journal, "load_started") == 1


def test_time_for_a_load_and_time_for_a_request_are_two_things(journal: Path) -> None:
    model = obedient(journal, options={"load_seconds": 2.0})
    with Service([model], http={"request_timeout_s": 0.5}) as service:
        wait_for(lambda: count(journal, "load_started"), "the load started")
        early = service.ask("m", {"do": "echo"})
        assert (early.status_code, early.json()["error_type"]) == (503, "model_loading")
        service.wait_ready()
        slow = service.ask("m", {"do": "sleep", "seconds": 1.0})
        assert (slow.status_code, slow.json()["error_type"]) == (504, "deadline_exceeded")
        assert service.slots()["m/0"]["incarnation"] == 1


def test_readiness_goes_with_the_process_and_comes_back_with_the_next(journal: Path) -> None:
    with Service([obedient(journal, options={"load_seconds": 1.0})]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: service.probe("/readyz") == 503, "/readyz says 503", 2)
        assert service.probe("/livez") == 200
        service.wait_ready()
        assert count(journal, "load_started") == 2


def test_all_that_was_on_its_way_into_a_killed_process_is_answered_once(journal: Path) -> None:
    with Service([obedient(journal, max_batch_size=2)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        answers = [
            service.ask_later("m", {"do": "sleep", "seconds": 0.1, "label": f"n{number}"}) for number in range(10)
        ]
        wait_for(lambda: count(journal, "forwarded") >= 1 and service.status()["models"][0]["queued"] >= 4, "a queue")
        os.kill(pid, signal.SIGKILL)
        assert [answer.result(30).status_code for answer in answers] == [200] * 10
        assert service.status()["counters"][0]["ended"] == {"ok": 10}


def test_many_clients_with_different_truncation_get_what_one_client_gets(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path / "model", "BertModel", positions=64)
    texts = [text * repeats for text in tiny_models.TEXTS for repeats in (1, 6)]
    requests = [(text, {"truncate": True}) for text in texts] + [(text, {}) for text in tiny_models.TEXTS[:4]]
    requests += [("fox " * 80, {})]
    with Service([{"name": "m", "model": directory, "task": "embedding", "device": "cpu"}], workers=2) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        alone = [service.ask("m", text, parameters=parameters) for text, parameters in requests]
        assert alone[-1].status_code == 422
        assert {answer.status_code for answer in alone[:-1]} == {200}
        together = [
            (number, service.ask_later("m", text, parameters=parameters))
            for _ in range(15)
            for number, (text, parameters) in enumerate(requests)
        ]
        for number, later in together:
            answer = later.result(60)
            assert answer.status_code == alone[number].status_code
            if answer.status_code == 200:
                # Which texts share a batch changes the last bits of a vector and nothing more.
                assert answer.json() == pytest.approx(alone[number].json(), abs=1e-4)
            else:
                assert answer.text == alone[number].text
        assert service.model_pids()["m/0"] == pid


@pytest.mark.parametrize("leaves", ["the client", "its deadline"])
def test_a_long_forward_that_nobody_waits_for_makes_room_for_the_next(journal: Path, leaves: str) -> None:
    inputs = {"do": "steps", "seconds": 0.05, "count": 1200, "label": "left"}
    with Service([obedient(journal)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        if leaves == "its deadline":
            assert service.ask("m", inputs, timeout_s=0.5).status_code == 504
        else:
            body = json.dumps({"inputs": inputs}).encode()
            with socket.create_connection(("127.0.0.1", service.port)) as client:
                head = f"POST /models/m HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                client.sendall(head.encode() + body)
                wait_for(lambda: count(journal, "forwarded", "left"), "the forward started")
        wait_for(lambda: count(journal, "left_off", "left"), "the forward was left off", 10)
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        assert service.model_pids()["m/0"] == pid


class Hub(BaseHTTPRequestHandler):
    """Refuses every model in the way that its name says."""

    def do_GET(self) -> None:
        status, code = next((answer for name, answer in REFUSALS.items() if name in self.path), (429, ""))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()


REFUSALS = {
    "private": (401, "RepoNotFound"),
    "forbidden": (403, ""),
    "gated": (403, "GatedRepo"),
    "missing": (404, "RepoNotFound"),
}


def test_each_refusal_of_the_hub_is_told_once_in_its_own_words_and_without_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "hf_nobodymayreadthisone"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    models = [
        {"name": name, "model": f"org/{name}", "task": "text-classification", "device": "cpu"} for name in REFUSALS
    ]
    with served_by(Hub) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with Service(models, server={"parallel_loads": 4}) as service:
            assert service.server
            assert service.server.wait(120) == 70
            log = service.log("server.log")
    reasons = {name: log.rpartition(f"{name}/0: ")[2].partition("; ")[0] for name in REFUSALS}
    assert "no such model, or it is private" in reasons["private"]
    assert "may not read this model" in reasons["forbidden"]
    assert "a gated model" in reasons["gated"]
    assert "no such model or revision" in reasons["missing"]
    assert log.count("replica_spawned") == len(REFUSALS)
    assert token not in log

"""What a model process can do to its requests, and what it cannot do to anybody else's."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.topology import Service, alive, journal_lines, wait_for


def obedient(journal: Path, **settings: object) -> dict[str, object]:
    options = {"journal": journal, **settings.pop("options", {})}  # type: ignore[dict-item]
    return {"name": "m", "model": "tests.obedient_model:Obedient", "device": "cpu", "options": options, **settings}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def count(journal: Path, what: str, label: str = "") -> int:
    return sum(1 for fields in journal_lines(journal, what) if not label or fields[3] == label)


def test_killed_idle_process_comes_back_in_the_same_slot(journal: Path) -> None:
    with Service([obedient(journal, replicas=2)]) as service:
        service.wait_ready()
        before = service.model_pids()
        assert service.front
        front, workers = service.front.pid, service.front_workers()
        os.kill(before["m/0"], signal.SIGKILL)
        after = wait_for(
            lambda: (
                (slots := service.slots())["m/0"]["state"] == "ready" and slots["m/0"]["pid"] != before["m/0"] and slots
            ),
            "m/0 is ready again",
        )
        assert list(after) == ["m/0", "m/1"]
        assert after["m/0"]["incarnation"] == 2
        assert after["m/0"]["restarts"] == 1
        assert after["m/1"]["pid"] == before["m/1"]
        assert after["m/1"]["incarnation"] == 1
        assert (service.front.pid, service.front_workers()) == (front, workers)
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        assert count(journal, "load_ended") == 3


def test_process_killed_in_the_middle_of_a_request_costs_its_client_nothing(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        answer = service.ask_later("m", {"do": "sleep", "seconds": 1.0, "label": "long"})
        wait_for(lambda: count(journal, "forwarded", "long"), "the forward started")
        os.kill(pid, signal.SIGKILL)
        assert answer.result(30).status_code == 200
        assert count(journal, "forwarded", "long") == 2


@pytest.mark.parametrize("deed", ["exit", "segfault", "kill"])
def test_input_that_kills_twice_is_named_and_then_refused_untouched(journal: Path, deed: str) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        first = service.ask("m", {"do": deed, "label": "poison"})
        assert (first.status_code, first.json()["error_type"]) == (500, "poison_input")
        assert count(journal, "forwarded", "poison") == 2
        again = service.ask("m", {"do": deed, "label": "poison"})
        assert (again.status_code, again.json()["error_type"]) == (500, "poison_input")
        assert count(journal, "forwarded", "poison") == 2
        assert service.ask("m", {"do": "echo", "value": "fine"}).json() == "fine"


def test_batch_mates_of_a_crash_get_their_answers(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        # Holds the process, so that the eight below wait and share the next batch.
        holder = service.ask_later("m", {"do": "sleep", "seconds": 0.5, "label": "holder"})
        wait_for(lambda: count(journal, "forwarded", "holder"), "the holder runs")
        answers = [
            service.ask_later("m", {"do": "exit"} if number == 3 else {"do": "echo", "value": number})
            for number in range(8)
        ]
        assert holder.result(30).status_code == 200
        results = [answer.result(60) for answer in answers]
        assert [r.status_code for r in results] == [200, 200, 200, 500, 200, 200, 200, 200]
        assert [r.json() for n, r in enumerate(results) if n != 3] == [0, 1, 2, 4, 5, 6, 7]


def test_bad_item_fails_alone_and_its_batch_mates_get_their_own_answers(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        holder = service.ask_later("m", {"do": "sleep", "seconds": 0.5, "label": "holder"})
        wait_for(lambda: count(journal, "forwarded", "holder"), "the holder runs")
        answers = [
            service.ask_later(
                "m", {"do": "fail", "text": "bad one"} if number == 3 else {"do": "echo", "value": number}
            )
            for number in range(8)
        ]
        holder.result(30)
        results = [answer.result(30) for answer in answers]
        assert [r.status_code for r in results] == [200, 200, 200, 500, 200, 200, 200, 200]
        assert "bad one" in results[3].json()["error"]
        assert [r.json() for n, r in enumerate(results) if n != 3] == [0, 1, 2, 4, 5, 6, 7]
        assert service.model_pids()["m/0"] == pid


@pytest.mark.parametrize("deed", ["sleep", "hold_gil"])
def test_hung_forward_is_ended_with_504_and_the_slot_filled_again(journal: Path, deed: str) -> None:
    with Service([obedient(journal, batch_timeout_s=1)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        hung = service.ask("m", {"do": deed, "seconds": 600})
        assert (hung.status_code, hung.json()["error_type"]) == (504, "deadline_exceeded")
        wait_for(lambda: not alive(pid), "the hung process is gone")
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        log = service.log("server.log")
        assert "obedient_model.py" in log, "the stacks of the hung process are in the log"
        # One story: it was killed because it hung, and so it ended.
        assert re.findall(r"(WARNING|ERROR) model_worker (\w+) slot=m/0 incarnation=1 .*hung", log) == [
            ("ERROR", "replica_killed"),
            ("ERROR", "replica_exited"),
        ]


def test_stopped_process_is_not_ready_until_it_goes_on(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: service.probe("/readyz") == 503, "/readyz says 503")
        assert service.probe("/livez") == 200
        waiting = service.ask("m", {"do": "echo", "value": 1}, timeout_s=0.3)
        assert waiting.status_code in (503, 504)
        os.kill(pid, signal.SIGCONT)
        service.wait_ready()
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        assert service.model_pids()["m/0"] == pid


def test_device_side_assert_ends_the_process_after_a_short_answer(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        answer = service.ask("m", {"do": "device_assert"})
        assert answer.status_code == 500
        assert "device-side assert" in answer.json()["error"]
        assert "Traceback" not in answer.text
        wait_for(lambda: not alive(pid), "the process with the broken device context is gone")
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1


def test_what_a_model_started_dies_with_it(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        helpers = service.ask("m", {"do": "helpers"}).json()
        assert all(alive(helper) for helper in helpers)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(helper) for helper in helpers), "the helpers are gone")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pool_inside_forward_reloads_nothing_and_stops_nobody(journal: Path, method: str) -> None:
    with Service([obedient(journal)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        assert service.front
        workers = service.front_workers()
        for number in range(5):
            assert service.ask("m", {"do": "pool", "method": method, "number": number}).json() == number**2
        assert service.model_pids()["m/0"] == pid
        assert service.front_workers() == workers
        assert count(journal, "load_started") == 1
        assert "front_stopped" not in service.log("front.log")


def test_load_that_holds_the_gil_is_left_alone(journal: Path) -> None:
    slow = {"load_seconds": 5.0, "load_holds_gil": True}
    with Service([obedient(journal, options=slow, batch_timeout_s=1)]) as service:
        wait_for(lambda: count(journal, "load_started"), "the load started")
        assert service.probe("/readyz") == 503
        assert service.slots()["m/0"]["state"] in ("starting", "loading")
        held = service.ask("m", {"do": "echo", "value": "held while loading"})
        assert held.json() == "held while loading"
        assert count(journal, "load_started") == 1
        assert service.slots()["m/0"]["incarnation"] == 1


def test_loads_happen_one_after_the_other(journal: Path) -> None:
    with Service([obedient(journal, replicas=3, options={"load_seconds": 0.5})]) as service:
        service.wait_ready()
        wait_for(lambda: count(journal, "load_ended") == 3, "all loads ended")
        moments = [
            (float(fields[2]), fields[0])
            for what in ("load_started", "load_ended")
            for fields in journal_lines(journal, what)
        ]
        assert [what for _, what in sorted(moments)] == ["load_started", "load_ended"] * 3


def test_model_that_cannot_load_says_why_while_the_others_serve(journal: Path) -> None:
    broken = obedient(journal, name="broken", options={"load_error": "weights are upside down"})
    with Service([obedient(journal), broken]) as service:
        wait_for(lambda: service.status()["models"][1]["state"] == "failed", "the broken model is given up", 60)
        ready = service.http.get("/readyz")
        assert ready.status_code == 503
        assert "weights are upside down" in ready.text
        assert service.ask("m", {"do": "echo", "value": 1}).json() == 1
        refused = service.ask("broken", {"do": "echo"})
        assert refused.status_code == 503
        assert "weights are upside down" in refused.json()["error"]


def test_server_whose_only_model_cannot_load_exits_with_the_cause(journal: Path) -> None:
    with Service([obedient(journal, options={"load_error": "weights are upside down"})]) as service:
        assert service.server
        assert service.server.wait(60) == 70
        assert "weights are upside down" in service.log("server.log")


def test_process_is_what_was_promised(journal: Path) -> None:
    model = obedient(journal, cores=1)
    with Service([model]) as service:
        service.wait_ready()
        assert service.server
        seen = service.ask("m", {"do": "report", "names": ["CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"]}).json()
        assert seen["ppid"] == service.server.pid
        assert seen["group"] == seen["pid"]
        assert seen["daemon"] is False
        assert seen["main_thread"] is True
        assert len(seen["cores"]) == 1
        pinned = Path(f"/proc/{seen['pid']}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=" in pinned
        assert b"TOKENIZERS_PARALLELISM=false" in pinned
        assert b"OMP_NUM_THREADS=1" in pinned


@pytest.mark.parametrize("cores", [1, 2])
def test_torch_computes_with_as_many_threads_as_the_slot_has_cores_and_on_these(cores: int) -> None:
    if len(os.sched_getaffinity(0)) < cores:
        pytest.skip(f"there are no {cores} cores")
    model = {"name": "m", "model": "tests.torch_stub:Parallel", "device": "cpu", "cores": cores}
    with Service([model]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        seen = service.ask("m", "anything").json()
        again = service.ask("m", "anything").json()
        assert seen["threads"] == cores
        # The one that calls computes as well; none is opened that torch does not compute with.
        assert len(seen["after"]) - len(seen["before"]) == cores - 1
        assert again["after"] == seen["after"]
        tasks = Path(f"/proc/{pid}/task")
        affinities = {tuple(sorted(os.sched_getaffinity(int(task.name)))) for task in tasks.iterdir()}
        assert len(affinities) == 1
        assert len(affinities.pop()) == cores
        pinned = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for name in ("OMP", "MKL", "OPENBLAS", "RAYON"):
            assert f"{name}_NUM_THREADS={cores}".encode() in pinned
        assert b"OMP_WAIT_POLICY=PASSIVE" in pinned


def test_values_that_json_does_not_know(journal: Path) -> None:
    with Service([obedient(journal)]) as service:
        service.wait_ready()
        assert service.ask("m", {"do": "nan"}).json() == {"score": None, "scores": [None, 1.0]}
        refused = service.ask("m", {"do": "object"})
        assert refused.status_code == 500
        assert "items[0].thing" in refused.json()["error"]


def test_long_forward_that_reports_its_steps_is_no_hang(journal: Path) -> None:
    with Service([obedient(journal, batch_timeout_s=1)]) as service:
        pid = service.wait_ready().model_pids()["m/0"]
        answer = service.ask("m", {"do": "steps", "seconds": 0.5, "count": 6})
        assert answer.status_code == 200
        assert service.model_pids()["m/0"] == pid

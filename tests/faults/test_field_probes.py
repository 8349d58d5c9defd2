"""More of what people report, told again with headwaiter in the middle: probes under load, slow loads, lost devices."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_field_stories import Hub, journal, story
from tests.faults.test_model_process_faults import count, obedient
from tests.local_server import served_by
from tests.topology import ROOT, Service, wait_for

__all__ = ["journal"]  # a fixture


def test_model_that_computed_in_parallel_while_it_loaded_answers_whatever_the_fronts() -> None:
    with Service([story("Parallel")], workers=4) as service:
        service.wait_ready()
        answers = [service.ask_later("m", number, timeout_s=5) for number in range(1, 9)]
        assert [answer.result(30).json() for answer in answers] == [4_000_000 * number for number in range(1, 9)]


def test_two_models_behind_three_fronts_are_two_processes(journal: Path) -> None:
    with Service([obedient(journal, name="one"), obedient(journal, name="two")], workers=3) as service:
        service.wait_ready()
        for name in ("one", "two") * 10:
            assert service.ask(name, {"do": "echo", "value": name}).json() == name
        assert count(journal, "load_started") == 2
        assert len(service.model_pids()) == 2


def test_probes_tell_alive_from_ready_all_through_a_load_that_holds_the_gil(journal: Path) -> None:
    slow = {"load_seconds": 4.0, "load_holds_gil": True}
    with Service([obedient(journal, options=slow)]) as service:
        wait_for(lambda: count(journal, "load_started"), "the load started")
        seen = []
        while not count(journal, "load_ended"):
            seen.append((service.probe("/livez"), service.probe("/readyz"), service.probe("/startupz")))
        # The last look may have seen the end of the load.
        assert len(seen) > 20
        assert set(seen[:-1]) == {(200, 503, 503)}
        service.wait_ready()
        assert service.slots()["m/0"]["incarnation"] == 1


def test_long_jobs_in_a_queue_are_no_reason_to_replace_their_process(journal: Path) -> None:
    with Service([obedient(journal, max_batch_size=1)]) as service:
        service.wait_ready()
        # Each longer than the silence after which an idle process is taken for dead.
        jobs = [service.ask_later("m", {"do": "sleep", "seconds": 4}) for _ in range(2)]
        wait_for(lambda: count(journal, "forwarded") == 1, "the first began")
        while not all(job.done() for job in jobs):
            assert service.probe("/readyz") == 200
        assert [job.result().status_code for job in jobs] == [200, 200]
        assert service.slots()["m/0"]["restarts"] == 0


def test_a_hundred_streams_do_not_keep_probes_waiting(journal: Path) -> None:
    streams, pieces = 100, 500
    body = json.dumps({"inputs": pieces, "stream": True}).encode()
    head = f"POST /models/m HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def read(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        text = await reader.read()
        writer.close()
        return text

    async def tell(service: Service) -> None:
        open_streams = [asyncio.create_task(read(service.port)) for _ in range(streams)]
        answered = 0
        while not all(stream.done() for stream in open_streams):
            assert await asyncio.to_thread(service.probe, "/livez") == 200
            answered += 1
        texts = [stream.result() for stream in open_streams]
        assert all(text.count(b"data: ") >= pieces and b"event: done" in text for text in texts)
        assert answered >= 5, "probes are answered all through"

    with Service([story("Streaming", max_batch_size=streams)]) as service:
        service.wait_ready()
        asyncio.run(tell(service))


def test_slot_whose_device_is_taken_says_so_while_the_other_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    model = story("ShutOut", options={"taken": "GPU-b"})
    del model["device"]
    with Service([{**model, "devices": ["GPU-a", "GPU-b"]}]) as service:
        service.wait_ready()
        assert [service.ask("m", 0).json() for _ in range(3)] == ["GPU-a"] * 3
        wait_for(lambda: service.slots()["m/1"]["reason"], "the other slot says why")
        slot = service.slots()["m/1"]
        assert slot["device"] == "GPU-b"
        assert "all CUDA-capable devices are busy or unavailable" in slot["reason"]
        assert "slot=m/1" in service.log("server.log")
        assert service.probe("/readyz") == 200


@pytest.mark.parametrize(
    ("endpoint", "words"), [("", "too many requests from here"), ("http://127.0.0.1:9", "couldn't connect to")]
)
def test_hub_that_wants_no_more_or_is_not_there_is_told_apart(tmp_path: Path, endpoint: str, words: str) -> None:
    with served_by(Hub) as stub:
        variables = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint or stub}
        # The library pauses between its tries, for half a minute in all.
        code = (
            "import time; time.sleep = lambda seconds: None\n"
            "from model_worker.runtimes.registry import build; from model_worker.specs import RuntimeSpec\n"
            "model = build(RuntimeSpec('m', 'org/busy', 'text-classification'))\n"
            "model.report_progress = lambda fraction, text: print(text)\n"
            "model.load('cpu')"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert words in done.stderr.splitlines()[-1]
    first, *later = done.stdout.splitlines()
    assert first == "download or find its configuration"
    assert f"{first}: waiting to ask the hub again" in later, "the half minute is not spent in silence"

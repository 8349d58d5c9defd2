"""Streams and continuous batches through the whole service: what clients read, and what their leaving stops."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests import tiny_models
from tests.topology import Service, wait_for

PROMPTS = ["fox", "The quick brown fox jumps over the lazy dog. Hello", "Paris is the capital", "one two three four"]
NEW_TOKENS = 40
ENDLESS = 1_000_000
# Long beside what it takes a message to arrive, so that the steps in between can be counted.
STEP_S = 0.05


def counting(directory: Path, step_s: float = 0.0) -> dict[str, Any]:
    options = {"journal": str(directory / "journal"), "step_s": step_s}
    return {"name": "count", "model": "tests.stub_models:Counting", "device": "cpu", "options": options}


@contextlib.contextmanager
def serving(step_s: float = 0.0, **sections: Any) -> Iterator[tuple[Service, Path]]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        directory = Path(name)
        with Service([counting(directory, step_s)], **sections) as service:
            yield service.wait_ready(), directory / "journal"


def noted(journal: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    return [line for line in lines if line["event"] == event]


def events(service: Service, model: str, inputs: object, **options: Any) -> Iterator[tuple[str, Any]]:
    """Names and data, as they arrive."""
    headers = {"X-Request-Timeout": str(options.pop("timeout_s", 60))}
    body = {"inputs": inputs, "stream": True, **options}
    with service.http.stream("POST", f"/models/{model}", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def generated_alone(directory: Path, prompt: str) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    inputs = tokenizer(prompt, return_tensors="pt")
    end = tokenizer.eos_token_id
    ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=0)[
        0
    ].tolist()
    context = len(inputs["input_ids"][0])
    whole: str = tokenizer.decode(ids, skip_special_tokens=True)
    return whole.removeprefix(tokenizer.decode(ids[:context], skip_special_tokens=True))


def test_text_is_the_same_in_pieces_and_whole_and_computed_alone(tmp_path: Path) -> None:
    directory = tiny_models.save(tmp_path, "GPTJForCausalLM", positions=128)
    model = {"name": "text", "model": str(directory), "task": "text-generation", "device": "cpu"}
    with Service([model]) as service:
        service.wait_ready()
        [slot] = service.slots().values()
        assert slot["choices"]["batching"].startswith("continuous")
        parameters = {"max_new_tokens": NEW_TOKENS}
        first = events(service, "text", PROMPTS[0], parameters=parameters)
        begun = [next(first)]
        # These join while the first one runs, and each while the one before does.
        others = [service.ask_later("text", prompt, parameters=parameters) for prompt in PROMPTS[1:]]
        told = [*begun, *first]
        streamed = "".join(data["text"] for name, data in told if name == "")
        assert [name for name, _ in told if name] == ["done"]
        done = told[-1][1]
        assert done["generated_text"] == streamed == generated_alone(directory, PROMPTS[0])
        assert done["finish_reason"] in ("stop", "length")
        for prompt, other in zip(PROMPTS[1:], others, strict=True):
            assert other.result(60).json()["generated_text"] == generated_alone(directory, prompt)
        refused = service.ask("text", PROMPTS[0], parameters={"max_new_tokens": 10_000}, stream=True)
        assert refused.status_code == 422


@pytest.mark.parametrize("stream", [True, False])
def test_two_steps_at_most_are_computed_for_a_client_that_has_left(stream: bool) -> None:
    with serving(STEP_S) as (service, journal):
        body = json.dumps({"inputs": {"name": "gone", "to": ENDLESS}, "stream": stream}).encode()
        head = f"POST /models/count HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", service.port)) as client:
            client.sendall(head + body)
            wait_for(lambda: len(noted(journal, "stepped")) >= 4, "some steps")
        before = len(noted(journal, "stepped"))
        [left] = wait_for(lambda: noted(journal, "left"), "it leaves")
        assert left["count"] - before <= 2
        wait_for(lambda: service.slots()["count/0"]["held"] == 0, "nothing is held")


def test_a_deadline_in_the_middle_of_a_stream_is_its_last_event() -> None:
    with serving(STEP_S) as (service, journal):
        told = list(events(service, "count", {"name": "late", "to": ENDLESS}, timeout_s=0.5))
        assert [data for name, data in told[:-1]] == list(range(1, len(told)))
        assert (told[-1][0], told[-1][1]["error_type"]) == ("error", "deadline_exceeded")
        wait_for(lambda: noted(journal, "left"), "it leaves")


def test_a_stop_lets_streams_end_and_tells_those_that_do_not() -> None:
    with serving(STEP_S, server={"grace_s": 1.5}) as (service, _):
        short = events(service, "count", {"to": 12})
        endless = events(service, "count", {"to": ENDLESS})
        assert next(short) == next(endless) == ("", 1)
        assert service.server is not None
        service.server.send_signal(signal.SIGTERM)
        assert [name for name, _ in short][-1] == "done"
        last = list(endless)[-1]
        assert (last[0], last[1]["error_type"]) == ("error", "draining")
        assert service.server.wait(30) == 0


def test_a_process_that_dies_ends_its_streams_with_an_error_and_runs_the_rest_again() -> None:
    with serving(STEP_S) as (service, journal):
        stream = events(service, "count", {"name": "stream", "to": ENDLESS})
        assert next(stream) == ("", 1)
        whole = service.ask_later("count", {"name": "whole", "to": 30})
        wait_for(lambda: any("whole" in step["names"] for step in noted(journal, "stepped")), "both run")
        os.kill(service.model_pids()["count/0"], signal.SIGKILL)
        told = list(stream)
        assert (told[-1][0], told[-1][1]["error_type"]) == ("error", "model_crashed")
        assert [data for _, data in told[:-1]] == list(range(2, len(told) + 1))
        assert whole.result(60).json() == {"numbers": list(range(1, 31))}


def test_a_reader_that_does_not_read_loses_its_own_stream_alone() -> None:
    with serving() as (service, journal):
        inputs = {"name": "slow", "to": ENDLESS, "piece_bytes": 256 * 1024}
        body = json.dumps({"inputs": inputs, "stream": True}).encode()
        head = f"POST /models/count HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", service.port)) as client:
            client.sendall(head + body)
            told = list(events(service, "count", {"name": "quick", "to": 50}))
            assert [data for _, data in told[:-1]] == list(range(1, 51))
            [left] = wait_for(lambda: noted(journal, "left"), "the slow one leaves")
            assert left["name"] == "slow"
            assert service.ask("count", {"to": 3}).json() == {"numbers": [1, 2, 3]}

"""Text generation: tokens per second beside static batches and `transformers serve`, and what streaming costs.

Each case is a burst: so many requests at once, with answers of the same length. Nothing suits a static batch better: it
has all prompts from the start, and no row waits for another. Traffic that comes and goes is kinder to continuous
batching, and has no limit to be measured against.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from benchmarks import inputs, shapes
from benchmarks.load_generator import LoadFailed, ask
from benchmarks.machine import cpu_s
from benchmarks.offline import Offline, offline
from benchmarks.run import Run
from benchmarks.summary import percentile
from benchmarks.systems import HEADWAITER, Endpoint, System, completion_body, text_systems
from benchmarks.targets import STATIC
from benchmarks.token_streams import streams, whole_answers

LOAD, STREAMS, LEAVING, OVERHEAD = "generation", "streams", "leaving", "overhead"
SMOLLM2, GPT_J = "SmolLM2", "GPT-J"
# Requests of a burst, by connections: a single one tells too little.
REQUESTS = {1: 2, 8: 8, 16: 16, 32: 32}
NEW_TOKENS = 32
STREAMING_CONNECTIONS = 16
# A reader leaves after so many pieces of an answer that would be much longer.
PIECES_READ = 8
LONG_ANSWER_TOKENS = 400
# The cost of streaming is measured where next to nothing else costs anything.
OVERHEAD_REQUESTS = 64
OVERHEAD_TOKENS = 128
# A model process tells its count of steps each second.
COUNT_SETTLED_S = 1.5


def measure(run: Run) -> None:
    run.say(f"{LOAD}: writes the models, once")
    _measure_model(run, SMOLLM2, shapes.smollm2())
    # 70 million weights, most of them in the vocabulary: a step takes some milliseconds.
    _measure_model(run, GPT_J, shapes.gpt_j(layers=6, width=512, heads=8))
    _measure_overhead(run, shapes.gpt_j(layers=1, width=64, heads=2, vocabulary=1024))


def _measure_model(run: Run, name: str, directory: Path) -> None:
    with (
        offline("text-generation", str(directory)) as limit,
        run.all_running(LOAD, text_systems(directory)) as endpoints,
    ):
        # The first batches of a process pay for memory and code that is made on demand.
        limit.ask("generate 8 8 2 0")
        for system, endpoint in endpoints.items():
            whole_answers(endpoint.port, system.path, _bodies(system, 8, 2, seed=0), 8)
        for number in range(1, run.rounds + 1):
            for connections in REQUESTS:
                _burst_round(run, name, limit, endpoints, connections, number)
            if name == SMOLLM2:
                _streams_round(run, name, endpoints, number)
            else:
                _leaving_round(run, name, endpoints, number)


def _bodies(system: System, requests: int, tokens: int, seed: int, *, stream: bool = False) -> list[bytes]:
    """Others with each seed: what a system has read before it may know."""
    own = {} if system.environment else {"model": "text"}
    return [completion_body(prompt, tokens, stream=stream, **own) for prompt in inputs.prompts(requests, seed)]


def _new_tokens(run: Run) -> int:
    return 4 if run.quick else NEW_TOKENS


def _burst_round(
    run: Run, name: str, limit: Offline, endpoints: dict[System, Endpoint], connections: int, number: int
) -> None:
    requests, tokens = REQUESTS[connections], _new_tokens(run)
    case = f"{name} c={connections}"
    run.record(LOAD, case, STATIC, number, limit.ask(f"generate {connections} {requests} {tokens} {number}"))
    for system, endpoint in endpoints.items():
        pids = endpoint.pids()
        before_s = cpu_s(pids)
        try:
            made, took_s = whole_answers(
                endpoint.port, system.path, _bodies(system, requests, tokens, number), connections
            )
        except LoadFailed as error:
            if not system.environment:
                raise
            run.leave_out(LOAD, f"{system.name}, {case}: {error}")
            continue
        if made != requests * tokens:
            raise LoadFailed(f"{system.name}: {made} tokens in {requests} answers of {tokens}")
        values = {"tokens_per_s": made / took_s, "cpu_token_ms": (cpu_s(pids) - before_s) / made * 1000}
        run.record(LOAD, case, system.name, number, values)


def _streams_round(run: Run, name: str, endpoints: dict[System, Endpoint], number: int) -> None:
    """Every connection asks twice, so that newcomers meet answers that are being made."""
    case = f"{name} c={STREAMING_CONNECTIONS}"
    for system, endpoint in endpoints.items():
        bodies = _bodies(system, 2 * STREAMING_CONNECTIONS, _new_tokens(run), -number, stream=True)
        try:
            read = streams(endpoint.port, system.path, bodies, STREAMING_CONNECTIONS)
        except LoadFailed as error:
            if not system.environment:
                raise
            run.leave_out(LOAD, f"{system.name}, streams: {error}")
            continue
        first_ms = [stream.first_ms for stream in read]
        between_ms = [pause_ms for stream in read for pause_ms in stream.between_ms]
        values = {
            "first_p50_ms": percentile(first_ms, 0.5),
            "first_p99_ms": percentile(first_ms, 0.99),
            "between_p50_ms": percentile(between_ms, 0.5),
            "between_p99_ms": percentile(between_ms, 0.99),
        }
        run.record(STREAMS, case, system.name, number, values)


def _leaving_round(run: Run, name: str, endpoints: dict[System, Endpoint], number: int) -> None:
    """Steps that are computed for a client that has left. Each token of this model is a piece, so the pieces that were
    read are the steps that were not in vain."""
    for system, endpoint in endpoints.items():
        if system.environment:
            continue
        body = _bodies(system, 1, LONG_ANSWER_TOKENS, -number, stream=True)
        before = _settled_steps(endpoint)
        [read] = streams(endpoint.port, system.path, body, 1, pieces_max=PIECES_READ)
        steps = _settled_steps(endpoint) - before
        run.record(LEAVING, f"{name} c=1", system.name, number, {"steps": float(steps - len(read.pieces_s))})


def _settled_steps(endpoint: Endpoint) -> int:
    """The steps of the model process, when it computes no more."""
    last, since_s = -1, time.monotonic()
    while True:
        status = json.loads(asyncio.run(ask(endpoint.port, "/status")))
        steps: int = sum(slot["steps"] for slot in status["slots"])
        if steps != last:
            last, since_s = steps, time.monotonic()
        elif time.monotonic() - since_s > COUNT_SETTLED_S:
            return steps
        time.sleep(0.05)


def _measure_overhead(run: Run, directory: Path) -> None:
    """The same answers streamed and whole: what the pieces cost all processes together, their clients excepted."""
    [system] = [system for system in text_systems(directory) if system.name == HEADWAITER]
    requests, tokens = (16, 16) if run.quick else (OVERHEAD_REQUESTS, OVERHEAD_TOKENS)
    made = requests * tokens
    with run.all_running(LOAD, [system]) as endpoints:
        endpoint = endpoints[system]
        whole_answers(endpoint.port, system.path, _bodies(system, requests, tokens, seed=0), STREAMING_CONNECTIONS)
        for number in range(1, run.rounds + 1):
            used_us = {}
            for streamed in (False, True):
                bodies = _bodies(system, requests, tokens, number, stream=streamed)
                before = {role: cpu_s(list_pids()) for role, list_pids in endpoint.roots.items()}
                if streamed:
                    streams(endpoint.port, system.path, bodies, STREAMING_CONNECTIONS)
                else:
                    whole_answers(endpoint.port, system.path, bodies, STREAMING_CONNECTIONS)
                used_us[streamed] = {
                    role: (cpu_s(list_pids()) - before[role]) / made * 1e6 for role, list_pids in endpoint.roots.items()
                }
            values = {f"cpu_{role}_us": used_us[True][role] - used_us[False][role] for role in endpoint.roots}
            values["cpu_all_us"] = sum(values.values())
            values["whole_us"] = sum(used_us[False].values())
            run.record(OVERHEAD, f"c={STREAMING_CONNECTIONS}", system.name, number, values)

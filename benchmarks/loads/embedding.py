"""A real encoder and texts of mixed lengths: throughput, latency, `/livez` meanwhile, and what the longest text waits.

The limit is computed in the same rounds, by one process that has all texts from the start and sorts them.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks import inputs
from benchmarks.load_generator import LoadFailed, NoAnswer, ask, in_turn, lanes, rates
from benchmarks.offline import Offline, offline
from benchmarks.run import Run
from benchmarks.summary import percentile
from benchmarks.systems import HEADWAITER, Endpoint, System, embedding_systems, minilm_directory

LOAD = "embedding"
LIVEZ = "livez"
FAIRNESS = "fairness"
OFFLINE = "offline, sorted by length"
IN_PROCESS = "in process, one by one"
# Seconds of a window, by concurrency.
WINDOWS_S = {1: 3.0, 8: 4.0, 64: 8.0}
WARM_UP_S = 1.0
PROBE_S = 3.0
PROBE_PAUSE_S = 0.02
FAIRNESS_S = 10.0
# The longest text among short ones is a matter of how batches are made.
FAIRNESS_SYSTEMS = (HEADWAITER, "LitServe, batches of 32", "mosec, batches of 32")


def measure(run: Run) -> None:
    bodies = inputs.bodies(inputs.mixed_texts())
    with (
        offline("embedding", minilm_directory()) as limit,
        run.all_running(LOAD, embedding_systems()) as endpoints,
    ):
        for number in range(1, run.rounds + 1):
            _offline_round(run, limit, number)
            for system, endpoint in endpoints.items():
                own = inputs.bodies([[text] for text in inputs.mixed_texts()]) if system.wraps_inputs else bodies
                _system_round(run, system, endpoint, own, number)
        for number in range(1, run.rounds + 1):
            for system, endpoint in endpoints.items():
                if system.name in FAIRNESS_SYSTEMS:
                    _fairness_round(run, system, endpoint, number)


def _offline_round(run: Run, limit: Offline, number: int) -> None:
    run.record(LOAD, "c=64", OFFLINE, number, limit.ask("limit"))
    run.record(LOAD, "c=1", IN_PROCESS, number, limit.ask(f"one_by_one {run.seconds(WINDOWS_S[1])}"))


def _system_round(run: Run, system: System, endpoint: Endpoint, bodies: list[bytes], number: int) -> None:
    for connections, usual_s in WINDOWS_S.items():
        seconds = run.seconds(usual_s)
        plan = [in_turn(range(len(bodies)))] * connections
        try:
            exchanges = lanes(endpoint.port, system.path, bodies, plan, seconds=seconds, warm_up_s=WARM_UP_S)
            run.record(LOAD, f"c={connections}", system.name, number, rates(exchanges, seconds))
        except LoadFailed as error:
            _left_out(run, system, f"c={connections}", error)
    try:
        run.record(LIVEZ, "c=64", system.name, number, _probe(run, endpoint, bodies))
    except LoadFailed as error:
        _left_out(run, system, "health probes", error)


def _left_out(run: Run, system: System, what: str, error: LoadFailed) -> None:
    if not system.environment and not isinstance(error, NoAnswer):
        raise error
    run.leave_out(LOAD, f"{system.name}, {what}: {error}")


def _probe(run: Run, endpoint: Endpoint, bodies: list[bytes]) -> dict[str, float]:
    """Latency of the health path, each time over a new connection, while 64 connections ask the model."""
    seconds = run.seconds(PROBE_S)
    end_s = time.perf_counter() + seconds

    async def probe() -> list[float]:
        took_ms = []
        while (start_s := time.perf_counter()) < end_s:
            await ask(endpoint.port, endpoint.health_path)
            took_ms.append((time.perf_counter() - start_s) * 1000)
            await asyncio.sleep(PROBE_PAUSE_S)
        return took_ms

    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(asyncio.run, probe())
        lanes(endpoint.port, endpoint.path, bodies, [in_turn(range(len(bodies)))] * 64, seconds=seconds)
        took_ms = probing.result()
    return {"p50_ms": percentile(took_ms, 0.5), "p99_ms": percentile(took_ms, 0.99), "probes": len(took_ms)}


def _fairness_round(run: Run, system: System, endpoint: Endpoint, number: int) -> None:
    """One connection sends the longest text again and again, 63 send short ones."""
    bodies = inputs.bodies([*inputs.short_texts(), inputs.longest_text()])
    longest = len(bodies) - 1
    plan = [in_turn([longest]), *[in_turn(range(longest))] * 63]
    seconds = run.seconds(FAIRNESS_S, 2.0)
    exchanges = lanes(endpoint.port, system.path, bodies, plan, seconds=seconds, warm_up_s=WARM_UP_S)
    alone = lanes(endpoint.port, system.path, bodies, plan[:1], seconds=run.seconds(1.0), warm_up_s=0.2)
    long_ms = [exchange.took_s * 1000 for exchange in exchanges if exchange.body == longest]
    short_ms = [exchange.took_s * 1000 for exchange in exchanges if exchange.body != longest]
    if not (long_ms and short_ms and alone):
        run.leave_out(FAIRNESS, f"{system.name}: {len(long_ms)} long and {len(short_ms)} short answers in {seconds} s")
        return
    values = {
        "long_p50_ms": percentile(long_ms, 0.5),
        "long_p99_ms": percentile(long_ms, 0.99),
        "short_p50_ms": percentile(short_ms, 0.5),
        "long_answers": float(len(long_ms)),
        "long_idle_p50_ms": percentile([exchange.took_s * 1000 for exchange in alone], 0.5),
    }
    run.record(FAIRNESS, "c=64", system.name, number, values)

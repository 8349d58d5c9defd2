"""Whether memory grows with the number of requests: 20,000 of random length, and every process looked at meanwhile."""

from __future__ import annotations

import itertools
import time

from benchmarks import inputs
from benchmarks.load_generator import lanes
from benchmarks.machine import pss_mib
from benchmarks.run import Run
from benchmarks.summary import slope_per_1000
from benchmarks.systems import ECHO_MODEL, HEADWAITER, MINILM_MODEL, Endpoint, System, headwaiter

LOAD = "growth"
REQUESTS = 20_000
STEP = 1_000
# Texts of the encoder are short, so that 20,000 of them take two minutes and not ten.
WORDS_MAX = {"echo": 2_000, "minilm": 24}
# Pools, caches and arenas fill first.
WARM_UP_SHARE = 0.25
# More than any step takes; a step ends when its requests are answered.
STEP_TIMEOUT_S = 120.0
# On a machine that is slow or busy, the slope is that of as many requests as were answered until then.
LIMIT_S = 400.0


def measure(run: Run) -> None:
    requests = 2_000 if run.quick else REQUESTS
    for model in (ECHO_MODEL, MINILM_MODEL):
        case = str(model["name"])
        system = headwaiter([model], name=HEADWAITER)
        with run.all_running(LOAD, [system]) as endpoints:
            answered, values = slopes(system, endpoints[system], WORDS_MAX[case], requests)
        run.record(LOAD, case, HEADWAITER, 1, values)
        if answered < requests:
            run.leave_out(LOAD, f"{case}: {requests - answered:,} of {requests:,} requests, after {LIMIT_S:.0f} s")


def slopes(system: System, endpoint: Endpoint, words_max: int, requests: int) -> tuple[int, dict[str, float]]:
    """How many requests were answered, and MiB for each 1,000 of them after the warm-up, of the process of each role
    that grows most."""
    end_s = time.monotonic() + LIMIT_S
    texts = inputs.random_texts(words_max)
    members = {pid: role for role, list_pids in endpoint.roots.items() for pid in list_pids()}
    points: dict[int, list[tuple[float, float]]] = {pid: [] for pid in members}
    step = min(STEP, requests // 10)
    for answered in range(step, requests + 1, step):
        bodies = inputs.bodies(list(itertools.islice(texts, step)))
        lanes(endpoint.port, system.path, bodies, [iter(range(step))] * 32, seconds=STEP_TIMEOUT_S)
        if answered >= requests * WARM_UP_SHARE:
            for pid, own in points.items():
                own.append((answered, pss_mib(pid)))
        if time.monotonic() > end_s and len(next(iter(points.values()))) > 1:
            break
    values: dict[str, float] = {}
    for pid, role in members.items():
        name = f"{role}_mib_per_1000"
        values[name] = max(values.get(name, -1e9), slope_per_1000(points[pid]))
    return answered, values

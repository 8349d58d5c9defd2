"""What a request costs beside its model: one short text there and back, at several concurrencies.

Also counts the processor time that each process spends on a request. On a busy machine that stays what it is, while
rates and latencies do not.
"""

from __future__ import annotations

from benchmarks.inputs import ECHO_BODY
from benchmarks.load_generator import LoadFailed, echo_round
from benchmarks.machine import cpu_s
from benchmarks.run import Run
from benchmarks.systems import Endpoint, echo_systems

LOAD = "echo"
CONCURRENCIES = (1, 16, 64, 256)
WINDOW_S = 2.0


def measure(run: Run) -> None:
    seconds = run.seconds(WINDOW_S)
    with run.all_running(LOAD, echo_systems()) as endpoints:
        for system, endpoint in endpoints.items():
            # The first requests of a process pay for imports and caches.
            echo_round(endpoint.port, system.path, ECHO_BODY, 16, 1.0)
        broken: set[tuple[str, int]] = set()
        for number in range(1, run.rounds + 1):
            for connections in CONCURRENCIES:
                for system, endpoint in endpoints.items():
                    if (system.name, connections) in broken:
                        continue
                    try:
                        values = _round(endpoint, connections, seconds)
                    except LoadFailed as error:
                        if not system.environment:
                            raise
                        broken.add((system.name, connections))
                        run.leave_out(LOAD, f"{system.name} at c={connections}: {' '.join(str(error).split())[:300]}")
                    else:
                        run.record(LOAD, f"c={connections}", system.name, number, values)


def _round(endpoint: Endpoint, connections: int, seconds: float) -> dict[str, float]:
    members = {role: list_pids() for role, list_pids in endpoint.roots.items()}
    before = {role: cpu_s(pids) for role, pids in members.items()}
    values = echo_round(endpoint.port, endpoint.path, ECHO_BODY, connections, seconds)
    requests = values["requests_per_s"] * seconds
    for role, pids in members.items():
        values[f"cpu_{role}_us"] = (cpu_s(pids) - before[role]) / requests * 1e6
    values["cpu_all_us"] = sum(values[f"cpu_{role}_us"] for role in members)
    return values

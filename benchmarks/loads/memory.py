"""Memory of everything that serves one encoder: with 1, 2 and 4 front workers, and as the recipe with 4 web workers."""

from __future__ import annotations

from benchmarks import inputs
from benchmarks.load_generator import in_turn, lanes
from benchmarks.machine import pss_mib
from benchmarks.run import Run
from benchmarks.systems import HEADWAITER, MINILM_MODEL, Endpoint, System, embedding_systems, headwaiter

LOAD = "memory"
FRONTS = (1, 2, 4)
RECIPE = "recipe, def, 4 workers"


def measure(run: Run) -> None:
    """One round: memory does not vary as time does."""
    for fronts in FRONTS:
        system = headwaiter([MINILM_MODEL], fronts, name=HEADWAITER)
        with run.all_running(LOAD, [system]) as endpoints:
            endpoint = endpoints[system]
            _ask_for_a_while(run, system, endpoint)
            by_role = {role: [pss_mib(pid) for pid in list_pids()] for role, list_pids in endpoint.roots.items()}
        values = {f"{role}_mib": sum(members) for role, members in by_role.items()}
        # The largest processes of the role are the workers; uvicorn's parent and a resource tracker are smaller.
        largest = sorted(by_role["front"], reverse=True)[:fronts]
        values |= {"all_mib": sum(values.values()), "front_worker_mib": max(largest)}
        run.record(LOAD, f"fronts={fronts}", HEADWAITER, 1, values)
    peers = [system for system in embedding_systems() if system.name == RECIPE]
    with run.all_running(LOAD, peers) as endpoints:
        for system, endpoint in endpoints.items():
            _ask_for_a_while(run, system, endpoint)
            run.record(LOAD, "fronts=4", system.name, 1, {"all_mib": sum(map(pss_mib, endpoint.pids()))})


def _ask_for_a_while(run: Run, system: System, endpoint: Endpoint) -> None:
    """So that every process has done its work at least once."""
    bodies = inputs.bodies(inputs.short_texts())
    lanes(endpoint.port, system.path, bodies, [in_turn(range(len(bodies)))] * 16, seconds=run.seconds(4.0))

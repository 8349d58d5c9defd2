"""What holds for all tests: long files begin first, and a property is checked however slow the machine is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Other tests and their processes run beside each example, so how long one takes says nothing about what it tries.
settings.register_profile("whatever the load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whatever the load")

# The files that take longest, the longest first: one that is begun last would keep one worker busy, and all others
# waiting, at the end. A file that is missing here is begun later, and costs no more than that.
LONGEST = (
    "examples/test_stories.py",
    "test_command_serve.py",
    "chaos/test_ledgers.py",
    "faults/test_field_stories.py",
    "faults/test_model_process_faults.py",
    "frontend/test_front_processes.py",
    "faults/test_server_and_front_faults.py",
    "model_worker/test_runtime_generation.py",
    "chaos/test_nothing_is_left.py",
    "examples/test_before_and_after.py",
    "test_command_interface.py",
    "faults/test_field_probes.py",
    "chaos/test_hostile_requests.py",
    "chaos/test_stops.py",
    "simulation/test_swarm.py",
    "test_command_plan.py",
    "frontend/test_dashboard_browser.py",
    "faults/test_security.py",
)
_RANKS = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take file by file in the order of this list."""
    items.sort(key=lambda item: _RANKS.get(item.path, len(_RANKS)))

"""Requests made from our own description of the service, right and wrong ones: each gets a documented answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok

from tests.topology import Service

EXAMPLES = 20
GROWTH_BYTES_MAX = 48 * 2**20
MODEL = {"name": "m", "model": "tests.obedient_model:Obedient", "device": "cpu", "options": {}}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service([MODEL], http={"request_timeout_max_s": 5}) as started:
        yield started.wait_ready()


def test_no_request_made_from_the_description_breaks_the_service(service: Service) -> None:
    document = service.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=service.url)
    pids, sizes = service.front_workers(), growth(service)
    asked = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        asked += 1

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: schemathesis.Case[Any]) -> None:
            response = case.call(timeout=20)
            # A tiny deadline passes, and a model may refuse; a fault of ours is another thing.
            assert response.status_code not in (500, 502), (case.as_curl_command(), response.text)

        ask()
    assert asked >= 8
    assert service.front_workers() == pids
    assert service.slots()["m/0"]["incarnation"] == 1
    assert growth(service) - sizes < GROWTH_BYTES_MAX
    assert "request_failed" not in service.log("front.log")
    assert "Traceback" not in service.log("front.log")


def growth(service: Service) -> int:
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in service.front_workers())

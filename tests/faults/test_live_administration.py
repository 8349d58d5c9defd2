"""Reload, scale, drain, unload and idle unload of a real model server, while clients count every answer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.operators import Operator
from tests.topology import Service, alive, wait_for

CLIENTS = 4


class Site(NamedTuple):
    service: Service
    operator: Operator
    load_error: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """`steady` is there all the time, `lazy` only while somebody asks for it."""
    load_error = tmp_path_factory.mktemp("site") / "load_error"
    model = {"model": "tests.obedient_model:Obedient", "device": "cpu", "max_batch_size": 2}
    models: list[dict[str, Any]] = [
        {**model, "name": "steady", "options": {"load_error_file": str(load_error)}},
        {**model, "name": "lazy", "idle_unload_s": 0.5},
    ]
    with Service(models) as service:
        service.wait_ready()
        with Operator(service.directory / "run") as operator:
            yield Site(service, operator, load_error)


class Clients:
    """Ask `steady` for squares, one after the other, and count what they get, until the `with` block ends."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[number]) for number in range(CLIENTS)]
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        self.see_more(CLIENTS)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def see_more(self, count: int) -> None:
        """Waits for so many more right answers."""
        before = self.answers["right"]
        wait_for(lambda: self.answers["right"] >= before + count, f"{count} more answers, not {self.answers}")

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._service.url, timeout=60) as http:
            while not self._stop.is_set():
                number += CLIENTS
                inputs = {"do": "square", "number": number, "seconds": 0.01}
                answer = http.post("/models/steady", json={"inputs": inputs})
                is_right = answer.status_code == 200 and answer.json() == number * number
                with self._lock:
                    self.answers["right" if is_right else answer.text] += 1


def test_reload_under_load_costs_no_answer_and_brings_a_new_process(site: Site) -> None:
    before = site.service.model_pids()
    with Clients(site.service) as clients:
        ended = site.operator.order("reload", "steady")
        clients.see_more(CLIENTS)
    assert (ended.outcome, ended.text) == ("done", "model 'steady' is loaded afresh: steady/0")
    assert set(clients.answers) == {"right"}
    after = site.service.model_pids()
    assert after["steady/0"] != before["steady/0"]
    assert not alive(before["steady/0"])
    assert after["lazy/0"] in (before["lazy/0"], 0)


def test_reload_that_cannot_be_loaded_leaves_the_process_that_serves(site: Site) -> None:
    before = site.service.model_pids()["steady/0"]
    site.load_error.write_text("the new weights are upside down")
    try:
        with Clients(site.service) as clients:
            ended = site.operator.order("reload", "steady")
            clients.see_more(CLIENTS)
    finally:
        site.load_error.unlink()
    assert ended.outcome == "failed"
    assert "the new weights are upside down" in ended.text
    assert "goes on serving" in ended.text
    assert set(clients.answers) == {"right"}
    assert site.service.model_pids()["steady/0"] == before


def test_scale_to_two_and_back_costs_no_answer_and_leaves_the_other_slots_alone(site: Site) -> None:
    before = site.service.model_pids()
    with Clients(site.service) as clients:
        grown = site.operator.order("scale", "steady", 2)
        assert grown.outcome == "done", grown.text
        assert "replicas = 2" in grown.text
        two = site.service.slots()
        assert [*two] == ["steady/0", "steady/1", "lazy/0"]
        assert two["steady/1"]["state"] == "ready"
        assert two["steady/0"]["pid"] == before["steady/0"]
        clients.see_more(CLIENTS)
        shrunk = site.operator.order("scale", "steady", 1)
        assert shrunk.outcome == "done", shrunk.text
        clients.see_more(CLIENTS)
    assert set(clients.answers) == {"right"}
    assert [*site.service.slots()] == ["steady/0", "lazy/0"]
    assert site.service.model_pids()["steady/0"] == before["steady/0"]
    assert not alive(two["steady/1"]["pid"])


def test_model_that_nobody_asks_for_gives_its_memory_back_and_the_next_request_is_answered(site: Site) -> None:
    def resting() -> bool:
        return bool(site.service.slots()["lazy/0"]["state"] == "unloaded")

    pid = site.service.ask("lazy", {"do": "report"}).json()["pid"]
    wait_for(resting, "lazy is unloaded")
    assert not alive(pid)
    assert site.service.probe("/readyz") == 200
    assert site.service.http.get("/models/lazy").json()["state"] == "idle"
    answer = site.service.ask("lazy", {"do": "report"})
    assert answer.status_code == 200
    assert answer.json()["pid"] != pid


def test_drain_finishes_what_is_in_progress_and_resume_opens_the_door(site: Site) -> None:
    service = site.service
    slow = service.ask_later("steady", {"do": "square", "number": 7, "seconds": 1.0})
    wait_for(lambda: service.slots()["steady/0"]["held"], "the model has work")
    token = site.operator.begin("drain")
    wait_for(lambda: service.probe("/readyz") == 503, "the front has heard of it")
    refused = service.ask("steady", {"do": "square", "number": 2})
    assert (refused.status_code, refused.json()["error_type"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) > 0
    assert site.operator.answer(token).outcome == "done"
    assert slow.result(30).json() == 49
    assert site.operator.order("resume").outcome == "done"
    wait_for(lambda: service.probe("/readyz") == 200, "it is ready again")
    assert service.ask("steady", {"do": "square", "number": 2}).json() == 4


def test_unloaded_model_is_refused_by_name_until_it_is_loaded(site: Site) -> None:
    service = site.service
    pid = service.model_pids()["steady/0"]
    assert site.operator.order("unload", "steady").outcome == "done"
    assert not alive(pid)
    refused = service.ask("steady", {"do": "square", "number": 2})
    assert (refused.status_code, refused.json()["error_type"]) == (503, "model_loading")
    assert "unloaded by an operator" in refused.json()["error"]
    assert site.operator.order("load", "steady").outcome == "done"
    assert service.ask("steady", {"do": "square", "number": 2}).json() == 4


def test_order_that_cannot_be_carried_out_is_refused_with_the_remedy(site: Site) -> None:
    for order, word in (
        (("scale", "steady", 0), "unload"),
        (("reload", "nobody"), "known: steady, lazy"),
        (("repaint", "steady"), "use reload"),
    ):
        ended = site.operator.order(*order)
        assert ended.outcome == "refused"
        assert word in ended.text

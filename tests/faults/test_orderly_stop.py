"""What the logs of both programs say: nothing alarming at an orderly stop, and a request's own name at a fault."""

from __future__ import annotations

import pytest

from tests.topology import Service, stop, wait_for

MODEL = {"name": "obedient", "model": "tests.obedient_model:Obedient", "device": "cpu"}


def warnings(service: Service) -> list[str]:
    lines = (service.log("server.log") + service.log("front.log")).splitlines()
    return [line for line in lines if " INFO " not in line]


@pytest.mark.parametrize("first", ["front", "server"])
def test_orderly_stop_of_everything_is_no_cause_for_a_warning(first: str) -> None:
    with Service([MODEL], workers=2) as service:
        service.wait_ready()
        waiting = [service.ask_later("obedient", {"do": "sleep", "seconds": 0.3}) for _ in range(4)]
        wait_for(lambda: service.slots()["obedient/0"]["held"], "the model has work")
        assert service.front is not None
        assert service.server is not None
        programs = [service.front, service.server]
        for program in programs if first == "front" else reversed(programs):
            assert stop(program) == 0
        # Requests that no worker had read yet when the server began to drain are refused; none hangs or breaks off.
        assert {answer.result(30).status_code for answer in waiting} <= {200, 503}
        assert warnings(service) == []
        if first == "front":
            assert service.log("server.log").count("front_left front=") == 2
            assert service.log("server.log").count('reason="said goodbye" cancelled=0') == 2


def test_restart_of_the_model_server_is_no_cause_for_a_warning() -> None:
    with Service([MODEL]) as service:
        service.wait_ready()
        assert service.server is not None
        assert stop(service.server) == 0
        noticed = ("server_silent", "server_disconnected")
        wait_for(lambda: any(event in service.log("front.log") for event in noticed), "it is missed")
        service.start_server()
        service.wait_ready()
        assert warnings(service) == []


def test_poison_is_named_by_the_id_that_its_sender_saw() -> None:
    with Service([MODEL]) as service:
        service.wait_ready()
        body = {"inputs": {"do": "exit"}}
        answer = service.http.post("/models/obedient", json=body, headers={"X-Request-Id": "mine-77"})
        assert answer.json()["error_type"] == "poison_input"
        assert "request_poisoned request_id=mine-77" in service.log("server.log")


def test_model_that_does_not_stream_answers_a_stream_with_one_piece() -> None:
    with Service([MODEL]) as service:
        service.wait_ready()
        answer = service.ask("obedient", {"do": "echo", "value": {"whole": 1}}, stream=True)
        assert answer.text == 'data: {"whole":1}\n\nevent: done\ndata: null\n\n'
        nothing = service.ask("obedient", {"do": "echo"}, stream=True)
        assert nothing.text == "data: null\n\nevent: done\ndata: null\n\n"
        refused = service.ask("obedient", {"do": "object"}, stream=True)
        assert (refused.status_code, refused.json()["error_type"]) == (500, "model_error")

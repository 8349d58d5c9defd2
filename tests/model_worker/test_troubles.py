"""What the model server remembers of what went wrong: each kind once, bounded, and nothing that quotes a request."""

from __future__ import annotations

from typing import Any

import pytest

from model_worker.troubles import TROUBLES_MAX, Troubles
from shared.errors import Code
from tests.command_line import ECHO
from tests.topology import Service, wait_for


def test_equal_troubles_are_one_with_the_newest_cause() -> None:
    troubles = Troubles()
    troubles.logged("replica_exited", {"slot": "m/0", "cause": "crashed", "reason": "exited with code 3"}, 10.0)
    troubles.request_failed(Code.OVERLOADED, "", "8 requests wait already", 11.0)
    troubles.logged("replica_exited", {"slot": "m/0", "cause": "crashed", "reason": "killed by signal 9"}, 12.0)
    first, last = troubles.recent(15.0)
    assert (first.event, first.slot, first.count) == ("overloaded", "", 1)
    assert (last.event, last.slot, last.count, last.seconds_ago) == ("replica_exited", "m/0", 2, 3.0)
    assert last.text == "crashed: killed by signal 9"


def test_an_event_without_a_reason_is_told_by_its_fields() -> None:
    troubles = Troubles()
    troubles.logged("loop_late", {"late_s": 2.5}, 0.0)
    [trouble] = troubles.recent(0.0)
    assert trouble.text == "late_s=2.5"


@pytest.mark.parametrize("code", [Code.INVALID_INPUT, Code.BAD_REQUEST, Code.TOO_LARGE, Code.CANCELLED])
def test_what_callers_do_wrong_is_no_trouble_of_the_service(code: Code) -> None:
    troubles = Troubles()
    troubles.request_failed(code, "m/0", "inputs must be text, got 'my secret'", 0.0)
    assert troubles.recent(0.0) == ()


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("ValueError: could not read 'my secret'", "ValueError"),
        ("torch.OutOfMemoryError: my secret", ""),
        ("my secret", ""),
        ("my secret is ValueError: x", ""),
        ("ValueError", "ValueError"),
    ],
)
def test_of_what_a_model_says_about_a_request_the_kind_of_error_is_kept_alone(message: str, kept: str) -> None:
    troubles = Troubles()
    troubles.request_failed(Code.MODEL_ERROR, "m/0", message, 0.0)
    [trouble] = troubles.recent(0.0)
    assert trouble.text == kept


def test_the_oldest_kinds_make_room() -> None:
    troubles = Troubles()
    for number in range(TROUBLES_MAX + 5):
        troubles.logged("replica_exited", {"slot": f"m/{number}", "reason": "x"}, float(number))
    kept = troubles.recent(100.0)
    assert [trouble.slot for trouble in kept] == [f"m/{number}" for number in range(5, TROUBLES_MAX + 5)]


def test_status_tells_what_became_of_a_process_and_nothing_that_was_asked() -> None:
    with Service([ECHO]) as service:
        service.wait_ready()
        assert [device["device"] for device in service.status()["devices"]] == ["cpu"]
        assert service.status()["devices"][0]["memory_bytes"] > 2**20
        assert service.status()["troubles"] == []
        assert service.ask("echo", {"do": "fail", "text": "my secret"}).status_code == 500
        assert service.ask("echo", {"do": "nothing", "text": "my secret"}).status_code == 422
        assert service.ask("echo", {"do": "kill", "text": "my secret"}).status_code == 500

        def troubles() -> dict[str, dict[str, Any]]:
            return {trouble["event"]: trouble for trouble in service.status()["troubles"]}

        def both() -> dict[str, dict[str, Any]] | None:
            found = troubles()
            return found if found.keys() >= {"poison_input", "replica_exited"} else None

        told = wait_for(both, "the request and its process are told")
        assert told["model_error"]["text"] == "ValueError"
        assert told["replica_exited"]["slot"] == "echo/0"
        # The input was tried once more, alone.
        assert told["replica_exited"]["count"] == 2
        assert "signal 9" in told["replica_exited"]["text"]
        assert "my secret" not in str(told)

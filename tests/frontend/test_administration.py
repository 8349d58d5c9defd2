"""Administration over HTTP: who may order, what reaches the model server, and how each end is told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from frontend.surfaces.administration import OF_MODEL, OF_SERVICE
from shared.config import Config
from shared.errors import ConfigurationError
from shared.messages import Manage
from tests.fronts import Front, raw_request
from tests.stub_broker import StubBroker, end_with, model_state, obey
from tests.topology import wait_for

ADMIN_KEY, API_KEY = "s3cret-admin-key", "s3cret-api-key"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
USER = {"Authorization": f"Bearer {API_KEY}"}
PATHS = [f"/admin/models/echo/{action}" for action in OF_MODEL] + [f"/admin/{action}" for action in OF_SERVICE]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with Front(api_keys=[API_KEY], admin_keys=[ADMIN_KEY, "another"], request_timeout_max_s=30) as started:
        yield started


@pytest.fixture(scope="module")
def server(front: Front) -> Iterator[StubBroker]:
    with StubBroker(front.run_dir, models=[model_state("echo"), model_state("org/writer")]) as started:
        front.wait_ready()
        yield started


@pytest.fixture
def broker(server: StubBroker) -> StubBroker:
    """The same one for all tests, which remembers nothing of the last."""
    server.forget()
    return server


def order(front: Front, path: str, **options: Any) -> httpx.Response:
    return front.post(f"/admin/{path}", headers=ADMIN, **options)


# --- who may ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_only_an_administration_key_opens_administration(front: Front, broker: StubBroker, path: str) -> None:
    for headers in ({}, USER, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {ADMIN_KEY}"}):
        refused = front.post(path, headers=headers, json={"replicas": 1})
        assert (refused.status_code, refused.json()["error_type"]) == (401, "unauthorized")
        assert "http.admin_keys" in refused.json()["error"]
    assert broker.received(Manage) == []
    assert ADMIN_KEY not in front.log()


def test_an_administration_key_opens_what_an_api_key_does(front: Front, broker: StubBroker) -> None:
    assert front.ask("x", headers=ADMIN).status_code == 200
    assert front.get("/status", headers=ADMIN).status_code == 200


def test_where_no_administration_key_is_configured_nobody_administers() -> None:
    with Front() as front, StubBroker(front.run_dir) as broker:
        front.wait_ready()
        for path in PATHS:
            refused = front.post(path, headers=ADMIN, json={"replicas": 1})
            assert refused.status_code == 403
            assert "set http.admin_keys" in refused.json()["error"]
        client = triton.InferenceServerClient(front.url.removeprefix("http://"))
        with pytest.raises(InferenceServerException, match="load is not supported"):
            client.load_model("echo", headers=ADMIN)
        assert broker.received(Manage) == []


def test_a_key_for_both_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAITER_HTTP__API_KEYS", '["xyzzy-1", "xyzzy-2"]')
    monkeypatch.setenv("HEADWAITER_HTTP__ADMIN_KEYS", '["xyzzy-3", "xyzzy-2"]')
    with pytest.raises(ConfigurationError, match="key 2 of 2 is in api_keys as well") as refused:
        Config.load()
    assert "xyzzy" not in str(refused.value)


# --- what is ordered -------------------------------------------------------------------------------------------------


def test_each_path_is_an_order(front: Front, broker: StubBroker) -> None:
    for action in OF_MODEL:
        done = order(front, f"models/org/writer/{action}", json={"replicas": 2} if action == "scale" else {})
        assert (done.status_code, done.json()["outcome"]) == (200, "done"), done.text
        assert action in done.json()["text"]
        assert done.headers["x-request-id"]
    for action in OF_SERVICE:
        assert order(front, action).status_code == 200
    told = [(each.action, each.model, each.replicas) for each in broker.received(Manage)]
    assert told == [(action, "org/writer", 2 if action == "scale" else 0) for action in OF_MODEL] + [
        (action, "", 0) for action in OF_SERVICE
    ]
    counted = front.get("/metrics").text
    assert 'code="200",model="org/writer",route="/admin/models/{name}/scale"' in counted
    assert 'code="200",model="",route="/admin/drain"' in counted
    assert "managed request_id=" in front.log()


@pytest.mark.parametrize(("outcome", "status"), [("refused", 409), ("failed", 502)])
def test_what_is_not_done_has_a_status_and_the_cause(
    front: Front, broker: StubBroker, outcome: str, status: int
) -> None:
    broker.manage = end_with(outcome, "because of the weather")
    told = order(front, "models/echo/reload")
    assert (told.status_code, told.json()) == (status, {"error": "because of the weather", "error_type": outcome})


def test_an_order_that_cannot_be_read_is_not_given(front: Front, broker: StubBroker) -> None:
    wrong: list[tuple[str, bytes, int, str]] = [
        ("models/echo/scale", b"", 400, '{"replicas": 2}'),
        ("models/echo/scale", b"{", 400, "not JSON"),
        ("models/echo/scale", b"{}", 422, "has nothing"),
        ("models/echo/scale", b'{"replicas": 0}', 422, "unload ends all"),
        ("models/echo/scale", b'{"replicas": true}', 422, "not a whole number"),
        ("models/echo/scale", b'{"replicas": 1e99}', 422, "not a whole number"),
        ("models/echo/scale", b'{"replicas": 1, "now": 1}', 422, "'now'"),
        ("models/echo/reload", b'{"replicas": 1}', 422, "send none"),
        ("drain", b"[]", 422, "an array"),
        ("models/nope/reload", b"", 404, "known: echo, org/writer"),
        ("models/echo/reload?timeout_s=soon", b"", 400, "timeout_s"),
        ("models/echo/reload?timeout_s=-1", b"", 400, "timeout_s"),
        ("models/echo/reload?timeout_s=1e9", b"", 422, "request_timeout_max_s"),
        ("models/echo/explode", b"", 404, "/docs"),
        ("nothing", b"", 404, "/docs"),
    ]
    for path, body, status, words in wrong:
        refused = order(front, path, content=body)
        assert (refused.status_code, words in refused.json()["error"]) == (status, True), refused.text
    assert broker.received(Manage) == []


# --- how long it is waited for ---------------------------------------------------------------------------------------


def test_an_order_that_takes_longer_than_its_sender_waits_goes_on(front: Front, broker: StubBroker) -> None:
    broker.manage = lambda order: []
    told = order(front, "models/echo/reload?timeout_s=0.2")
    assert (told.status_code, told.json()["outcome"]) == (202, "goes_on")
    assert "/status" in told.json()["text"]
    # The end that comes later is nobody's, and does no harm.
    broker.end_orders("done", "at last")
    broker.manage = obey
    assert order(front, "models/echo/reload").json()["text"] == "reload echo 0"


def test_a_slow_end_is_waited_for(front: Front, broker: StubBroker) -> None:
    broker.manage = end_with("done", "at last", after_s=1.0)
    assert order(front, "models/echo/reload?timeout_s=20").json() == {"outcome": "done", "text": "at last"}


def test_a_sender_who_leaves_stops_nothing_and_costs_nothing(front: Front, broker: StubBroker) -> None:
    broker.manage = lambda order: []
    with front.connect() as connection:
        connection.sendall(raw_request("/admin/drain", b"", f"Authorization: Bearer {ADMIN_KEY}"))
        wait_for(lambda: broker.received(Manage), "it is ordered")
    wait_for(lambda: "client_gone" in front.log(), "the front notices")
    assert [each.action for each in broker.received(Manage)] == ["drain"]


def test_a_model_server_that_is_not_there_or_restarted_meanwhile_is_told() -> None:
    with Front(admin_keys=[ADMIN_KEY]) as front:
        nobody = order(front, "drain")
        assert (nobody.status_code, nobody.json()["error_type"]) == (503, "server_unavailable")
        answers: list[httpx.Response] = []
        with StubBroker(front.run_dir) as broker:
            front.wait_ready()
            broker.manage = lambda order: []
            asking = threading.Thread(target=lambda: answers.append(order(front, "models/echo/reload")))
            asking.start()
            wait_for(lambda: broker.received(Manage), "it is ordered")
        with StubBroker(front.run_dir):
            asking.join(20)
        assert (answers[0].status_code, answers[0].json()["error_type"]) == (503, "server_unavailable")
        assert "a new one begins as it is configured" in answers[0].json()["error"]


def test_a_worker_that_stops_leaves_what_was_ordered_to_go_on() -> None:
    with Front(admin_keys=[ADMIN_KEY]) as front, StubBroker(front.run_dir) as broker, ThreadPoolExecutor() as pool:
        front.wait_ready()
        broker.manage = lambda order: []
        told = pool.submit(order, front, "drain")
        wait_for(lambda: broker.received(Manage), "it is ordered")
        front.signal(signal.SIGTERM)
        assert (told.result(20).status_code, told.result().json()["outcome"]) == (202, "goes_on")
        assert front.wait() == 0


# --- Open Inference --------------------------------------------------------------------------------------------------


def test_tritons_client_loads_and_unloads_with_the_key(front: Front, broker: StubBroker) -> None:
    client = triton.InferenceServerClient(front.url.removeprefix("http://"))
    client.load_model("org/writer", headers=ADMIN)
    client.unload_model("echo", headers=ADMIN, unload_dependents=True)
    assert [(each.action, each.model) for each in broker.received(Manage)] == [
        ("load", "org/writer"),
        ("unload", "echo"),
    ]
    with pytest.raises(InferenceServerException, match="load is not supported"):
        client.load_model("echo", headers=USER)
    with pytest.raises(InferenceServerException, match="as it is configured"):
        client.load_model("echo", headers=ADMIN, config="{}")
    broker.manage = end_with("refused", "because of the weather")
    with pytest.raises(InferenceServerException, match="because of the weather") as refused:
        client.load_model("echo", headers=ADMIN)
    assert refused.value.status() == "409"
    broker.manage = lambda order: []
    with pytest.raises(InferenceServerException, match="the unload goes on") as late:
        client.unload_model("echo", headers=ADMIN | {"X-Request-Timeout": "0.2"})
    assert late.value.status() == "504"
    assert len(broker.received(Manage)) == 4


def test_the_description_has_every_path_with_what_it_answers(front: Front) -> None:
    paths = front.get("/openapi.json").json()["paths"]
    for path in PATHS:
        post = paths[path.replace("/models/echo/", "/models/{name}/")]["post"]
        assert {"200", "202", "401", "403", "409", "502"} <= set(post["responses"])
        assert post["security"] == [{"bearer": []}]
        assert "timeout_s" in [parameter["name"] for parameter in post["parameters"]]

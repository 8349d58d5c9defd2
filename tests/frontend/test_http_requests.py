"""The native dialect over real sockets: what clients send, and what they get."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import select
import signal
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from frontend.calls import StreamCall
from frontend.responses import KEEP_ALIVE
from frontend.surfaces.base import Exchange
from frontend.surfaces.native import NativeEvents
from shared.errors import Code, RequestError
from shared.messages import Reply, ReplyHeader, RequestId, Timings
from shared.values import pack
from shared.wire import encode
from tests.fronts import Front, raw_request, read_response
from tests.stub_broker import (
    Answer,
    Behaviour,
    Fail,
    Piece,
    Request,
    Step,
    StubBroker,
    echo,
    model_state,
    silent,
)
from tests.topology import wait_for

MODELS = (model_state("echo"), model_state("other"))


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with Front(models=("echo", "other"), body_bytes_max=100_000, request_timeout_max_s=20.0) as started:
        yield started


@pytest.fixture(scope="module")
def running_broker(front: Front) -> Iterator[StubBroker]:
    with StubBroker(front.run_dir, models=MODELS) as started:
        front.wait_ready()
        yield started


@pytest.fixture
def broker(front: Front, running_broker: StubBroker) -> Iterator[StubBroker]:
    running_broker.behave = echo
    running_broker.models = MODELS
    # A test that ended with other models may have been heard of last.
    front.wait_ready()
    yield running_broker
    running_broker.behave = echo
    running_broker.models = MODELS


def steps(*planned: Step) -> Behaviour:
    return lambda request: planned


def last(broker: StubBroker, marker: str) -> Request:
    return next(request for request in reversed(broker.requests) if request.header.request_id == marker)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_answer_is_the_models_result_without_an_envelope(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Answer(value=[{"label": "good", "score": 0.5}]))
    answer = front.ask("x")
    assert answer.status_code == 200
    assert answer.json() == [{"label": "good", "score": 0.5}]
    assert answer.headers["content-type"] == "application/json"


def test_inputs_and_parameters_reach_the_model_as_they_are(front: Front, broker: StubBroker) -> None:
    inputs = {"question": "é?", "context": ["a", 1, 2.5, None, True]}
    answer = front.post("/models/echo", json={"inputs": inputs, "parameters": {"top_k": 2}})
    assert answer.json() == {"model": "echo", "inputs": inputs, "parameters": {"top_k": 2}}


def test_what_json_has_no_word_for_is_null(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Answer(value={"score": float("nan"), "most": float("inf")}))
    assert json.loads(front.ask("x").content) == {"score": None, "most": None}


@pytest.mark.parametrize("content_type", [None, "application/octet-stream", "text/plain", "application/json"])
def test_json_is_read_whatever_its_content_type_says(
    front: Front, broker: StubBroker, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = front.post("/models/echo", content=b'{"inputs": 1, "parameters": null}', headers=headers)
    assert (answer.status_code, answer.json()["inputs"]) == (200, 1)


def test_server_timing_says_where_the_time_went(front: Front, broker: StubBroker) -> None:
    timing = front.ask("x").headers["server-timing"]
    expected = Timings(queue_ms=1.0, prepare_ms=2.0, forward_ms=3.0, finish_ms=4.0)
    for stage in ("queue", "prepare", "forward", "finish"):
        assert f"{stage};dur={getattr(expected, f'{stage}_ms')}" in timing


def test_request_id_is_echoed_and_passed_on(front: Front, broker: StubBroker) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = front.ask("x", headers={"X-Request-Id": "mine-1", "traceparent": trace, "X-Request-Priority": "-5"})
    assert answer.headers["x-request-id"] == "mine-1"
    header = last(broker, "mine-1").header
    assert (header.traceparent, header.priority) == (trace, -5)


def test_request_without_an_id_gets_one_that_also_failures_carry(front: Front, broker: StubBroker) -> None:
    ids = {front.ask("x").headers["x-request-id"], front.ask("x", model="none").headers["x-request-id"]}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{24}", request_id) for request_id in ids)


def test_timeout_header_is_the_deadline(front: Front, broker: StubBroker) -> None:
    front.ask("x", headers={"X-Request-Timeout": "7.5", "X-Request-Id": "short"})
    assert 6_000 < last(broker, "short").header.remaining_ms <= 7_500


def test_timeout_header_beyond_the_maximum_is_refused(front: Front, broker: StubBroker) -> None:
    answer = front.ask("x", headers={"X-Request-Timeout": "20.5"})
    assert (answer.status_code, answer.json()["detail"]) == (422, {"request_timeout_max_s": 20.0})
    assert "'20.5' is more than the 20 seconds" in answer.json()["error"]


# --- refusals of this process ----------------------------------------------------------------------------------------

BAD_BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "empty"),
    (b"{", 400, "not JSON"),
    (b'{"inputs": NaN}', 400, "not JSON"),
    (b'{"inputs": "caf\xe9"}', 400, "byte 0xe9 at position 15"),
    ('{"inputs": 1}'.encode("utf-16"), 400, "byte 0xff at position 0"),
    (b'{"inputs": 1}\n}', 400, "line 2, column 1"),
    (b"[1]", 422, "an array, not an object"),
    (b"null", 422, "null, not an object"),
    (b"{}", 422, "no inputs"),
    (b'{"inputs": 1, "parameters": "x"}', 422, "parameters is a string"),
    (b'{"inputs": 1, "parameters": [1]}', 422, "parameters is an array"),
    (b'{"inputs": 1, "stream": 1}', 422, "stream is a number"),
    (b'{"inputs": 1, "top_k": 1, "x": 2}', 422, "'top_k', 'x'"),
    (b'{"inputs": ' + b"[" * 200 + b"]" * 200 + b"}", 422, "inputs[0][0]"),
    (b'{"inputs": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400, "not JSON"),
]


@pytest.mark.parametrize(("body", "status", "text"), BAD_BODIES, ids=[text for _, _, text in BAD_BODIES])
def test_bad_body_is_refused_with_its_reason(
    front: Front, broker: StubBroker, body: bytes, status: int, text: str
) -> None:
    answer = front.post("/models/echo", content=body)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["error"]
    assert answer.json()["error_type"] == ("bad_request" if status == 400 else "invalid_input")


def test_malformed_json_names_the_position(front: Front, broker: StubBroker) -> None:
    detail = front.post("/models/echo", content=b'{"inputs": 1,\n "parameters": }').json()["detail"]
    assert (detail["line"], detail["column"]) == (2, 16)


@pytest.mark.parametrize(
    "header",
    ["X-Request-Timeout: soon", "X-Request-Timeout: -1", "X-Request-Priority: high", "Content-Encoding: gzip"],
)
def test_bad_header_is_refused(front: Front, broker: StubBroker, header: str) -> None:
    name, _, value = header.partition(": ")
    answer = front.ask("x", headers={name: value})
    assert (answer.status_code, answer.json()["error_type"]) == (400, "bad_request")
    assert name in answer.json()["error"]


def test_compressed_body_is_read_as_what_it_stands_for(front: Front, broker: StubBroker) -> None:
    content = json.dumps({"inputs": "x" * 1000}).encode()
    for encoding, body in (("gzip", gzip.compress(content)), ("deflate", zlib.compress(content))):
        answer = front.post("/models/echo", content=body, headers={"Content-Encoding": encoding})
        assert answer.status_code == 200, answer.text
        assert answer.json()["inputs"] == "x" * 1000


def test_unknown_model_is_told_the_known_ones(front: Front, broker: StubBroker) -> None:
    for name in ("none", "org/name", "echo/v1", "%1b[31m"):
        answer = front.ask("x", model=name)
        assert (answer.status_code, answer.json()["error_type"]) == (404, "unknown_model")
        assert "echo, other" in answer.json()["error"]


def test_root_asks_the_only_model_there_is(front: Front, broker: StubBroker) -> None:
    refused = front.post("/", json={"inputs": 1})
    assert refused.status_code == 404
    assert "/models/NAME" in refused.json()["error"]
    broker.models = MODELS[:1]
    wait_for(lambda: front.post("/", json={"inputs": 1}).status_code == 200, "one model is left")
    broker.models = MODELS
    wait_for(lambda: front.post("/", json={"inputs": 1}).status_code == 404, "two models again")


@pytest.mark.parametrize(
    ("method", "path", "status", "error_type"),
    [
        ("GET", "/none", 404, "not_found"),
        ("POST", "/none", 404, "not_found"),
        ("GET", "/models/none", 404, "unknown_model"),
        ("DELETE", "/models/echo", 405, "method_not_allowed"),
        ("POST", "/livez", 405, "method_not_allowed"),
        # Not redirected to a host that the client has named.
        ("GET", "/livez/", 404, "not_found"),
    ],
)
def test_what_the_framework_refuses_has_the_same_shape(
    front: Front, broker: StubBroker, method: str, path: str, status: int, error_type: str
) -> None:
    answer = front.client.request(method, front.url + path)
    assert (answer.status_code, answer.json()["error_type"]) == (status, error_type)
    assert ("allow" in answer.headers) is (status == 405)


# --- failures of the model -------------------------------------------------------------------------------------------

FAILURES: list[tuple[Code, int, str | None]] = [
    (Code.INVALID_INPUT, 422, None),
    (Code.UNKNOWN_MODEL, 404, None),
    (Code.OVERLOADED, 429, None),
    (Code.MODEL_ERROR, 500, "false"),
    (Code.OUT_OF_MEMORY, 500, "false"),
    (Code.POISON_INPUT, 500, "false"),
    (Code.INTERNAL, 500, None),
    (Code.MODEL_CRASHED, 502, None),
    (Code.MODEL_LOADING, 503, None),
    (Code.MODEL_FAILED, 503, "false"),
    (Code.DRAINING, 503, None),
    (Code.DEADLINE_EXCEEDED, 504, "false"),
]


@pytest.mark.parametrize(("code", "status", "should_retry"), FAILURES, ids=[code for code, _, _ in FAILURES])
def test_each_code_has_its_status_and_its_advice(
    front: Front, broker: StubBroker, code: Code, status: int, should_retry: str | None
) -> None:
    broker.behave = steps(Fail(code=code, message="because", detail={"limit": 8}))
    answer = front.ask("x")
    assert answer.status_code == status
    assert answer.json() == {"error": "because", "error_type": code.value, "detail": {"limit": 8}}
    assert answer.headers.get("x-should-retry") == should_retry
    assert ("retry-after" in answer.headers) is (status in (429, 503) and should_retry is None)


def test_failed_model_is_worth_a_retry_only_if_it_will_be_tried_again(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Fail(code=Code.MODEL_FAILED, retry_after_ms=90_000))
    answer = front.ask("x")
    assert (answer.headers.get("retry-after"), answer.headers.get("x-should-retry")) == ("90", None)


def test_retry_after_is_in_whole_seconds_rounded_up(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Fail(code=Code.OVERLOADED, retry_after_ms=1200))
    assert front.ask("x").headers["retry-after"] == "2"
    broker.behave = steps(Fail(code=Code.OVERLOADED, retry_after_ms=10))
    assert front.ask("x").headers["retry-after"] == "1"


def test_lost_answer_is_504_after_the_deadline_and_the_server_is_told(front: Front, broker: StubBroker) -> None:
    broker.behave = silent
    answer = front.ask("x", headers={"X-Request-Timeout": "0.3", "X-Request-Id": "lost"})
    assert (answer.status_code, answer.json()["error_type"]) == (504, "deadline_exceeded")
    wait_for(lambda: last(broker, "lost").header.id in broker.cancelled, "the server is told")


def test_result_that_json_cannot_hold_is_the_models_fault(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Answer(value="\ud800".encode("utf-8", "surrogatepass")))
    assert front.ask("x").status_code == 200, "bytes are base64 text"


# --- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_answering", [0, 1])
def test_client_that_leaves_is_noticed_and_the_server_told(
    front: Front, broker: StubBroker, after_answering: int
) -> None:
    marker = f"gone-{after_answering}"
    with front.connect() as connection:
        for _ in range(after_answering):
            connection.sendall(raw_request("/models/echo", b'{"inputs": 1}'))
            assert read_response(connection)[0] == 200
        broker.behave = silent
        connection.sendall(raw_request("/models/echo", b'{"inputs": 1}', f"X-Request-Id: {marker}"))
        wait_for(lambda: any(request.header.request_id == marker for request in broker.requests), "it is there")
        assert last(broker, marker).header.id not in broker.cancelled
    wait_for(lambda: last(broker, marker).header.id in broker.cancelled, "the server is told before the deadline", 10)
    wait_for(lambda: f"client_gone request_id={marker} model=echo status=499" in front.log(), "it is logged")


def test_client_that_leaves_with_a_second_request_behind_the_first_is_noticed(front: Front, broker: StubBroker) -> None:
    broker.behave = silent
    with front.connect() as connection:
        first = raw_request("/models/echo", b'{"inputs": 1}', "X-Request-Id: first-of-two")
        connection.sendall(first + raw_request("/models/echo", b'{"inputs": 2}'))
        wait_for(lambda: any(request.header.request_id == "first-of-two" for request in broker.requests), "it is there")
    wait_for(lambda: last(broker, "first-of-two").header.id in broker.cancelled, "the server is told", 10)


@pytest.mark.parametrize("body_bytes", [1, 60_000])
def test_client_that_leaves_after_it_has_sent_another_request_is_noticed(
    front: Front, broker: StubBroker, body_bytes: int
) -> None:
    """The server stops reading a connection when another request comes in, and must go on for the end to be seen."""
    broker.behave = silent
    marker = f"first-before-{body_bytes}"
    with front.connect() as connection:
        connection.sendall(raw_request("/models/echo", b'{"inputs": 1}', f"X-Request-Id: {marker}"))
        wait_for(lambda: any(request.header.request_id == marker for request in broker.requests), "it is there")
        connection.sendall(raw_request("/models/echo", b'{"inputs": "' + b"x" * body_bytes + b'"}'))
        # Behind what was just sent, so that this has been read when the end of the connection is.
        connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: last(broker, marker).header.id in broker.cancelled, "the server is told", 10)


def test_client_that_sends_more_than_is_wanted_is_made_to_wait(front: Front, broker: StubBroker) -> None:
    """What comes in behind a request that is being answered is bounded, and nothing of it is lost."""
    broker.behave = silent
    ahead = raw_request("/models/echo", b'{"inputs": "' + b"x" * 90_000 + b'"}')
    with front.connect() as connection:
        connection.sendall(raw_request("/models/echo", b'{"inputs": 1}', "X-Request-Id: slow"))
        wait_for(lambda: any(request.header.request_id == "slow" for request in broker.requests), "it is there")
        broker.behave = steps(Answer(value="quick"))
        sent_bytes = send_until_full(connection, ahead, bytes_max=64 * 2**20)
        assert sent_bytes < 64 * 2**20, "the kernel's buffers fill up, and this process's do not"
        frames = pack("slow")
        reply = ReplyHeader(last(broker, "slow").header.id, Code.OK, len(frames))
        broker.tell_all(*encode(Reply((reply,)), frames))
        with ThreadPoolExecutor(1) as pool, connection.makefile("rb") as stream:
            rest = pool.submit(connection.sendall, ahead[sent_bytes % len(ahead) :])
            answers = [read_from(stream) for _ in range(1 + sent_bytes // len(ahead) + 1)]
            rest.result(20)
    assert answers == ["slow"] + ["quick"] * (len(answers) - 1)


def send_until_full(connection: socket.socket, message: bytes, *, bytes_max: int) -> int:
    """Sends the message over and over, until nothing more is taken; returns how many bytes were."""
    sent_bytes = 0
    connection.setblocking(False)
    while sent_bytes < bytes_max and select.select([], [connection], [], 0.5)[1]:
        sent_bytes += connection.send(message[sent_bytes % len(message) :])
    connection.setblocking(True)
    return sent_bytes


def read_from(stream: BinaryIO) -> object:
    """The value of the next response."""
    length = 0
    while (line := stream.readline()) != b"\r\n":
        assert line, "the connection ended"
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return json.loads(stream.read(length))


def test_client_that_leaves_after_a_long_body_is_noticed(front: Front, broker: StubBroker) -> None:
    """The server stops reading a connection with so much on it, and must go on for the end to be seen."""
    broker.behave = silent
    body = b'{"inputs": "' + b"x" * 90_000 + b'"}'
    with front.connect() as connection:
        connection.sendall(raw_request("/models/echo", body, "X-Request-Id: long"))
        wait_for(lambda: any(request.header.request_id == "long" for request in broker.requests), "it is there")
    wait_for(lambda: last(broker, "long").header.id in broker.cancelled, "the server is told", 10)


def test_client_that_leaves_in_the_middle_of_its_body_reaches_no_model(front: Front, broker: StubBroker) -> None:
    count = len(broker.requests)
    with front.connect() as connection:
        connection.sendall(raw_request("/models/echo", b'{"inp', "X-Request-Id: half", length=500))
    wait_for(lambda: "client_gone request_id=half" in front.log(), "it is logged")
    assert len(broker.requests) == count


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_body_that_says_it_is_too_large_is_refused_before_it_is_sent(front: Front, broker: StubBroker) -> None:
    with front.connect() as connection:
        connection.sendall(raw_request("/models/echo", b"", "Expect: 100-continue", length=10**9))
        status, headers, body = read_response(connection)
        assert status == 413
        assert headers["connection"] == "close"
        assert json.loads(body)["detail"] == {"body_bytes_max": 100_000}
        assert connection.recv(100) == b"", "the connection is of no more use"


def test_too_large_body_is_read_out_so_that_the_client_sees_why(front: Front, broker: StubBroker) -> None:
    answer = front.post("/models/echo", content=b" " * 20_000_000)
    assert (answer.status_code, answer.json()["error_type"]) == (413, "too_large")


def test_chunked_upload_is_stopped_at_the_limit(front: Front, broker: StubBroker) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(1000):
            yield b" " * 10_000

    answer = front.post("/models/echo", content=pieces())
    assert answer.status_code == 413


def test_chunked_upload_within_the_limit_is_read(front: Front, broker: StubBroker) -> None:
    answer = front.post("/models/echo", content=iter([b'{"inputs"', b": [1", b", 2]}"]))
    assert answer.json()["inputs"] == [1, 2]


def test_body_of_just_the_limit_is_read(front: Front, broker: StubBroker) -> None:
    body = json.dumps({"inputs": "x" * (100_000 - len('{"inputs": ""}'))}).encode()
    assert len(body) == 100_000
    assert front.post("/models/echo", content=body).status_code == 200
    assert front.post("/models/echo", content=body + b" ").status_code == 413


def test_body_that_does_not_come_is_given_up_at_the_deadline(front: Front, broker: StubBroker) -> None:
    with front.connect() as connection:
        connection.sendall(raw_request("/models/echo", b'{"inp', "X-Request-Timeout: 0.2", length=500))
        status, _, body = read_response(connection)
        assert status == 504
        assert "did not arrive" in json.loads(body)["error"]


def test_connection_whose_body_did_not_come_is_not_kept(front: Front, broker: StubBroker) -> None:
    with ExitStack() as stack:
        connections = []
        for header in ("X-Request-Timeout: 0.1", "X-Request-Timeout: soon", "Content-Encoding: br"):
            connection = stack.enter_context(front.connect())
            connection.sendall(raw_request("/models/echo", b'{"inp', header, length=500))
            connections.append(connection)
        # All at once, because each stays open for some seconds, for a client that still sends.
        for connection in connections:
            assert read_response(connection)[1]["connection"] == "close"
        for connection in connections:
            while connection.recv(100):
                pass


def test_broken_body_is_refused_at_once_and_reaches_no_model(front: Front, broker: StubBroker) -> None:
    count = len(broker.requests)
    with front.connect() as connection:
        connection.sendall(raw_request("/models/echo", b"zz\r\n", "Transfer-Encoding: chunked", "X-Request-Id: torn"))
        status, headers, body = read_response(connection)
        assert (status, headers["connection"], json.loads(body)["error_type"]) == (400, "close", "bad_request")
        wait_for(lambda: "client_gone request_id=torn" in front.log(), "the application hears of it")
    assert len(broker.requests) == count
    assert "Exception" not in front.log()


def test_client_that_offers_another_protocol_is_answered_in_this_one(front: Front, broker: StubBroker) -> None:
    """As the HTTP client of Java does, with every request."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
    with front.connect() as connection:
        for number in range(2):
            connection.sendall(raw_request("/models/echo", b'{"inputs": %d}' % number, *offer))
            status, _, body = read_response(connection)
            assert (status, json.loads(body)["inputs"]) == (200, number)


def test_headers_are_bounded(front: Front, broker: StubBroker) -> None:
    with front.connect() as connection:
        connection.sendall(b"POST /models/echo HTTP/1.1\r\n")
        connection.sendall(b"X: " + b"x" * 1_000_000)
        assert read_response(connection)[0] == 431


def test_pipelined_requests_are_answered_in_order(front: Front, broker: StubBroker) -> None:
    with front.connect() as connection:
        connection.sendall(b"".join(raw_request("/models/echo", b'{"inputs": %d}' % number) for number in range(3)))
        data = b""
        while data.count(b'"inputs":') < 3:
            data += connection.recv(65536)
    assert [int(number) for number in re.findall(rb'"inputs":(\d)', data)] == [0, 1, 2]


# --- streams ---------------------------------------------------------------------------------------------------------


def events(text: str) -> list[tuple[str, object]]:
    """Names and data of server-sent events."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


def stream(front: Front, **options: object) -> tuple[int, dict[str, str], str]:
    answer = front.post("/models/echo", json={"inputs": 1, "stream": True}, **options)
    return answer.status_code, dict(answer.headers), answer.text


def test_stream_is_events_with_an_explicit_end(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Piece(value="a"), Piece(0.02, value={"b": 1}, index=1), Answer(0.02, {"whole": "ab"}))
    status, headers, text = stream(front)
    assert status == 200
    assert events(text) == [("", "a"), ("", {"b": 1}), ("done", {"whole": "ab"})]
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache")
    assert "x-request-id" in headers


def test_first_event_leaves_before_the_second_is_made(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Piece(value="first"))
    with front.client.stream("POST", f"{front.url}/models/echo", json={"inputs": 1, "stream": True}) as answer:
        assert next(answer.iter_text()) == 'data: "first"\n\n'


def test_stream_that_fails_before_its_first_piece_has_a_status(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Fail(code=Code.MODEL_LOADING))
    status, headers, text = stream(front)
    assert (status, json.loads(text)["error_type"]) == (503, "model_loading")
    assert "retry-after" in headers


def test_stream_that_breaks_off_says_so_in_its_last_event(front: Front, broker: StubBroker) -> None:
    broker.behave = steps(Piece(value="a"), Fail(0.02, code=Code.MODEL_CRASHED, message="died"))
    assert events(stream(front)[2]) == [("", "a"), ("error", {"error": "died", "error_type": "model_crashed"})]


def test_client_that_leaves_a_stream_cancels_it(front: Front, broker: StubBroker) -> None:
    def endless(request: Request) -> Sequence[Step]:
        return [Piece(0.02, index, index) for index in range(100)]

    broker.behave = endless
    headers = {"X-Request-Id": "left-stream"}
    with front.client.stream(
        "POST", f"{front.url}/models/echo", json={"inputs": 1, "stream": True}, headers=headers
    ) as answer:
        next(answer.iter_text())
    wait_for(lambda: last(broker, "left-stream").header.id in broker.cancelled, "the server is told", 5)


def test_silent_stream_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.surfaces.base.KEEP_ALIVE_S", 0.01)
    sent: list[bytes] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        call = StreamCall(RequestId(b"1" * 16), loop, lambda request_id: None)
        comments = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if sent.count(KEEP_ALIVE) == 2:
                comments.set()

        async def receive() -> Any:
            await asyncio.Event().wait()

        client = SimpleNamespace(submit_stream=lambda *arguments, **options: call, stop_holding=lambda: None)
        metrics = SimpleNamespace(stream_began=lambda model, waited_s: None)
        services: Any = SimpleNamespace(client=client, metrics=metrics)
        exchange = Exchange(services, {"headers": []}, receive, send)
        streaming = asyncio.ensure_future(exchange.stream(1, None, NativeEvents()))
        await comments.wait()
        call.push("a", 1)
        call.fail(RequestError("died", code=Code.MODEL_CRASHED))
        assert await streaming == 502

    asyncio.run(asyncio.wait_for(work(), 20))
    text = b"".join(sent).replace(KEEP_ALIVE, b"").decode()
    assert events(text) == [("", "a"), ("error", {"error": "died", "error_type": "model_crashed"})]


# --- what there is ---------------------------------------------------------------------------------------------------


def test_models_are_listed_and_described(front: Front, broker: StubBroker) -> None:
    assert front.get("/models").json() == {
        "models": [
            {"name": "echo", "task": "echo", "state": "ready"},
            {"name": "other", "task": "echo", "state": "ready"},
        ]
    }
    broker.models = (model_state("a/b", state="loading", reason="a/b/0: loading 40%", replicas_ready=0, queued=3),)
    wait_for(lambda: front.get("/models/a/b").status_code == 200, "it is known")
    expected = {
        "name": "a/b",
        "task": "echo",
        "state": "loading",
        "reason": "a/b/0: loading 40%",
        "required": True,
        "replicas_ready": 0,
        "replicas_total": 1,
        "queued": 3,
    }
    assert front.get("/models/a/b").json() == expected
    assert front.client.head(f"{front.url}/models/a/b").status_code == 200
    unknown = front.get("/models/echo")
    assert (unknown.status_code, unknown.json()["error"]) == (404, "no model is called 'echo'; known: a/b")
    broker.pulses = broker.says_welcome = False
    try:
        wait_for(lambda: front.get("/models").json()["models"][0]["state"] == "unknown", "old news is no news")
    finally:
        broker.pulses = broker.says_welcome = True
    broker.models = MODELS
    front.wait_ready()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/models/echo", "GET, HEAD, POST"),
        ("PUT", "/models", "GET, HEAD"),
        ("POST", "/models", "GET, HEAD"),
        ("GET", "/", "POST"),
        ("POST", "/readyz", "GET, HEAD"),
        ("OPTIONS", "/openapi.json", "GET, HEAD"),
    ],
)
def test_wrong_method_is_told_the_right_ones(
    front: Front, broker: StubBroker, method: str, path: str, allowed: str
) -> None:
    answer = front.client.request(method, front.url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"] == f"{method} {path}: this path takes {' or '.join(allowed.split(', '))}"


def test_paths_of_models_are_described(front: Front, broker: StubBroker) -> None:
    paths = front.get("/openapi.json").json()["paths"]
    assert paths["/models"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert paths["/models/{name}"]["get"]["parameters"][0]["name"] == "name"


# --- probes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda broker: setattr(broker, "models", (MODELS[0], model_state("other", replicas_ready=0))), "other"),
        (lambda broker: setattr(broker, "models", ()), "no model is configured"),
        (lambda broker: setattr(broker, "models", MODELS[:1]), "other"),
        (lambda broker: setattr(broker, "draining", True), "about to stop"),
        (lambda broker: setattr(broker, "pulses", False), "not heard"),
    ],
    ids=["one model down", "no models", "one model missing", "draining", "silent server"],
)
def test_not_ready_says_why_and_alive_stays_alive(
    front: Front, broker: StubBroker, change: Callable[[StubBroker], None], reason: str
) -> None:
    front.wait_ready()
    try:
        if reason == "not heard":
            broker.says_welcome = False
        change(broker)
        wait_for(lambda: front.probe("/readyz") == 503, "/readyz says 503")
        answer = front.get("/readyz")
        assert reason in answer.json()["reason"]
        assert answer.headers["retry-after"] == "1"
        assert front.probe("/livez") == 200
        if len(broker.models) == len(MODELS):
            assert front.probe("/startupz") == 200, "it has started before"
    finally:
        broker.models, broker.draining, broker.pulses, broker.says_welcome = MODELS, False, True, True
    front.wait_ready()


def test_started_is_what_the_model_server_says_and_no_memory_of_a_worker(front: Front, broker: StubBroker) -> None:
    broker.models = (MODELS[0], model_state("other", replicas_ready=0, was_ready=False))
    wait_for(lambda: front.probe("/startupz") == 503, "one has never been ready")
    assert front.get("/startupz").json() == {"started": False, "reason": "not ready yet: other"}
    broker.models = (MODELS[0], model_state("other", replicas_ready=0, was_ready=True))
    wait_for(lambda: front.probe("/startupz") == 200, "all have been ready")
    assert front.probe("/readyz") == 503
    (before,) = front.workers()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: front.workers() not in ([], [before]), "a new worker")
    assert [status for _ in range(300) if (status := front.probe("/startupz"))] == [200] * 300
    broker.models = MODELS[:1]
    wait_for(lambda: front.probe("/startupz") == 503, "a configured one is not served")
    broker.models = MODELS
    front.wait_ready()


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/metrics"])
def test_probes_may_ask_for_headers_only(front: Front, broker: StubBroker, path: str) -> None:
    answer = front.client.head(front.url + path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_model_that_is_not_required_does_not_hold_readiness_back(front: Front, broker: StubBroker) -> None:
    broker.models = (*MODELS, model_state("extra", required=False, replicas_ready=0, state="failed", reason="why"))
    wait_for(lambda: "extra" in front.get("/readyz").json()["models"], "it is known")
    answer = front.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["models"]["extra"]["reason"] == "why"


def test_status_is_the_model_servers_snapshot(front: Front, broker: StubBroker) -> None:
    status = front.get("/status").json()
    assert status["epoch"] == broker.epoch
    assert status["slots"][0]["slot"] == "echo/0"


def test_livez_answers_while_a_hundred_requests_wait(front: Front, broker: StubBroker) -> None:
    broker.behave = silent
    connections = [front.connect() for _ in range(100)]
    try:
        for connection in connections:
            connection.sendall(raw_request("/models/echo", b'{"inputs": "wait"}'))
        wait_for(lambda: sum(request.inputs == "wait" for request in broker.requests) >= 100, "all of them wait")
        assert [front.probe("/livez") for _ in range(50)] == [200] * 50
    finally:
        for connection in connections:
            connection.close()


def test_openapi_describes_every_model_with_examples_and_failures(front: Front, broker: StubBroker) -> None:
    description = front.get("/openapi.json").json()
    for path in ("/models/echo", "/models/other"):
        operation = description["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["examples"]
        assert {"200", "400", "404", "413", "422", "429", "500", "502", "503", "504"} <= operation["responses"].keys()
        assert operation["responses"]["429"]["content"]["application/json"]["example"]["error_type"] == "overloaded"
    assert {"/livez", "/readyz", "/startupz", "/status", "/metrics"} <= description["paths"].keys()
    assert front.get("/docs").status_code == 200


def test_nothing_is_logged_for_a_request_that_goes_well(front: Front, broker: StubBroker) -> None:
    before = front.log()
    for _ in range(5):
        assert front.ask("x", headers={"X-Request-Id": "quiet"}).status_code == 200
    assert "quiet" not in front.log()[len(before) :]
    assert "POST" not in front.log()

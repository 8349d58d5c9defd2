"""What headers may say, and what is made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from frontend import guards
from frontend.guards import BodyReader, ClientGone, KeyRing
from shared.errors import Code, RequestError


@pytest.mark.parametrize(("text", "seconds"), [(None, 60.0), (b"2.5", 2.5), (b"600", 600.0), (b" 3 ", 3.0)])
def test_timeout_is_taken_as_it_is(text: bytes | None, seconds: float) -> None:
    headers = {} if text is None else {b"x-request-timeout": text}
    assert guards.request_timeout_s(headers, 60.0, 600.0) == seconds


@pytest.mark.parametrize("text", [b"600.1", b"1e3", b"inf"])
def test_timeout_beyond_the_maximum_is_refused_with_value_and_limit(text: bytes) -> None:
    with pytest.raises(RequestError, match=rf"X-Request-Timeout '{text.decode()}' .* 600 seconds") as refused:
        guards.request_timeout_s({b"x-request-timeout": text}, 60.0, 600.0)
    assert (refused.value.code, refused.value.detail) == (Code.INVALID_INPUT, {"request_timeout_max_s": 600.0})


def test_request_that_names_no_timeout_gets_no_more_than_the_maximum() -> None:
    assert guards.request_timeout_s({}, 60.0, 20.0) == 20.0


@pytest.mark.parametrize("text", [b"", b"soon", b"0", b"-1", b"nan", b"1,5", b"\xff\x1b[31m"])
def test_timeout_that_is_no_time_is_refused_without_repeating_control_characters(text: bytes) -> None:
    with pytest.raises(RequestError, match="X-Request-Timeout") as refused:
        guards.request_timeout_s({b"x-request-timeout": text}, 60.0, 600.0)
    assert refused.value.code is Code.BAD_REQUEST
    assert refused.value.message.isprintable()


@pytest.mark.parametrize(("text", "priority"), [(None, 0), (b"-3", -3), (b"100", 100)])
def test_priority_is_a_whole_number(text: bytes | None, priority: int) -> None:
    assert guards.request_priority({} if text is None else {b"x-request-priority": text}) == priority


@pytest.mark.parametrize("text", [b"", b"high", b"1.5", b"101", b"-101", b"9" * 5000])
def test_priority_out_of_bounds_is_refused(text: bytes) -> None:
    with pytest.raises(RequestError, match="X-Request-Priority") as refused:
        guards.request_priority({b"x-request-priority": text})
    assert refused.value.code is Code.BAD_REQUEST
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({b"x-request-id": b"abc"}, "abc"),
        ({b"x-request-id": b"a\x00b\x1b[0m\xe9c"}, "ab[0mc"),
        ({b"x-request-id": b"x" * 500}, "x" * 128),
        ({b"x-request-id": b"\x00", b"x-amzn-trace-id": b"Root=1-2"}, "Root=1-2"),
        ({b"x-amzn-trace-id": b"Root=1-2"}, "Root=1-2"),
    ],
)
def test_request_id_is_the_clients_own_made_safe(headers: guards.Headers, expected: str) -> None:
    assert guards.request_id(headers) == expected


def test_request_without_an_id_gets_one_of_its_own() -> None:
    assert len({guards.request_id({}) for _ in range(100)}) == 100


GOOD_TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        GOOD_TRACE.upper(),
        b"ff" + GOOD_TRACE[2:],
        GOOD_TRACE.replace(b"b7ad6b7169203331", b"0" * 16),
        GOOD_TRACE.replace(b"0af7651916cd43dd8448eb211c80319c", b"0" * 32),
        GOOD_TRACE[:-1],
        GOOD_TRACE + b"\n",
    ],
)
def test_malformed_trace_context_is_dropped(text: bytes) -> None:
    assert guards.traceparent({b"traceparent": text}) == ""
    assert guards.traceparent({b"traceparent": GOOD_TRACE}) == GOOD_TRACE.decode()


@pytest.mark.parametrize("value", [b"Bearer secret", b"bearer second", b"Bearer  secret "])
def test_known_key_opens(value: bytes) -> None:
    KeyRing(["secret", "second"]).check({b"authorization": value})


@pytest.mark.parametrize("value", [None, b"", b"secret", b"Basic secret", b"Bearer", b"Bearer secre", b"Bearer \xff"])
def test_unknown_key_does_not_open_and_is_not_repeated(value: bytes | None) -> None:
    with pytest.raises(RequestError) as refused:
        KeyRing(["secret"]).check({} if value is None else {b"authorization": value})
    assert refused.value.code is Code.UNAUTHORIZED
    assert "secre" not in refused.value.message


def test_without_keys_everybody_may_enter() -> None:
    KeyRing([]).check({})


def test_key_ring_keeps_no_key() -> None:
    assert "secret" not in repr(vars(KeyRing(["secret"])))


def read(reader: BodyReader, messages: Iterable[dict[str, Any]], headers: guards.Headers | None = None) -> bytes:
    parts = iter(messages)

    async def receive() -> dict[str, Any]:
        for part in parts:
            return part
        await asyncio.sleep(3600)
        raise AssertionError

    async def run() -> bytes:
        return await reader.read(headers or {}, receive, asyncio.get_running_loop().time() + 0.05)

    return asyncio.run(run())


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_body_comes_in_one_piece_or_many() -> None:
    reader = BodyReader(body_bytes_max=10, total_bytes_max=20)
    assert read(reader, [part(b"0123456789")]) == b"0123456789"
    assert read(reader, [part(b"01234", more=True), part(b"", more=True), part(b"56789")]) == b"0123456789"


@pytest.mark.parametrize(
    ("messages", "headers"),
    [
        ([part(b"01234567890")], {}),
        ([part(b"0123456789", more=True), part(b"0")], {}),
        ([], {b"content-length": b"11"}),
    ],
)
def test_body_over_the_limit_is_refused_as_soon_as_it_shows(
    messages: list[dict[str, Any]], headers: guards.Headers
) -> None:
    with pytest.raises(RequestError, match="larger than the 10 bytes") as refused:
        read(BodyReader(body_bytes_max=10, total_bytes_max=100), messages, headers)
    assert refused.value.code is Code.TOO_LARGE


def test_bodies_that_are_being_read_share_a_limit_and_give_it_back() -> None:
    reader = BodyReader(body_bytes_max=10, total_bytes_max=8)
    for _ in range(3):
        with pytest.raises(RequestError) as refused:
            read(reader, [part(b"01234", more=True), part(b"56789", more=True), part(b"")])
        assert refused.value.code is Code.OVERLOADED
    assert read(reader, [part(b"0123", more=True), part(b"45")]) == b"012345"


def test_body_that_never_ends_is_given_up_at_the_deadline() -> None:
    with pytest.raises(RequestError, match="did not arrive") as refused:
        read(BodyReader(body_bytes_max=10, total_bytes_max=100), [part(b"0", more=True)])
    assert refused.value.code is Code.DEADLINE_EXCEEDED


def test_client_that_leaves_in_the_middle_is_gone() -> None:
    with pytest.raises(ClientGone):
        read(BodyReader(body_bytes_max=10, total_bytes_max=100), [part(b"0", more=True), {"type": "http.disconnect"}])


def test_content_length_that_is_no_number_is_refused() -> None:
    with pytest.raises(RequestError, match="Content-Length"):
        read(BodyReader(body_bytes_max=10, total_bytes_max=100), [], {b"content-length": b"1e9"})

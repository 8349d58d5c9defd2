"""The table of waiting requests, without a socket or a clock."""

from __future__ import annotations

import pytest

from frontend.pending import Answer, PendingRequest, PendingTable
from shared.errors import Code, RequestError
from shared.messages import RequestId


class Waiter:
    def resolve(self, answer: Answer) -> None: ...

    def fail(self, error: RequestError) -> None: ...

    def push(self, value: object, size_bytes: int) -> bool:
        return True


def request(number: int, *, size: int = 10, next_chunk: int = 0, deadline_s: float = 60.0) -> PendingRequest:
    return PendingRequest(
        id=RequestId(number.to_bytes(16, "big")),
        model="m",
        operation="predict",
        batch_key=b"",
        priority=0,
        stream=next_chunk > 0,
        retryable=True,
        request_id="",
        traceparent="",
        payload=(b"x" * size,),
        body_bytes=size,
        deadline_s=deadline_s,
        waiter=Waiter(),
        next_chunk=next_chunk,
    )


def table_of(*requests: PendingRequest, count_max: int = 100, bytes_max: int = 1000) -> PendingTable:
    table = PendingTable(count_max=count_max, bytes_max=bytes_max)
    for entry in requests:
        table.admit(entry)
    return table


def sent(table: PendingTable, count_max: int = 100, bytes_max: int = 1000) -> list[int]:
    return [int.from_bytes(entry.id) for entry in table.take_unsent(count_max=count_max, bytes_max=bytes_max)]


def test_requests_go_out_once_and_in_order() -> None:
    table = table_of(request(1), request(2), request(3))
    assert sent(table) == [1, 2, 3]
    assert sent(table) == []
    assert len(table) == 3


def test_one_more_than_the_count_is_refused_and_leaves_no_trace() -> None:
    table = table_of(request(1), request(2), count_max=2)
    with pytest.raises(RequestError, match="waits for 2 answers") as refused:
        table.admit(request(3))
    assert refused.value.code is Code.OVERLOADED
    assert refused.value.retry_after_s
    assert (len(table), table.body_bytes) == (2, 20)


def test_more_than_the_bytes_is_refused_until_some_have_left() -> None:
    table = table_of(request(1, size=600), bytes_max=1000)
    with pytest.raises(RequestError, match="its limit of 1000"):
        table.admit(request(2, size=401))
    table.admit(request(3, size=400))
    table.remove(request(1).id)
    table.admit(request(2, size=401))
    assert table.body_bytes == 801


def test_one_message_holds_no_more_than_its_limits() -> None:
    table = table_of(*(request(number, size=100) for number in range(5)))
    assert sent(table, count_max=2) == [0, 1]
    assert sent(table, bytes_max=250) == [2, 3]
    assert sent(table) == [4]


def test_a_request_larger_than_a_message_goes_alone() -> None:
    table = table_of(request(1, size=900), request(2))
    assert sent(table, bytes_max=100) == [1]
    assert sent(table, bytes_max=100) == [2]


def test_removed_request_is_not_sent() -> None:
    first = request(1)
    table = table_of(first, request(2))
    assert table.remove(first.id) is first
    assert table.remove(first.id) is None
    assert sent(table) == [2]


def test_what_could_not_be_sent_keeps_its_place() -> None:
    table = table_of(request(1), request(2), request(3))
    taken = table.take_unsent(count_max=2, bytes_max=1000)
    table.remove(taken[0].id)
    table.put_back(taken)
    assert sent(table) == [2, 3]


def test_everything_is_sent_again_in_its_old_order() -> None:
    table = table_of(request(1), request(2))
    assert sent(table, count_max=1) == [1]
    table.admit(request(3))
    assert table.unsend(started_too=True) == []
    assert sent(table) == [1, 2, 3]


def test_a_stream_that_has_begun_is_never_sent_again() -> None:
    begun = request(2, next_chunk=1)
    table = table_of(request(1), begun)
    assert sent(table) == [1, 2]
    assert table.unsend(started_too=False) == []
    assert sent(table) == [1]
    assert table.unsend(started_too=True) == [begun]
    assert table.get(begun.id) is None
    assert sent(table) == [1]


def test_header_carries_what_is_left_of_the_time() -> None:
    entry = request(1, deadline_s=10.0)
    assert entry.header(now_s=7.5).remaining_ms == 2500
    assert entry.header(now_s=11.0).remaining_ms == 1, "the model server refuses it, and not the wire"

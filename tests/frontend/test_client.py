"""`ModelClient` against a real socket: answers, failures, cancellation, and servers that go and come back."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import uvloop

from frontend.client import ModelClient
from shared.config import Config
from shared.errors import Code, RequestError, UsageError
from shared.messages import Cancel, FrontHello, FrontPulse, Kind, Reply, ReplyHeader, RequestId, ServerPulse, Submit
from shared.values import pack
from shared.wire import encode
from tests.stub_broker import Answer, Behaviour, Fail, Piece, Raw, Request, Step, StubBroker, echo, model_state, silent
from tests.topology import ROOT

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def run(
    work: Callable[[ModelClient], Awaitable[None]], source: Config | Path, loop: str = "uvloop", within_s: float = 60
) -> None:
    async def main() -> None:
        async with asyncio.timeout(within_s), ModelClient(source) as client:
            await work(client)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


async def until(condition: Callable[[], object], what: str, within_s: float = 20) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


def steps(*planned: Step) -> Behaviour:
    return lambda request: planned


async def failure(awaitable: Awaitable[object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await awaitable
    return caught.value


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_answer_comes_back_as_the_value_it_is(run_dir: Path, loop: str) -> None:
    async def work(client: ModelClient) -> None:
        array = numpy.arange(100_000, dtype=numpy.float32).reshape(100, 1000)
        answer: Any = await client.predict("echo", {"text": "é", "array": array, "raw": b"\x00"}, {"b": 1, "a": None})
        assert answer["inputs"]["text"] == "é"
        assert answer["inputs"]["raw"] == b"\x00"
        numpy.testing.assert_array_equal(answer["inputs"]["array"], array)
        assert answer["parameters"] == {"a": None, "b": 1}

    with StubBroker(run_dir):
        run(work, run_dir, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_thousands_at_once_are_answered_each_with_its_own(run_dir: Path, loop: str) -> None:
    async def work(client: ModelClient) -> None:
        answers: list[Any] = await asyncio.gather(*(client.predict("echo", number) for number in range(3000)))
        assert [answer["inputs"] for answer in answers] == list(range(3000))
        assert client.pending_count() == 0

    with StubBroker(run_dir) as broker:
        run(work, run_dir, loop)
        assert len(broker.requests) == 3000
        assert len(broker.received(Submit)) < 100, "what is submitted in one turn of the loop travels together"
        assert len({request.header.id for request in broker.requests}) == 3000


def test_header_says_all_the_model_server_needs(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        await client.predict("echo", 1, timeout_s=30, priority=-2, request_id="r-1", traceparent="t")
        await client.predict("echo", 1, {"b": 1, "a": 2})
        await client.predict("echo", 1, {"a": 2, "b": 1})
        await client.predict("echo", 1, {"a": 3, "b": 1})

    with StubBroker(run_dir) as broker:
        run(work, run_dir)
        plain, one, same, other = (request.header for request in broker.requests)
    assert (plain.model, plain.operation, plain.priority, plain.stream) == ("echo", "predict", -2, False)
    assert (plain.request_id, plain.traceparent, plain.retryable, plain.batch_key) == ("r-1", "t", True, b"")
    assert 25_000 < plain.remaining_ms <= 30_000
    assert one.request_id == one.id.hex(), "there is always something to search the logs for"
    assert len(one.batch_key) == 8
    assert one.batch_key == same.batch_key, "the order of keys is nobody's intention"
    assert one.batch_key != other.batch_key


def test_failure_comes_back_with_its_code_and_advice(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        error = await failure(client.predict("echo", 1))
        assert (error.code, error.message, error.detail) == (Code.OVERLOADED, "full", {"queued": 7})
        assert error.retry_after_s == 1.5

    full = Fail(code=Code.OVERLOADED, message="full", detail={"queued": 7}, retry_after_ms=1500)
    with StubBroker(run_dir, behave=steps(full)):
        run(work, run_dir)


def test_value_that_cannot_be_sent_is_the_callers_fault(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        error = await failure(client.predict("echo", {"when": {1, 2}}))
        assert error.code is Code.INVALID_INPUT
        assert "set" in error.message
        assert (await failure(client.predict("x" * 1000, 1))).code is Code.INVALID_INPUT
        error = await failure(client.predict("echo", 1, {"labels": [{1}]}))
        assert error.message.startswith("parameters.labels[0] is a set"), error
        error = await failure(client.predict("echo", 1, timeout_s=float("nan")))
        assert (error.code, client.pending_count()) == (Code.INVALID_INPUT, 0)
        assert await client.predict("echo", 1)

    with StubBroker(run_dir):
        run(work, run_dir)


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e308, 10**9])
def test_longest_wait_is_a_day(run_dir: Path, timeout_s: float) -> None:
    async def work(client: ModelClient) -> None:
        assert await client.predict("echo", 1, timeout_s=timeout_s)
        [request] = broker.requests
        assert 86_300_000 < request.header.remaining_ms <= 86_400_000

    with StubBroker(run_dir) as broker:
        run(work, run_dir)


def test_parameters_may_have_keys_of_different_kinds(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        assert await client.predict("echo", 1, {"b": 1, 2: 3})  # type: ignore[dict-item]

    with StubBroker(run_dir):
        run(work, run_dir)


def test_client_tells_what_the_server_told(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        assert client.model_names() == ()
        await until(client.models, "the models are known")
        assert client.model_names() == ("echo", "slow")
        assert (client.ready("echo"), client.ready("slow"), client.ready("other")) == (True, False, False)
        assert (await client.inspect()).epoch == broker.epoch
        broker.draining = True
        await until(client.server_draining, "the server drains")
        assert not client.ready("echo")

    with StubBroker(run_dir, models=[model_state("echo"), model_state("slow", replicas_ready=0)]) as broker:
        run(work, run_dir)


def test_configured_names_are_used_until_a_server_is_heard(run_dir: Path) -> None:
    config = Config.model_validate({"run_dir": run_dir, "models": [{"name": "a", "model": "m:M"}]})

    async def work(client: ModelClient) -> None:
        assert client.model_names() == ("a",)
        with StubBroker(run_dir, models=[]):
            await until(client.server_heard, "the server is heard")
            assert client.model_names() == ()

    run(work, config)


# --- cancelling and deadlines ----------------------------------------------------------------------------------------


def test_cancelling_the_task_cancels_the_request_at_the_server(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        task = asyncio.create_task(client.predict("echo", 1))
        await until(lambda: broker.requests, "the request is there")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client.pending_count() == 0
        await until(lambda: broker.cancelled, "the server is told")
        assert broker.cancelled == {broker.requests[0].header.id}

    with StubBroker(run_dir, behave=silent) as broker:
        run(work, run_dir)


def test_request_cancelled_before_it_was_sent_is_never_mentioned(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        await until(client.server_heard, "the server is heard")
        call = client.submit("echo", "unwanted")
        call.abandon()
        assert (await failure(asyncio.ensure_future(_await(call)))).code is Code.CANCELLED
        assert await client.predict("echo", "wanted")
        assert [request.inputs for request in broker.requests] == ["wanted"]
        assert not broker.received(Cancel)

    with StubBroker(run_dir) as broker:
        run(work, run_dir)


async def _await(call: Awaitable[object]) -> object:
    return await call


def test_lost_answer_ends_the_wait_shortly_after_the_deadline(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        await until(client.server_heard, "the server is heard")
        error = await failure(client.predict("echo", 1, timeout_s=0.3))
        assert error.code is Code.DEADLINE_EXCEEDED
        assert "'echo'" in error.message
        await until(lambda: broker.cancelled, "the server is told")

    with StubBroker(run_dir, behave=silent) as broker:
        run(work, run_dir)


def test_answer_after_the_deadline_harms_nobody(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        await until(client.server_heard, "the server is heard")
        assert (await failure(client.predict("echo", "late", timeout_s=0.05))).code is Code.DEADLINE_EXCEEDED
        answer: Any = await client.predict("echo", "next")
        assert answer["inputs"] == "next"
        assert client.malformed_count() == 0

    with StubBroker(run_dir, behave=lambda request: [Answer(0.5, {"inputs": request.inputs})]):
        run(work, run_dir)


def test_too_many_waiting_requests_are_refused_at_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.client.PENDING_COUNT_MAX", 3)

    async def work(client: ModelClient) -> None:
        calls = [client.submit("echo", number) for number in range(3)]
        with pytest.raises(RequestError) as refused:
            client.submit("echo", 3)
        assert refused.value.code is Code.OVERLOADED
        calls[0].abandon()
        client.submit("echo", 4)

    run(work, run_dir)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_stream_gives_every_piece_in_order_and_ends(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        assert [piece async for piece in client.stream("echo", 1)] == ["a", "b", "c"]
        assert client.pending_count() == 0
        assert broker.requests[0].header.stream

    pieces = [Piece(0.01, value, index) for index, value in enumerate("abc")]
    with StubBroker(run_dir, behave=steps(*pieces, Answer(0.01))) as broker:
        run(work, run_dir)


def test_leaving_a_stream_cancels_it_at_the_server(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        stream = client.stream("echo", 1)
        assert await anext(stream) == "a"
        await stream.aclose()
        assert client.pending_count() == 0
        await until(lambda: broker.cancelled, "the server is told")

    with StubBroker(run_dir, behave=steps(Piece(value="a"))) as broker:
        run(work, run_dir)


@pytest.mark.parametrize(
    ("planned", "code"),
    [
        ([Piece(value="a"), Fail(code=Code.MODEL_CRASHED)], Code.MODEL_CRASHED),
        ([Piece(value="a"), Piece(value="c", index=2)], Code.INTERNAL),
    ],
)
def test_broken_stream_never_ends_like_a_whole_one(run_dir: Path, planned: Sequence[Step], code: Code) -> None:
    async def work(client: ModelClient) -> None:
        stream = client.stream("echo", 1)
        assert await anext(stream) == "a"
        assert (await failure(anext(stream))).code is code

    with StubBroker(run_dir, behave=steps(*planned)):
        run(work, run_dir)


@pytest.mark.parametrize(("limit", "number"), [("CHUNKS_BEHIND_MAX", 10), ("BYTES_BEHIND_MAX", 10)])
def test_reader_that_stops_reading_loses_its_stream_and_not_the_memory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, limit: str, number: int
) -> None:
    # A small number is one byte on the wire.
    monkeypatch.setattr(f"frontend.calls.{limit}", number)

    async def work(client: ModelClient) -> None:
        call = client.submit_stream("echo", 1)
        await until(lambda: broker.cancelled, "the server is told")
        values = call.values()
        assert [await anext(values) for _ in range(10)] == list(range(10))
        assert (await failure(anext(values))).code is Code.CANCELLED

    with StubBroker(run_dir, behave=steps(*(Piece(value=n, index=n) for n in range(20)))) as broker:
        run(work, run_dir)


# --- servers that go and come back -----------------------------------------------------------------------------------


def test_request_made_before_the_server_is_answered_when_it_comes(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        waiting = asyncio.create_task(client.predict("echo", "early"))
        await asyncio.sleep(0)
        with StubBroker(run_dir) as broker:
            answer: Any = await waiting
            assert answer["inputs"] == "early"
            assert len(broker.received(Submit)) == 1

    run(work, run_dir)


def test_request_is_sent_again_to_a_new_server_with_the_time_that_is_left(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        with StubBroker(run_dir, behave=silent) as first:
            waiting = asyncio.create_task(client.predict("echo", "twice", timeout_s=30))
            await until(lambda: first.requests, "the first server has it")
        with StubBroker(run_dir) as second:
            answer: Any = await waiting
            assert answer["inputs"] == "twice"
            before, after = first.requests[0].header, second.requests[0].header
            assert before.id == after.id
            assert before.remaining_ms > after.remaining_ms > 10_000
            assert second.received(FrontHello)

    run(work, run_dir)


def test_server_that_never_comes_ends_the_wait_at_the_deadline(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        error = await failure(client.predict("echo", 1, timeout_s=0.3))
        assert error.code is Code.SERVER_UNAVAILABLE
        assert error.retry_after_s
        assert (await failure(client.inspect())).code is Code.SERVER_UNAVAILABLE

    run(work, run_dir)


def test_what_waits_for_a_server_that_gives_up_is_told_the_cause_and_so_is_what_comes_later(run_dir: Path) -> None:
    states = (model_state("echo", state="failed", reason="echo/0: no such weights", replicas_ready=0),)

    async def work(client: ModelClient) -> None:
        with StubBroker(run_dir, models=states, behave=silent) as server:
            waiting = asyncio.create_task(failure(client.predict("echo", 1, timeout_s=600)))
            await until(lambda: server.requests, "the server has it")
            # A server's last word is its last one.
            server.pulses = False
            server.tell_all(*encode(ServerPulse(server.epoch, False, states, hopeless=True)))
            error = await waiting
            told = (Code.MODEL_FAILED, "model 'echo' has failed: echo/0: no such weights", None)
            assert (error.code, error.message, error.retry_after_s) == told
        # There is no server now, and none is waited for, until there is one.
        error = await failure(client.predict("echo", 2, timeout_s=600))
        assert (error.code, error.message, error.retry_after_s) == told
        assert client.pending_count() == 0
        with StubBroker(run_dir):
            await until(lambda: client.ready("echo"), "the next server is known")
            assert await client.predict("echo", 3)

    run(work, run_dir)


def test_client_that_holds_no_longer_ends_what_waits_for_nobody_and_finishes_the_rest(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        with StubBroker(run_dir, behave=steps(Answer(1.0, value="late"))) as server:
            waiting = asyncio.create_task(client.predict("echo", 1, timeout_s=600))
            await until(lambda: server.requests, "the server has it")
            client.stop_holding()
            client.stop_holding()
            assert await waiting == "late"
            server.behave = silent
            failing = asyncio.create_task(failure(client.predict("echo", 2, timeout_s=600)))
            await until(lambda: len(server.requests) == 2, "the server has the second one, too")
        assert (await failing).code is Code.SERVER_UNAVAILABLE
        assert (await failure(client.predict("echo", 3, timeout_s=600))).code is Code.SERVER_UNAVAILABLE

    run(work, run_dir)


def test_silent_server_gets_nothing_new_and_everything_when_it_speaks_again(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        waiting = asyncio.create_task(client.predict("echo", "asked in time"))
        await until(lambda: broker.requests, "the request is there")
        broker.pulses = broker.says_welcome = False
        hellos = len(broker.received(FrontHello))
        await until(lambda: len(broker.received(FrontHello)) > hellos, "the front asks who is there")
        held = asyncio.create_task(client.predict("echo", "held"))
        hellos = len(broker.received(FrontHello))
        await until(lambda: len(broker.received(FrontHello)) > hellos, "the front asks again")
        assert "held" not in [request.inputs for request in broker.requests]
        broker.behave = echo
        broker.pulses = broker.says_welcome = True
        answers: Any = await asyncio.gather(waiting, held)
        assert [answer["inputs"] for answer in answers] == ["asked in time", "held"]

    with StubBroker(run_dir, behave=silent) as broker:
        run(work, run_dir)


def test_stream_that_had_begun_fails_when_its_server_is_gone(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        with StubBroker(run_dir, behave=steps(Piece(value="a"))):
            stream = client.stream("echo", 1)
            assert await anext(stream) == "a"
        with StubBroker(run_dir) as second:
            error = await failure(anext(stream))
            assert error.code is Code.SERVER_UNAVAILABLE
            assert await client.predict("echo", 1)
            assert len(second.requests) == 1

    run(work, run_dir)


def test_stream_that_had_not_begun_is_sent_again(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        with StubBroker(run_dir, behave=silent) as first:
            stream = client.stream("echo", 1)
            reading = asyncio.ensure_future(anext(stream))
            await until(lambda: first.requests, "the first server has it")
        with StubBroker(run_dir, behave=steps(Piece(value="a"), Answer())):
            assert await reading == "a"
            await stream.aclose()

    run(work, run_dir)


def test_front_pulses_with_the_number_that_waits(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        call = client.submit("echo", 1)
        await until(lambda: FrontPulse(pending=1) in broker.received(FrontPulse), "a pulse says so")
        call.abandon()
        await until(lambda: FrontPulse(pending=0) in broker.received(FrontPulse), "a pulse says so")

    with StubBroker(run_dir, behave=silent) as broker:
        run(work, run_dir)


# --- what cannot be read ---------------------------------------------------------------------------------------------

GARBAGE: list[Sequence[bytes]] = [
    [b""],
    [b"\x01"],
    [b"\xff\xff", b"\x90"],
    [bytes([1, Kind.REPLY]), b"\xc1"],
    [bytes([1, Kind.REPLY]), b"\x90"],
    [bytes([1, Kind.BATCH]), b"\x93\x01\xc2\x90"],
    [os.urandom(40), os.urandom(40), os.urandom(40)],
]


def test_garbage_is_counted_logged_once_and_ends_nothing(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(client: ModelClient) -> None:
        await until(client.server_heard, "the server is heard")
        for parts in GARBAGE:
            broker.tell_all(*parts)
        await until(lambda: client.malformed_count() == len(GARBAGE), "all of it is counted")
        assert await client.predict("echo", 1)

    with StubBroker(run_dir) as broker, caplog.at_level(logging.WARNING):
        run(work, run_dir)
    assert [record.message for record in caplog.records] == ["message_malformed"]


def test_answer_that_is_no_value_fails_only_its_request(run_dir: Path) -> None:
    def behave(request: Request) -> Sequence[Step]:
        if request.inputs == "bad":
            reply = Reply((ReplyHeader(request.header.id, Code.OK, 1),))
            return [Raw(parts=[bytes(memoryview(part)) for part in encode(reply, [b"\xc1"])])]
        return [Answer(0.2, request.inputs)]

    async def work(client: ModelClient) -> None:
        good = asyncio.create_task(client.predict("echo", "good"))
        assert (await failure(client.predict("echo", "bad"))).code is Code.INTERNAL
        assert await good == "good"
        assert client.malformed_count() == 1

    with StubBroker(run_dir, behave=behave):
        run(work, run_dir)


def test_answers_that_nobody_asked_for_are_passed_over(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        await until(client.server_heard, "the server is heard")
        reply = Reply((ReplyHeader(RequestId(os.urandom(16)), Code.OK, 1),))
        broker.tell_all(*(bytes(memoryview(part)) for part in encode(reply, pack(1))))
        assert await client.predict("echo", 1)
        assert client.malformed_count() == 0

    with StubBroker(run_dir) as broker:
        run(work, run_dir)


# --- wrong use -------------------------------------------------------------------------------------------------------


def test_closed_client_says_how_to_open_it(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="async with"):
        asyncio.run(_await(ModelClient(run_dir).predict("echo", 1)))


def test_client_of_another_loop_is_refused(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        def elsewhere() -> None:
            asyncio.run(_await(client.predict("echo", 1)))

        with pytest.raises(UsageError, match="another event loop"):
            await asyncio.to_thread(elsewhere)
        with pytest.raises(UsageError, match="from coroutines"):
            await asyncio.to_thread(client.submit, "echo", 1)
        with pytest.raises(UsageError, match="open already"):
            client.open()

    run(work, run_dir)


def test_client_may_be_opened_in_one_loop_after_the_other(run_dir: Path) -> None:
    client = ModelClient(run_dir)

    async def meet(timeout_s: float) -> bool:
        async with client:
            return await client.wait_for_server(timeout_s)

    assert not asyncio.run(meet(0.1))
    with StubBroker(run_dir):
        assert asyncio.run(meet(20))
    assert not asyncio.run(meet(0.1)), "what an earlier opening has heard is no news"


def test_closing_ends_the_wait_for_a_server(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        waiting = asyncio.ensure_future(client.wait_for_server(3_600))
        await asyncio.sleep(0)
        client.close()
        assert not await waiting

    run(work, run_dir)


@pytest.mark.parametrize("loop", LOOPS)
def test_client_left_open_by_a_loop_that_ended_can_be_closed_and_used_again(run_dir: Path, loop: str) -> None:
    client = ModelClient(run_dir)

    async def leave_open() -> None:
        client.open()
        client.submit("echo", 1)
        assert await client.predict("echo", 2)

    with StubBroker(
        run_dir, behave=lambda request: silent(request) if request.inputs == 1 else echo(request)
    ) as broker:
        for number in (1, 2):
            with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
                runner.run(leave_open())
            client.close()
            deadline_s = time.monotonic() + 20
            while (
                len(broker.cancelled) < number or sum(pulse.leaving for pulse in broker.received(FrontPulse)) < number
            ):
                assert time.monotonic() < deadline_s, "the server is told"
                time.sleep(0.01)


def test_forgotten_client_holds_nobody_up(run_dir: Path) -> None:
    code = """
import asyncio, gc, sys
from headwaiter import ModelClient
async def main():
    client = ModelClient(sys.argv[1])
    client.open()
    print(await client.predict("echo", 1))
asyncio.run(main())
gc.collect()
print("collected")
"""
    with StubBroker(run_dir, behave=steps(Answer(value="a"))):
        command = [sys.executable, "-W", "error", "-c", code, str(run_dir)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("a\ncollected\n", "")


def test_client_inherited_by_fork_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: ModelClient) -> None:
        with monkeypatch.context() as patch:
            pid = os.getpid()
            patch.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(UsageError, match=f"process {pid}"):
                client.submit("echo", 1)
            client.close()
        assert await client.predict("echo", 1)

    with StubBroker(run_dir):
        run(work, run_dir)


def test_closing_ends_open_requests_here_and_at_the_server(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        call = client.submit("echo", 1)
        await until(lambda: broker.requests, "the request is there")
        inspecting = asyncio.create_task(client.inspect())
        await asyncio.sleep(0)
        client.close()
        assert (await failure(asyncio.ensure_future(_await(call)))).code is Code.SERVER_UNAVAILABLE
        assert (await failure(inspecting)).code is Code.SERVER_UNAVAILABLE
        client.close()
        await until(lambda: broker.cancelled, "the server is told")

    with StubBroker(run_dir, behave=silent) as broker:
        run(work, run_dir)


def test_no_child_process_is_ever_made(run_dir: Path) -> None:
    async def work(client: ModelClient) -> None:
        assert await client.predict("echo", 1)
        assert not multiprocessing.active_children()

    with StubBroker(run_dir):
        run(work, run_dir)

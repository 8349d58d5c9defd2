"""`BlockingModelClient` against a real socket: many threads, interruptions, forks, and the interpreter's exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import headwaiter
from frontend.blocking import BlockingModelClient, _LoopThread
from frontend.client import ModelClient
from shared.errors import Code, ConfigurationError, RequestError, UsageError
from tests.stub_broker import Answer, Fail, Piece, Request, Step, StubBroker, silent
from tests.topology import ROOT, wait_for

THREAD = "headwaiter client"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def python(code: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """Another program; a warning of an unfinished end shows in its output."""
    command = [sys.executable, "-W", "always", "-c", code, str(run_dir)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_methods_have_the_names_and_arguments_of_the_other_client() -> None:
    assert headwaiter.BlockingModelClient is BlockingModelClient
    for name in vars(BlockingModelClient):
        if not name.startswith("_"):
            ours, theirs = (signature(getattr(owner, name)) for owner in (BlockingModelClient, ModelClient))
            assert list(ours.parameters.values()) == list(theirs.parameters.values()), name
    # A stream that has begun has no counterpart here; `submit` gives a future.
    missing = {name for name in vars(ModelClient) if not name.startswith("_")} - vars(BlockingModelClient).keys()
    assert missing == {"submit_stream"}


def test_many_threads_get_each_its_own_answer(run_dir: Path) -> None:
    with StubBroker(run_dir), BlockingModelClient(run_dir) as client, ThreadPoolExecutor(16) as pool:

        def ask(number: int) -> Any:
            answer: Any = client.predict("echo", number)
            return answer["inputs"]

        assert list(pool.map(ask, range(500))) == list(range(500))
        futures = [client.submit("echo", number) for number in range(500)]
        answers: list[Any] = [future.result(30) for future in futures]
        assert [answer["inputs"] for answer in answers] == list(range(500))
        assert client.pending_count() == 0
        assert len(threads()) == 1
    assert not threads()


def test_failure_and_news_are_those_of_the_other_client(run_dir: Path) -> None:
    with (
        StubBroker(run_dir, behave=lambda request: [Fail(code=Code.OVERLOADED, retry_after_ms=1500)]),
        BlockingModelClient(run_dir) as client,
    ):
        assert client.wait_for_server(20)
        with pytest.raises(RequestError) as caught:
            client.predict("echo", 1)
        assert (caught.value.code, caught.value.retry_after_s) == (Code.OVERLOADED, 1.5)
        with pytest.raises(RequestError, match="inputs"):
            client.predict("echo", object())
        assert client.model_names() == ("echo",)
        assert client.models()[0].name == "echo"
        assert client.ready("echo")
        assert client.server_heard()
        assert not client.server_draining()
        assert client.malformed_count() == 0
        assert client.inspect().version == "stub"
        managed = client.manage("scale", "echo", 2)
        assert managed is not None
        assert (managed.outcome, managed.text) == ("done", "scale echo 2")


def test_stream_is_an_ordinary_iterator(run_dir: Path) -> None:
    pieces = [Piece(0.01, value, index) for index, value in enumerate("abc")]
    with StubBroker(run_dir, behave=lambda request: [*pieces, Answer(0.01)]), BlockingModelClient(run_dir) as client:
        assert list(client.stream("echo", 1)) == ["a", "b", "c"]


def test_leaving_a_stream_or_a_future_cancels_it_at_the_server(run_dir: Path) -> None:
    def first(request: Request) -> list[Step]:
        return [Piece(value="a")]

    with StubBroker(run_dir, behave=first) as broker, BlockingModelClient(run_dir) as client:
        for _ in client.stream("echo", 1):
            break
        wait_for(lambda: len(broker.cancelled) == 1, "the server is told")
        broker.behave = silent
        future = client.submit("echo", 1)
        wait_for(lambda: len(broker.requests) == 2, "the request is there")
        future.cancel()
        wait_for(lambda: len(broker.cancelled) == 2, "the server is told")


def test_interrupted_wait_gives_the_request_up(run_dir: Path) -> None:
    code = """
import signal, sys, threading
from headwaiter import BlockingModelClient
signal.signal(signal.SIGALRM, signal.default_int_handler)
with BlockingModelClient(sys.argv[1]) as client:
    client.wait_for_server(20)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        client.predict("echo", 1)
    except KeyboardInterrupt:
        print("interrupted", client.pending_count())
"""
    with StubBroker(run_dir, behave=silent) as broker:
        done = python(code, run_dir)
        assert (done.stdout, done.stderr) == ("interrupted 0\n", "")
        assert broker.cancelled == {broker.requests[0].header.id}


def test_closing_ends_every_wait(run_dir: Path) -> None:
    with StubBroker(run_dir, behave=silent) as broker, ThreadPoolExecutor(4) as pool:
        client = BlockingModelClient(run_dir)
        client.open()
        waiting = [pool.submit(client.predict, "echo", number) for number in range(3)]
        waiting.append(pool.submit(list, client.stream("echo", 3)))
        wait_for(lambda: len(broker.requests) == 4, "all of them wait")
        client.close()
        for future in waiting:
            error = future.exception(20)
            assert isinstance(error, RequestError)
            assert error.code is Code.SERVER_UNAVAILABLE
        client.close()
        assert not threads()


def test_closing_ends_the_wait_for_a_server_that_never_comes(run_dir: Path) -> None:
    client = BlockingModelClient(run_dir)
    client.open()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_for_server, 3_600)
        (running,) = [value for value in vars(client).values() if isinstance(value, _LoopThread)]
        wait_for(lambda: len(asyncio.all_tasks(running._loop)) == 2, "it waits beside the loop's main task")
        client.close()
        assert not waiting.exception(20)
    assert not threads()


def test_only_one_of_many_threads_opens_it(run_dir: Path) -> None:
    client = BlockingModelClient(run_dir)
    together = threading.Barrier(8)

    def open_it(number: int) -> None:
        together.wait(20)
        client.open()

    with ThreadPoolExecutor(8) as pool:
        errors = [future.exception(20) for future in [pool.submit(open_it, number) for number in range(8)]]
    refused = [error for error in errors if error is not None]
    assert len(refused) == 7
    assert all(isinstance(error, UsageError) and "open already" in str(error) for error in refused)
    assert len(threads()) == 1
    client.close()
    assert not threads()


def test_wrong_use_says_what_is_right(run_dir: Path) -> None:
    client = BlockingModelClient(run_dir)
    uses: list[Callable[[], object]] = [
        lambda: client.predict("echo", 1),
        lambda: list(client.stream("echo", 1)),
        client.models,
    ]
    for use in uses:
        with pytest.raises(UsageError, match="not open: use `with"):
            use()
    with client, pytest.raises(UsageError, match="open already"):
        client.open()
    with client:
        assert client.pending_count() == 0, "it may be opened again"
    with pytest.raises(ConfigurationError, match="run_dir"):
        BlockingModelClient(run_dir / ("x" * 120)).open()
    assert not threads()


def test_forgotten_client_leaves_no_thread(run_dir: Path) -> None:
    client = BlockingModelClient(run_dir)
    client.open()
    assert len(threads()) == 1
    del client
    wait_for(lambda: not threads(), "its thread ends")


def test_interpreter_ends_cleanly_with_an_open_client(run_dir: Path) -> None:
    code = """
import sys
from headwaiter import BlockingModelClient
client = BlockingModelClient(sys.argv[1])
client.open()
stream = client.stream("echo", 1)
print(next(stream))
client.submit("echo", 2)
"""
    with StubBroker(run_dir, behave=lambda request: [Piece(value="a")]) as broker:
        done = python(code, run_dir)
        assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")
        wait_for(lambda: len(broker.cancelled) == len(broker.requests), "the server is told of all")


def test_child_of_a_fork_is_refused_and_the_parent_undisturbed(run_dir: Path) -> None:
    code = """
import os, sys
from headwaiter import BlockingModelClient
from shared.errors import UsageError
client = BlockingModelClient(sys.argv[1])
client.open()
stream = client.stream("echo", 1)
next(stream)
if not (child := os.fork()):
    for use in (lambda: client.predict("echo", 1), lambda: next(stream), client.open, client.models):
        try:
            use()
        except UsageError as error:
            print(error, flush=True)
    client.close()
    with BlockingModelClient(sys.argv[1]) as own:
        print(next(own.stream("echo", 1)), flush=True)
    sys.exit()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), next(client.stream("echo", 1)))
"""
    with StubBroker(run_dir, behave=lambda request: [Piece(value="a")]):
        done = python(code, run_dir)
    *refusals, child, parent = done.stdout.splitlines()
    assert (child, parent) == ("a", "0 a"), done.stderr
    assert len(refusals) == 4
    assert all("inherited by fork" in line for line in refusals)

"""When the end of a process is believed: behind its last words, and never much later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

from model_worker.keeper import EXIT_SETTLE_MAX_S, EXIT_SETTLE_S, Exit, Key, ProcessKeeper
from model_worker.outbox import Outbox
from shared.messages import ReplicaHello, SlotName
from shared.sockets import bind_router, connect_dealer, drain, send
from shared.wire import encode
from tests.topology import wait_for

QA0 = SlotName("qa/0")
PIDFD = 99


def keeper_of_one_that_ended(is_heard_out: Callable[[Key], bool]) -> ProcessKeeper:
    """Its child's end is noticed at 0.0 s."""
    child: Any = SimpleNamespace(pid=4711, pidfd=PIDFD, exit_code=lambda: -9, reap=lambda: None)
    launcher: Any = SimpleNamespace(start=lambda spec: child)
    spec: Any = SimpleNamespace(slot=QA0, incarnation=1)
    keeper = ProcessKeeper(launcher, lambda fd: None, lambda fd: None, is_heard_out)
    keeper.start(spec)
    keeper.notice_exits({PIDFD: zmq.POLLIN}, 0.0)
    return keeper


def believed_s(keeper: ProcessKeeper) -> tuple[float, int]:
    """When the keeper believes in the exit, woken whenever it asks for that; and how often it was."""
    turns = 0
    while True:
        assert keeper.wake_at_s is not None
        now_s, turns = keeper.wake_at_s, turns + 1
        if exits := list(keeper.due(now_s)):
            assert exits == [Exit(QA0, 1, -9)]
            assert keeper.wake_at_s is None
            return now_s, turns


def test_exit_is_believed_one_turn_after_the_process_was_heard_out() -> None:
    assert believed_s(keeper_of_one_that_ended(lambda key: True)) == (EXIT_SETTLE_S, 2)
    answers = iter([False, False, True])
    now_s, turns = believed_s(keeper_of_one_that_ended(lambda key: next(answers)))
    assert (round(now_s / EXIT_SETTLE_S), turns) == (3, 4)


def test_exit_of_one_that_is_never_heard_out_is_believed_all_the_same() -> None:
    now_s, _ = believed_s(keeper_of_one_that_ended(lambda key: False))
    assert now_s == EXIT_SETTLE_MAX_S


def test_replica_is_heard_out_when_its_connection_has_ended_and_its_words_are_there(tmp_path: Path) -> None:
    with zmq.Context() as context, zmq.Context() as process:
        router = bind_router(context, f"ipc://{tmp_path}/s")
        dealer = connect_dealer(process, f"ipc://{tmp_path}/s")
        outbox = Outbox(router, router)
        try:
            send(dealer, encode(ReplicaHello(QA0, 1, 4711, "1")))
            assert not outbox.is_heard_out((QA0, 1)), "nothing of it has been read yet"
            wait_for(lambda: router.poll(10), "it is there")
            [(routing_id, *_)] = drain(router, 10)
            outbox.connect((QA0, 1), bytes(routing_id))
            assert not outbox.is_heard_out((QA0, 1))
            for number in range(100):
                send(dealer, [b"last words", str(number).encode()])
            dealer.close(linger=1000)
            wait_for(lambda: outbox.is_heard_out((QA0, 1)), "its connection has ended")
            words = [bytes(parts[2]) for parts in drain(router, 1000)]
            assert words == [str(number).encode() for number in range(100)]
        finally:
            dealer.close(linger=0)
            router.close(linger=0)

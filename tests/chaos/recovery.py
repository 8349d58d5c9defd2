"""How long a kill keeps a client without an answer: measured and printed, never asserted.

One client asks again and again, a question at a time, from the kill until the service is whole again; what is told is
the longest time between two right answers, beside the time that the model needs to load.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable

from tests.chaos import questions
from tests.chaos.clients import Clients
from tests.chaos.ledger import Ledger, Outcome
from tests.chaos.questions import Question
from tests.chaos.subject import BATCH_TIMEOUT_S, Subject
from tests.topology import alive, wait_for

LOAD_S = 0.5
ROUNDS = 3
GIVE_UP_S = 60.0


def report() -> str:
    """A table: what was killed, the median and the slowest of some rounds, in milliseconds."""
    ledger = Ledger()
    with Subject(load_s=LOAD_S) as subject, Clients(subject.port, ledger, count=0, seed=0) as clients:

        def without_answer(find: Callable[[], int], model: str) -> float:
            subject.wait_whole()
            pid = find()
            with ledger.window("recovery", may_cut=True, may_shut=True, kills=1):
                os.kill(pid, signal.SIGKILL)
                whole = threading.Event()
                waiting = clients.start(_longest_wait(clients, lambda: questions.square(model), whole.is_set))
                wait_for(lambda: not alive(pid), "it has ended")
                subject.wait_whole()
                whole.set()
                return waiting.result(GIVE_UP_S)

        def until_replaced(deed: str) -> float:
            subject.wait_whole()
            before = set(subject.replicas("m"))
            began_s = time.monotonic()
            hung = clients.ask(questions.culprit(deed))
            while True:
                with contextlib.suppress(LookupError):
                    if len(before & set(subject.replicas("m"))) < len(before):
                        break
                time.sleep(0.01)
            took_s = time.monotonic() - began_s
            hung.result(GIVE_UP_S)
            return took_s

        rows: list[tuple[str, Callable[[], float]]] = [
            ("model process, with a sibling", lambda: without_answer(lambda: subject.replicas("m")[0], "m")),
            ("model process, the only one", lambda: without_answer(lambda: subject.replicas("one")[0], "one")),
            ("front worker", lambda: without_answer(lambda: subject.workers()[0], "m")),
            ("uvicorn's master", lambda: without_answer(subject.master, "m")),
            ("model server", lambda: without_answer(subject.server, "m")),
            ("everything, by supervisord's death", lambda: without_answer(subject.supervisord, "m")),
            (f"hang that holds the GIL, limit {BATCH_TIMEOUT_S:g} s", lambda: until_replaced("hold_gil")),
            (f"endless loop, limit {BATCH_TIMEOUT_S:g} s", lambda: until_replaced("spin")),
        ]
        lines = [f"{'without an answer after kill -9; hang to its end':<48}{'median':>10}{'slowest':>10}   ms"]
        for name, measure in rows:
            times_ms = [measure() * 1000 for _ in range(ROUNDS)]
            lines.append(f"{name:<48}{statistics.median(times_ms):>10.0f}{max(times_ms):>10.0f}")
    lines.append(f"(each model's own load takes {LOAD_S:g} s of it, and two load at a time)")
    return "\n".join(lines)


async def _longest_wait(clients: Clients, make: Callable[[], Question], is_over: Callable[[], bool]) -> float:
    """The longest time without a right answer, from now until it is over."""
    last_s = time.monotonic()
    longest_s = 0.0
    while True:
        over = is_over()
        outcome, _ = await clients.ask_on(None, make(), keep=False)
        now_s = time.monotonic()
        if outcome is Outcome.RIGHT:
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            if over:
                return longest_s
        await asyncio.sleep(0.005)

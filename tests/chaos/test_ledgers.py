"""Each kind of fault once, under a load that knows the right answers: no answer is wrong, lost, or given twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from tests.chaos import questions
from tests.chaos.clients import Clients
from tests.chaos.connection import Connection
from tests.chaos.faults import BY_NAME, FAULTS, Fault, Scene, inject
from tests.chaos.ledger import CALM, Ledger, Outcome
from tests.chaos.subject import Subject

CLIENTS = 5
# Of each process, the front workers above all; two of these have fewer connections together than are opened here.
OPEN_FILES = 256
PLANS = {
    "model processes": [name for name in BY_NAME if name.startswith(("model.", "only_model."))],
    "inputs": [name for name in BY_NAME if name.startswith("input.")],
    "programs": [name for name in BY_NAME if name.startswith(("server.", "guardian.", "worker.", "master."))],
    "everything": [name for name in BY_NAME if name.startswith(("serve.", "supervisord.", "everything."))],
    "disk and crowds": [name for name in BY_NAME if name.startswith(("disk.", "run_directory.", "clients."))],
}


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """One for all plans, which leave it whole; at its end nothing of any of them may be left."""
    with Subject(small_disk=True) as started:
        yield started


@pytest.mark.parametrize("plan", PLANS)
def test_no_fault_makes_an_answer_wrong_or_lost_or_given_twice(subject: Subject, plan: str) -> None:
    faults = [BY_NAME[name] for name in PLANS[plan]]
    ledger = run(subject, faults)
    print(ledger.text())
    assert ledger.broken == []
    for fault in faults:
        assert ledger.sent(fault.name) > 0, fault.name
        if fault.is_free:
            assert ledger.count(Outcome.REFUSED, fault.name) == 0, f"{fault.name} cost {ledger.refusals(fault.name)}"
        if not fault.may_cut:
            assert ledger.count(Outcome.CUT, fault.name) == 0, fault.name
        if not fault.may_shut:
            assert ledger.count(Outcome.SHUT, fault.name) == 0, fault.name
    assert ledger.count(Outcome.RIGHT, CALM) == ledger.sent(CALM)


def test_every_kind_of_fault_is_in_one_plan() -> None:
    planned = [name for names in PLANS.values() for name in names]
    assert sorted(planned) == sorted(fault.name for fault in FAULTS)


def test_more_connections_than_open_files_are_refused_and_nobody_is_lost() -> None:
    ledger = Ledger()
    held: list[Connection] = []

    async def hold(count: int) -> None:
        held.extend([await Connection.connect(clients.port) for _ in range(count)])

    async def ask_each(count: int) -> None:
        for _ in range(count):
            await clients.ask_on(None, questions.square("m"), keep=False)

    async def let_go() -> None:
        while held:
            held.pop().close()

    with Subject(open_files=OPEN_FILES) as subject, Clients(subject.port, ledger, count=2, seed=1) as clients:
        with ledger.window("files"):
            clients.start(hold(3 * OPEN_FILES)).result(60)
            clients.start(ask_each(100)).result(60)
            clients.start(let_go()).result()
        subject.wait_whole()
        assert clients.ask(questions.square("m")).result(60) is Outcome.RIGHT
        assert "Too many open files" not in subject.log()
    print(ledger.text())
    assert ledger.broken == []
    assert ledger.refusals("files")["overloaded"] >= 90


def run(subject: Subject, faults: Sequence[Fault]) -> Ledger:
    """One after the other, each until the service is whole again."""
    ledger = Ledger()
    with Clients(subject.port, ledger, count=CLIENTS, seed=1) as clients:
        scene = Scene(subject, clients, ledger, random.Random(1))
        for fault in faults:
            inject(fault, scene)
        if ledger.broken:
            print(subject.log())
    return ledger

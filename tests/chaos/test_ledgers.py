"""Each kind of fault once, under a load that knows the right answers: no answer is wrong, lost, or given twice."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.chaos.clients import Clients
from tests.chaos.faults import BY_NAME, FAULTS, Fault, Scene, inject
from tests.chaos.ledger import CALM, Ledger, Outcome
from tests.chaos.subject import Subject

CLIENTS = 5
PLANS = {
    "model processes": [name for name in BY_NAME if name.startswith(("model.", "only_model."))],
    "inputs": [name for name in BY_NAME if name.startswith("input.")],
    "programs": [name for name in BY_NAME if name.startswith(("server.", "guardian.", "worker.", "master."))],
    "everything": [name for name in BY_NAME if name.startswith(("serve.", "supervisord.", "everything."))],
    "disk and crowds": [name for name in BY_NAME if name.startswith(("disk.", "run_directory.", "clients."))],
}


@pytest.mark.parametrize("plan", PLANS)
def test_no_fault_makes_an_answer_wrong_or_lost_or_given_twice(plan: str) -> None:
    faults = [BY_NAME[name] for name in PLANS[plan]]
    ledger = run(faults)
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


def run(faults: Sequence[Fault]) -> Ledger:
    """One after the other, each until the service is whole again."""
    ledger = Ledger()
    disk = any(fault.name.startswith("disk.") for fault in faults)
    with Subject(small_disk=disk) as subject, Clients(subject.port, ledger, count=CLIENTS, seed=1) as clients:
        scene = Scene(subject, clients, ledger, random.Random(1))
        for fault in faults:
            inject(fault, scene)
        if ledger.broken:
            print(subject.log())
    return ledger

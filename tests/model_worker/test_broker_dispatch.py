"""How requests meet replicas: credit, prefetching, even spread, waiting for company."""

from __future__ import annotations

from collections import Counter

from model_worker.broker.effects import ReleasePayload, SendBatch, SendCancel, SendReply, SpawnReplica
from model_worker.broker.events import ItemFinished, RequestArrived
from shared.errors import Code
from shared.messages import Timings
from tests.broker_history import (
    FRONT,
    QA0,
    QA1,
    History,
    batches,
    broker_settings,
    entry,
    model_settings,
    replies,
    request_id,
    spawns,
)


def one_replica(**settings: int | float) -> History:
    history = History(broker_settings([model_settings(**settings)]))  # type: ignore[arg-type]
    history.ready()
    return history


def test_a_request_goes_through_and_its_result_is_relayed() -> None:
    history = History()
    assert history.started == [SpawnReplica(QA0, 1)]
    assert history.ready() == []
    assert history.arrive(1) == [SendBatch(QA0, 1, 1, False, (entry(1),))]
    history.wait(0.5)
    event = ItemFinished(QA0, 1, request_id(1), 1, Code.OK, 7, 1.0, 2.0, 3.0, 1)
    assert history.tell(event) == [
        SendReply(
            FRONT,
            request_id(1),
            Code.OK,
            relay=True,
            attempt=1,
            slot=QA0,
            incarnation=1,
            cost=7,
            timings=Timings(0.0, 1.0, 2.0, 3.0, 1),
        )
    ]


def test_an_item_that_fails_by_itself_is_answered_with_its_own_error() -> None:
    history = one_replica()
    history.arrive(1)
    [reply] = history.finish(1, Code.INVALID_INPUT, message="too long")
    assert isinstance(reply, SendReply)
    assert (reply.code, reply.message, reply.relay) == (Code.INVALID_INPUT, "too long", False)


def test_requests_before_ready_wait_and_go_at_ready() -> None:
    history = History(broker_settings([model_settings(max_batch_size=4)]))
    assert history.arrive(1) == []
    assert history.arrive(2) == []
    assert batches(history.ready()) == [("qa/0", [1, 2])]


def test_an_idle_replica_gets_work_at_once_and_a_busy_one_only_full_batches() -> None:
    history = one_replica(max_batch_size=2)
    assert batches(history.arrive(1)) == [("qa/0", [1])]
    assert history.arrive(2) == []
    assert batches(history.arrive(3)) == [("qa/0", [2, 3])]
    assert history.arrive(4) == []
    assert history.arrive(5) == []  # credit is used up: one running, one prefetched
    assert batches(history.finish(1)) == [("qa/0", [4, 5])]


def test_what_waits_less_than_full_goes_when_the_replica_is_idle() -> None:
    history = one_replica(max_batch_size=4)
    history.arrive(1)
    history.arrive(2)
    history.arrive(3)
    assert batches(history.finish(1)) == [("qa/0", [2, 3])]


def test_nothing_is_prefetched_while_another_replica_is_idle() -> None:
    history = History(broker_settings([model_settings(max_batch_size=1)], slots=2))
    history.ready(QA0)
    history.ready(QA1)
    assert batches(history.arrive(1)) == [("qa/0", [1])]
    assert batches(history.arrive(2)) == [("qa/1", [2])]
    assert batches(history.arrive(3)) == [("qa/0", [3])]


def test_a_batch_is_prefetched_when_the_cost_limit_closes_it() -> None:
    history = one_replica(max_batch_size=100, max_batch_cost=100)
    history.arrive(1, cost=10)
    assert history.arrive(2, cost=60) == []
    assert batches(history.arrive(3, cost=50)) == [("qa/0", [2])]


def test_credit_returns_with_the_last_item_of_a_batch() -> None:
    history = one_replica(max_batch_size=3)
    history.arrive(0)
    for number in (1, 2, 3, 4):
        history.arrive(number)
    assert batches(history.finish(0)) == []  # 1, 2, 3 were prefetched and run now; 4 does not fill a batch
    assert batches(history.finish(1)) == []
    assert batches(history.finish(3)) == []
    assert batches(history.finish(2)) == [("qa/0", [4])]


def test_a_cancelled_item_keeps_its_credit_until_the_replica_reports_it() -> None:
    history = one_replica()
    history.arrive(1)
    history.arrive(2)
    history.arrive(3)
    assert history.cancel(1) == [ReleasePayload(request_id(1)), SendCancel(QA0, 1, (request_id(1),))]
    assert batches(history.finish(1, Code.CANCELLED)) == [("qa/0", [3])]
    assert replies(history.finish(2)) == {2: Code.OK}


def test_a_prefetched_batch_whose_items_were_all_cancelled_frees_its_place() -> None:
    history = one_replica()
    history.arrive(1)
    history.arrive(2)
    history.cancel(2)
    assert history.arrive(3) == []
    assert batches(history.finish(2, Code.CANCELLED)) == [("qa/0", [3])]


def test_one_shot_requests_are_spread_evenly() -> None:
    history = History(broker_settings([model_settings()], slots=2))
    history.ready(QA0)
    history.ready(QA1)
    served: Counter[str] = Counter()
    for number in range(100):
        [(slot, _)] = batches(history.arrive(number))
        served[slot] += 1
        history.finish(number, slot=QA0 if slot == "qa/0" else QA1)
    assert served == {"qa/0": 50, "qa/1": 50}


def test_a_small_batch_waits_for_company_where_that_is_configured() -> None:
    history = one_replica(max_batch_size=3, max_wait_s=0.2)
    assert history.arrive(1) == []
    history.wait(0.1)
    assert history.arrive(2) == []
    assert history.wait(0.0999) == []
    assert batches(history.wait(0.001)) == [("qa/0", [1, 2])]


def test_a_full_batch_does_not_wait_for_company() -> None:
    history = one_replica(max_batch_size=2, max_wait_s=0.2)
    assert history.arrive(1) == []
    assert batches(history.arrive(2)) == [("qa/0", [1, 2])]


def test_requests_of_one_turn_go_together() -> None:
    history = one_replica(max_batch_size=4)
    effects = []
    for number in (1, 2, 3):
        arrived = RequestArrived(FRONT, request_id(number), "qa", "predict", b"", 1, 10, 60.0, 0, False, True)
        effects += history.broker.handle(arrived, 0.0, more_follow=number < 3)
    assert batches(effects) == [("qa/0", [1, 2, 3])]
    history.broker.validate(0.0)


def test_other_operations_and_batch_keys_go_apart() -> None:
    history = one_replica(max_batch_size=4)
    history.arrive(0)
    history.arrive(1, batch_key=b"a")
    history.arrive(2, batch_key=b"b")
    history.arrive(3, batch_key=b"a")
    history.arrive(4, operation="tokenise", batch_key=b"a")
    assert batches(history.finish(0)) == [("qa/0", [1, 3])]
    history.finish(1)
    assert batches(history.finish(3)) == [("qa/0", [2])]
    assert batches(history.finish(2)) == [("qa/0", [4])]


def test_a_model_that_mixes_parameters_batches_over_batch_keys_but_not_over_operations() -> None:
    history = History(broker_settings([model_settings(max_batch_size=4)]))
    history.arrive(1, batch_key=b"a")
    history.arrive(2, batch_key=b"b")
    history.arrive(3, operation="tokenise")
    assert batches(history.ready(mixes_parameters=True)) == [("qa/0", [1, 2])]
    assert history.broker.model_states()[0].mixes_parameters


def test_measured_limits_apply_where_the_settings_have_none() -> None:
    history = History(broker_settings([model_settings(max_batch_size=0, max_batch_cost=0)]))
    for number in (1, 2, 3, 4, 5):
        history.arrive(number, cost=10)
    assert batches(history.ready(max_batch_size=4, max_batch_cost=25)) == [("qa/0", [1, 2]), ("qa/0", [3, 4])]


def test_configured_limits_win_over_measured_ones() -> None:
    history = History(broker_settings([model_settings(max_batch_size=3, max_batch_cost=30)]))
    for number in (1, 2, 3):
        history.arrive(number, cost=10)
    assert batches(history.ready(max_batch_size=2, max_batch_cost=10)) == [("qa/0", [1, 2, 3])]


def test_costs_are_learned_from_what_replicas_report() -> None:
    history = one_replica(max_batch_size=10, max_batch_cost=100)
    history.arrive(1, cost=0, body_bytes=100)
    history.finish(1, cost=50)  # half a unit per byte from now on
    history.arrive(2, cost=0, body_bytes=80)
    for number in (3, 4, 5):
        history.arrive(number, cost=0, body_bytes=80)
    assert batches(history.finish(2, cost=40)) == []  # 3 and 4 were prefetched: 2 x 40 units; a third would be 120
    assert batches(history.all_effects)[-1] == ("qa/0", [3, 4])


def test_several_models_do_not_share_queue_or_replicas() -> None:
    history = History(broker_settings([model_settings("qa"), model_settings("ner")], parallel_loads=2))
    assert spawns(history.started) == [("qa/0", 1), ("ner/0", 1)]
    history.ready()
    assert batches(history.arrive(1, model="ner")) == []
    assert batches(history.arrive(2, model="qa")) == [("qa/0", [2])]


def test_a_more_urgent_priority_goes_first_but_does_not_starve_the_others() -> None:
    history = one_replica()
    history.arrive(0)
    history.arrive(1)  # prefetched
    history.arrive(2, priority=1)
    history.arrive(3, priority=0)
    assert batches(history.finish(0)) == [("qa/0", [3])]
    history.wait(5.1)  # one step of priority is worth 5 s of age
    history.arrive(4, priority=0)
    assert batches(history.finish(1)) == [("qa/0", [2])]
    assert batches(history.finish(3)) == [("qa/0", [4])]


def test_a_late_report_of_an_ended_attempt_is_fenced() -> None:
    history = one_replica()
    history.arrive(1)
    assert history.finish(1, attempt=2) == []
    assert history.finish(7) == []
    assert history.finish(1, incarnation=2) == []
    assert history.broker.fenced == 3
    assert replies(history.finish(1)) == {1: Code.OK}
    assert history.finish(1) == []
    assert history.broker.fenced == 4

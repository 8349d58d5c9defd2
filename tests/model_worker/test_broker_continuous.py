"""Credit of replicas that batch continuously: requests join one by one, as they arrive, while there is room."""

from __future__ import annotations

from model_worker.broker.effects import KillReplica, SendCancel, SendReply
from model_worker.broker.events import DrainRequested
from shared.errors import Code
from shared.messages import SlotName
from tests.broker_history import (
    QA0,
    QA1,
    History,
    batches,
    broker_settings,
    model_settings,
    replies,
    reply,
    request_id,
)


def continuous(concurrency: int = 3, *, slots: int = 1, **settings: int | float) -> History:
    history = History(broker_settings([model_settings(**settings)], slots=slots))  # type: ignore[arg-type]
    for number in range(slots):
        history.ready((QA0, QA1)[number], concurrency=concurrency)
    return history


def test_each_request_is_sent_as_it_arrives_while_there_is_room() -> None:
    history = continuous(3, max_wait_s=10.0)
    assert [batches(history.arrive(number)) for number in range(4)] == [[("qa/0", [n])] for n in range(3)] + [[]]
    # The first to end makes room, whatever else runs.
    assert batches(history.finish(1)) == [("qa/0", [3])]
    assert history.broker.model_states()[0].queued == 0


def test_the_most_urgent_goes_first_whatever_it_costs() -> None:
    history = continuous(1)
    history.arrive(0, cost=5)
    history.arrive(1, cost=900)
    history.arrive(2, cost=5)
    history.arrive(3, cost=5, priority=-1)
    assert [batches(history.finish(number)) for number in (0, 3, 1)] == [[("qa/0", [number])] for number in (3, 1, 2)]


def test_parameters_and_operations_do_not_keep_requests_apart() -> None:
    history = continuous(3)
    for number in range(3):
        assert batches(history.arrive(number, batch_key=bytes([number]), operation=f"o{number}"))


def test_requests_spread_over_replicas_by_their_room() -> None:
    history = continuous(3, slots=2)
    slots = [batches(history.arrive(number))[0][0] for number in range(4)]
    assert sorted(slots) == ["qa/0", "qa/0", "qa/1", "qa/1"]
    for number in range(4):
        if slots[number] == "qa/0":
            history.finish(number)
    assert [batches(history.arrive(number))[0][0] for number in (10, 11)] == ["qa/0", "qa/0"]


def test_the_queue_begins_behind_what_can_run() -> None:
    history = continuous(3, queue_size_max=1)
    codes = [replies(history.arrive(number)) for number in range(5)]
    assert codes == [{}, {}, {}, {}, {4: Code.OVERLOADED}]


def test_time_in_the_queue_is_counted_for_each_request() -> None:
    history = continuous(2)
    history.arrive(0)
    history.wait(5.0)
    history.arrive(1)
    answer = reply(history.finish(1), 1)
    assert answer.timings.queue_ms == 0.0


def test_a_cancelled_request_makes_room_when_the_replica_has_let_go_of_it() -> None:
    history = continuous(1)
    history.arrive(0)
    history.arrive(1)
    effects = history.cancel(0)
    assert SendCancel(QA0, 1, (request_id(0),)) in effects
    assert batches(effects) == []
    assert batches(history.finish(0, Code.CANCELLED)) == [("qa/0", [1])]


def test_after_a_death_streams_end_and_the_others_run_again_alone() -> None:
    history = continuous(3)
    for number in range(3):
        history.arrive(number, stream=number == 0)
    history.chunk(0)
    effects = history.exit()
    assert replies(effects) == {0: Code.MODEL_CRASHED}
    effects = history.ready(concurrency=3)
    assert batches(effects) == [("qa/0", [1])]
    # Whoever arrives meanwhile waits: neither of the two suspects has company.
    assert batches(history.arrive(5)) == []
    assert batches(history.finish(1, incarnation=2, attempt=2)) == [("qa/0", [2])]
    assert batches(history.finish(2, incarnation=2, attempt=2)) == [("qa/0", [5])]


def test_a_death_does_not_bring_the_other_replicas_to_a_standstill() -> None:
    """Suspects wait for an empty replica, and busy ones are never empty by themselves."""
    slots = [SlotName(f"qa/{number}") for number in range(4)]
    history = History(broker_settings([model_settings()], slots=4, parallel_loads=4))
    for slot in slots:
        history.ready(slot, concurrency=2)
    places = {number: batches(history.arrive(number))[0][0] for number in range(8)}
    for number in range(8, 40):
        history.arrive(number)
    history.exit(slot=slots[3])
    suspects = [number for number, slot in places.items() if slot == slots[3]]
    sent = []
    for number in [number for number in places if number not in suspects]:
        sent += batches(history.finish(number, slot=SlotName(places[number])))
    # One replica was kept free until it was empty; four of the six that ended were followed by others at once.
    assert [numbers for _, numbers in sent if numbers[0] in suspects] == [suspects[:1]]
    assert len([numbers for _, numbers in sent if numbers[0] not in suspects]) == 4


def test_all_replicas_but_half_go_on_whatever_the_number_of_suspects() -> None:
    slots = [SlotName(f"qa/{number}") for number in range(5)]
    history = History(broker_settings([model_settings()], slots=5, parallel_loads=5))
    for slot in slots:
        history.ready(slot, concurrency=4)
    for number in range(60):
        history.arrive(number)
    history.exit(slot=slots[4])
    model = history.broker.models["qa"]
    assert model.backlog.count_alone_ahead() == 4
    for replica in history.broker.keeper.replicas():
        if replica.running is not None:
            history.finish(int.from_bytes(next(iter(replica.running.open)), "big"), slot=replica.slot)
    assert len(model.joinable) == len(model.kept_for_suspects()) == 2


def test_newcomers_do_not_make_a_hung_replica_look_alive() -> None:
    history = continuous(3, batch_timeout_s=4.0)
    history.arrive(0)
    for number in (1, 2):
        history.wait(1.9)
        history.arrive(number)
    assert KillReplica(QA0, 1, "hung: no progress for 4 s", dump_stacks=True) in history.wait(0.3)


def test_steps_that_the_replica_counts_keep_it_alive() -> None:
    history = continuous(3, batch_timeout_s=4.0)
    history.arrive(0)
    for step in range(1, 8):
        assert history.wait(1.0) == []
        assert history.pulse(progress_count=step) == []


def test_a_drain_finishes_what_runs_and_what_waits() -> None:
    history = continuous(1)
    history.arrive(0)
    history.arrive(1)
    history.tell(DrainRequested(30.0))
    assert batches(history.finish(0)) == [("qa/0", [1])]
    effects = history.finish(1)
    assert [effect.code for effect in effects if isinstance(effect, SendReply)] == [Code.OK]


def test_the_histogram_shows_how_many_shared_the_steps_of_each_answer() -> None:
    history = continuous(3)
    for number in range(2):
        history.arrive(number)
    for number in range(2):
        history.finish(number)
    [totals] = history.broker.counters()
    assert (totals.batches, totals.batch_size_sum) == (2, 2)

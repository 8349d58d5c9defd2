"""What operators order: reload, scale, drain, unload, load, each answered once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from model_worker.broker.effects import (
    Effect,
    KillReplica,
    SendDrain,
    SendManaged,
    SendStop,
    SpawnReplica,
    StopServer,
)
from model_worker.broker.events import DrainRequested, ReplicaPhaseChanged, SpawnFailed
from model_worker.broker.settings import SlotSettings
from shared.errors import Code, ConfigurationError
from shared.messages import Phase, SlotName
from tests.broker_history import (
    OPERATOR,
    QA0,
    QA1,
    History,
    batches,
    broker_settings,
    managed,
    model_settings,
    replies,
    reply,
    spawns,
)


class Room:
    """A planner with room for so many processes."""

    def __init__(self, processes: int = 99) -> None:
        self.processes = processes

    def grow(
        self, model: str, replicas: int, present: Sequence[SlotName], used_bytes: Mapping[str, int]
    ) -> tuple[SlotSettings, ...]:
        if replicas > self.processes:
            raise ConfigurationError(f"{replicas} replicas take more than there is")
        names = [SlotName(f"{model}/{number}") for number in range(replicas)]
        return tuple(SlotSettings(name, model, "cpu") for name in names if name not in present)

    def crowding(self, processes: Sequence[SlotName], used_bytes: Mapping[str, int]) -> str:
        return f"{len(processes)} are too many" if len(processes) > self.processes else ""


def serving(*slots: SlotName, room: int = 99, **limits: float) -> History:
    history = History(broker_settings([model_settings()], slots=len(slots) or 1, **limits), Room(room))
    for slot in slots or (QA0,):
        history.ready(slot)
    return history


def ready(history: History, slot: SlotName, incarnation: int) -> list[Effect]:
    return history.tell(ReplicaPhaseChanged(slot, incarnation, Phase.READY))


def text(history: History) -> str:
    """Of the latest answer to an operator."""
    return [effect for effect in history.all_effects if isinstance(effect, SendManaged)][-1].text


# --- reload ------------------------------------------------------------------------------------------------------


def test_reload_takes_the_old_process_away_only_when_the_new_one_is_ready() -> None:
    history = serving()
    assert history.order("reload", "qa") == [SpawnReplica(QA0, 2)]
    assert batches(history.arrive(1)) == [("qa/0", [1])]
    assert ready(history, QA0, 2) == [SendDrain(QA0, 1, 60.0)]
    assert batches(history.arrive(2)) == [("qa/0", [2])]
    assert history.finish(1)[-1] == SendStop(QA0, 1)
    assert managed(history.exit(0, incarnation=1)) == [(1, "done")]
    assert replies(history.finish(2, incarnation=2)) == {2: Code.OK}


def test_reload_renews_one_slot_after_the_other() -> None:
    history = serving(QA0, QA1)
    assert spawns(history.order("reload", "qa")) == [("qa/0", 2)]
    assert ready(history, QA0, 2) == [SendStop(QA0, 1)]
    assert spawns(history.exit(0, incarnation=1)) == [("qa/1", 2)]
    ready(history, QA1, 2)
    assert managed(history.exit(0, slot=QA1, incarnation=1)) == [(1, "done")]
    assert text(history) == "model 'qa' is loaded afresh: qa/0, qa/1"


@pytest.mark.parametrize("how", ["failed", "killed", "not started"])
def test_reload_that_cannot_be_loaded_keeps_the_process_that_serves(how: str) -> None:
    history = serving()
    history.order("reload", "qa")
    if how == "failed":
        assert history.tell(ReplicaPhaseChanged(QA0, 2, Phase.FAILED, detail="no such file", permanent=True)) == []
        effects = history.exit(70)
    elif how == "killed":
        effects = history.exit(-9)
    else:
        effects = history.tell(SpawnFailed(QA0, 2, "no more processes"))
    assert managed(effects) == [(1, "failed")]
    reason = {"failed": "no such file", "killed": "signal 9", "not started": "no more processes"}[how]
    assert reason in text(history)
    assert "goes on serving" in text(history)
    assert batches(history.arrive(1)) == [("qa/0", [1])]
    assert replies(history.finish(1)) == {1: Code.OK}
    assert history.broker.model_states()[0].state == "ready"


def test_a_process_that_dies_during_its_reload_is_followed_by_the_one_that_loads() -> None:
    history = serving()
    history.arrive(1)
    history.order("reload", "qa")
    assert spawns(history.exit(-9, incarnation=1)) == []
    effects = ready(history, QA0, 2)
    assert batches(effects) == [("qa/0", [1])]
    assert managed(effects) == [(1, "done")]


def test_without_room_for_two_the_old_process_goes_first_and_what_comes_waits() -> None:
    history = serving(room=1)
    history.arrive(1)
    assert history.order("reload", "qa") == [SendDrain(QA0, 1, 60.0)]
    history.arrive(2)
    assert history.finish(1)[-1] == SendStop(QA0, 1)
    assert spawns(history.exit(0)) == [("qa/0", 2)]
    effects = ready(history, QA0, 2)
    assert batches(effects) == [("qa/0", [2])]
    assert managed(effects) == [(1, "done")]
    assert "2 are too many" in text(history)


def test_a_second_reload_is_refused_by_name_while_the_first_goes_on() -> None:
    history = serving()
    history.order("reload", "qa")
    assert managed(history.order("reload", "qa")) == [(2, "refused")]
    assert text(history) == "model 'qa' is being reloaded: try again when that has ended"


def test_reload_gives_a_model_that_was_given_up_another_try() -> None:
    history = History(broker_settings([model_settings(), model_settings("ner")], parallel_loads=2))
    history.ready(SlotName("ner/0"))
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.FAILED, detail="no such file", permanent=True))
    history.exit(70)
    assert history.broker.model_states()[0].state == "failed"
    assert spawns(history.order("reload", "qa")) == [("qa/0", 2)]
    assert managed(ready(history, QA0, 2)) == [(1, "done")]


def test_what_a_replaced_process_says_late_is_fenced() -> None:
    history = serving()
    history.arrive(1)
    history.order("reload", "qa")
    ready(history, QA0, 2)
    history.finish(1)
    history.exit(0, incarnation=1)
    fenced = history.broker.fenced
    assert history.finish(1) == []
    assert history.broker.fenced == fenced + 1


def test_a_process_that_drains_and_hangs_is_killed() -> None:
    history = serving()
    history.arrive(1, timeout_s=300)
    history.order("reload", "qa")
    ready(history, QA0, 2)
    effects = history.wait(60.0)
    assert [effect.incarnation for effect in effects if isinstance(effect, KillReplica)] == [1]
    assert replies(effects) == {1: Code.DEADLINE_EXCEEDED}  # alone in there, it is the reason
    assert managed(history.exit(-9, incarnation=1)) == [(1, "done")]


# --- scale -------------------------------------------------------------------------------------------------------


def test_scale_adds_slots_and_takes_the_highest_away_again() -> None:
    history = serving()
    assert spawns(history.order("scale", "qa", 2)) == [("qa/1", 1)]
    assert [slot.slot for slot in history.broker.slot_states(0.0)] == ["qa/0", "qa/1"]
    assert managed(ready(history, QA1, 1)) == [(1, "done")]
    assert "set replicas = 2 in the configuration" in text(history)
    history.arrive(1)
    history.arrive(2)
    assert history.order("scale", "qa", 1) == [SendDrain(QA1, 1, 60.0)]
    assert history.finish(2, slot=QA1)[-1] == SendStop(QA1, 1)
    assert managed(history.exit(0, slot=QA1)) == [(2, "done")]
    assert [slot.slot for slot in history.broker.slot_states(0.0)] == ["qa/0"]
    assert spawns(history.order("scale", "qa", 2)) == [("qa/1", 2)]  # incarnations never repeat


def test_scale_that_has_no_room_is_refused_with_the_numbers() -> None:
    history = serving(room=3)
    assert managed(history.order("scale", "qa", 4)) == [(1, "refused")]
    assert text(history) == "4 replicas take more than there is"


def test_scale_to_nothing_is_refused_with_the_remedy() -> None:
    history = serving()
    assert managed(history.order("scale", "qa", 0)) == [(1, "refused")]
    assert "use unload" in text(history)


def test_scale_whose_new_slots_cannot_be_loaded_ends_as_it_began() -> None:
    history = serving(load_attempts_max=1)
    history.order("scale", "qa", 3)
    history.tell(ReplicaPhaseChanged(QA1, 1, Phase.FAILED, detail="out of memory"))
    history.exit(70, slot=QA1)
    effects = ready(history, SlotName("qa/2"), 1)
    assert effects == [SendStop(SlotName("qa/2"), 1)]
    assert managed(history.exit(0, slot=SlotName("qa/2"))) == [(1, "failed")]
    assert "model 'qa' has 1 replica and no more: qa/1: out of memory" in text(history)
    assert [slot.slot for slot in history.broker.slot_states(0.0)] == ["qa/0"]


# --- drain -------------------------------------------------------------------------------------------------------


def test_drain_refuses_what_comes_finishes_what_is_there_and_stays() -> None:
    history = serving()
    history.arrive(1)
    assert history.order("drain") == []
    assert history.broker.draining
    assert not history.broker.is_ending
    refused = reply(history.arrive(2), 2)
    assert (refused.code, refused.retry_after_s) == (Code.DRAINING, 5.0)
    assert managed(history.finish(1)) == [(1, "done")]
    assert managed(history.order("resume")) == [(2, "done")]
    assert batches(history.arrive(3)) == [("qa/0", [3])]


def test_resume_ends_a_drain_that_has_not_come_to_its_end() -> None:
    history = serving()
    history.arrive(1)
    history.order("drain")
    assert managed(history.order("resume")) == [(1, "failed"), (2, "done")]
    assert managed(history.finish(1)) == []


def test_a_batch_does_not_wait_for_company_that_is_not_let_in() -> None:
    history = History(broker_settings([model_settings(max_batch_size=4, max_wait_s=1.0)]))
    history.ready()
    assert history.arrive(1) == []
    assert batches(history.order("drain")) == [("qa/0", [1])]


# --- unload and load ---------------------------------------------------------------------------------------------


def test_unload_finishes_what_was_let_in_and_refuses_until_load() -> None:
    history = serving()
    for number in (1, 2, 3):
        history.arrive(number)
    assert history.order("unload", "qa") == []
    assert reply(history.arrive(4), 4).code is Code.MODEL_LOADING
    history.finish(1)
    history.finish(2)
    assert history.finish(3)[-1] == SendStop(QA0, 1)
    assert managed(history.exit(0)) == [(1, "done")]
    assert history.wait(100.0) == []
    [state] = history.broker.model_states()
    assert (state.state, history.broker.slot_states(0.0)[0].state) == ("unloaded", "unloaded")
    assert managed(history.order("reload", "qa")) == [(2, "refused")]
    assert spawns(history.order("load", "qa")) == [("qa/0", 2)]
    assert managed(ready(history, QA0, 2)) == [(3, "done")]
    assert batches(history.arrive(5)) == [("qa/0", [5])]


def test_a_request_that_lost_its_process_during_an_unload_is_run_all_the_same() -> None:
    history = serving()
    history.arrive(1)
    history.order("unload", "qa")
    assert spawns(history.exit(-9)) == [("qa/0", 2)]
    assert batches(ready(history, QA0, 2)) == [("qa/0", [1])]
    assert history.finish(1, incarnation=2, attempt=2)[-1] == SendStop(QA0, 2)
    assert managed(history.exit(0)) == [(1, "done")]


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "model", "words"),
    [("repaint", "qa", "use reload"), ("reload", "nobody", "known: qa"), ("unload", "", "known: qa")],
)
def test_what_cannot_be_ordered_is_refused_with_what_can(action: str, model: str, words: str) -> None:
    history = serving()
    assert managed(history.order(action, model)) == [(1, "refused")]
    assert words in text(history)


def test_every_order_is_answered_when_the_server_stops() -> None:
    history = serving()
    history.arrive(1)
    history.order("reload", "qa")
    history.order("drain")
    effects = history.tell(DrainRequested(30.0))
    assert managed(effects) == [(1, "failed"), (2, "failed")]
    assert [type(effect) for effect in effects if isinstance(effect, KillReplica)] == [KillReplica]
    assert managed(history.order("load", "qa")) == [(3, "refused")]
    history.exit(-9)
    assert history.finish(1)[-1] == SendStop(QA0, 1)
    assert history.exit(0, incarnation=1) == [StopServer(0, "drained")]


def test_an_operator_that_only_gives_orders_is_no_front() -> None:
    history = serving()
    assert OPERATOR not in history.broker.fronts.known
    history.order("reload", "qa")
    assert OPERATOR not in history.broker.fronts.known


# --- what simulated worlds have shown ----------------------------------------------------------------------------


def test_reload_is_over_only_when_the_process_that_failed_is_gone() -> None:
    history = serving()
    history.order("reload", "qa")
    assert managed(history.tell(ReplicaPhaseChanged(QA0, 2, Phase.FAILED, detail="no such file"))) == []
    assert managed(history.order("reload", "qa")) == [(2, "refused")]
    assert managed(history.exit(70)) == [(1, "failed")]
    assert spawns(history.order("reload", "qa")) == [("qa/0", 3)]


def test_a_new_process_that_was_ready_and_died_is_no_failed_reload() -> None:
    history = serving()
    history.arrive(1)
    history.order("reload", "qa")
    ready(history, QA0, 2)
    assert managed(history.exit(-9)) == []
    assert history.finish(1)[-1] == SendStop(QA0, 1)
    assert managed(history.exit(0, incarnation=1)) == [(1, "done")]


def test_who_waits_for_a_model_that_is_scaled_to_what_cannot_be_loaded_is_told_so() -> None:
    history = History(broker_settings([model_settings()], slots=2))
    history.tell(ReplicaPhaseChanged(QA0, 1, Phase.FAILED, detail="no such file", permanent=True))
    history.exit(70)
    history.arrive(1)
    assert replies(history.order("scale", "qa", 1)) == {1: Code.MODEL_FAILED}


def test_a_slot_whose_breaker_is_open_is_tried_again_after_its_model_was_idle() -> None:
    limits = {"breaker_deaths_max": 1, "breaker_window_s": 30.0}
    history = History(broker_settings([model_settings(idle_unload_s=10.0)], slots=2, **limits))
    history.ready(QA0)
    history.ready(QA1)
    history.exit(-9, slot=QA1)
    history.wait(10.0)
    history.exit(0)
    assert spawns(history.arrive(1)) == [("qa/0", 2)]
    history.ready(QA0)
    history.finish(1, incarnation=2)
    spawned = []
    for number in range(2, 7):
        spawned += spawns(history.wait(5.0))
        history.arrive(number)
        history.finish(number, incarnation=2)
    assert spawned == [("qa/1", 2)]

"""On which thread a stage runs: on the main one where nothing else is to be computed, beside it as soon as there is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from queue import Queue
from typing import Any, NoReturn

import pytest
from typing_extensions import Buffer

from model_worker.replica import handover
from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.forward_stage import Progress
from model_worker.replica.host_stages import Limits
from model_worker.replica.intake import Intake
from model_worker.replica.jobs import Job
from model_worker.replica.stages import Stages, run_guarded
from model_worker.runtimes.base import Model
from shared import values
from shared.errors import Code
from shared.messages import ChunkHeader, ItemResult, RequestId
from tests.topology import wait_for

WITHIN_S = 20.0


class Noted(Model):
    """Notes which thread did what to which item; the subclasses of the tests below wait and fail in it."""

    def __init__(self) -> None:
        self.threads: dict[tuple[str, Any], str] = {}

    def note(self, stage: str, what: Any) -> None:
        self.threads[stage, what] = threading.current_thread().name

    def load(self, device: str) -> None:
        raise AssertionError("there is nothing to load")

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
        self.note("prepare", inputs)
        return inputs

    def forward(self, items: Sequence[Any]) -> Sequence[Any]:
        for item in items:
            self.note("forward", item)
        return items

    def finish(self, output: Any) -> Any:
        self.note("finish", output)
        return output


class Bench:
    """The stages of one model, served by a thread named `main`; `told` is what the broker would hear, in order."""

    def __init__(self, model: Model) -> None:
        self.told: list[tuple[int, str | int]] = []
        """Who it is about, and the code of its result or the index of its piece."""
        self.flushed: list[int] = []
        """How much had been told at each flush that told something."""
        self.left: Queue[tuple[ReplicaExit, str]] = Queue()
        self.stages = Stages(model, Limits(0, 8), self, Progress(), self.leave)
        self._main = threading.Thread(target=self._serve, name="main", daemon=True)
        self._main.start()

    def _serve(self) -> None:
        with contextlib.suppress(SystemExit):
            run_guarded(self.stages.serve, self.leave)

    def submit(self, *inputs: Any, first_id: int = 0, stream: bool = False, alone: bool = False) -> None:
        """One batch; its items are numbered from `first_id`."""
        self.stages.submit(
            [
                Job(
                    id=RequestId(number.to_bytes(16, "big")),
                    attempt=1,
                    operation="predict",
                    stream=stream,
                    deadline_s=float("inf"),
                    payload=values.pack([each, {}]),
                    alone=alone,
                )
                for number, each in enumerate(inputs, first_id)
            ]
        )

    def wait_told(self, count: int) -> None:
        wait_for(lambda: len(self.told) >= count, f"{count} answers", WITHIN_S)

    def ask(self, *inputs: Any, alone: bool = False) -> None:
        before = len(self.told)
        self.submit(*inputs, alone=alone)
        self.wait_told(before + len(inputs))

    def end(self) -> None:
        self.stages.end()
        self._main.join(WITHIN_S)
        assert not self._main.is_alive()
        assert self.left.empty()

    def result(self, job: Job, result: ItemResult, frames: Sequence[Buffer]) -> None:
        self.told.append((int.from_bytes(job.id, "big"), result.code))

    def chunk(self, chunk: ChunkHeader, frames: Sequence[Buffer]) -> None:
        self.told.append((int.from_bytes(chunk.id, "big"), chunk.index))

    def flush(self) -> None:
        if len(self.told) != (self.flushed[-1] if self.flushed else 0):
            self.flushed.append(len(self.told))

    def dying(self, reason: str) -> None:
        raise AssertionError(reason)

    def leave(self, code: ReplicaExit, reason: str, error: BaseException | None = None) -> NoReturn:
        self.left.put((code, reason))
        raise SystemExit


@pytest.fixture
def all_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, finishing counts as short."""
    monkeypatch.setattr(handover, "SHORT_S", 1e6)


@pytest.fixture
def no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the main thread prepares."""
    monkeypatch.setattr(Intake, "help", lambda self: None)


@pytest.mark.usefixtures("all_is_short")
def test_a_lone_batch_is_prepared_computed_and_finished_on_the_main_thread() -> None:
    model = Noted()
    bench = Bench(model)

    def is_all_main() -> bool:
        # An answer may be heard, and the next batch be there, a moment before the main thread waits again.
        bench.ask("a", "b")
        return set(model.threads.values()) == {"main"}

    wait_for(is_all_main, "a batch that met an idle process", WITHIN_S)
    assert {stage for stage, _ in model.threads} == {"prepare", "forward", "finish"}
    bench.end()


@pytest.mark.usefixtures("all_is_short")
def test_the_next_batch_is_prepared_beside_a_forward_and_the_last_one_is_finished_beside_the_next() -> None:
    """Each forward waits for what has to happen beside it: without the overlap, the test never ends."""
    prepared_second, finished_first = threading.Event(), threading.Event()

    class Overlapping(Noted):
        def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
            if inputs == "second":
                prepared_second.set()
            return super().prepare(inputs, parameters)

        def forward(self, items: Sequence[Any]) -> Sequence[Any]:
            if "first" in items:
                bench.submit("second")
                # The helper has it in `prepared` before the forward ends, so that something waits then.
                assert prepared_second.wait(WITHIN_S)
            if "second" in items:
                assert finished_first.wait(WITHIN_S)
            return super().forward(items)

        def finish(self, output: Any) -> Any:
            if output == "first":
                finished_first.set()
            return super().finish(output)

    model = Overlapping()
    bench = Bench(model)
    bench.ask("before")
    bench.submit("first")
    bench.wait_told(3)
    assert model.threads["prepare", "second"] == "prepare"
    assert model.threads["finish", "first"] == "finish"
    bench.end()


@pytest.mark.usefixtures("all_is_short")
def test_what_arrives_while_results_are_finished_has_the_others_finished_beside_it() -> None:
    class Interrupted(Noted):
        def finish(self, output: Any) -> Any:
            if output == "a":
                bench.submit("next")
            return super().finish(output)

    model = Interrupted()
    bench = Bench(model)
    bench.ask("before")
    bench.submit("a", "b", "c")
    bench.wait_told(5)
    assert [model.threads["finish", each] for each in "abc"] == ["main", "finish", "finish"]
    bench.end()


def test_what_takes_long_to_finish_is_left_to_the_finish_thread() -> None:
    model = Noted()
    bench = Bench(model)
    # Nothing is known of a model before the first result.
    bench.ask("a")
    assert model.threads["finish", "a"] == "finish"
    bench.end()


def test_after_an_item_that_had_the_device_to_itself_the_main_thread_finishes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Noted()
    bench = Bench(model)
    bench.ask("a", alone=True)
    assert model.threads["finish", "a"] == "finish"
    monkeypatch.setattr(handover, "SHORT_S", 1e6)

    def is_finished_there() -> bool:
        bench.ask("b")
        return model.threads["finish", "b"] == "main"

    wait_for(is_finished_there, "an answer that the main thread finished", WITHIN_S)
    bench.end()


@pytest.mark.usefixtures("all_is_short", "no_help")
def test_results_that_the_main_thread_finishes_leave_together() -> None:
    bench = Bench(Noted())
    bench.ask("a", "b", "c")
    bench.end()
    assert bench.flushed == [3]


def test_no_answer_overtakes_what_was_left_to_the_finish_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, go_on = threading.Event(), threading.Event()

    class Held(Noted):
        def finish(self, output: Any) -> Any:
            if output == "held":
                is_held.set()
                assert go_on.wait(WITHIN_S)
            return super().finish(output)

    model = Held()
    bench = Bench(model)
    bench.submit("held")
    assert is_held.wait(WITHIN_S)
    # From now on all is short, but the finish thread has not told the first answer yet.
    monkeypatch.setattr(handover, "SHORT_S", 1e6)
    bench.submit("next", first_id=1)
    wait_for(lambda: ("forward", "next") in model.threads, "the next forward", WITHIN_S)
    go_on.set()
    bench.wait_told(2)
    bench.end()
    assert bench.told == [(0, Code.OK), (1, Code.OK)]
    assert model.threads["finish", "next"] == "finish"


@pytest.mark.usefixtures("all_is_short")
def test_the_steps_of_a_stream_do_not_wait_for_its_pieces_to_be_finished() -> None:
    """Each step waits until the piece before it is finished: without the overlap, the test never ends."""
    finished = [threading.Event() for _ in range(3)]

    class Words(Noted):
        def forward(self, items: Sequence[Any]) -> Sequence[Any]:
            return [self.words() for _ in items]

        def words(self) -> Iterator[int]:
            for number, event in enumerate(finished):
                yield number
                assert event.wait(WITHIN_S)

        def finish(self, output: Any) -> Any:
            finished[output].set()
            return super().finish(output)

    model = Words()
    bench = Bench(model)
    bench.submit("x", stream=True)
    bench.wait_told(4)
    bench.end()
    assert bench.told == [(0, 0), (0, 1), (0, 2), (0, Code.OK)]
    assert {thread for (stage, _), thread in model.threads.items() if stage == "finish"} == {"finish"}


@pytest.mark.usefixtures("all_is_short", "no_help")
def test_an_error_in_a_finish_on_the_main_thread_fails_its_item_alone() -> None:
    class Failing(Noted):
        def finish(self, output: Any) -> Any:
            super().finish(output)
            if output == "bad":
                raise ValueError("no")
            return output

    model = Failing()
    bench = Bench(model)
    bench.ask("a", "bad", "c")
    bench.ask("d")
    bench.end()
    assert [code for _, code in bench.told] == [Code.OK, Code.MODEL_ERROR, Code.OK, Code.OK]
    assert {thread for (stage, _), thread in model.threads.items() if stage == "finish"} == {"main"}


@pytest.mark.usefixtures("all_is_short", "no_help")
@pytest.mark.parametrize("place", ["prepare", "finish"])
def test_a_model_that_exits_on_the_main_thread_ends_the_process(place: str) -> None:
    class Exiting(Noted):
        def note(self, stage: str, what: Any) -> None:
            if stage == place:
                raise SystemExit(4)

    bench = Bench(Exiting())
    bench.submit("a")
    code, reason = bench.left.get(timeout=WITHIN_S)
    assert code is ReplicaExit.MODEL_EXITED
    assert reason == "the model's code raised SystemExit: 4 on the main thread"
    assert bench.told == []


def test_whoever_prepares_batches_are_taken_in_the_order_of_arrival() -> None:
    """Each of the two threads prepares some; batches that have ended in it are left out."""
    prepared_by: list[str] = []
    inside = threading.Lock()

    def prepare(jobs: list[Job]) -> list[list[Job]]:
        assert inside.acquire(blocking=False), "prepare was entered twice at once"
        prepared_by.append(threading.current_thread().name)
        inside.release()
        return [] if jobs[0].attempt % 5 == 0 else [jobs]

    intake = Intake(prepare, arrived_max=16, prepared_max=4)
    helper = threading.Thread(target=intake.help, name="prepare")
    helper.start()
    count = 400

    def put_all() -> None:
        for number in range(1, count + 1):
            batch = [Job(RequestId(bytes(16)), number, "predict", False, 0.0, [])]
            wait_for(lambda batch=batch: intake.put([batch]), "room", WITHIN_S)  # type: ignore[misc]
        intake.end()

    putter = threading.Thread(target=put_all)
    putter.start()
    taken = []
    while (micro_batch := intake.take(wait=True)) is not None:
        taken.append(micro_batch[0].attempt)
    putter.join(WITHIN_S)
    helper.join(WITHIN_S)
    assert not helper.is_alive()
    assert taken == [number for number in range(1, count + 1) if number % 5]
    assert len(prepared_by) == count
    assert intake.is_empty()
    assert intake.take(wait=False) is None

"""What holds for the stages by themselves: bounds, who does what, and that no thread ever dies alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Queue
from typing import Any, NoReturn

import pytest
from typing_extensions import Buffer

from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.forward_stage import Progress
from model_worker.replica.host_stages import Limits
from model_worker.replica.jobs import Job
from model_worker.replica.returns import WrongOutputs, WrongReturn, cost_of, one_output_per_item
from model_worker.replica.stages import ARRIVED_BATCHES_MAX, Stages, run_guarded
from model_worker.runtimes.base import Model
from shared import values
from shared.errors import Code
from shared.messages import ChunkHeader, ItemResult, RequestId
from tests.stub_models import Grumpy, Quiet

WITHIN_S = 10.0


class Recorder:
    """An outlet that keeps what it is given, and a way out that is noted and not taken."""

    def __init__(self) -> None:
        self.results: Queue[ItemResult] = Queue()
        self.left: Queue[tuple[ReplicaExit, str]] = Queue()
        self.refuses: str = ""
        self.told: list[str] = []
        """What the broker would hear, in order."""

    def result(self, job: Job, result: ItemResult, frames: Sequence[Buffer]) -> None:
        if threading.current_thread().name == self.refuses:
            raise RuntimeError("the outlet is broken")
        self.told.append(result.code)
        self.results.put(result)

    def chunk(self, chunk: ChunkHeader, frames: Sequence[Buffer]) -> None:
        raise AssertionError("nothing streams here")

    def flush(self) -> None:
        pass

    def dying(self, reason: str) -> None:
        self.told.append(f"dying: {reason}")

    def leave(self, code: ReplicaExit, reason: str, error: BaseException | None = None) -> NoReturn:
        self.left.put((code, reason))
        # A real process would be gone by now; this thread can only stand still.
        threading.Event().wait()
        raise AssertionError("unreachable")


def job(number: int, inputs: object = "x", **changes: Any) -> Job:
    return Job(
        id=RequestId(number.to_bytes(16, "big")),
        attempt=1,
        operation="predict",
        stream=False,
        deadline_s=time.monotonic() + 60,
        payload=values.pack([inputs, {}]),
        **changes,
    )


def stages_of(model: Model, recorder: Recorder) -> Stages:
    return Stages(model, Limits(0, 8), recorder, Progress(), recorder.leave)


def on_main(stages: Stages, recorder: Recorder) -> threading.Thread:
    """Serves on a thread named `main`, guarded like a process's own."""
    thread = threading.Thread(target=run_guarded, args=(stages.serve, recorder.leave), name="main", daemon=True)
    thread.start()
    return thread


class Held(Grumpy):
    """The input `held` stays in its forward until `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.release = threading.Event(), threading.Event()

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        if "held" in items:
            self.is_held.set()
            assert self.release.wait(WITHIN_S)
        return super().answer(items)


def test_batches_that_came_before_the_end_are_answered_before_serve_returns() -> None:
    recorder = Recorder()
    stages = stages_of(Quiet(), recorder)
    for number in range(ARRIVED_BATCHES_MAX):
        stages.submit([job(2 * number), job(2 * number + 1)])
    stages.end()
    stages.serve()
    assert recorder.results.qsize() == 2 * ARRIVED_BATCHES_MAX
    assert recorder.left.empty()


def test_more_batches_than_any_credit_allows_are_refused_at_once() -> None:
    recorder = Recorder()
    stages = stages_of(Quiet(), recorder)
    for number in range(ARRIVED_BATCHES_MAX):
        stages.submit([job(number)])
    assert recorder.results.empty()
    stages.submit([job(100), job(101)])
    assert [recorder.results.get_nowait().code for _ in range(2)] == [Code.OVERLOADED] * 2


@pytest.mark.parametrize(("thread", "inputs"), [("prepare", "refused"), ("main", "forward fails"), ("finish", "fine")])
def test_error_outside_an_item_takes_the_way_out_from_whichever_thread(thread: str, inputs: str) -> None:
    recorder = Recorder()
    recorder.refuses = thread
    model = Held()
    stages = stages_of(model, recorder)
    on_main(stages, recorder)
    if thread == "prepare":
        # While the main thread computes, it is another one that prepares.
        stages.submit([job(0, "held")])
        assert model.is_held.wait(WITHIN_S)
    stages.submit([job(1, inputs)])
    code, reason = recorder.left.get(timeout=WITHIN_S)
    model.release.set()
    assert code is ReplicaExit.INTERNAL_ERROR
    assert reason == f"RuntimeError: the outlet is broken on the {thread} thread"


@pytest.mark.parametrize("place", ["forward", "prepare", "finish"])
@pytest.mark.parametrize(
    ("batches", "code"),
    [([[True]], Code.MODEL_ERROR), ([[False, False]], Code.REPLICA_FAULT)],
    ids=["one that is alone", "two together"],
)
def test_end_of_the_device_is_told_before_any_result_that_comes_of_it(
    place: str, batches: list[list[bool]], code: Code
) -> None:
    """For the credit of a result, the broker sends the next request at once, and whatever is in a process that ends may
    be blamed for its end."""

    class Fragile(Quiet):
        def _break(self, name: str) -> None:
            if name == place:
                raise RuntimeError("CUDA error: device-side assert triggered")

        def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
            self._break("prepare")
            return inputs

        def forward(self, items: Sequence[Any]) -> Sequence[Any]:
            self._break("forward")
            return items

        def finish(self, output: Any) -> Any:
            self._break("finish")
            return output

    recorder = Recorder()
    stages = stages_of(Fragile(), recorder)
    for batch in batches:
        stages.submit([job(number, alone=alone) for number, alone in enumerate(batch)])
    threading.Thread(target=stages.serve, daemon=True).start()
    left, reason = recorder.left.get(timeout=WITHIN_S)
    assert left is ReplicaExit.DEVICE_FAULT
    assert recorder.told[0] == f"dying: {reason}"
    assert set(recorder.told[1:]) == {code}


def test_expired_output_is_not_finished() -> None:
    recorder = Recorder()
    late = job(1)

    class Late(Quiet):
        def forward(self, items: Sequence[Any]) -> Sequence[Any]:
            late.deadline_s = 0.0
            return items

        def finish(self, output: Any) -> Any:
            raise AssertionError("nobody waits for this")

    stages = stages_of(Late(), recorder)
    stages.submit([late])
    stages.end()
    stages.serve()
    assert recorder.results.get_nowait().code is Code.DEADLINE_EXCEEDED


class Fixed(Quiet):
    """Returns the same whatever it is asked."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def cost(self, item: Any) -> Any:
        return self.returned

    def forward(self, items: Sequence[Any]) -> Any:
        return self.returned


@pytest.mark.parametrize("outputs", ["ab", b"ab", {"a": 1, "b": 2}, 2, None, iter([1, 2]), [1], [1, 2, 3]])
def test_outputs_that_cannot_be_told_apart_are_refused(outputs: object) -> None:
    with pytest.raises(WrongOutputs, match=r"^Fixed\.forward returned .* for 2 items: return "):
        one_output_per_item(Fixed(outputs), ["a", "b"])


@pytest.mark.parametrize("outputs", [[1, 2], (1, 2), range(1, 3)])
def test_any_sequence_of_outputs_will_do(outputs: object) -> None:
    assert one_output_per_item(Fixed(outputs), ["a", "b"]) == [1, 2]


@pytest.mark.parametrize("cost", [-1, 2**63, 1.5, None])
def test_cost_that_no_message_can_carry_is_refused(cost: object) -> None:
    with pytest.raises(WrongReturn, match=r"^Fixed\.cost returned .*: a cost is a whole number from 0 to "):
        cost_of(Fixed(cost), "x")

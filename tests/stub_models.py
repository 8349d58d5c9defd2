"""Small models with one habit each, to be served by real model processes as `tests.stub_models:Name`.

Each tells what happened in it through a file, the option `journal`: one JSON object a line, with the process's id and
the thread's name, so that a test counts what really happened, in whichever process it happened.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from model_worker.replica import host_stages
from model_worker.runtimes.base import Model, Progress
from shared.errors import InvalidInput, LoadError

GIVE_UP_S = 60.0


def wait_for_file(path: str) -> None:
    """Blocks until a test makes this file; an empty path blocks nothing."""
    deadline_s = time.monotonic() + GIVE_UP_S
    while path and not os.path.exists(path):
        assert time.monotonic() < deadline_s, f"nobody made {path}"
        time.sleep(0.005)


class Echo(Model):
    """Gives back what it gets; the base of the others. A text costs its length, everything else 1."""

    def __init__(self, journal: str = "", examples: Sequence[Any] = (), cost_limit: int = 0) -> None:
        self.journal = Path(journal) if journal else None
        self.example_inputs = examples
        self.max_batch_cost = cost_limit
        self._entered = {stage: threading.Lock() for stage in ("prepare", "forward", "finish")}

    @contextlib.contextmanager
    def alone_in(self, stage: str) -> Iterator[None]:
        assert self._entered[stage].acquire(blocking=False), f"{stage} was entered twice at once"
        try:
            yield
        finally:
            self._entered[stage].release()

    def note(self, event: str, **fields: object) -> None:
        if self.journal is not None:
            line = {"event": event, "pid": os.getpid(), "thread": threading.current_thread().name, **fields}
            with self.journal.open("a") as stream:
                stream.write(json.dumps(line) + "\n")

    def load(self, device: str) -> None:
        self.note("loaded", device=device, torch="torch" in sys.modules)

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        return [(inputs, {}) for inputs in self.example_inputs]

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
        with self.alone_in("prepare"):
            self.note("prepared", inputs=str(inputs))
        if inputs == "refused":
            raise InvalidInput("inputs must not be 'refused'", detail={"got": "refused"})
        return inputs

    def cost(self, item: Any) -> int:
        return len(item) if isinstance(item, str) else 1

    def forward(self, items: Sequence[Any]) -> Sequence[Any]:
        with self.alone_in("forward"):
            self.note("forwarded", items=[str(item) for item in items], budget=self.max_batch_cost)
            return self.answer(items)

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        return list(items)

    def finish(self, output: Any) -> Any:
        with self.alone_in("finish"):
            self.note("finished")
        return output


class Unhurried(Echo):
    """However long finishing takes, all results of a batch leave together."""

    def load(self, device: str) -> None:
        super().load(device)
        host_stages.HAND_OVER_S = GIVE_UP_S


class SlowLoader(Echo):
    """Loads until the file `release` exists, and says how far it is."""

    def __init__(self, release: str = "", journal: str = "") -> None:
        super().__init__(journal)
        self.release = release

    def load(self, device: str) -> None:
        self.report_progress(0.25, "download of the first part")
        self.report_progress(0.5, "second part")
        wait_for_file(self.release)


class Unloadable(Echo):
    """Its load fails in the way named by `how`."""

    def __init__(self, how: str = "", journal: str = "") -> None:
        super().__init__(journal)
        self.how = how

    def load(self, device: str) -> None:
        if self.how == "permanent":
            raise LoadError("the directory holds no model", permanent=True)
        if self.how == "exit":
            sys.exit("the model's author gives up")
        raise ValueError("weights are\nupside down")


class Masked(Echo):
    """The error that leaves `load` is not the one that matters."""

    def load(self, device: str) -> None:
        try:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nand more text")
        except RuntimeError:
            self.undefined()  # type: ignore[attr-defined]


class Sleeper(Echo):
    """An input that names a file holds the forward until that file exists."""

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        for item in items:
            if isinstance(item, str) and item.startswith("/"):
                wait_for_file(item)
        return list(items)


class Grumpy(Echo):
    """Fails in many ways, each asked for by an input's text."""

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
        item = super().prepare(inputs, parameters)
        if inputs == "prepare fails":
            raise KeyError("prepare", "failed\nin two lines")
        if inputs == "prepare panics":
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return item

    def group(self, item: Any) -> Any:
        return ["unhashable"] if item == "group fails" else None

    def cost(self, item: Any) -> Any:
        return {"cost fails": -5, "cost is text": "many"}.get(item, super().cost(item))

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        if "forward fails" in items:
            raise TwoArguments("forward", 7)
        if "forward panics" in items:
            raise PanicException("index out of bounds")
        if "forward exits" in items:
            sys.exit(0)
        return [ValueError("this output is bad") if item == "output fails" else item for item in items]

    def finish(self, output: Any) -> Any:
        if output == "finish fails":
            raise Speechless
        if output == "finish exits":
            sys.exit(3)
        if output == "unserialisable":
            return {"list": [1, object()]}
        return {"score": float("nan")} if output == "nan" else output


class PanicException(BaseException):
    """Like what a Rust extension raises: `except Exception` does not see it."""


class TwoArguments(Exception):
    """Cannot be rebuilt from its text alone."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(where, number)


class Speechless(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise AttributeError("no text")


class Miscounting(Echo):
    """Returns one output too few, or none of a countable kind."""

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        if "iterator" in items:
            return iter(items)  # type: ignore[return-value]
        return list(items)[1:]


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


class Hungry(Echo):
    """Has memory for `capacity` items at once; the input `huge` never fits."""

    def __init__(self, capacity: int = 2, journal: str = "", examples: Sequence[Any] = (), cost_limit: int = 0) -> None:
        super().__init__(journal, examples, cost_limit)
        self.capacity = capacity

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        if "huge" in items:
            raise MemoryError
        if len(items) > self.capacity:
            raise OutOfMemoryError("Tried to allocate 2.00 GiB")
        return list(items)


class Faulty(Echo):
    """The input `fault` breaks the device: every later forward of the process fails. `returned fault` does so by an
    output, `late fault` only when its output is finished; `patient` is not finished before something broke."""

    broken = threading.Event()

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        error = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")
        if "fault" in items:
            self.broken.set()
        if self.broken.is_set():
            raise error
        return [error if item == "returned fault" else item for item in items]

    def finish(self, output: Any) -> Any:
        if output == "late fault":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if output == "patient":
            assert self.broken.wait(GIVE_UP_S)
            time.sleep(0.01)  # The forward that broke is now on its way to the exit.
        return output


class Lingering(Echo):
    """Finishing `held` gives the next forward a chance to start first, and notes whether it did."""

    forwards = 0
    again = threading.Event()

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        self.forwards += 1
        if self.forwards > 1:
            self.again.set()
        return list(items)

    def finish(self, output: Any) -> Any:
        return self.again.wait(0.3) if output == "held" else output


class Streaming(Echo):
    """Yields the words of a text, one a step; counts the steps in its journal. Closed generators say so."""

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        return [self.words(item) for item in items]

    def words(self, text: str) -> Generator[str, None, str | None]:
        try:
            for word in text.split():
                if word.startswith("/"):
                    wait_for_file(word)
                if word == "fails":
                    raise ValueError("the stream broke")
                self.note("stepped", word=word)
                yield word
        finally:
            self.note("closed")
        return f"{len(text.split())} words" if text.endswith("counted") else None


class Undressed(Echo):
    """Its code takes the standard streams away, as some libraries do to be left in peace, and may fail after that."""

    def __init__(self, how: str = "absent", fails: bool = False, journal: str = "") -> None:
        super().__init__(journal)
        self.how = how
        self.fails = fails

    def load(self, device: str) -> None:
        if self.how == "absent":
            sys.stdout = sys.stderr = None
        elif self.how == "closed":
            sys.stdout.close()
            sys.stderr.close()
        elif self.how == "descriptors closed":
            os.close(1)
            os.close(2)
        elif self.how == "broken":
            sys.stdout = sys.stderr = Broken()
        if self.fails:
            raise ValueError("weights are upside down")


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError("nothing is written here")


class Sampled(Echo):
    """Offers texts of some lengths to measure with; a batch of any size takes the same time."""

    def __init__(self, lengths: Sequence[int], fails: bool = False, journal: str = "") -> None:
        super().__init__(journal)
        self.lengths = lengths
        self.fails = fails

    def samples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        return [("x" * length, {}) for length in self.lengths]

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        if self.fails:
            raise ValueError("no such kernel")
        time.sleep(1e-3)
        return list(items)


class Misdescribed(Echo):
    """One of its methods returns a list of texts."""

    def __init__(self, method: str, journal: str = "") -> None:
        super().__init__(journal)
        setattr(self, method, lambda: ["a"])


class Grouping(Echo):
    """Keeps items with different first letters apart, and knows a second operation."""

    operations: ClassVar[tuple[str, ...]] = ("count",)
    mixes_parameters: ClassVar[bool] = True

    def group(self, item: Any) -> Any:
        return item[0]

    def prepare_operation(self, operation: str, inputs: Any, parameters: dict[str, Any]) -> Any:
        return f"{operation} {len(inputs)}"

    def describe(self) -> dict[str, object]:
        return {"dtype": "none at all", "odd": object}


class Quiet(Model):
    """Does nothing at all, as fast as it can: what is left is what the process itself costs."""

    def __init__(self, journal: str = "") -> None:
        pass

    def load(self, device: str) -> None:
        pass

    def forward(self, items: Sequence[Any]) -> Sequence[Any]:
        return items


class Counting(Quiet):
    """Batches continuously: counts each item, a dict, up to its `to`, one number a step.

    With `error`, a step raises an error of that text once the item has got to `raise_at` and at least `raise_from`
    items run. `wait_at` makes the step that gets there wait for the file `release`. With `piece_bytes` the pieces are
    texts of that size.
    """

    continuous_batching = True

    def __init__(self, journal: str = "", room: int = 0, examples: Sequence[Any] = (), step_s: float = 0.0) -> None:
        super().__init__(journal)
        self.step_s = step_s
        self.journal = Path(journal) if journal else None
        self.room = room
        self.example_inputs = examples
        self.running: dict[int, tuple[dict[str, Any], list[int]]] = {}

    def note(self, event: str, **fields: object) -> None:
        if self.journal is not None:
            with self.journal.open("a") as stream:
                stream.write(json.dumps({"event": event, **fields}) + "\n")

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        return [(inputs, {}) for inputs in self.example_inputs]

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
        self.note("prepared", name=inputs.get("name"))
        return dict(inputs)

    def can_join(self, item: Any) -> bool:
        return not self.room or len(self.running) < self.room

    def join(self, item: Any) -> None:
        if item.get("join") == "raise":
            raise ValueError("not this one")
        self.running[id(item)] = (item, [])

    def leave(self, item: Any) -> None:
        self.note("left", name=item.get("name"), count=len(self.running[id(item)][1]))
        del self.running[id(item)]

    def step(self) -> Sequence[Progress]:
        time.sleep(self.step_s)
        self.note("stepped", names=[item.get("name") for item, _ in self.running.values()])
        return [self._count(item, numbers) for item, numbers in list(self.running.values())]

    def _count(self, item: dict[str, Any], numbers: list[int]) -> Progress:
        numbers.append(len(numbers) + 1)
        if len(numbers) == item.get("wait_at"):
            wait_for_file(item["release"])
        if "error" in item and len(numbers) >= item.get("raise_at", 1) and len(self.running) >= item["raise_from"]:
            raise RuntimeError(item["error"])
        piece = "x" * item["piece_bytes"] if "piece_bytes" in item else len(numbers)
        if len(numbers) < item["to"]:
            return Progress(item, piece)
        del self.running[id(item)]
        output = ValueError("it ends badly") if item.get("ends") == "badly" else {"numbers": numbers}
        return Progress(item, piece, ended=True, output=output)


class Confused(Counting):
    """Tells of items that nobody gave it."""

    def step(self) -> Sequence[Progress]:
        return [Progress("whatever", ended=True)]

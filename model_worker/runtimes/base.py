"""The interface between a model process and what it runs; a user's own class implements the same one.

Refuses torch: a class that needs it imports it in `load`, on the main thread of the model process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shared.errors import InvalidInput


def _ignore_progress(fraction: float, text: str) -> None:
    """Stands in until the model process sets its own."""


def _ignore_step() -> None:
    """Stands in until the model process sets its own."""


def _always_wanted(item: object) -> bool:
    """Stands in until the model process sets its own."""
    return True


@dataclass(frozen=True, slots=True)
class Progress:
    """What one `Model.step` did for one item."""

    item: Any
    piece: Any = None
    """A piece of the answer, for a request that streams; it goes through `finish`. None: nothing to show yet."""
    ended: bool = False
    """The last word on this item, which has left the batch."""
    output: Any = None
    """The whole answer of an item that has ended, as `forward` would return it; a request that streams gets it behind
    its pieces. An `Exception` fails this item alone."""


class Model:
    """One loaded model. Only `load` and `forward` have to be written; or, for a model that makes its answers step by
    step and sets `continuous_batching`, `load`, `join`, `leave` and `step`.

    Threads: `load`, `forward`, the steps and the warm-up run on the main thread of the process. While it computes,
    `prepare` and `cost` run on a thread beside it, and `finish` on another; where nothing else is to be computed, the
    main thread calls them itself. No method is ever entered twice at once, so a tokenizer that only `prepare` touches
    needs no lock.
    """

    mixes_parameters: ClassVar[bool] = False
    """Whether requests with different `parameters` may share a `forward`; if not, the broker keeps them apart."""

    pads: bool = True
    """Whether a `forward` pads its items to one length, so that it costs `max(cost) * len(items)`. Set it to False, in
    the class or in `load`, for one that costs what its items cost together: any of them are good company then."""

    operations: ClassVar[tuple[str, ...]] = ()
    """What requests may ask for besides `predict`; such a request goes to `prepare_operation`. Others are refused."""

    max_batch_cost: int = 0
    """Units one `forward` may take, padding included; set in `load`. 0: no limit of the model's own.
    After `load` the process puts the configured number here, if there is one, else what it has measured with `samples`;
    or a lower one that fits into memory."""

    max_batch_size: int = 0
    """Most items in one `forward`, or in one step. The configured number, there before `load`; 0: no limit."""

    continuous_batching: bool = False
    """Whether items join and leave a running batch between its steps. Set it in the class, or in `load`: then `join`,
    `leave` and `step` are called, and `forward` and `group` never are. What shares a step may have any parameters."""

    report_progress: Callable[[float, str], None] = staticmethod(_ignore_progress)
    """Call it in `load` with a fraction from 0.0 to 1.0 (-1.0: unknown) and a few words, for `headwaiter status`."""

    report_step: Callable[[], None] = staticmethod(_ignore_step)
    """Call it in a long `forward` after each part, such as a decode step: the process counts as hung, and is replaced,
    when `batch_timeout_s` pass without a report or an end."""

    is_wanted: Callable[[object], bool] = staticmethod(_always_wanted)
    """Ask it in a long `forward`, with one of its items, whether anybody still waits for that one: its client may have
    left, or its deadline passed. The output of an item that nobody waits for is thrown away, whatever it is."""

    def load(self, device: str) -> None:
        """Loads the weights onto `device` (`cpu`, `cuda:0`, `mps`). Called once, before anything else.

        Raises:
            shared.errors.LoadError: the cause in one line; `permanent` if a new try cannot help.
        """
        raise NotImplementedError

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Any:
        """Turns one request into one item: decode, check, tokenise.

        Raises:
            InvalidInput: refuses this request only, with 422 and this text.
        """
        if parameters:
            raise InvalidInput(f"unknown parameter {next(iter(parameters))!r}: this model takes none")
        return inputs

    def prepare_operation(self, operation: str, inputs: Any, parameters: dict[str, Any]) -> Any:
        """Does what `prepare` does, for a request that asked for one of `operations`."""
        raise NotImplementedError

    def cost(self, item: Any) -> int:
        """Units of one item, such as its number of tokens; `pads` says what a batch costs."""
        return 1

    def group(self, item: Any) -> Hashable:
        """Items with different groups never share a `forward`; for parameters that hold for a whole batch."""
        return None

    def forward(self, items: Sequence[Any]) -> Sequence[Any]:
        """Computes one batch: one output per item, in order.

        An output that is an `Exception` fails that item alone; one that is a generator is streamed.
        """
        raise NotImplementedError

    def can_join(self, item: Any) -> bool:
        """Whether there is room for this item now, besides what runs; `max_batch_size` is looked after elsewhere.

        There must be room for any item that `prepare` has let through while nothing runs.
        """
        return True

    def join(self, item: Any) -> None:
        """Takes an item in, from its beginning; the next steps compute it. What was made of it before is forgotten."""
        raise NotImplementedError

    def leave(self, item: Any) -> None:
        """Lets go of an item that has joined and not ended: nobody waits for it any more, or a step has raised."""
        raise NotImplementedError

    def step(self) -> Sequence[Progress]:
        """Computes one step of everything that has joined; returns what it did, at most one end per item.

        If it raises, all items are made to leave, and those of which nothing was sent join again, in smaller company.
        """
        raise NotImplementedError

    def finish(self, output: Any) -> Any:
        """Turns one output into plain values (str, numbers, lists, dicts, bytes, numpy arrays, tensors).

        Large arrays are sent without a copy: never write to one after returning it.
        """
        return output

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        """Requests (inputs, parameters) to warm up with before the first real one; the largest shape first."""
        return ()

    def samples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        """Requests (inputs, parameters) of usual sizes, to measure with how much one `forward` should hold.

        Where the configuration names no `max_batch_cost`, batches of more and more copies of each are timed, for a few
        seconds at most, before the model is ready. Empty: nothing is measured, and what `load` has set counts.
        """
        return ()

    def describe(self) -> dict[str, object]:
        """What was decided in `load` (dtype, bytes, padding side …), for `headwaiter status`."""
        return {}

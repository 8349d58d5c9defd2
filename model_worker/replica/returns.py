"""What a model's methods must return, checked where it is used.

Owns the errors that name the class, the method, what it returned and what was expected: a wrong return would otherwise
fail far from its cause, in words about headwaiter's own code. Refuses to know threads, jobs or queues.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence

from typing_extensions import Buffer

from model_worker.runtimes.base import Model, Progress
from model_worker.runtimes.checks import shown
from shared import values
from shared.messages import INT_MAX


class WrongReturn(TypeError):
    """A method of the model returned what its description does not allow."""

    def __init__(self, model: Model, method: str, returned: object, expected: str) -> None:
        super().__init__(
            f"{type(model).__name__}.{method} returned {shown(returned)} ({type(returned).__name__}): {expected}"
        )


class WrongOutputs(Exception):
    """`forward` did not return one output per item, so no output can be told to belong to any item."""


def cost_of(model: Model, item: object) -> int:
    """`Model.cost` as a whole number that is not negative.

    Raises:
        WrongReturn: it is something else, or more than a message can carry.
    """
    returned = model.cost(item)
    expected = f"a cost is a whole number from 0 to {INT_MAX}"
    try:
        cost = operator.index(returned)
    except TypeError:
        raise WrongReturn(model, "cost", returned, expected) from None
    if not 0 <= cost <= INT_MAX:
        raise WrongReturn(model, "cost", returned, expected)
    return cost


def group_of(model: Model, item: object) -> Hashable:
    """
    Raises:
        WrongReturn: `Model.group` returned what cannot be compared by its hash.
    """
    group = model.group(item)
    try:
        hash(group)
    except TypeError:
        expected = "a group is hashable, such as a string, a number or a tuple of these"
        raise WrongReturn(model, "group", group, expected) from None
    return group


def one_output_per_item(model: Model, items: Sequence[object]) -> list[object]:
    """What `Model.forward` returns for `items`, as a list that matches them.

    Raises:
        WrongOutputs: it cannot be told which output belongs to which item.
    """
    outputs: object = model.forward(items)
    name, count = f"{type(model).__name__}.forward", len(items)
    if isinstance(outputs, (str, bytes, Mapping)) or not (hasattr(outputs, "__len__") and hasattr(outputs, "__iter__")):
        raise WrongOutputs(f"{name} returned {type(outputs).__name__} for {count} items: return a list")
    listed = list(outputs)
    if len(listed) != count:
        raise WrongOutputs(f"{name} returned {len(listed)} outputs for {count} items: return one for each")
    return listed


def progress_of(model: Model) -> list[Progress]:
    """What `Model.step` returns.

    Raises:
        WrongReturn: it is no list of `Progress`.
    """
    progress: object = model.step()
    if not isinstance(progress, (list, tuple)) or not all(isinstance(entry, Progress) for entry in progress):
        raise WrongReturn(model, "step", progress, "return a list of Progress, one or more for each item that moved")
    return list(progress)


def packed(model: Model, value: object) -> list[Buffer]:
    """What `Model.finish` returned, or a list of that, as frames.

    Raises:
        Unserialisable: something in it cannot be sent; the text names the method and the place.
    """
    return values.pack(value, where=f"{type(model).__name__}.finish()")


def examples_of(model: Model) -> list[tuple[object, dict[str, object]]]:
    """
    Raises:
        WrongReturn: `Model.examples` returned something else than pairs of inputs and parameters.
    """
    return _requests(model, "examples", model.examples())


def samples_of(model: Model) -> list[tuple[object, dict[str, object]]]:
    """
    Raises:
        WrongReturn: `Model.samples` returned something else than pairs of inputs and parameters.
    """
    return _requests(model, "samples", model.samples())


def _requests(model: Model, method: str, returned: object) -> list[tuple[object, dict[str, object]]]:
    expected = "return a list of pairs (inputs, parameters), the parameters a dict"
    if not isinstance(returned, (list, tuple)):
        raise WrongReturn(model, method, returned, expected)
    for request in returned:
        if not (isinstance(request, (list, tuple)) and len(request) == 2 and isinstance(request[1], Mapping)):
            raise WrongReturn(model, method, returned, expected)
    return [(inputs, dict(parameters)) for inputs, parameters in returned]


def description_of(model: Model) -> dict[str, object]:
    """
    Raises:
        WrongReturn: `Model.describe` returned no dict with names for keys.
    """
    described: object = model.describe()
    if not (isinstance(described, dict) and all(isinstance(key, str) for key in described)):
        raise WrongReturn(model, "describe", described, "return a dict with text for keys")
    return described

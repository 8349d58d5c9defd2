"""A simulated operator, and the planner that knows the machine.

It reloads, scales, drains and unloads at any moment, and takes back what would keep requests out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from model_worker.broker.effects import SendManaged
from model_worker.broker.events import FrontId, ManageRequested
from model_worker.broker.settings import SlotSettings
from shared.errors import ConfigurationError
from shared.messages import SlotName
from tests.simulation.faults import Fault, dice

if TYPE_CHECKING:
    from tests.simulation.world import World

LOOK_S = 0.5
REPLICAS_MAX = 4
# What takes requests away from everybody is taken back with these.
REMEDIES = {"unload": "load", "drain": "resume"}
ORDERS = {
    Fault.RELOAD: "reload",
    Fault.SCALE: "scale",
    Fault.UNLOAD: "unload",
    Fault.LOAD: "load",
    Fault.DRAIN: "drain",
    Fault.NONSENSE: "nonsense",
}


class Operator:
    """Gives orders, several at a time, and does not always wait for the answers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = dice(world.recipe.seed, "operator")
        self._id = FrontId(self._rng.randbytes(5))
        self._tokens = 0
        self._look()

    def _look(self) -> None:
        world = self._world
        for fault, action in ORDERS.items():
            if world.faults.strikes(fault, "operator"):
                self._order(action, self._rng.choice([*world.checker.stations, "nobody"]), self._rng.randint(0, 4))
        world.clock.after(LOOK_S, self._look)

    def _order(self, action: str, model: str, replicas: int) -> None:
        self._tokens += 1
        order = ManageRequested(self._id, self._tokens, action, model, replicas)
        self._world.clock.after(self._rng.uniform(0.0, 0.1), lambda: self._world.deliver(order))

    def answered(self, order: ManageRequested, answer: SendManaged) -> None:
        """Whatever came of it, or was refused: what it was to take away is given back, and asked for until it is."""
        remedy = REMEDIES.get(order.action)
        if remedy is not None:
            delay_s = self._rng.uniform(0.0, 4.0)
            self._world.clock.after(delay_s, lambda: self._order(remedy, order.model, 0))
        elif order.action == "load" and answer.outcome == "refused":
            self._world.clock.after(1.0, lambda: self._order("load", order.model, 0))


class SimulatedPlanner:
    """A machine with room for so many processes."""

    def __init__(self, world: World, room: int) -> None:
        self._world = world
        self._room = room

    def grow(
        self, model: str, replicas: int, present: Sequence[SlotName], used_bytes: Mapping[str, int]
    ) -> tuple[SlotSettings, ...]:
        if replicas > REPLICAS_MAX:
            raise ConfigurationError(f"there is no room for {replicas} replicas of {model}")
        names = [SlotName(f"{model}/{number}") for number in range(replicas)]
        added = tuple(SlotSettings(name, model, "cpu") for name in names if name not in present)
        self._world.checker.saw_growth(added)
        return added

    def crowding(self, processes: Sequence[SlotName], used_bytes: Mapping[str, int]) -> str:
        is_crowded = self._world.checker.is_crowded = len(processes) > self._room
        return f"{len(processes)} processes do not fit" if is_crowded else ""

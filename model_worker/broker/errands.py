"""What an operator orders and what takes its time: a reload, a change of the number of replicas, an unload, a load, a
drain.

Owns the course of each. An errand looks at the records in every turn and orders what is missing, so that it goes on
from wherever crashes have left it; it ends with an `Outcome`, at the latest when every load, drain and stop that it
waits for has reached its own limit of time. Refuses to judge whether it may begin: that is `managing`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from model_worker.broker.ledger import Ledger
from model_worker.broker.models import Model
from model_worker.broker.planning import Planner
from model_worker.broker.processes import Processes
from model_worker.broker.records import ReplicaState, Slot, Standing
from model_worker.broker.slots import SlotKeeper
from shared.messages import SlotName


@dataclass(frozen=True, slots=True)
class Outcome:
    word: Literal["done", "refused", "failed"]
    text: str


class Errand(Protocol):
    doing: str
    """What is being done, as in "model 'qa' is being …"."""

    def go_on(self, now_s: float) -> Outcome | None:
        """Orders what can be done now; None while there is something to wait for."""

    def abandon(self, now_s: float) -> None:
        """Leaves everything as it is at this moment, without beginning anything new."""


class Reload:
    """Renews a model's slots one after the other, so that at most one process more than usual is there at a time.

    Where memory allows, the slot's process serves until its successor is READY. Elsewhere it is dismissed first, and
    what arrives meanwhile waits, or goes to the other replicas.
    """

    doing = "reloaded"

    def __init__(self, model: Model, keeper: SlotKeeper, processes: Processes, planner: Planner) -> None:
        self._model = model
        self._keeper = keeper
        self._processes = processes
        self._planner = planner
        self._pending = deque(model.slots)
        self._renewed: list[str] = []
        # The incarnation that the first pending slot is to get beyond; None until its renewal has begun.
        self._before: int | None = None
        self._loads_before = 0
        # Why processes had to go before their successors came.
        self._crowding = ""

    def go_on(self, now_s: float) -> Outcome | None:
        while self._pending:
            slot = self._pending[0]
            if self._before is None and not self._begin(slot, now_s):
                return None
            # Once its new process has been READY, what becomes of that is no business of the reload.
            is_loaded = slot.loads > self._loads_before
            if not is_loaded and slot.incarnation == self._before:
                # Its process has to go first, and its slot to be filled in its turn.
                return self._failed(slot, slot.reason) if slot.failure is not None else None
            if not is_loaded:
                is_gone = self._keeper.current(slot.name, slot.incarnation) is None
                return self._failed(slot, slot.last_end) if is_gone else None
            if slot.retired is not None:
                return None
            self._before = None
            self._renewed.append(self._pending.popleft().name)
        return Outcome("done", f"model {self._model.name!r} is loaded afresh: {self._told()}")

    def _begin(self, slot: Slot, now_s: float) -> bool:
        """Whether the slot's renewal has begun."""
        replica = slot.replica
        serves = replica is not None and replica.state is ReplicaState.READY
        crowding = self._planner.crowding([*self._keeper.seats(), slot.name], self._keeper.used_bytes())
        if serves and not crowding:
            if not self._keeper.may_load(now_s):
                return False
            self._before, self._loads_before = slot.incarnation, slot.loads
            self._keeper.spawn_successor(slot, now_s)
            return True
        self._before, self._loads_before = slot.incarnation, slot.loads
        self._keeper.revive(slot, now_s)
        if replica is not None:
            self._crowding = self._crowding or (crowding if serves else "")
            self._processes.dismiss(replica, now_s)
        return True

    def _failed(self, slot: Slot, reason: str) -> Outcome:
        others = f"; renewed before that: {', '.join(self._renewed)}" if self._renewed else ""
        serves = slot.replica is not None and slot.replica.state is ReplicaState.READY
        now = "its process from before goes on serving" if serves else "it is tried again as after any failed load"
        return Outcome("failed", f"{slot.name} could not be loaded afresh: {reason}; {now}{others}")

    def _told(self) -> str:
        told = ", ".join(self._renewed)
        return f"{told}; not beside the process from before, because {self._crowding}" if self._crowding else told

    def abandon(self, now_s: float) -> None:
        for slot in self._model.slots:
            if slot.successor is not None:
                self._processes.dismiss(slot.successor, now_s)


class Grow:
    """Fills slots that were added to a model; the first that cannot be is taken out again, with those behind it."""

    doing = "scaled"

    def __init__(self, model: Model, added: Sequence[Slot], keeper: SlotKeeper) -> None:
        self._model = model
        self._added = added
        self._keeper = keeper
        # Why some could not be filled, once they are taken out again.
        self._reasons = ""
        self._removed: Sequence[Slot] = ()

    def go_on(self, now_s: float) -> Outcome | None:
        if not self._removed:
            given_up = [slot for slot in self._added if slot.failure is not None]
            if not all(_is_filled(slot) or slot in given_up for slot in self._added):
                return None
            if not given_up:
                return Outcome("done", scaled(self._model))
            self._reasons = "; ".join(f"{slot.name}: {slot.reason}" for slot in given_up)
            self._removed = self._added[self._added.index(given_up[0]) :]
            self._keeper.remove(self._model, self._removed, now_s)
        if any(slot.name in self._keeper.slots for slot in self._removed):
            return None
        return Outcome("failed", f"model {self._model.name!r} has {_counted(self._model)} and no more: {self._reasons}")

    def abandon(self, now_s: float) -> None:
        """The slots are there, and are filled like any other."""


class Shrink:
    """Waits until slots that were taken out of the table have lost their processes."""

    doing = "scaled"

    def __init__(self, model: Model, removed: Sequence[SlotName], keeper: SlotKeeper) -> None:
        self._model = model
        self._removed = removed
        self._keeper = keeper

    def go_on(self, now_s: float) -> Outcome | None:
        if any(name in self._keeper.slots for name in self._removed):
            return None
        return Outcome("done", scaled(self._model))

    def abandon(self, now_s: float) -> None:
        """They go all the same."""


class Unload:
    """Lets a model finish what it has, and ends its processes."""

    doing = "unloaded"

    def __init__(self, model: Model, keeper: SlotKeeper, processes: Processes, now_s: float) -> None:
        self._model = model
        self._keeper = keeper
        self._processes = processes
        model.stand(Standing.CLOSING)
        keeper.note_standing(model, now_s)

    def go_on(self, now_s: float) -> Outcome | None:
        model = self._model
        if model.backlog:
            return None
        replicas = [replica for slot in model.slots for replica in slot.replicas()]
        for replica in replicas:
            self._processes.dismiss(replica, now_s)
        if replicas:
            return None
        model.stand(Standing.UNLOADED)
        for slot in model.slots:
            self._keeper.revive(slot, now_s)
        unready = "; /readyz says 503 until then, because it is required" if model.settings.required else ""
        return Outcome("done", f"model {model.name!r} is unloaded, and refuses requests until it is loaded{unready}")

    def abandon(self, now_s: float) -> None:
        """What has begun is what a stop of the server would do as well."""


class Load:
    """Waits until every slot of a model is filled, or given up."""

    doing = "loaded"

    def __init__(self, model: Model, keeper: SlotKeeper, now_s: float) -> None:
        self._model = model
        if model.standing is not Standing.SERVING:
            model.stand(Standing.SERVING)
        for slot in model.slots:
            if slot.failure is not None:
                keeper.revive(slot, now_s)
        keeper.note_standing(model, now_s)

    def go_on(self, now_s: float) -> Outcome | None:
        model = self._model
        given_up = [slot for slot in model.slots if slot.failure is not None]
        if not all(_is_filled(slot) or slot in given_up for slot in model.slots):
            return None
        if not given_up:
            return Outcome("done", f"model {model.name!r} is loaded: {_counted(model)}")
        reasons = "; ".join(f"{slot.name}: {slot.reason}" for slot in given_up)
        return Outcome("failed", f"model {model.name!r} could not be loaded in every slot: {reasons}")

    def abandon(self, now_s: float) -> None:
        """The slots are filled like any other."""


class ServerDrain:
    """Waits until no request is left."""

    doing = "drained"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def go_on(self, now_s: float) -> Outcome | None:
        if self._ledger.requests:
            return None
        return Outcome("done", "the model server is drained: nothing is in progress, and nobody is let in until resume")

    def abandon(self, now_s: float) -> None:
        """The requests finish all the same."""


def scaled(model: Model) -> str:
    """What is told of a model that has as many replicas as it was to have."""
    count = len(model.slots)
    return (
        f"model {model.name!r} has {_counted(model)} until the model server ends: to keep that, set replicas = {count} "
        "in the configuration"
    )


def _counted(model: Model) -> str:
    count = len(model.slots)
    return f"{count} {'replica' if count == 1 else 'replicas'}"


def _is_filled(slot: Slot) -> bool:
    return slot.replica is not None and slot.replica.state is ReplicaState.READY

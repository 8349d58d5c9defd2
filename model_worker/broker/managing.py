"""What operators order: one errand at a time for each model, and one for the whole server.

Owns who may begin what, and that each order is answered exactly once: at once if it is refused or there is nothing to
do, otherwise when its errand has ended. Whoever asked may be gone by then. Also owns the door that a drain shuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from model_worker.broker.effects import Effect, Log, SendManaged
from model_worker.broker.errands import Errand, Grow, Load, Outcome, Reload, ServerDrain, Shrink, Unload, scaled
from model_worker.broker.events import ManageRequested
from model_worker.broker.ledger import Ledger
from model_worker.broker.models import Model
from model_worker.broker.planning import Planner
from model_worker.broker.processes import Processes
from model_worker.broker.records import AT_REST, Standing
from model_worker.broker.slots import SlotKeeper
from shared.errors import ConfigurationError, UnknownModel

# As in the configuration.
REPLICAS_MAX = 1024
# The key of the errand that is about no model; a model's name is never empty.
SERVER = ""


@dataclass(slots=True)
class _Running:
    """An errand, and the order that it answers."""

    order: ManageRequested
    errand: Errand


class Managing:
    """See the module's text."""

    def __init__(
        self,
        models: Mapping[str, Model],
        keeper: SlotKeeper,
        processes: Processes,
        ledger: Ledger,
        planner: Planner,
        effects: list[Effect],
        stir: Callable[[str], None],
    ) -> None:
        """`stir` says that something has changed for a model."""
        # An operator had the server drained: nobody is let in.
        self.is_closed = False
        # By model; with `SERVER`, that of the whole server. Empty in a server that is left alone.
        self.running: dict[str, _Running] = {}
        self._models = models
        self._keeper = keeper
        self._processes = processes
        self._ledger = ledger
        self._planner = planner
        self._effects = effects
        self._stir = stir
        self._of_server: dict[str, Callable[[], Errand | Outcome]] = {"drain": self._drain, "resume": self._resume}
        self._of_model: dict[str, Callable[[Model, ManageRequested, float], Errand | Outcome]] = {
            "reload": self._reload,
            "scale": self._scale,
            "unload": self._unload,
            "load": self._load,
        }

    def ask(self, order: ManageRequested, now_s: float, *, is_ending: bool) -> None:
        begun = Outcome("refused", "the model server is stopping") if is_ending else self._begin(order, now_s)
        if isinstance(begun, Outcome):
            self._answer(order, begun)
            return
        self.running[order.model if order.action in self._of_model else SERVER] = _Running(order, begun)
        self._effects.append(Log("info", "errand_began", _named(order)))

    def go_on(self, now_s: float) -> None:
        """Orders what follows for every errand from what has happened."""
        for key, running in list(self.running.items()):
            if key != SERVER:
                self._stir(key)
            outcome = running.errand.go_on(now_s)
            if outcome is not None:
                self._end(key, outcome, now_s)

    def abandon(self, reason: str, now_s: float) -> None:
        """Ends all errands."""
        for key in list(self.running):
            self._end(key, Outcome("failed", reason), now_s)

    def _end(self, key: str, outcome: Outcome, now_s: float) -> None:
        running = self.running.pop(key)
        running.errand.abandon(now_s)
        self._answer(running.order, outcome)

    def _answer(self, order: ManageRequested, outcome: Outcome) -> None:
        fields = {**_named(order), "outcome": outcome.word, "text": outcome.text}
        self._effects.append(Log("error" if outcome.word == "failed" else "info", "errand_ended", fields))
        self._effects.append(SendManaged(order.front, order.token, outcome.word, outcome.text))

    # --- beginnings ----------------------------------------------------------------------------------------------

    def _begin(self, order: ManageRequested, now_s: float) -> Errand | Outcome:
        if order.action in self._of_server:
            return self._of_server[order.action]()
        begin = self._of_model.get(order.action)
        if begin is None:
            known = ", ".join([*self._of_model, *self._of_server])
            return Outcome("refused", f"there is no action {order.action[:80]!r}: use {known}")
        model = self._models.get(order.model)
        if model is None:
            return Outcome("refused", UnknownModel(order.model, self._models).message)
        if model.name in self.running:
            doing = self.running[model.name].errand.doing
            return Outcome("refused", f"model {model.name!r} is being {doing}: try again when that has ended")
        return begin(model, order, now_s)

    def _reload(self, model: Model, order: ManageRequested, now_s: float) -> Errand | Outcome:
        if model.standing in AT_REST:
            return Outcome("refused", f"model {model.name!r} is not loaded, and will be loaded afresh: use load")
        return Reload(model, self._keeper, self._processes, self._planner)

    def _scale(self, model: Model, order: ManageRequested, now_s: float) -> Errand | Outcome:
        count, present = order.replicas, len(model.slots)
        if model.standing in AT_REST:
            return Outcome("refused", f"model {model.name!r} is not loaded: use load first")
        if count == 0:
            return Outcome("refused", f"model {model.name!r} needs one replica at least: use unload to have none")
        if count > REPLICAS_MAX:
            return Outcome("refused", f"replicas = {count} is more than a model may have: {REPLICAS_MAX} at most")
        if count == present:
            return Outcome("done", scaled(model))
        if count < present:
            removed = model.slots[count:]
            self._keeper.remove(model, removed, now_s)
            return Shrink(model, [slot.name for slot in removed], self._keeper)
        try:
            planned = self._planner.grow(model.name, count, list(self._keeper.slots), self._keeper.used_bytes())
        except ConfigurationError as error:
            return Outcome("refused", str(error))
        self._keeper.add(model, planned)
        return Grow(model, model.slots[present:], self._keeper)

    def _unload(self, model: Model, order: ManageRequested, now_s: float) -> Errand | Outcome:
        if model.standing is Standing.UNLOADED:
            return Outcome("done", f"model {model.name!r} is unloaded already")
        return Unload(model, self._keeper, self._processes, now_s)

    def _load(self, model: Model, order: ManageRequested, now_s: float) -> Errand | Outcome:
        return Load(model, self._keeper, now_s)

    def _drain(self) -> Errand | Outcome:
        if SERVER in self.running:
            return Outcome("refused", "the model server is being drained: wait for the end of that")
        self.is_closed = True
        for name in self._models:
            self._stir(name)  # batches that were held back for company go now
        return ServerDrain(self._ledger)

    def _resume(self) -> Outcome:
        if not self.is_closed:
            return Outcome("done", "the model server was not drained, and lets requests in")
        self.is_closed = False
        running = self.running.pop(SERVER, None)
        if running is not None:
            self._answer(running.order, Outcome("failed", "the model server was resumed before it was drained"))
        return Outcome("done", "the model server lets requests in again")


def _named(order: ManageRequested) -> dict[str, object]:
    return {"action": order.action, "model": order.model}

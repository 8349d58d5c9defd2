"""Unloads models that nobody asks for, where the configuration says so, and loads them again for the next request.

Owns what counts as disuse: for `idle_unload_s` no request came, ran or ended, no process came or went, and none loads.
Refuses to touch a model that an operator is managing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from model_worker.broker.effects import Effect, Log
from model_worker.broker.models import Model
from model_worker.broker.processes import Processes
from model_worker.broker.records import Disuse, Standing
from model_worker.broker.slots import SlotKeeper
from model_worker.broker.timers import Timers


class DisuseWatch:
    """Of all models with an `idle_unload_s`."""

    def __init__(
        self,
        models: Mapping[str, Model],
        keeper: SlotKeeper,
        processes: Processes,
        timers: Timers[object],
        effects: list[Effect],
    ) -> None:
        self._models = models
        self._keeper = keeper
        self._processes = processes
        self._timers = timers
        self._effects = effects
        for model in models.values():
            if model.settings.idle_unload_s > 0:
                model.disuse = Disuse(model.name)

    def used(self, model: Model, now_s: float) -> None:
        """Something happened to the model. A timer that is set already is left alone, and rings too early."""
        if model.disuse is not None:
            model.disuse.since_s = now_s
            self._timers.advance(model.disuse, now_s + model.settings.idle_unload_s)

    def wake(self, model: Model, now_s: float) -> None:
        """A request has come: its slots are filled again."""
        if model.standing is Standing.IDLE:
            self._effects.append(Log("info", "model_woken", {"model": model.name}))
            model.stand(Standing.SERVING)
            self._keeper.note_standing(model, now_s)

    def due(self, disuse: Disuse, now_s: float, managed: Collection[str]) -> None:
        """The timer has rung. What keeps a model from being unloaded now sets the timer again when it ends."""
        model = self._models[disuse.model]
        due_s = disuse.since_s + model.settings.idle_unload_s
        if now_s < due_s:
            self._timers.set(disuse, due_s)
            return
        if model.standing is not Standing.SERVING or model.name in managed:
            return
        if not model.ready_count or model.is_loading or model.has_work:
            return
        self._effects.append(
            Log("info", "model_unloaded", {"model": model.name, "idle_s": model.settings.idle_unload_s})
        )
        model.stand(Standing.IDLE)
        self._keeper.note_standing(model, now_s)
        for slot in model.slots:
            for replica in slot.replicas():
                self._processes.dismiss(replica, now_s)

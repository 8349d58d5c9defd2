"""The way to the end: a drain that was asked for, or the insight that no model can ever be loaded.

Owns when the server may stop. New requests are refused from the first request to drain on; admitted ones go on. When
all have ended, or the grace has, every process is told to stop, and when all have exited, so may the server. Meanwhile
a slot is refilled only for a model that has queued requests and no process at all, and a load for which nothing is
queued is ended at once. A second request to drain can only shorten the grace.
"""

from __future__ import annotations

from collections.abc import Mapping

from model_worker.broker.admission import DRAINING_RETRY_AFTER_S
from model_worker.broker.effects import Effect, Log, StopServer
from model_worker.broker.ledger import Ledger
from model_worker.broker.models import Model
from model_worker.broker.records import Drain, Slot, Standing
from model_worker.broker.slots import SlotKeeper
from model_worker.broker.timers import Timers
from shared.errors import Code


class Ending:
    """Whether the server is to go on."""

    def __init__(
        self,
        models: Mapping[str, Model],
        keeper: SlotKeeper,
        ledger: Ledger,
        timers: Timers[object],
        effects: list[Effect],
    ) -> None:
        # Set by the first request to drain.
        self.drain: Drain | None = None
        # StopServer was ordered, for whichever reason; nothing but answers is ordered after it.
        self.stopped = False
        self._models = models
        self._keeper = keeper
        self._ledger = ledger
        self._timers = timers
        self._effects = effects

    def ask(self, grace_s: float, now_s: float) -> None:
        ends_s = now_s + grace_s
        if self.drain is None:
            self.drain = Drain(ends_s)
            fields: dict[str, object] = {"grace_s": grace_s, "requests": len(self._ledger.requests)}
            self._effects.append(Log("info", "drain_began", fields))
        self.drain.ends_s = min(self.drain.ends_s, ends_s)
        self._timers.set(self.drain, self.drain.ends_s)

    def go_on(self, now_s: float) -> None:
        """Gives up what has outlived the grace, and stops the processes when nothing is left to do for them."""
        drain = self.drain
        if drain is None or drain.stopping:
            return
        if now_s >= drain.ends_s:
            for request in list(self._ledger.requests.values()):
                message = "the model server stopped before this request was done"
                self._ledger.answer(request, Code.DRAINING, message, DRAINING_RETRY_AFTER_S)
        if self._ledger.requests:
            self._keeper.stop_loads(lambda slot: not self._models[slot.model].backlog)
        else:
            drain.stopping = True
            self._keeper.stop(now_s)

    def wants(self, slot: Slot) -> bool:
        """Whether a vacant slot is to be filled: of what ends, only for those who still wait for it."""
        model = self._models[slot.model]
        if self.drain is None and model.standing is Standing.SERVING:
            return True
        return len(model.backlog) > 0 and all(other.replica is None for other in model.slots)

    def finish(self) -> None:
        """Stops the server if nothing is left of it."""
        if self.drain is not None:
            if self.drain.stopping and not self._keeper.replicas():
                self._stop(StopServer(0, "drained"))
        elif self._keeper.is_hopeless:
            reasons = "; ".join(f"{model.name}: {model.failure_reason}" for model in self._models.values())
            self._stop(StopServer(1, f"no model can be loaded: {reasons}", hopeless=True))

    def _stop(self, order: StopServer) -> None:
        self.stopped = True
        self._effects.append(order)

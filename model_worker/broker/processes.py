"""One model process, from its spawn to its exit: what it says of itself, how long it may take, and how it is ended.

Owns the states of a replica between LOADING and its exit, the limits of time in each of them, and the orders that end
it. Refuses to know which slot is filled, or when again: that is `slots`; and what a process held: that is `machine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from model_worker.broker.effects import Effect, KillReplica, Log, SendDrain, SendStop
from model_worker.broker.events import ReplicaPulsed
from model_worker.broker.models import Model
from model_worker.broker.records import WORKING, Cause, Replica, ReplicaState
from model_worker.broker.settings import BrokerSettings
from model_worker.broker.timers import Timers

SIGKILL = 9


class Processes:
    """The life of each replica."""

    def __init__(
        self,
        settings: BrokerSettings,
        models: Mapping[str, Model],
        timers: Timers[object],
        effects: list[Effect],
    ) -> None:
        # Those that are DRAINING; empty in a server that is left alone, which makes `stop_drained` free.
        self.draining: dict[Replica, None] = {}
        self._settings = settings
        self._models = models
        self._timers = timers
        self._effects = effects

    # --- watching ------------------------------------------------------------------------------------------------

    def heard(self, replica: Replica, now_s: float) -> None:
        """Anything came from the process."""
        replica.heard_s = now_s
        if replica.silent:
            replica.silent = False
            self.arm(replica, now_s)
            self._models[replica.model].note_credit(replica)
            self.log("info", "replica_heard_again", replica)

    def pulsed(self, replica: Replica, event: ReplicaPulsed, now_s: float) -> None:
        replica.memory_bytes = event.memory_bytes
        replica.step_items = event.step_items
        if event.progress_count != replica.progress_count:
            replica.progress_count = event.progress_count
            replica.progressed_s = max(replica.progressed_s, now_s - event.running_s)

    def is_hung(self, replica: Replica, now_s: float) -> bool:
        """Whether its work has stood still for too long."""
        return replica.state in WORKING and replica.running is not None and now_s >= self._hung_at_s(replica)

    def _hung_at_s(self, replica: Replica) -> float:
        timeout_s = self._models[replica.model].settings.batch_timeout_s
        return replica.progressed_s + timeout_s + self._settings.pulse_tolerance_s

    def check(self, replica: Replica, now_s: float) -> None:
        """Acts on every limit of time that has passed, except the one of `is_hung`."""
        settings = self._settings
        if replica.state is ReplicaState.LOADING:
            if now_s >= replica.due_s:
                timeout_s = self._models[replica.model].settings.load_timeout_s
                self.kill(replica, "load_timeout", f"the load took longer than {timeout_s:g} s")
        elif replica.state in (ReplicaState.FAILING, ReplicaState.STOPPING):
            if now_s >= replica.due_s:
                self.kill(replica, replica.cause, f"{replica.reason}; no exit within {settings.stop_timeout_s:g} s")
        elif replica.state is ReplicaState.READY:
            if not replica.silent and now_s >= replica.heard_s + settings.replica_silence_s:
                replica.silent = True
                self._models[replica.model].note_credit(replica)
                self.log("warning", "replica_quarantined", replica, silence_s=settings.replica_silence_s)
            if replica.running is None and now_s >= replica.heard_s + settings.replica_silence_kill_s:
                self.kill(replica, "silent", f"not heard for {settings.replica_silence_kill_s:g} s")

    def arm(self, replica: Replica, now_s: float) -> None:
        """Sets its timer for the next limit that could pass; called after whatever makes one come earlier."""
        due_s = self._due_s(replica)
        if due_s is not None and due_s > now_s:
            self._timers.advance(replica, due_s)

    def _due_s(self, replica: Replica) -> float | None:
        settings = self._settings
        if replica.state in (ReplicaState.LOADING, ReplicaState.FAILING, ReplicaState.STOPPING):
            return replica.due_s
        if replica.state is ReplicaState.DRAINING:
            return self._hung_at_s(replica)
        if replica.state is not ReplicaState.READY:
            return None
        limits_s = []
        if not replica.silent:
            limits_s.append(replica.heard_s + settings.replica_silence_s)
        if replica.running is not None:
            limits_s.append(self._hung_at_s(replica))
        else:
            limits_s.append(replica.heard_s + settings.replica_silence_kill_s)
        return min(limits_s)

    # --- ending --------------------------------------------------------------------------------------------------

    def kill(self, replica: Replica, cause: Cause | None, reason: str, *, dump_stacks: bool = False) -> None:
        replica.cause, replica.reason = cause, reason
        self._move(replica, ReplicaState.KILLED)
        self._effects.append(KillReplica(replica.slot, replica.incarnation, reason, dump_stacks))

    def fail(self, replica: Replica, reason: str, now_s: float) -> None:
        """The process is about to end by itself; it gets no more work, and is killed if it stays."""
        replica.cause = "crashed" if replica.was_ready else "load_failed"
        replica.reason = reason
        replica.due_s = now_s + self._settings.stop_timeout_s
        self._move(replica, ReplicaState.FAILING)
        self.arm(replica, now_s)

    def dismiss(self, replica: Replica, now_s: float) -> None:
        """Ends it in order: what it holds is finished first. One that is on its way out goes on with that."""
        if replica.state is ReplicaState.LOADING:
            # A load hears nothing, so it is killed; nothing is lost with it.
            self.kill(replica, "stopped", "its load was not wanted any more")
        elif replica.state is ReplicaState.READY:
            held = replica.live_requests()
            if not held:
                self.stop(replica, now_s)
                return
            self.draining[replica] = None
            self._move(replica, ReplicaState.DRAINING)
            self.arm(replica, now_s)
            grace_s = max(request.deadline_s for request in held) - now_s
            self._effects.append(SendDrain(replica.slot, replica.incarnation, grace_s))

    def stop_drained(self, now_s: float) -> None:
        """Stops those that have drained: nobody waits for anything from them any more."""
        for replica in [replica for replica in self.draining if not replica.live_requests()]:
            self.stop(replica, now_s)

    def stop(self, replica: Replica, now_s: float) -> None:
        """Tells it to exit now."""
        replica.cause, replica.reason = "stopped", "told to stop"
        replica.due_s = now_s + self._settings.stop_timeout_s
        self._move(replica, ReplicaState.STOPPING)
        self._effects.append(SendStop(replica.slot, replica.incarnation))
        self.arm(replica, now_s)

    def exited(self, replica: Replica, exit_code: int) -> tuple[Cause, str]:
        """It is gone; returns why, as a cause and in words."""
        cause: Cause = replica.cause or ("crashed" if replica.was_ready else "load_failed")
        reason = end_of(replica, exit_code)
        fields: dict[str, object] = {"cause": cause}
        fields |= {"signal": -exit_code} if exit_code < 0 else {"exit_code": exit_code}
        if replica.cause is None:
            # One that was known before is in the log already: in the process's own last line, or in that of its kill.
            fields["reason"] = reason
        self.log("info" if cause == "stopped" else "error", "replica_exited", replica, **fields)
        self.forget(replica)
        return cause, reason

    def forget(self, replica: Replica) -> None:
        """It is gone, or never was a process."""
        replica.running = replica.prefetched = None
        self._move(replica, ReplicaState.GONE)
        self._timers.clear(replica)

    def _move(self, replica: Replica, state: ReplicaState) -> None:
        """To a state in which it gets no work."""
        replica.move(state)
        if state is not ReplicaState.DRAINING:
            self.draining.pop(replica, None)
        self._models[replica.model].note_credit(replica)

    def log(
        self, level: Literal["debug", "info", "warning", "error"], event: str, replica: Replica, **fields: object
    ) -> None:
        self._effects.append(Log(level, event, {"slot": replica.slot, "incarnation": replica.incarnation, **fields}))


def end_of(replica: Replica, exit_code: int) -> str:
    """Why a process ended, in words that fit behind a colon: what the broker knew, else what the exit code says."""
    if replica.cause is not None:
        return replica.reason
    if exit_code == -SIGKILL:
        told = "killed by signal 9, probably out of memory"
    elif exit_code < 0:
        told = f"killed by signal {-exit_code}"
    else:
        told = f"exited with code {exit_code}"
    return told if replica.was_ready else f"{told} while it loaded"

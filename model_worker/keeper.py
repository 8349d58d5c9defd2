"""The keeper of model processes: starts, watches, kills and buries the child of each slot.

Owns the living children and the time between a process's end and the moment it may be believed gone. Decides
nothing: the broker core says which incarnation to start or kill. Main thread of the model server only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from model_worker.launchers import Child, Launcher
from model_worker.specs import ReplicaSpec
from shared.logs import log_event
from shared.messages import SlotName

logger = logging.getLogger("model_worker")

Key = tuple[SlotName, int]

# A process's last words are already in the kernel when its exit is seen, but ZeroMQ's I/O thread may not have read
# them; handling the exit this much later keeps "results first, then the exit". Half of the 50 ms promised.
EXIT_SETTLE_S = 0.02
# What faulthandler needs to write the stacks of a hung process before it is killed.
STACK_DUMP_S = 0.25


@dataclass(frozen=True, slots=True)
class Exit:
    slot: SlotName
    incarnation: int
    exit_code: int


class ProcessKeeper:
    """All children of this model server, by slot and incarnation."""

    def __init__(self, launcher: Launcher, watch: Callable[[int], None], unwatch: Callable[[int], None]) -> None:
        """`watch` and `unwatch` add a pidfd to the loop's poller and take it out."""
        self._launcher = launcher
        self._watch = watch
        self._unwatch = unwatch
        self._children: dict[Key, Child] = {}
        self._exits_due: dict[Key, float] = {}
        self._kills_due: dict[Key, float] = {}

    def start(self, spec: ReplicaSpec) -> int:
        """Starts one incarnation and returns its pid.

        Raises:
            OSError: the process could not be started.
        """
        child = self._launcher.start(spec)
        self._children[spec.slot, spec.incarnation] = child
        self._watch(child.pidfd)
        return child.pid

    def pid(self, slot: SlotName, incarnation: int) -> int | None:
        child = self._children.get((slot, incarnation))
        return child.pid if child else None

    def kill(self, slot: SlotName, incarnation: int, reason: str, dump_stacks: bool, now_s: float) -> None:
        child = self._children.get((slot, incarnation))
        if child is None or (slot, incarnation) in self._kills_due:
            return
        log_event(logger, "warning", "replica_killed", slot=slot, incarnation=incarnation, pid=child.pid, reason=reason)
        if dump_stacks:
            child.dump_stacks()
            self._kills_due[slot, incarnation] = now_s + STACK_DUMP_S
        else:
            child.kill()

    def notice_exits(self, readable: dict[int, int], now_s: float) -> None:
        """Takes the poller's answer: children whose pidfd fired have ended."""
        for key, child in self._children.items():
            if child.pidfd in readable and key not in self._exits_due:
                self._unwatch(child.pidfd)
                self._exits_due[key] = now_s + EXIT_SETTLE_S

    def due(self, now_s: float) -> Iterator[Exit]:
        """Kills what is due, then yields the exits whose last words have had time to arrive."""
        for key in [key for key, due_s in self._kills_due.items() if due_s <= now_s]:
            del self._kills_due[key]
            if key in self._children:
                self._children[key].kill()
        for key in [key for key, due_s in self._exits_due.items() if due_s <= now_s]:
            del self._exits_due[key]
            self._kills_due.pop(key, None)
            child = self._children.pop(key)
            exit_code = child.exit_code()
            child.reap()
            yield Exit(*key, exit_code if exit_code is not None else 0)

    @property
    def wake_at_s(self) -> float | None:
        return min([*self._exits_due.values(), *self._kills_due.values()], default=None)

    @property
    def alive(self) -> int:
        return len(self._children)

    def kill_all(self) -> None:
        """Ends every child and everything it started, at once; for the way out of a failing server."""
        for child in self._children.values():
            child.kill()
            child.reap()
        self._children.clear()

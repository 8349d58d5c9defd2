"""The keeper of model processes: starts, watches, kills and buries the child of each slot.

Owns the living children and the time between a process's end and the moment it may be believed gone. Decides
nothing: the broker core says which incarnation to start or kill. Main thread of the model server only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from model_worker.launchers import Child, Launcher
from model_worker.specs import ReplicaSpec
from shared.logs import Level, log_event
from shared.messages import SlotName

logger = logging.getLogger("model_worker")

Key = tuple[SlotName, int]

# A process's last words are already in the kernel when its exit is seen, but ZeroMQ's I/O thread may not have read
# them. It has once the end of the connection is known as well, so an exit is believed this much later, half of the
# 50 ms promised, or as soon after that as the process is heard out.
EXIT_SETTLE_S = 0.02
# One that never connected, or whose connection a process of its own keeps open, is never known to be heard out.
EXIT_SETTLE_MAX_S = 0.25
# What faulthandler needs to write the stacks of a hung process before it is killed.
STACK_DUMP_S = 0.25


@dataclass(frozen=True, slots=True)
class Exit:
    slot: SlotName
    incarnation: int
    exit_code: int


@dataclass(slots=True)
class _Ending:
    """A process whose end was noticed, until it is believed."""

    due_s: float
    """When to look at it next."""
    believed_s: float
    """When its end is believed in any case."""
    is_heard_out: bool = False


class ProcessKeeper:
    """All children of this model server, by slot and incarnation."""

    def __init__(
        self,
        launcher: Launcher,
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        is_heard_out: Callable[[Key], bool],
    ) -> None:
        """`watch` and `unwatch` add a pidfd to the loop's poller and take it out; `is_heard_out` tells of a process
        that has ended whether everything that it has said is known to have been read."""
        self._launcher = launcher
        self._is_heard_out = is_heard_out
        self._watch = watch
        self._unwatch = unwatch
        self._children: dict[Key, Child] = {}
        self._endings: dict[Key, _Ending] = {}
        self._kills_due: dict[Key, float] = {}
        # Whose end has not been noticed yet, by the file descriptor that tells of it.
        self._running: dict[int, Key] = {}

    def start(self, spec: ReplicaSpec) -> int:
        """Starts one incarnation and returns its pid.

        Raises:
            OSError: the process could not be started.
        """
        child = self._launcher.start(spec)
        key = (spec.slot, spec.incarnation)
        self._children[key] = child
        self._running[child.pidfd] = key
        self._watch(child.pidfd)
        return child.pid

    def pid(self, slot: SlotName, incarnation: int) -> int | None:
        child = self._children.get((slot, incarnation))
        return child.pid if child else None

    def kill(self, slot: SlotName, incarnation: int, reason: str, dump_stacks: bool, now_s: float) -> None:
        child = self._children.get((slot, incarnation))
        if child is None or (slot, incarnation) in self._kills_due:
            return
        # This line is all that is told of why. One whose stacks are worth having did not end as it should.
        level: Level = "error" if dump_stacks else "warning"
        log_event(logger, level, "replica_killed", slot=slot, incarnation=incarnation, pid=child.pid, reason=reason)
        if dump_stacks:
            child.dump_stacks()
            self._kills_due[slot, incarnation] = now_s + STACK_DUMP_S
        else:
            child.kill()

    def notice_exits(self, readable: Iterable[int], now_s: float) -> None:
        """Takes what the poller found to be readable: children whose pidfd is have ended."""
        for file_descriptor in readable:
            key = self._running.pop(file_descriptor, None)
            if key is not None:
                self._unwatch(file_descriptor)
                self._endings[key] = _Ending(now_s + EXIT_SETTLE_S, now_s + EXIT_SETTLE_MAX_S)

    def due(self, now_s: float) -> Iterator[Exit]:
        """Kills what is due, then yields the exits whose last words have had time to arrive."""
        for key in [key for key, due_s in self._kills_due.items() if due_s <= now_s]:
            del self._kills_due[key]
            if key in self._children:
                self._children[key].kill()
        for key, ending in list(self._endings.items()):
            if ending.due_s > now_s:
                continue
            if not ending.is_heard_out and now_s < ending.believed_s:
                # What is known to have been read is in the socket, and taken from there in the next turn.
                ending.is_heard_out = self._is_heard_out(key)
                ending.due_s = now_s if ending.is_heard_out else min(now_s + EXIT_SETTLE_S, ending.believed_s)
                continue
            del self._endings[key]
            self._kills_due.pop(key, None)
            child = self._children.pop(key)
            exit_code = child.exit_code()
            child.reap()
            yield Exit(*key, exit_code if exit_code is not None else 0)

    @property
    def wake_at_s(self) -> float | None:
        if not (self._endings or self._kills_due):
            return None
        return min([*(ending.due_s for ending in self._endings.values()), *self._kills_due.values()])

    @property
    def alive(self) -> int:
        return len(self._children)

    def kill_all(self) -> None:
        """Ends every child and everything it started, at once; for the way out of a failing server."""
        for child in self._children.values():
            child.kill()
            child.reap()
        self._children.clear()
        self._running.clear()

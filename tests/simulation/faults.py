"""Everything that can go wrong in a simulated world, and whether it does on a given occasion.

Each occasion has a name, such as `batch_crash m0/1#3 7`, and its outcome depends on the seed and that name alone. So
one fault can be spared while all the others stay what they are, which is how a failing world is made smaller.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b


class Fault(StrEnum):
    """The kinds. What comes with a request's payload is the payload's nature: it is the same each time it is sent."""

    # Natures.
    INVALID = "invalid"  # the input is refused
    COSTLY = "costly"  # it does not fit into memory even alone
    SLOW = "slow"  # it takes long
    POISON = "poison"  # it ends the process
    FAULTY = "faulty"  # it breaks the device for good
    HANGING = "hanging"  # it never ends
    # Processes.
    SPAWN_FAILS = "spawn_fails"
    LOAD_CRASH = "load_crash"
    LOAD_FAILURE = "load_failure"
    LOAD_HANG = "load_hang"
    READY_CRASH = "ready_crash"
    IDLE_CRASH = "idle_crash"
    BATCH_CRASH = "batch_crash"
    BATCH_OUT_OF_MEMORY = "batch_out_of_memory"
    ITEM_FAILURE = "item_failure"
    FREEZE = "freeze"  # SIGSTOP, and later SIGCONT
    GIL_HELD = "gil_held"  # it computes, and nothing is heard of it meanwhile
    LAGGARD = "laggard"  # an item is reported after the next batch has begun, or ended
    FORGOTTEN_ITEM = "forgotten_item"  # an item is never reported
    LIE = "lie"  # words that are wrong, doubled, malformed or about somebody else
    PHASE_LIE = "phase_lie"  # it is READY, and says something else
    LATE_WORDS = "late_words"  # its last words take longer than the news of its death
    STOP_IGNORED = "stop_ignored"
    SLOW_KILL = "slow_kill"  # SIGKILL takes seconds, as it does in a driver call
    # Fronts.
    FRONT_DEATH = "front_death"  # it falls silent for good
    FRONT_LEAVES = "front_leaves"
    FRONT_FREEZE = "front_freeze"
    CANCEL = "cancel"
    FOREIGN_CANCEL = "foreign_cancel"  # a front cancels what another one has sent, or what has ended
    DUPLICATE = "duplicate"
    LATE_ARRIVAL = "late_arrival"  # the deadline is over before the request comes
    MISFIT = "misfit"  # no such model, or too large a body
    BURST = "burst"
    LULL = "lull"  # nobody asks for a while
    # The model server itself.
    LOOP_STALL = "loop_stall"
    SECOND_DRAIN = "second_drain"
    # Operators; what they do is no fault, but disturbs like one.
    RELOAD = "reload"
    SCALE = "scale"
    UNLOAD = "unload"
    LOAD = "load"
    DRAIN = "drain"
    NONSENSE = "nonsense"


NATURES = (Fault.INVALID, Fault.COSTLY, Fault.SLOW, Fault.POISON, Fault.FAULTY, Fault.HANGING)


class Faults:
    """The dice of one world."""

    def __init__(self, seed: int, chances: Mapping[Fault, float], spared: frozenset[str] = frozenset()) -> None:
        self._seed = seed
        self._chances = chances
        self._spared = spared
        self._occasions: Counter[tuple[Fault, str]] = Counter()
        self.struck: list[str] = []
        """Names of all that did happen, in order."""

    def strikes(self, fault: Fault, owner: str) -> bool:
        """Whether it happens to this owner on this occasion."""
        chance = self._chances[fault]
        if chance == 0.0:
            return False
        self._occasions[fault, owner] += 1
        name = f"{fault} {owner} {self._occasions[fault, owner]}"
        digest = blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") >= chance * 2**64 or name in self._spared:
            return False
        self.struck.append(name)
        return True

    def by_kind(self) -> Counter[str]:
        return Counter(name.partition(" ")[0] for name in self.struck)


def dice(*names: object) -> random.Random:
    """A source of numbers that depends on the names alone."""
    return random.Random(" ".join(map(str, names)))

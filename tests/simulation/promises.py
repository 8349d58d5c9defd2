"""What a model server promises to those outside it, each by name; `test_planted_bugs.py` breaks every one of them."""

from __future__ import annotations

from enum import Enum


class Promise(Enum):
    """What must hold in every world, in one line each."""

    ONE_ANSWER = "each request gets exactly one final answer, unless nobody waits for it"
    IN_TIME = "the answer comes at the latest 250 ms after the deadline"
    NOBODY_WAITS = "who has cancelled, or is gone, is told nothing, and counts as cancelled"
    OWN_VALUE = "a value, or a piece of one, goes to the request that it was computed for, from its present attempt"
    FENCE = "what an incarnation says after its end is void, and no order is for one that does not hold its slot"
    FITNESS = "work goes only to processes that are ready, sound and heard"
    CREDIT = "a process holds one running and one prefetched batch at most, or as many items as it said, within limits"
    ALONE = "who was in a process that died shares the next one with nothing else"
    ONE_RETRY = "nothing is sent a third time, nor a second time if it may have had an effect"
    BLAME = "nobody is called poison before a second process has died"
    POISON = "no input ends more than two processes, and its payload is refused while it is banned"
    CONSERVATION = "no process rests while work waits that it could do"
    ORDER = "the most urgent request goes first, and with age everybody becomes the most urgent one"
    BOUNDS = "what waits is bounded, by count and by bytes"
    SLOT_TABLE = "the slots are those of the plan and of operators, each with one process, and one more to replace it"
    LOADS = "no more loads at once than allowed"
    REFILL = "a vacant slot is filled again as soon as its back-off is over"
    PATIENCE = "a process that hangs, is silent or never becomes ready is ended"
    CANCELS_TOLD = "a process is told at once which of its items nobody waits for any more"
    MANAGED = "each order of an operator is answered once, and what is said to be done is done"
    HANDOVER = "no process goes with work in it, or before another serves in its place where memory has room"
    REST = "a model is unloaded when nobody asks for it or an operator says so, and only then"
    DRAINING = "who stops lets nobody in, gives up when the grace is over, and leaves no process behind"
    COUNTERS = "the counters say what happened"
    NOTHING_KEPT = "what has ended leaves nothing behind"


class Violation(AssertionError):
    """A promise was broken."""

    def __init__(self, promise: Promise, message: str) -> None:
        super().__init__(message)
        self.promise = promise

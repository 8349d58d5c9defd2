"""What went wrong of late, for people who look at the service and not at its log.

Owns a short list, filled with what the log gets as warnings and errors, and with how requests failed. Keeps nothing
that a model says about a request: that may quote it, and whoever looks here has not sent it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from shared.errors import Code
from shared.messages import Trouble

TROUBLES_MAX = 50
# The caller's own fault, or wish: nothing here is to be repaired.
_NOT_OURS = frozenset(
    {
        Code.BAD_REQUEST,
        Code.INVALID_INPUT,
        Code.UNAUTHORIZED,
        Code.UNKNOWN_MODEL,
        Code.TOO_LARGE,
        Code.CANCELLED,
    }
)
# Worded by the model, or by what went wrong with its result.
_WORDED_BY_MODEL = frozenset({Code.MODEL_ERROR, Code.OUT_OF_MEMORY, Code.INTERNAL})
# An exception's class, as it stands before its text.
_CLASS = re.compile(r"\w{1,80}(?:Error|Exception)(?=: |$)")


class _Kind(Struct):
    """All troubles of one event at one slot."""

    text: str
    count: int
    last_s: float


class Troubles:
    """The most recent ones, each kind once, however often it comes. For one thread."""

    def __init__(self) -> None:
        # By event and slot; the one that came last is last.
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def request_failed(self, code: Code, slot: str, message: str, now_s: float) -> None:
        """`slot` is empty where the request never reached one."""
        if code in _NOT_OURS:
            return
        if code in _WORDED_BY_MODEL:
            match = _CLASS.match(message)
            message = match[0] if match else ""
        self._note(code.value, slot, message, now_s)

    def logged(self, event: str, fields: Mapping[str, object], now_s: float) -> None:
        """An event of the log that is a warning or an error, with its fields."""
        told = [f"{fields[key]}" for key in ("cause", "reason") if fields.get(key)]
        known = ("cause", "reason", "slot", "model", "incarnation")
        rest = [f"{name}={value}" for name, value in fields.items() if name not in known]
        self._note(event, str(fields.get("slot", "")), ": ".join(told) or " ".join(rest), now_s)

    def recent(self, now_s: float) -> tuple[Trouble, ...]:
        """The newest last."""
        return tuple(
            Trouble(event, slot, kind.text, kind.count, max(0.0, now_s - kind.last_s))
            for (event, slot), kind in self._kinds.items()
        )

    def _note(self, event: str, slot: str, text: str, now_s: float) -> None:
        kind = self._kinds.pop((event, slot), None) or _Kind("", 0, now_s)
        kind.text, kind.count, kind.last_s = text, kind.count + 1, now_s
        self._kinds[event, slot] = kind
        if len(self._kinds) > TROUBLES_MAX:
            del self._kinds[next(iter(self._kinds))]

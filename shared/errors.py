"""The error tree and the closed set of codes that cross the wire.

Owns which outcomes exist and whose fault each one is. HTTP numbers are not here: only
`frontend/responses.py` translates codes into statuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar


class Code(StrEnum):
    """How a request ended. The text is the wire value; `shared/PROTOCOL.md` lists each with its meaning."""

    OK = "ok"
    # The caller's fault: sending the same request again gives the same answer.
    BAD_REQUEST = "bad_request"
    INVALID_INPUT = "invalid_input"
    UNAUTHORIZED = "unauthorized"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    POISON_INPUT = "poison_input"
    # Nobody's fault: the service cannot take this now.
    OVERLOADED = "overloaded"
    MODEL_LOADING = "model_loading"
    MODEL_FAILED = "model_failed"
    DRAINING = "draining"
    SERVER_UNAVAILABLE = "server_unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    # The model's or our fault.
    MODEL_ERROR = "model_error"
    OUT_OF_MEMORY = "out_of_memory"
    MODEL_CRASHED = "model_crashed"
    INTERNAL = "internal"
    # Between a replica and the broker only: this item shared a batch with a fault that ended the process, and may
    # be innocent. The broker runs it once more, alone; no front ever sees this code.
    REPLICA_FAULT = "replica_fault"


class HeadwaiterError(Exception):
    """The root of everything headwaiter raises on purpose."""


class ConfigurationError(HeadwaiterError):
    """The configuration, or the machine it is used on, does not allow a start; the message names value and remedy.

    The remedy is told in keys of the configuration. `keys` are those for which a command may have a flag as well, by
    the flag's name; it is the command that says so.
    """

    def __init__(self, message: str, *, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys


class UsageError(HeadwaiterError):
    """One of our objects is used in a way it does not allow; the message says which way it does."""


class ProtocolError(HeadwaiterError):
    """A peer sent a message that the wire protocol does not allow; it is counted and dropped."""


class LoadError(HeadwaiterError):
    """A model cannot be loaded. `permanent` means that trying again cannot help (a missing file, a wrong task)."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class RequestError(HeadwaiterError):
    """A request ended without a result. `code` says how, the message says why in one line."""

    default_code: ClassVar[Code] = Code.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: Code | None = None,
        detail: dict[str, object] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.detail = detail or {}
        self.retry_after_s = retry_after_s


class InvalidInput(RequestError):
    """The caller's input cannot be used; raised by `Model.prepare` to refuse this one request only."""

    default_code = Code.INVALID_INPUT


class UnknownModel(RequestError):
    """No model has the name that was asked for."""

    default_code = Code.UNKNOWN_MODEL

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = ", ".join(known) or "none: the configuration names no model"
        super().__init__(f"no model is called {name[:80]!r}; known: {names}")


class ModelFailed(RequestError):
    """The model was given up: until `retry_after_s`, if there is one, else for good."""

    default_code = Code.MODEL_FAILED

    def __init__(self, name: str, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"model {name!r} has failed: {reason}", retry_after_s=retry_after_s)


class Unserialisable(RequestError):
    """A model returned a value that cannot be sent; the message names the key that holds it."""

    default_code = Code.MODEL_ERROR

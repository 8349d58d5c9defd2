"""What the broker core asks of whoever knows the machine: where new slots go, and whether processes fit beside each
other.

Owns the question. The answers come from the function that makes the slot table, so that a table that has grown is one
that `headwaiter plan` could have made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from model_worker.broker.settings import SlotSettings
from shared.errors import ConfigurationError
from shared.messages import SlotName


class Planner(Protocol):
    """Starts nothing and never blocks; the same question has the same answer."""

    def grow(
        self, model: str, replicas: int, present: Sequence[SlotName], used_bytes: Mapping[str, int]
    ) -> tuple[SlotSettings, ...]:
        """The slots to be added to the `present` ones, which stay where they are, so that the model has `replicas`.

        `used_bytes` is by model what one of its processes takes, as observed; a model may have more than is known of
        its weights.

        Raises:
            ConfigurationError: there is no place for them, in numbers, and with a remedy.
        """

    def crowding(self, processes: Sequence[SlotName], used_bytes: Mapping[str, int]) -> str:
        """Why these processes cannot be in memory together, in numbers; empty if they can.

        A slot that occurs twice has two processes.
        """


class FixedTable:
    """The planner of a table that nobody can add to."""

    def grow(
        self, model: str, replicas: int, present: Sequence[SlotName], used_bytes: Mapping[str, int]
    ) -> tuple[SlotSettings, ...]:
        raise ConfigurationError(f"the slots of model {model!r} are fixed here: start the server with more replicas")

    def crowding(self, processes: Sequence[SlotName], used_bytes: Mapping[str, int]) -> str:
        return ""

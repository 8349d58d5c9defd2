"""Text generation whose load holds the GIL for a while, as the load of a large checkpoint may."""

from __future__ import annotations

from examples.story_models import hold_the_gil, note
from model_worker.runtimes.generation import GenerationModel
from model_worker.specs import RuntimeSpec


class SlowGeneration(GenerationModel):
    """What `task = "text-generation"` serves from `directory`, `seconds` later."""

    def __init__(self, directory: str, seconds: float, journal: str) -> None:
        super().__init__(RuntimeSpec(name="slow", source=directory, task="text-generation"))
        self._seconds = seconds
        self._journal = journal

    def load(self, device: str) -> None:
        note(self._journal, "loaded")
        hold_the_gil(self._seconds)
        super().load(device)

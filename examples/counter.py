"""The model of docs/custom-models.md that makes its answers step by step: it counts."""

from __future__ import annotations

from typing import Any

from headwaiter import Model, Progress


class Counter(Model):
    continuous_batching = True

    def load(self, device: str) -> None:
        self.running: list[dict[str, Any]] = []

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"to": int(inputs), "numbers": []}

    def join(self, item: dict[str, Any]) -> None:  # from its beginning, also if it has run before
        item["numbers"] = []
        self.running.append(item)

    def leave(self, item: dict[str, Any]) -> None:  # nobody waits for it any more, or a step has raised
        self.running = [other for other in self.running if other is not item]

    def step(self) -> list[Progress]:
        return [self.count(item) for item in list(self.running)]

    def count(self, item: dict[str, Any]) -> Progress:
        item["numbers"].append(len(item["numbers"]) + 1)
        if len(item["numbers"]) < item["to"]:
            return Progress(item, piece=item["numbers"][-1])
        self.leave(item)
        return Progress(item, piece=item["numbers"][-1], ended=True, output=item["numbers"])

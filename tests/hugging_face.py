"""Hugging Face's two clients, unmodified, as the tests call them: any method, for any model of a service."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.topology import Service


@dataclass(frozen=True)
class Clients:
    """`InferenceClient`, or `AsyncInferenceClient`, for the models of one service."""

    service: Service
    kind: Literal["sync", "async"]

    def __call__(self, name: str, method: str, *arguments: Any, **keywords: Any) -> Any:
        """What the method returns; a stream as a list."""
        url = f"{self.service.url}/hf/{name}"
        if self.kind == "async":
            return asyncio.run(_ask(url, method, *arguments, **keywords))
        with InferenceClient(url, token="none") as client:
            answer = getattr(client, method)(*arguments, **keywords)
            return list(answer) if keywords.get("stream") else answer


async def _ask(url: str, method: str, *arguments: Any, **keywords: Any) -> Any:
    async with AsyncInferenceClient(url, token="none") as client:
        answer = await getattr(client, method)(*arguments, **keywords)
        return [each async for each in answer] if keywords.get("stream") else answer


def native(service: Service, name: str, inputs: object, **parameters: object) -> Any:
    """What the pipeline answers, which the native route hands on as it is."""
    answer = service.ask(name, inputs, parameters=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def configured(saved: dict[str, tuple[str, Path]]) -> list[dict[str, Any]]:
    """Tasks and directories by name, as a service is told of them."""
    return [{"name": name, "model": path, "task": task, "device": "cpu"} for name, (task, path) in saved.items()]

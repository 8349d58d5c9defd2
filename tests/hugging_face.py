"""Hugging Face's two clients, unmodified, as the tests call them: any method, for any model of a service.

Owns `Gallery` too, for many models at once: a process for each would take longer than all that they are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import httpx
from huggingface_hub import AsyncInferenceClient, InferenceClient

from model_worker.runtimes import registry
from model_worker.runtimes.base import Model
from model_worker.specs import RuntimeSpec
from shared.errors import RequestError
from tests.fronts import Front
from tests.stub_broker import Answer, Fail, Request, Step, StubBroker, model_state


class Served(Protocol):
    """Models behind HTTP."""

    url: str

    def ask(self, model: str, inputs: object, *, timeout_s: float | None = None, **body: object) -> httpx.Response:
        """`POST /models/NAME`."""


class Gallery:
    """A front worker beside models that are loaded in this process: only the model server and its processes are not
    real. `models` by name, each with its task."""

    def __init__(self, models: Mapping[str, tuple[str, Model]]) -> None:
        self._models = models
        self._stack = ExitStack()
        self.url = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            front = Front(models=tuple(self._models))
            states = [model_state(name, task=task) for name, (task, _) in self._models.items()]
            stack.enter_context(StubBroker(front.run_dir, models=states, behave=self._compute))
            stack.enter_context(front).wait_ready()
            self.url, self.post = front.url, front.post
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def ask(self, model: str, inputs: object, *, timeout_s: float | None = None, **body: object) -> httpx.Response:
        return self.post(f"/models/{model}", json={"inputs": inputs, **body})

    def _compute(self, request: Request) -> Sequence[Step]:
        _, model = self._models[request.header.model]
        try:
            item = model.prepare(request.inputs, request.parameters or {})
            return [Answer(value=model.finish(model.forward([item])[0]))]
        except RequestError as error:
            return [Fail(code=error.code, message=error.message, detail=error.detail)]


@dataclass(frozen=True)
class Clients:
    """`InferenceClient`, or `AsyncInferenceClient`, for the models of one service."""

    service: Served
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


def native(service: Served, name: str, inputs: object, **parameters: object) -> Any:
    """What the pipeline answers, which the native route hands on as it is."""
    answer = service.ask(name, inputs, parameters=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def loaded(task: str, directory: Path) -> Model:
    """A model for a `Gallery`."""
    model = registry.build(RuntimeSpec("tiny", str(directory), task))
    model.load("cpu")
    return model


def configured(saved: dict[str, tuple[str, Path]]) -> list[dict[str, Any]]:
    """Tasks and directories by name, as a service is told of them."""
    return [{"name": name, "model": path, "task": task, "device": "cpu"} for name, (task, path) in saved.items()]

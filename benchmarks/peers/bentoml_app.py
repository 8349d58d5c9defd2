"""BentoML as its documents recommend: `bentoml serve bentoml_app:Echo`, or `MiniLM`; `PEER_MAX_BATCH_SIZE` in the
environment decides about batches."""

from __future__ import annotations

import os

import bentoml

MAX_BATCH_SIZE = int(os.environ["PEER_MAX_BATCH_SIZE"])
BATCHING = {"batchable": True, "max_batch_size": MAX_BATCH_SIZE, "max_latency_ms": 60_000} if MAX_BATCH_SIZE > 1 else {}
TRAFFIC = {"timeout": 120, "max_concurrency": 512}


@bentoml.service(workers=1, traffic=TRAFFIC)
class Echo:
    @bentoml.api
    def predict(self, inputs: str) -> str:
        return inputs


@bentoml.service(workers=1, traffic=TRAFFIC)
class MiniLM:
    def __init__(self) -> None:
        from encoder import Encoder

        self._encoder = Encoder()

    @bentoml.api(**BATCHING)
    def predict(self, inputs: list[str]) -> list[list[float]]:
        return self._encoder.encode(inputs)

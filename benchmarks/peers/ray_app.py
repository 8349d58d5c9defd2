"""Ray Serve as its documents recommend: `python ray_app.py echo|minilm PORT MAX_BATCH_SIZE`."""

from __future__ import annotations

import signal
import sys
from typing import Any

from ray import serve
from starlette.requests import Request

KIND, PORT, MAX_BATCH_SIZE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


@serve.deployment(num_replicas=1, max_ongoing_requests=512, ray_actor_options={"num_cpus": 1})
class Served:
    def __init__(self, kind: str) -> None:
        self._encoder = None
        if kind == "minilm":
            from encoder import Encoder

            self._encoder = Encoder()

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=0.002 if MAX_BATCH_SIZE > 1 else 0.0)
    async def answer(self, inputs: list[str]) -> list[Any]:
        return inputs if self._encoder is None else self._encoder.encode(inputs)

    async def __call__(self, request: Request) -> Any:
        return await self.answer((await request.json())["inputs"])


if __name__ == "__main__":
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Served.bind(KIND))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()

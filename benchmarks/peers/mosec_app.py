"""mosec as its documents recommend: `python mosec_app.py --port PORT`, with `PEER_MODEL` echo or minilm and
`PEER_MAX_BATCH_SIZE` in the environment (its own command line takes the rest)."""

from __future__ import annotations

import os
from typing import Any

from mosec import Server, Worker

MAX_BATCH_SIZE = int(os.environ["PEER_MAX_BATCH_SIZE"])


class Echo(Worker):
    def forward(self, data: Any) -> Any:
        """One request, or a list of them where there are batches."""
        return [entry["inputs"] for entry in data] if MAX_BATCH_SIZE > 1 else data["inputs"]


class MiniLM(Worker):
    def __init__(self) -> None:
        super().__init__()
        from encoder import Encoder

        self._encoder = Encoder()

    def forward(self, data: Any) -> Any:
        if MAX_BATCH_SIZE > 1:
            return self._encoder.encode([entry["inputs"] for entry in data])
        return self._encoder.encode([data["inputs"]])[0]


if __name__ == "__main__":
    server = Server()
    worker = {"echo": Echo, "minilm": MiniLM}[os.environ["PEER_MODEL"]]
    batching = {"max_batch_size": MAX_BATCH_SIZE, "max_wait_time": 2} if MAX_BATCH_SIZE > 1 else {}
    server.append_worker(worker, num=1, **batching)
    server.run()

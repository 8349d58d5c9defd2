"""LitServe as its documents recommend: `python litserve_app.py echo|minilm PORT MAX_BATCH_SIZE`."""

from __future__ import annotations

import sys
from typing import Any

import litserve


class Echo(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # annotated, it would be taken for the schema of the body
        return request["inputs"]

    def predict(self, inputs: Any) -> Any:
        """One input, or a list of them where there are batches."""
        return inputs

    def encode_response(self, output: Any) -> Any:
        return output


class MiniLM(Echo):
    def setup(self, device: str) -> None:
        from encoder import Encoder

        self._encoder = Encoder()

    def predict(self, inputs: Any) -> Any:
        return self._encoder.encode(inputs) if isinstance(inputs, list) else self._encoder.encode([inputs])[0]


if __name__ == "__main__":
    kind, port, max_batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    batching = {"max_batch_size": max_batch_size, "batch_timeout": 0.002} if max_batch_size > 1 else {}
    api = {"echo": Echo, "minilm": MiniLM}[kind](**batching)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, timeout=120)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False, log_level="warning")

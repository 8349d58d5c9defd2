"""Where the service can be reached from this machine, and a request to try it with."""

from __future__ import annotations

import json
import shlex

from shared.config import Config
from shared.messages import ModelState

# Tasks whose input is one text get this one.
EXAMPLE_TEXT = "A great day at the sea."
EXAMPLE_BODIES: dict[str, dict[str, object]] = {
    "text-generation": {"inputs": "The sea is", "parameters": {"max_new_tokens": 20}},
    "question-answering": {
        "inputs": {"question": "Where was it a great day?", "context": "We had a great day at the sea."}
    },
    "fill-mask": {"inputs": "A great [MASK] at the sea."},
    "zero-shot-classification": {"inputs": EXAMPLE_TEXT, "parameters": {"candidate_labels": ["holiday", "work"]}},
    "table-question-answering": {
        "inputs": {"query": "How old is Ada?", "table": {"Name": ["Ada", "Max"], "Age": ["36", "41"]}}
    },
}
# Tasks whose input is a file, sent as it is.
FILE_WORDS = ("image", "audio", "video", "speech-recognition", "object-detection", "depth", "mask-generation")


def connectable_host(config: Config) -> str:
    """An address to connect to for the one that is listened on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(config.http.host, config.http.host)


def base_url(config: Config) -> str:
    host = connectable_host(config)
    return f"http://[{host}]:{config.http.port}" if ":" in host else f"http://{host}:{config.http.port}"


def curl_line(config: Config, model: ModelState) -> str:
    """A request that the model answers, to be pasted into a shell."""
    words = f"curl {base_url(config)}/models/{model.name}"
    if config.http.api_keys:
        words += ' -H "Authorization: Bearer $KEY"'
    if any(word in model.task for word in FILE_WORDS):
        return f"{words} --data-binary @FILE"
    body = EXAMPLE_BODIES.get(model.task, {"inputs": EXAMPLE_TEXT})
    return f"{words} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"

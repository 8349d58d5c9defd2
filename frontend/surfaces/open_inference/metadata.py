"""What the protocol tells about the service and its models, beside their answers.

Owns the shapes of these answers. Tells what the model server said last, and only what is known: times that nobody
measures are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from frontend.surfaces.open_inference.signatures import Described, Signature
from shared.messages import ModelCounters, ModelState
from shared.version import VERSION

NAME = "headwaiter"
# A model of the configuration has no versions; clients that ask for one ask for this.
MODEL_VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "schedule_policy")
# Names that Triton's configurations have for datatypes.
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class ModelReady(BaseModel):
    name: str
    ready: bool


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1 is any size.")


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata] = Field(description="Empty for a class of your own, which takes any.")
    outputs: list[TensorMetadata] = Field(description="Empty for a class of your own, whose answers tell theirs.")


def server() -> ServerMetadata:
    return ServerMetadata(name=NAME, version=VERSION, extensions=list(EXTENSIONS))


def model(name: str, signature: Signature) -> ModelMetadata:
    return ModelMetadata(
        name=name,
        versions=[MODEL_VERSION],
        platform=NAME,
        inputs=[_tensor(each) for each in signature.inputs],
        outputs=[_tensor(each) for each in signature.outputs],
    )


def _tensor(described: Described) -> TensorMetadata:
    return TensorMetadata(name=described.name, datatype=described.datatype, shape=list(described.shape))


def config(name: str, signature: Signature) -> dict[str, object]:
    """As Triton's model configuration, without all that has no meaning here."""
    return {
        "name": name,
        "platform": NAME,
        "backend": NAME,
        # The first size of a shape is part of it: there is no other batch.
        "max_batch_size": 0,
        "input": [_config_tensor(each) for each in signature.inputs],
        "output": [_config_tensor(each) for each in signature.outputs],
    }


def _config_tensor(described: Described) -> dict[str, object]:
    data_type = _CONFIG_TYPES.get(described.datatype, f"TYPE_{described.datatype}")
    return {"name": described.name, "data_type": data_type, "dims": list(described.shape)}


def index(names: Iterable[str], states: Iterable[ModelState], not_heard: str) -> list[dict[str, str]]:
    """Every model with its state; `not_heard` is why nobody knows it, if that is so."""
    known = {} if not_heard else {state.name: state for state in states}
    return [_index_entry(name, known.get(name), not_heard) for name in names]


def _index_entry(name: str, state: ModelState | None, not_heard: str) -> dict[str, str]:
    if state is None:
        told, reason = "UNAVAILABLE", not_heard
    elif state.answers:
        told, reason = "READY", ""
    else:
        told, reason = ("UNAVAILABLE" if state.state in ("failed", "unloaded") else "LOADING"), state.reason
    return {"name": name, "version": MODEL_VERSION, "state": told, "reason": reason}


def statistics(counters: Iterable[ModelCounters]) -> dict[str, object]:
    return {"model_stats": [_model_statistics(counted) for counted in counters]}


def _model_statistics(counted: ModelCounters) -> dict[str, Any]:
    answered = counted.ended.get("ok", 0)
    failed = sum(counted.ended.values()) - answered + sum(counted.rejected.values())
    return {
        "name": counted.model,
        "version": MODEL_VERSION,
        "inference_count": answered,
        "execution_count": counted.batches,
        "inference_stats": {
            "success": {"count": answered},
            "fail": {"count": failed},
            "queue": {"count": counted.queue_s_buckets.get("+Inf", 0), "ns": _nanoseconds(counted.queue_s_sum)},
            "compute_infer": {
                "count": counted.forward_s_buckets.get("+Inf", 0),
                "ns": _nanoseconds(counted.forward_s_sum),
            },
        },
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

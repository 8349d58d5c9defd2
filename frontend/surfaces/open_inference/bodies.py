"""Reads an inference request: the JSON, what it asks for, and the tensors behind it.

Owns the places of a request's body and which of its parameters mean something to the protocol. Refuses to know what a
model takes: `signatures` does. Keys that are not known are ignored, as the protocol's extensions expect; what would
change the answer and is not possible here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from frontend.guards import PRIORITY_MAX, Headers
from frontend.json_bodies import json_type, read_object
from frontend.surfaces.open_inference.tensors import BYTES, Input, check_shape, read_bytes, read_json, refuse_input
from shared.errors import Code, InvalidInput, RequestError

LENGTH_HEADER = b"inference-header-content-length"
EXAMPLE = '{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["I like it."]}]}'
TENSORS_MAX = 256
# Digits of a length: no body has more.
_DIGITS_MAX = 12
# The protocol counts priorities from 1, the most urgent. Ours go from -PRIORITY_MAX to PRIORITY_MAX, so the one in
# the middle, which a request without any has, is 101.
_PRIORITY_SHIFT = PRIORITY_MAX + 1
_PRIORITY_LAST = 2 * PRIORITY_MAX + 1
_MICROSECONDS = 1_000_000

_UNSUPPORTED = {
    "sequence_id": "requests are independent of each other here, and no state is kept from one to the next",
    "sequence_start": "requests are independent of each other here",
    "sequence_end": "requests are independent of each other here",
    "headers": "send HTTP headers instead",
}
_SHARED_MEMORY = "shared_memory_region"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output by its name, and how it is to be sent."""

    name: str
    is_binary: bool


@dataclass(frozen=True, slots=True)
class Inference:
    """What an inference request asks."""

    id: str | None
    inputs: tuple[Input, ...]
    outputs: tuple[Wanted, ...]
    """Empty: all there are."""
    is_binary: bool
    """How outputs are sent that were not asked for by name."""
    timeout_s: float | None
    priority: int | None
    """As `X-Request-Priority`."""
    parameters: dict[str, object]
    """What is left for the model."""
    is_raw: bool = False
    """The body was the one element of the model's one input, without JSON."""


def read_inference(body: bytes, headers: Headers) -> Inference:
    """The Content-Type is not looked at: clients send all kinds, and none.

    Raises:
        RequestError: `bad_request`, where it cannot be read; `invalid_input`, where it is no request.
    """
    head, data = _split(body, headers)
    if head is None:
        return _raw(data)
    request = read_object(head, EXAMPLE)
    parameters = _object(request.get("parameters"), "parameters")
    is_binary = _flag(parameters.pop("binary_data_output", False), "parameters.binary_data_output")
    identifier = request.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise InvalidInput(f"id is {json_type(identifier)}, not a string")
    return Inference(
        id=identifier,
        inputs=_inputs(request.get("inputs"), data),
        outputs=_outputs(request.get("outputs"), is_binary),
        is_binary=is_binary,
        timeout_s=_timeout_s(parameters.pop("timeout", 0)),
        priority=_priority(parameters.pop("priority", 0)),
        parameters=_for_model(parameters),
    )


def check_load(body: bytes) -> None:
    """Refuses to load or unload otherwise than as configured; the body may be empty.

    Raises:
        RequestError: `bad_request`, where it cannot be read; `invalid_input`, where it wants that.
    """
    parameters = _object(read_object(body, "{}").get("parameters"), "parameters") if body.strip() else {}
    # No model here depends on another one, so nothing is to be unloaded with it.
    unwanted = [name[:60] for name in parameters if name != "unload_dependents"]
    if unwanted:
        raise InvalidInput(f"parameters.{unwanted[0]} is not supported: a model is loaded as it is configured")


def _split(body: bytes, headers: Headers) -> tuple[bytes | None, memoryview]:
    """The JSON, and the bytes behind it, uncopied; None for the JSON where there is none of it."""
    text = headers.get(LENGTH_HEADER)
    if text is None:
        return body, memoryview(b"")
    shown = repr(text[:40].decode("latin-1"))
    if not text.isdigit() or len(text) > _DIGITS_MAX:
        name = "Inference-Header-Content-Length"
        raise RequestError(f"{name} {shown} is not a number of bytes", code=Code.BAD_REQUEST)
    length = int(text)
    if length > len(body):
        reason = f"is more than the {len(body)} bytes of the body"
        raise RequestError(f"Inference-Header-Content-Length {length} {reason}", code=Code.BAD_REQUEST)
    return body[:length] or None, memoryview(body)[length:]


def _raw(data: memoryview) -> Inference:
    return Inference(
        id=None,
        inputs=(Input("raw", BYTES, (1,), [bytes(data)]),),
        outputs=(),
        is_binary=True,
        timeout_s=None,
        priority=None,
        parameters={},
        is_raw=True,
    )


def _inputs(given: object, data: memoryview) -> tuple[Input, ...]:
    if not isinstance(given, list) or not 0 < len(given) <= TENSORS_MAX:
        raise InvalidInput(f"inputs must be a list of 1 to {TENSORS_MAX} tensors: send {EXAMPLE}")
    inputs: dict[str, Input] = {}
    for index, entry in enumerate(given):
        name, tensor = _named(entry, f"inputs[{index}]")
        if name in inputs:
            raise refuse_input(name, "is there twice")
        inputs[name], data = _input(name, tensor, data)
    if data:
        raise InvalidInput(f"{data.nbytes} bytes of the body belong to no input: binary_data_size says how many do")
    return tuple(inputs.values())


def _input(name: str, tensor: Mapping[str, object], data: memoryview) -> tuple[Input, memoryview]:
    """The tensor, and the bytes behind it."""
    datatype, shape = check_shape(name, tensor.get("datatype"), tensor.get("shape"))
    parameters = _object(tensor.get("parameters"), f"parameters of input {name[:60]!r}")
    if _SHARED_MEMORY in parameters:
        raise refuse_input(name, "is in shared memory, which is not supported: send its content")
    size_bytes = parameters.get("binary_data_size")
    if size_bytes is None:
        if "data" not in tensor:
            raise refuse_input(name, "has no data: send it as data, or as binary data with binary_data_size")
        return read_json(name, datatype, shape, tensor["data"]), data
    if "data" in tensor:
        raise refuse_input(name, "has both data and binary_data_size: send one of them")
    if type(size_bytes) is not int or size_bytes < 0:
        raise refuse_input(name, "has a binary_data_size that is not a number of bytes")
    if size_bytes > data.nbytes:
        raise refuse_input(name, f"has a binary_data_size of {size_bytes}, and {data.nbytes} bytes are left for it")
    return read_bytes(name, datatype, shape, data[:size_bytes]), data[size_bytes:]


def _outputs(given: object, is_binary: bool) -> tuple[Wanted, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > TENSORS_MAX:
        raise InvalidInput(f"outputs must be a list of at most {TENSORS_MAX} objects with a name each")
    outputs: dict[str, Wanted] = {}
    for index, entry in enumerate(given):
        where = f"outputs[{index}]"
        name, tensor = _named(entry, where)
        parameters = _object(tensor.get("parameters"), f"{where}.parameters")
        if name in outputs:
            raise InvalidInput(f"{where} asks for {name[:60]!r} again")
        if _SHARED_MEMORY in parameters:
            raise InvalidInput(f"{where} asks for shared memory, which is not supported: take the content")
        if parameters.get("classification"):
            raise InvalidInput(f"{where} asks for a classification, which is not supported: take the scores")
        flag = _flag(parameters.get("binary_data", is_binary), f"{where}.parameters.binary_data")
        outputs[name] = Wanted(name, flag)
    return tuple(outputs.values())


def _for_model(parameters: dict[str, object]) -> dict[str, object]:
    for name in parameters:
        if name in _UNSUPPORTED:
            raise InvalidInput(f"the parameter {name} is not supported: {_UNSUPPORTED[name]}")
        if name.startswith("triton_"):
            raise InvalidInput(f"the parameter {name[:60]!r} is not supported: names like it are reserved by Triton")
    return parameters


def _timeout_s(given: object) -> float | None:
    if type(given) is not int or given < 0:
        raise InvalidInput("the parameter timeout is not a whole number of microseconds")
    return given / _MICROSECONDS or None


def _priority(given: object) -> int | None:
    if type(given) is not int or not 0 <= given <= _PRIORITY_LAST:
        text = f"the parameter priority is not a whole number from 1, the most urgent, to {_PRIORITY_LAST}"
        raise InvalidInput(text)
    return given - _PRIORITY_SHIFT if given else None


def _named(entry: object, where: str) -> tuple[str, Mapping[str, object]]:
    tensor = entry if isinstance(entry, dict) else {}
    name = tensor.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{where} must be an object with a name")
    return name, tensor


def _object(given: object, where: str) -> dict[str, object]:
    if given is not None and not isinstance(given, dict):
        raise InvalidInput(f"{where} is {json_type(given)}, not an object")
    return dict(given or {})


def _flag(given: object, where: str) -> bool:
    if not isinstance(given, bool):
        raise InvalidInput(f"{where} is {json_type(given)}, not true or false")
    return given

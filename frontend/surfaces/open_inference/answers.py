"""Writes an inference response: JSON, and behind it the outputs that are to be binary.

Owns which outputs are sent, and how each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from frontend.responses import JSON, HeaderList
from frontend.surfaces.open_inference.bodies import LENGTH_HEADER, Inference, Wanted
from frontend.surfaces.open_inference.tensors import Output
from shared.errors import InvalidInput
from shared.json_text import dump_json

BINARY = (b"content-type", b"application/octet-stream")


def check_wanted(wanted: Sequence[Wanted], names: Iterable[str]) -> None:
    """
    Raises:
        InvalidInput: an output is wanted that is none of `names`.
    """
    known = list(names)
    for output in wanted:
        if output.name not in known:
            there_are = ", ".join(known) or "none"
            raise InvalidInput(f"no output is called {output.name[:60]!r}; this model's: {there_are}")


def write_answer(request: Inference, model: str, version: str, outputs: Sequence[Output]) -> tuple[HeaderList, bytes]:
    """The headers and the body of a response.

    Raises:
        InvalidInput: an output that is wanted is not there, or cannot be sent as it is wanted.
    """
    by_name = {output.name: output for output in outputs}
    check_wanted(request.outputs, by_name)
    wanted = request.outputs or [Wanted(name, request.is_binary) for name in by_name]
    described: list[dict[str, object]] = []
    behind: list[bytes | memoryview] = []
    for name, is_binary in ((each.name, each.is_binary) for each in wanted):
        output = by_name[name]
        entry: dict[str, object] = {"name": name, "datatype": output.datatype, "shape": output.shape}
        if is_binary:
            content = output.as_bytes()
            entry["parameters"] = {"binary_data_size": len(content)}
            behind.append(content)
        else:
            entry["data"] = output.as_json()
        described.append(entry)
    head: dict[str, object] = {"model_name": model, "model_version": version, "outputs": described}
    if request.id is not None:
        head["id"] = request.id
    text = dump_json(head)
    if not behind:
        return [JSON], text
    return [BINARY, (LENGTH_HEADER, b"%d" % len(text))], b"".join([text, *behind])

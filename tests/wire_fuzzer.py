"""Coverage-guided fuzzing of everything that reads bytes of a peer: `python -m tests.wire_fuzzer --seconds 60`.

Needs atheris (`pip install atheris`), which brings libFuzzer: it watches which branches an input reaches, and goes on
from those that reach new ones. What it finds is written to a file `crash-…`, which `--replay` runs again. In the suite,
without atheris, hypothesis does the same blindly (`wire/`).

An input is the frames of one message, each behind its length in two bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy
from typing_extensions import Buffer

from shared.errors import ProtocolError
from shared.messages import KINDS, Reply, ReplyHeader, RequestHeader, RequestId, Submit
from shared.values import pack, unpack
from shared.wire import check, decode, encode

SEEDS_OF_VALUES: tuple[object, ...] = (
    {"inputs": "a text", "parameters": {"top_k": 5, "none": None, "yes": True}},
    [1, -1, 2**80, 0.5, "\u00e9", b"bytes"],
    numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    [bytes(70_000), numpy.zeros(20_000, dtype=numpy.float32)],
)


def one_input(data: bytes) -> None:
    """Reads `data` as a message and as a value. Raises what must never happen."""
    frames = split(data)
    try:
        message, rest = decode(frames)
    except ProtocolError:
        pass
    else:
        # What can be read can be sent on, and says the same.
        again, rest_again = decode(encode(message, rest))
        assert (again, rest_again) == (message, rest)
    try:
        value = unpack(frames)
    except ProtocolError:
        return
    assert bytes_of(pack(unpack(pack(value)))) == bytes_of(pack(value))


def split(data: bytes) -> list[Buffer]:
    frames: list[Buffer] = []
    while len(data) >= 2:
        end = 2 + int.from_bytes(data[:2], "big")
        frames.append(data[2:end])
        data = data[end:]
    return frames


def join(frames: Sequence[Buffer]) -> bytes:
    return b"".join(len(part).to_bytes(2, "big") + part for frame in frames if len(part := bytes(frame)) < 2**16)


def bytes_of(frames: Sequence[Buffer]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def seeds() -> list[bytes]:
    """A message of each kind that can be made of nothing, some with frames, and values."""
    inputs = [join(pack(value)) for value in SEEDS_OF_VALUES]
    request_id = RequestId(bytes(range(16)))
    request = RequestHeader(request_id, "echo", "predict", b"key", 3, 1000, -1, False, True, 2, "id", "")
    reply = ReplyHeader(request_id, "ok", 1, detail={"a": [1, {"b": None}]})  # type: ignore[arg-type]
    inputs += [join(encode(Submit((request,)), [b"a", b"b"])), join(encode(Reply((reply,)), [b"\xc0"]))]
    for kind in KINDS:
        try:
            message = kind()
            check(message)
        except (TypeError, ProtocolError):
            continue
        inputs.append(join(encode(message)))
    return inputs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wire_fuzzer", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="how long (default: 60)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run this input alone")
    options = parser.parse_args()
    if options.replay is not None:
        one_input(options.replay.read_bytes())
        return
    import atheris

    # The modules are loaded by now; only what was loaded before this call is watched.
    atheris.instrument_all()
    with tempfile.TemporaryDirectory(prefix="headwaiter-fuzz-") as directory:
        for number, content in enumerate(seeds()):
            (Path(directory) / f"seed-{number}").write_bytes(content)
        atheris.Setup([sys.argv[0], f"-max_total_time={options.seconds}", "-max_len=65536", directory], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

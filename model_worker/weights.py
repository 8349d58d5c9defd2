"""How many bytes a model's weights take in memory, read from the heads of its files.

Owns just enough of the safetensors and GGUF layouts to add up sizes, without torch and without reading a tensor. A
file that lies about itself is refused; what cannot be told is None, never a guess.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shared.errors import ConfigurationError

# Bytes for each element of the types that a `dtype` of the configuration converts. Integers stay what they are, and so
# do the 8-bit and smaller floats: they are quantised weights that only their own kernels read.
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# The safetensors format allows no larger header.
_HEADER_BYTES_MAX = 100_000_000
# Names of weights as transformers looks for them, in its order.
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "*.safetensors")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin")

# Of all bytes, what an element type must have to be worth a word.
_LEAST_SHARE = 0.01
# What each format is called, by the ending of its files.
_FORMATS = {".safetensors": "safetensors", ".gguf": "GGUF", ".bin": "pickled (.bin)"}

_GGUF_MAGIC = b"GGUF"
_GGUF_VERSIONS = (2, 3)
# struct formats of the GGUF value types 0 to 12 that have a fixed size; 8 is a string and 9 an array.
_GGUF_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
# ggml itself allows no tensor of more dimensions.
_GGUF_DIMENSIONS_MAX = 4


def weights_bytes(path: Path, dtype: str) -> int | None:
    """Bytes of the weights at `path` (a directory, or one file) once they are loaded as `dtype`.

    `auto` is as stored, and float32 for a GGUF file, which is taken out of its blocks at the load. A `.bin` file
    counts as it lies there. None: no weights in a layout that is known here, or not all of them.

    Raises:
        ConfigurationError: a file is truncated or no weights file at all; the message names it.
    """
    files = [path] if path.is_file() else _weight_files(path)
    if not files or not all(file.is_file() for file in files):
        return None
    sizes = [_file_bytes(file, dtype) for file in files]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def layout(path: Path) -> str:
    """How the weights at `path` are stored, in words: the format, the element types, the number of files if several.

    Raises:
        ConfigurationError: as `weights_bytes`.
    """
    files = [path] if path.is_file() else _weight_files(path)
    present = [file for file in files if file.is_file()]
    if not present:
        return "no weights in a format that is known here"
    words = [_FORMATS.get(present[0].suffix, present[0].suffix)]
    if present[0].suffix == ".safetensors":
        stored_bytes: Counter[str] = Counter()
        for file in present:
            with _naming(file):
                for kind, size_bytes in _safetensors_tensors(file):
                    stored_bytes[kind] += size_bytes
        # Buffers, such as positions as integers, say nothing about the weights.
        least_bytes = stored_bytes.total() * _LEAST_SHARE
        words.append("+".join(kind for kind, size_bytes in stored_bytes.most_common() if size_bytes >= least_bytes))
    if len(files) > 1:
        missing = len(files) - len(present)
        words.append(f"{len(files)} files" + (f", {missing} of them missing" if missing else ""))
    return " ".join(word for word in words if word)


def rows_of(directory: Path, tensor: str) -> int | None:
    """The first dimension of a tensor; None where it is in no .safetensors file of the weights in `directory`.

    Raises:
        ConfigurationError: as `weights_bytes`.
    """
    for file in _weight_files(directory):
        if file.suffix == ".safetensors" and file.is_file():
            with _naming(file):
                described = _safetensors_header(file)[0].get(tensor)
                shape = described.get("shape") if isinstance(described, dict) else None
                if isinstance(shape, list) and shape and isinstance(shape[0], int):
                    return shape[0]
    return None


def human_bytes(size_bytes: int) -> str:
    """A size for people, in binary units.

    >>> human_bytes(1536), human_bytes(999)
    ('1.5 KiB', '999 B')
    """
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.95 would round to 1024.0 of this unit.
        if size < 1023.95:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _weight_files(directory: Path) -> list[Path]:
    for pattern in (*_SAFETENSORS, *_PICKLED):
        found = sorted(directory.glob(pattern))
        if found and found[0].suffix == ".json":
            return _shards(found[0])
        if found:
            return found
    # Several GGUF files are several quantisations of one model, not its parts.
    found = sorted(directory.glob("*.gguf"))
    return found if len(found) == 1 else []


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("a shard is not a plain file name")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{index}: not an index of weight files: {_reason(error)}") from None
    return [index.parent / name for name in sorted(names)]


def _file_bytes(file: Path, dtype: str) -> int | None:
    with _naming(file):
        if file.suffix == ".safetensors":
            return sum(_converted_bytes(size_bytes, kind, dtype) for kind, size_bytes in _safetensors_tensors(file))
        if file.suffix == ".gguf":
            return _gguf_bytes(file, dtype)
        return file.stat().st_size if file.suffix == ".bin" else None


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Whatever is wrong with a file is told with its name."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{file}: not a whole {file.suffix.removeprefix('.')} file (an incomplete download?): {_reason(error)}"
        ) from None


def _safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """What the file says of each tensor, by name, and the bytes that are left for all of them."""
    with file.open("rb") as stream:
        file_bytes = file.stat().st_size
        header_bytes = int.from_bytes(_read(stream, 8), "little")
        data_bytes = file_bytes - 8 - header_bytes
        if header_bytes > _HEADER_BYTES_MAX or data_bytes < 0:
            raise ValueError(f"its header claims {header_bytes} bytes, the file has {file_bytes}")
        header = json.loads(_read(stream, header_bytes))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, data_bytes


def _safetensors_tensors(file: Path) -> list[tuple[str, int]]:
    """Element type and stored bytes of each tensor."""
    header, data_bytes = _safetensors_header(file)
    tensors: list[tuple[str, int]] = []
    for name, tensor in header.items():
        try:
            kind, (begin, end) = tensor["dtype"], tensor["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"its header does not describe tensor {name!r}") from None
        if not (isinstance(kind, str) and type(begin) is type(end) is int and 0 <= begin <= end):
            raise ValueError(f"its header does not describe tensor {name!r}")
        if end > data_bytes:
            raise ValueError(f"tensor {name!r} ends at byte {end} of {data_bytes}")
        tensors.append((kind, end - begin))
    if sum(size_bytes for _, size_bytes in tensors) > data_bytes:
        raise ValueError("its tensors overlap")
    return tensors


def _converted_bytes(stored_bytes: int, kind: str, dtype: str) -> int:
    if dtype not in _DTYPE_BYTES or kind not in _FLOAT_BYTES:
        return stored_bytes
    return stored_bytes // _FLOAT_BYTES[kind] * _DTYPE_BYTES[dtype]


def _gguf_bytes(file: Path, dtype: str) -> int:
    """See the GGUF specification of the ggml project: magic, version, counts, key-value pairs, tensor descriptions."""
    with file.open("rb") as stream:
        if (magic := _read(stream, 4)) != _GGUF_MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        version, tensor_count, pair_count = struct.unpack("<IQQ", _read(stream, 20))
        if version not in _GGUF_VERSIONS:
            raise ValueError(f"its version is {version}, known here are 2 and 3")
        walk = _GgufWalk(stream, file.stat().st_size)
        for _ in range(pair_count):
            walk.skip_string()
            walk.skip_value(walk.number("I"))
        elements = sum(walk.tensor_elements() for _ in range(tensor_count))
    return elements * _DTYPE_BYTES.get(dtype, 4)


class _GgufWalk:
    """Steps over the fields of a GGUF head. Every length is checked against the file before anything is skipped."""

    def __init__(self, stream: BinaryIO, file_bytes: int) -> None:
        self._stream = stream
        self._file_bytes = file_bytes

    def number(self, form: str) -> int:
        (value,) = struct.unpack(f"<{form}", _read(self._stream, struct.calcsize(f"<{form}")))
        return int(value)

    def skip(self, size_bytes: int) -> None:
        left_bytes = self._file_bytes - self._stream.tell()
        if size_bytes > left_bytes:
            raise ValueError(f"a field of {size_bytes} bytes begins {left_bytes} before its end")
        self._stream.seek(size_bytes, 1)

    def skip_string(self) -> None:
        self.skip(self.number("Q"))

    def skip_value(self, kind: int) -> None:
        if kind == _GGUF_STRING:
            self.skip_string()
        elif kind == _GGUF_ARRAY:
            self._skip_array()
        elif kind in _GGUF_SCALARS:
            self.skip(_GGUF_SCALARS[kind])
        else:
            raise ValueError(f"a value has the unknown type {kind}")

    def _skip_array(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in _GGUF_SCALARS:
            self.skip(_GGUF_SCALARS[kind] * count)
        else:
            for _ in range(count):
                self.skip_value(kind)

    def tensor_elements(self) -> int:
        self.skip_string()
        dimensions = self.number("I")
        if dimensions > _GGUF_DIMENSIONS_MAX:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= self.number("Q")
        # Its type and offset.
        self.skip(4 + 8)
        return elements


def _read(stream: BinaryIO, size_bytes: int) -> bytes:
    data = stream.read(size_bytes)
    if len(data) != size_bytes:
        raise ValueError(f"it ends {size_bytes - len(data)} bytes early")
    return data


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

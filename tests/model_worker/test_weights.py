"""Sizes of weights from the heads of their files, and files that lie about themselves."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_worker.weights import human_bytes, layout, rows_of, weights_bytes
from shared.errors import ConfigurationError


def safetensors(file: Path, *tensors: tuple[str, int], missing_bytes: int = 0) -> Path:
    """A file by the format's own description; each tensor is (dtype, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for number, (kind, size_bytes) in enumerate(tensors):
        header[f"t{number}"] = {"dtype": kind, "shape": [size_bytes], "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    return with_header(file, json.dumps(header).encode(), offset - missing_bytes)


def with_header(file: Path, header: bytes, data_bytes: int = 0) -> Path:
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data_bytes))
    return file


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", 1000), ("float32", 1300), ("float16", 700), ("bfloat16", 700)]
)
def test_floats_change_size_with_dtype_and_quantised_weights_do_not(tmp_path: Path, dtype: str, expected: int) -> None:
    tensors = ("F32", 600), ("F16", 200), ("BF16", 100), ("I8", 50), ("F8_E4M3", 50)
    assert weights_bytes(safetensors(tmp_path / "model.safetensors", *tensors), dtype) == expected


def test_a_directory_is_measured_by_the_files_that_would_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(77))
    assert weights_bytes(tmp_path, "float32") == 77
    safetensors(tmp_path / "other.safetensors", ("F32", 8))
    assert weights_bytes(tmp_path, "auto") == 8
    safetensors(tmp_path / "model.safetensors", ("F32", 40))
    assert weights_bytes(tmp_path, "auto") == 40


def test_the_rows_of_a_tensor_are_told_where_a_file_tells_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(77))
    assert rows_of(tmp_path, "t1") is None
    safetensors(tmp_path / "one.safetensors", ("F32", 40))
    safetensors(tmp_path / "two.safetensors", ("F32", 40), ("F32", 8))
    assert rows_of(tmp_path, "t1") == 8
    assert rows_of(tmp_path, "t2") is None


def test_the_shards_of_an_index_add_up_once_each(tmp_path: Path) -> None:
    safetensors(tmp_path / "one.safetensors", ("F32", 40), ("F32", 4))
    safetensors(tmp_path / "two.safetensors", ("F32", 400))
    safetensors(tmp_path / "stray.safetensors", ("F32", 4000))
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_bytes(tmp_path, "float16") == 222
    (tmp_path / "two.safetensors").unlink()
    assert weights_bytes(tmp_path, "float16") is None


def test_the_format_is_told_with_the_types_that_hold_the_weights(tmp_path: Path) -> None:
    assert layout(tmp_path) == "no weights in a format that is known here"
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(77))
    assert layout(tmp_path) == "pickled (.bin)"
    safetensors(tmp_path / "model.safetensors", ("I64", 8), ("BF16", 2000), ("F32", 4000))
    assert layout(tmp_path) == "safetensors F32+BF16"
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    index = {"weight_map": {"a": "part.safetensors", "b": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert layout(tmp_path) == "safetensors F32+BF16 2 files, 1 of them missing"
    with_header(tmp_path / "part.safetensors", b"[]")
    with pytest.raises(ConfigurationError, match=r"part\.safetensors"):
        layout(tmp_path)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x.bin"}}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_refused_by_name(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors\.index\.json"):
        weights_bytes(tmp_path, "auto")


def test_what_cannot_be_told_is_none(tmp_path: Path) -> None:
    assert weights_bytes(tmp_path / "absent", "auto") is None
    assert weights_bytes(tmp_path, "auto") is None
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    assert weights_bytes(tmp_path / "model.onnx", "auto") is None


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"t": 3}',
        b'{"t": {"dtype": "F32"}}',
        b'{"t": {"dtype": 4, "data_offsets": [0, 4]}}',
        b'{"t": {"dtype": "F32", "data_offsets": [0, 4, 8]}}',
        b'{"t": {"dtype": "F32", "data_offsets": [4, 0]}}',
        b'{"t": {"dtype": "F32", "data_offsets": [-4, 0]}}',
        b'{"t": {"dtype": "F32", "data_offsets": [0, true]}}',
        b'{"t": {"dtype": "F32", "data_offsets": [0, 1e400]}}',
        b'{"t": {"dtype": "F32", "data_offsets": [0, 99999999999999999999]}}',
        b'{"t": {"dtype": "F32", "data_offsets": [0, 8]}, "u": {"dtype": "F32", "data_offsets": [0, 8]}}',
    ],
)
def test_a_hostile_header_is_refused_by_name(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        weights_bytes(with_header(tmp_path / "model.safetensors", header, 8), "float32")


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = safetensors(tmp_path / "model.safetensors", ("F32", 400), missing_bytes=1)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors.*incomplete.*400"):
        weights_bytes(tmp_path, "auto")
    data = whole.read_bytes()
    for length in (0, 7, 8, 20):
        whole.write_bytes(data[:length])
        with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
            weights_bytes(tmp_path, "auto")


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 2**31))
        # Sparse: takes no room on the disk.
        stream.truncate(2**32)
    with pytest.raises(ConfigurationError, match="header claims"):
        weights_bytes(file, "auto")


@given(st.binary(max_size=200), st.sampled_from(["model.safetensors", "model.gguf"]), st.booleans())
def test_no_garbage_gets_out_as_anything_but_a_refusal(data: bytes, name: str, framed: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / name
        head = b"GGUF" + struct.pack("<I", 3) if name.endswith("gguf") else struct.pack("<Q", len(data))
        file.write_bytes(head + data if framed else data)
        with contextlib.suppress(ConfigurationError):
            assert weights_bytes(file, "float32") is not None


# --- GGUF --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "def"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_bool("some.flag", True)
    writer.add_tensor("full", np.zeros((3, 5), np.float32))
    quantised = gguf.quants.quantize(np.zeros((2, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blocks", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_counts_as_it_is_unpacked(gguf_file: Path) -> None:
    elements = 3 * 5 + 2 * 64
    assert weights_bytes(gguf_file, "auto") == 4 * elements
    assert weights_bytes(gguf_file, "bfloat16") == 2 * elements
    assert weights_bytes(gguf_file.parent, "float32") == 4 * elements
    # A second quantisation beside it: which one would be loaded cannot be told.
    (gguf_file.parent / "other.gguf").write_bytes(gguf_file.read_bytes())
    assert weights_bytes(gguf_file.parent, "float32") is None


def test_a_gguf_file_cut_anywhere_in_its_head_is_refused(gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    head_bytes = data.index(b"blocks") + len(b"blocks")
    for length in range(head_bytes):
        gguf_file.write_bytes(data[:length])
        with pytest.raises(ConfigurationError, match=r"model\.gguf"):
            weights_bytes(gguf_file, "auto")


@pytest.mark.parametrize(
    "rest",
    [
        struct.pack("<IQQ", 1, 0, 0),
        struct.pack(">IQQ", 3, 0, 0),
        struct.pack("<IQQ", 3, 2**60, 0),
        struct.pack("<IQQQ", 3, 0, 1, 2**63),
        struct.pack("<IQQQI", 3, 0, 1, 0, 99),
        struct.pack("<IQQQIIQ", 3, 0, 1, 0, 9, 4, 2**61),
        struct.pack("<IQQQI", 3, 0, 1, 0, 9) + struct.pack("<IQ", 9, 1) * 5000,
        struct.pack("<IQQQI", 3, 1, 0, 0, 2**31),
    ],
)
def test_a_hostile_gguf_head_is_refused(tmp_path: Path, rest: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + rest + bytes(64))
    with pytest.raises(ConfigurationError, match=r"model\.gguf"):
        weights_bytes(file, "auto")


# --- the rest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_sizes_read_well(size_bytes: int, text: str) -> None:
    assert human_bytes(size_bytes) == text


def test_measuring_weights_imports_nothing_heavy() -> None:
    program = "import sys, model_worker.weights; print({'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"

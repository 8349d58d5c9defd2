"""Which errors mean less memory, which mean a lost device, and what may be said of each in one line."""

from __future__ import annotations

import pytest
import torch

from model_worker.replica import faults
from shared.errors import Code, InvalidInput, LoadError, Unserialisable

OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
DEVICE_FAULTS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("something new"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("HIP error: unspecified launch failure"),
]
OTHERS = [
    ValueError("CUDA error: only quoted by a ValueError"),
    RuntimeError("The size of tensor a (40) must match the size of tensor b (32)"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    KeyError("out of memory"),
    InvalidInput("out of memory"),
]


def name(error: BaseException) -> str:
    return f"{type(error).__name__}-{str(error)[:30]}"


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=name)
def test_out_of_memory_is_told_by_class_or_text(error: BaseException) -> None:
    assert faults.is_out_of_memory(error)
    assert not faults.is_device_fault(error)
    assert faults.code_of(error) is Code.OUT_OF_MEMORY


@pytest.mark.parametrize("error", DEVICE_FAULTS, ids=name)
def test_lost_device_is_told_by_class_or_text(error: BaseException) -> None:
    assert faults.is_device_fault(error)
    assert not faults.is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=name)
def test_other_errors_are_only_errors(error: BaseException) -> None:
    assert not faults.is_out_of_memory(error)
    assert not faults.is_device_fault(error)


def test_errors_worded_for_the_caller_are_not_given_a_class_name() -> None:
    assert faults.describe(InvalidInput("too\nlong")) == "too long"
    assert faults.describe(LoadError("no such file")) == "no such file"
    assert faults.describe(ValueError("bad")) == "ValueError: bad"
    assert faults.describe(ValueError()) == "ValueError"
    assert faults.code_of(Unserialisable("no")) is Code.MODEL_ERROR


def test_long_text_is_cut() -> None:
    assert len(faults.describe(ValueError("x" * 10_000))) == faults.TEXT_CHARACTERS_MAX


def test_first_error_of_a_chain_is_told_even_if_the_chain_is_a_ring() -> None:
    outer, inner = ValueError("outer"), OSError("inner")
    outer.__cause__ = inner
    assert faults.describe_with_cause(outer) == "ValueError: outer (first: OSError: inner)"
    inner.__cause__ = outer
    assert "outer" in faults.describe_with_cause(outer)


def test_hidden_context_stays_hidden() -> None:
    error = ValueError("outer")
    error.__context__ = OSError("inner")
    error.__suppress_context__ = True
    assert faults.describe_with_cause(error) == "ValueError: outer"

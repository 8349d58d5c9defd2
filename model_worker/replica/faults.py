"""What an exception from a model means: whose fault it is, whether less would fit, whether the device is lost.

Owns the classification and the one-line texts that may leave the process. It goes by names and texts, so that it
needs no torch: the classes differ between versions, and a model may not use torch at all.
"""

from __future__ import annotations

import re

from shared.errors import Code, LoadError, RequestError

# Enough for the longest useful message of a loader or a driver; a whole document in an error's text is cut.
TEXT_CHARACTERS_MAX = 1000
# An error may name itself as its cause.
CHAIN_LENGTH_MAX = 50

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED",
    re.IGNORECASE,
)
# The state of the device after these is undefined until the process that used it ends.
_DEVICE_FAULT = re.compile(
    r"CUDA error|HIP error|device-side assert|illegal memory access|uncorrectable|unspecified launch failure"
    r"|CU(?:BLAS|DNN)_STATUS_(?:NOT_INITIALIZED|MAPPING_ERROR|EXECUTION_FAILED|INTERNAL_ERROR)",
    re.IGNORECASE,
)


def ends_process(error: BaseException) -> bool:
    """Whether the model's code asked the process to end; every other exception is about an item."""
    return isinstance(error, (SystemExit, KeyboardInterrupt))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the same work might fit if there were less of it."""
    if isinstance(error, MemoryError) or _has_class(error, "OutOfMemoryError"):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(_text(error)) is not None


def is_device_fault(error: BaseException) -> bool:
    """Whether the device is lost for this process: everything it runs from now on fails."""
    if is_out_of_memory(error):
        return False
    if _has_class(error, "AcceleratorError"):
        return True
    return isinstance(error, RuntimeError) and _DEVICE_FAULT.search(_text(error)) is not None


def code_of(error: BaseException) -> Code:
    """How a request ends that failed with this error by itself."""
    if isinstance(error, RequestError):
        return error.code
    return Code.OUT_OF_MEMORY if is_out_of_memory(error) else Code.MODEL_ERROR


def describe(error: BaseException) -> str:
    """Class and text in one line; the text alone for errors that were worded for the caller."""
    if isinstance(error, (RequestError, LoadError)):
        return one_line(_text(error))
    text = _text(error)
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def describe_with_cause(error: BaseException) -> str:
    """As `describe`, with the first error of the chain, which a later one may have hidden; `LoadError`s tell it all."""
    if isinstance(error, LoadError):
        return describe(error)
    root = error
    for _ in range(CHAIN_LENGTH_MAX):
        earlier = root.__cause__ or (None if root.__suppress_context__ else root.__context__)
        if earlier is None:
            break
        root = earlier
    if root is error:
        return describe(error)
    return f"{describe(error)} (first: {describe(root)})"


def first_line(error: BaseException) -> str:
    """Class and first line of the text: device errors go on with advice for developers."""
    text = _text(error).strip().splitlines()
    return one_line(f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)


def one_line(text: str) -> str:
    """Whitespace collapsed, and cut at `TEXT_CHARACTERS_MAX`."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARACTERS_MAX else line[: TEXT_CHARACTERS_MAX - 1] + "…"


def _has_class(error: BaseException, name: str) -> bool:
    return any(base.__name__ == name for base in type(error).__mro__)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        # A model's own exception class may fail to describe itself; the answer is then about the class alone.
        return f"(its text cannot be read: {type(failure).__name__})"

"""Reads a `.gguf` file once, where transformers reads it again for each part of a model.

transformers goes through everything that such a file says about itself, a vocabulary of many thousand words among it,
for the configuration, for the tokenizer and for the weights; and it makes the table of all tensors' names anew for
each module of the model. That is most of the time that a small model takes to load. Refuses to read anything itself:
what is read, and when, is transformers' own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# What transformers imports from the library `gguf` each time that it is about to call it. Both are functions of their
# arguments alone, and what they return is only looked at.
_NAMES = ("GGUFReader", "get_tensor_name_map")


class ReadOnce:
    """What has been read of one model's file so far. Main thread only, as every load is; kept no longer than a load."""

    def __init__(self) -> None:
        self._remembering: dict[str, Callable[..., Any]] = {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Until the block ends, the library answers with what it has answered before.

        Raises:
            ImportError: the library is not installed.
        """
        import gguf

        own = {name: getattr(gguf, name) for name in _NAMES}
        try:
            for name, function in own.items():
                setattr(gguf, name, self._remembering.setdefault(name, functools.cache(function)))
            yield
        finally:
            for name, function in own.items():
                setattr(gguf, name, function)

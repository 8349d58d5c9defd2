"""The progress bars of the libraries, heard instead of drawn.

Owns the one place where a bar of tqdm's is changed, and what the bars of one part of a load mean together. Whatever
downloads or loads shows a bar: huggingface_hub one or two for the bytes of each file, or for those of all files at
once, and transformers one for the weights that it puts into their places. Refuses to know what is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tqdm.std

_DRAWN_INIT = tqdm.std.tqdm.__init__
# Of a bar that counts bytes, which only downloads do.
_BYTES = "B"
_HUB_PACKAGE = "huggingface_hub"

OnProgress = Callable[[bool, float], None]
"""Whether it is a download, and how far it is, from 0.0 to 1.0. Called on whichever thread moves a bar."""


class _Ear:
    """Hears the bars that are made while it listens."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._downloads: list[Any] = []
        self._others: list[Any] = []

    def open(self, bar: Any, unit: str) -> None:
        with self._lock:
            if unit == _BYTES:
                self._downloads.append(bar)
            elif not type(bar).__module__.startswith(_HUB_PACKAGE):
                # The hub's own others count files, whose bytes are counted already.
                self._others.append(bar)

    def move(self, bar: Any, count: float) -> None:
        with self._lock:
            bar.n += count
            is_download = any(bar is other for other in self._downloads)
            if not is_download and not any(bar is other for other in self._others):
                return
            # Several files may be under way at once.
            together = self._downloads if is_download else [bar]
            done, whole = sum(each.n for each in together), sum(each.total or 0 for each in together)
            if whole > 0:
                self._on_progress(is_download, min(1.0, max(0.0, done / whole)))


@contextmanager
def heard_bars(on_progress: OnProgress) -> Iterator[None]:
    """While entered, no bar that is made is drawn, and `on_progress` is called when one moves."""
    ear = _Ear(on_progress)
    bars = tqdm.std.tqdm
    # As they stand in the class: one of them makes a new function whenever it is looked up.
    before = {name: vars(bars)[name] for name in ("__init__", "update", "__iter__")}

    def make(bar: Any, *positional: Any, **keywords: Any) -> None:
        _DRAWN_INIT(bar, *positional, **{**keywords, "disable": True})
        ear.open(bar, keywords.get("unit", ""))

    def update(bar: Any, n: float | None = 1) -> None:
        ear.move(bar, n or 0)

    def iterate(bar: Any) -> Iterator[Any]:
        for item in bar.iterable:
            yield item
            ear.move(bar, 1)

    bars.__init__, bars.update, bars.__iter__ = make, update, iterate
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(bars, name, method)

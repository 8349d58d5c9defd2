"""What somebody may have meant who wrote a name that is not there.

Owns how near a guess has to be, and its wording. Guesses are for messages alone: nothing acts on one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `word`; None if none is near.

    >>> closest("embeding", ["embedding", "fill-mask"]), closest("batch", ["max_batch_size"]), closest("x", ["port"])
    ('embedding', 'max_batch_size', None)
    """
    lower = word.lower()
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(lower, by_lower, n=1) or [
        name for name in by_lower if len(lower) > 3 and lower in name
    ]
    return by_lower[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """To be put behind `word` in a message; empty if nothing is near.

    >>> did_you_mean("embeding", ["embedding", "fill-mask"])
    " (did you mean 'embedding'?)"
    """
    near = closest(word, known)
    return "" if near is None else f" (did you mean {near!r}?)"

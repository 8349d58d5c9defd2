"""Numbers for people, as they stand in the texts of answers.

Owns the rounding. Refuses whatever a program might read: that gets the exact number.
"""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Two digits, in milliseconds or seconds.

    >>> duration(0.00162), duration(0.298), duration(12.345), duration(612.0)
    ('1.6 ms', '0.3 s', '12 s', '612 s')
    """
    if seconds < 0.001:
        return "less than 1 ms"
    return f"{_rounded(seconds)} s" if seconds >= 0.0995 else f"{_rounded(seconds * 1000)} ms"


def _rounded(number: float) -> str:
    return f"{number:.2g}" if number < 9.95 else f"{number:.0f}"

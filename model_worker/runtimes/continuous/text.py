"""The text of an answer, piece by piece as its tokens come.

Owns when a piece may be shown: a character spread over several tokens only when it is whole, and what may be the
beginning of a stop string only when it is clear that it is not. Nothing is dropped: what was held back comes with the
end. All pieces together are the text that the tokenizer makes of all tokens together.

Refuses to encode: a tokenizer that only decodes changes nothing in itself, so any thread may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Some tokenizers drop a space at the start of what they decode, so tokens are decoded behind others.
_CONTEXT_TOKENS = 6
# Decoding again and again what has been shown already costs more with each token; from here on the oldest are let go.
_WINDOW_TOKENS = 32
# A character has at most four bytes, and a token at least one. Whoever writes this many bytes that are no character
# does not write any.
_HELD_TOKENS_MAX = 16

Decode = Callable[[Sequence[int]], str]


def decoding(tokenizer: Any, *, skip_special_tokens: bool) -> Decode:
    """What `tokenizer.decode` does, without its detour through Python where there is a quicker way."""
    quick = getattr(tokenizer, "backend_tokenizer", None)
    if quick is not None and type(tokenizer).__module__ == "transformers.tokenization_utils_tokenizers":
        return lambda ids: cast(str, quick.decode(ids, skip_special_tokens=skip_special_tokens))
    return lambda ids: cast(
        str,
        tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False),
    )


class TextStream:
    """Whole characters out of tokens."""

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = _context(decode, prompt_ids)
        self._shown = decode(self._window)
        """What the window's tokens have been shown as."""
        self._boundaries = [len(self._window)]
        """Places in the window before which all tokens have been shown; the window may be cut at any of them."""

    def push(self, token_id: int) -> str:
        """The characters that `token_id` has made whole; often none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_whole = not text.endswith(_REPLACEMENT)
        if is_whole and text.startswith(self._shown):
            return self._show(text)
        if len(self._window) - self._boundaries[-1] < _HELD_TOKENS_MAX:
            return ""
        # No valid text comes here. Still, the last bytes may be the first ones of a character.
        return self._show(text if is_whole else text[:-1])

    def finish(self) -> str:
        """What is left at the end, whole or not."""
        return self._decode(self._window)[len(self._shown) :]

    def _show(self, text: str) -> str:
        # Where a decoder takes back what it gave (no valid text makes one do so), what was shown stays.
        piece = text[len(self._shown) :]
        self._shown = text
        self._boundaries.append(len(self._window))
        if len(self._window) > _WINDOW_TOKENS:
            self._forget()
        return piece

    def _forget(self) -> None:
        oldest = max((place for place in self._boundaries if place <= len(self._window) - _CONTEXT_TOKENS), default=0)
        unseen = self._decode(self._window)[len(self._shown) :]
        self._window = self._window[oldest:]
        self._boundaries = [place - oldest for place in self._boundaries if place >= oldest]
        self._shown = self._decode(self._window).removesuffix(unseen)


def _context(decode: Decode, prompt_ids: Sequence[int]) -> list[int]:
    """The last tokens of a prompt, as few as make whole characters."""
    longest = min(len(prompt_ids), _CONTEXT_TOKENS + _HELD_TOKENS_MAX)
    for length in range(min(_CONTEXT_TOKENS, longest), longest + 1):
        context = list(prompt_ids[len(prompt_ids) - length :])
        if _REPLACEMENT not in decode(context):
            return context
    # The prompt ends inside a character that the answer completes: the answer alone is the best there is.
    return []


class StopWatch:
    """Finds stop strings across the borders of pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_found = False

    def push(self, piece: str) -> str:
        """What of the text so far can be shown; sets `is_found` when the next thing in it is a stop string."""
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_found = True
            self._held = ""
            return text[: min(places)]
        held = max(_beginning_at_the_end(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _beginning_at_the_end(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first ones of `stop`; at most all of `stop` but one."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)

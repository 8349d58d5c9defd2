"""A question and its context as tokens, and the windows in which a context of any length is read.

Owns where a window begins and ends, and the way from a token back to the characters of the context. The text is
tokenised once and in one piece, and the windows are slices of that: the tokenizers' own way of cutting panics where
windows could not move on. Refuses to compute. Prepare thread for `encode` and `cut`; what they make never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_worker.runtimes import loading
from model_worker.runtimes.question_parameters import Pair, QuestionParameters
from shared.errors import InvalidInput

_DEFAULT_WINDOW_TOKENS = 384
_DEFAULT_OVERLAP_TOKENS = 128

Positions = NDArray[np.int64]
Window = tuple[int, int]
"""The tokens of the context that a window holds, as positions in the whole pair: the first, and the one behind the
last. Around them stand the question and the special tokens, in every window."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPair:
    """One question with its whole context, as one sequence of tokens."""

    context: str
    ids: list[int]
    type_ids: list[int]
    context_tokens: Window
    is_allowed: NDArray[np.bool_]
    """[tokens]: where an answer may begin and end."""
    offsets: Positions
    """[tokens, 2]: the characters that each token stands for."""
    words: Positions
    """[tokens]: the number of each token's word, -1 for none. Question and context count separately."""
    word_first: Positions
    """[words + 1]: the first token of each word of the context. The last entry, which -1 leads to, is no word."""
    word_last: Positions

    @property
    def fixed_tokens(self) -> int:
        """Tokens that stand in every window."""
        start, stop = self.context_tokens
        return len(self.ids) - (stop - start)

    def of_window(self, values: list[int], window: Window) -> list[int]:
        """Of one value per token, those of a window."""
        start, stop = self.context_tokens
        return [*values[:start], *values[slice(*window)], *values[stop:]]

    def positions(self, window: Window) -> Positions:
        """[tokens of the window]: where in the whole pair each of them stands."""
        start, stop = self.context_tokens
        return np.concatenate([np.arange(start), np.arange(*window), np.arange(stop, len(self.ids))])

    def characters(
        self, window: Window, first: Positions, last: Positions, *, align_to_words: bool
    ) -> tuple[Positions, Positions]:
        """Where in the context spans of tokens begin and end, grown to whole words as far as the window holds them."""
        starts, stops = self.offsets[first, 0], self.offsets[last, 1]
        if not align_to_words:
            return starts, stops
        first_of_start, last_of_start = self._word_in(window, self.words[first])
        first_of_stop, last_of_stop = self._word_in(window, self.words[last])
        # Special tokens belong to no word, and a word may be one of the question's.
        has_words = (first_of_start <= last_of_start) & (first_of_stop <= last_of_stop)
        grown_starts = self.offsets[np.where(has_words, first_of_start, 0), 0]
        grown_stops = self.offsets[np.where(has_words, last_of_stop, 0), 1]
        return np.where(has_words, grown_starts, starts), np.where(has_words, grown_stops, stops)

    def _word_in(self, window: Window, words: Positions) -> tuple[Positions, Positions]:
        """The first and the last token of words in a window; the first is behind the last where it holds none."""
        start, stop = window
        return np.maximum(self.word_first[words], start), np.minimum(self.word_last[words], stop - 1)


def encode(tokenizer: Any, pair: Pair) -> EncodedPair:
    """
    Raises:
        InvalidInput: the tokenizer cannot process the text.
    """
    question_first = tokenizer.padding_side == "right"
    texts = (pair.question, pair.context) if question_first else (pair.context, pair.question)
    with loading.refuse_panics():
        encoding = tokenizer(*texts)[0]
    sequences = np.array([-1 if each is None else each for each in encoding.sequence_ids])
    words = np.array([-1 if each is None else each for each in encoding.word_ids], dtype=np.int64)
    in_context = sequences == (1 if question_first else 0)
    context_positions = np.flatnonzero(in_context)
    count = len(encoding.ids)
    start, stop = (
        (int(context_positions[0]), int(context_positions[-1]) + 1) if context_positions.size else (count,) * 2
    )
    in_word = context_positions[words[context_positions] >= 0]
    word_first = np.full(words.max(initial=-1) + 2, count, dtype=np.int64)
    word_last = np.full_like(word_first, -1)
    # Of several values for one word the last one stays.
    word_first[words[in_word[::-1]]] = in_word[::-1]
    word_last[words[in_word]] = in_word
    return EncodedPair(
        context=pair.context,
        ids=encoding.ids,
        type_ids=encoding.type_ids,
        context_tokens=(start, stop),
        # Models that were trained on questions without an answer point at the CLS token for those.
        is_allowed=in_context | (np.array(encoding.ids) == tokenizer.cls_token_id),
        offsets=np.array(encoding.offsets, dtype=np.int64).reshape(count, 2),
        words=words,
        word_first=word_first,
        word_last=word_last,
    )


class WindowCutter:
    """Deals the tokens of a context out to windows, for one model."""

    def __init__(self, tokenizer: Any, positions: int) -> None:
        """`positions` is how many tokens one sequence of the model may have."""
        self.default_window_tokens = min(tokenizer.model_max_length, _DEFAULT_WINDOW_TOKENS, positions)
        self._positions = positions
        self._special_tokens_alone = tokenizer.num_special_tokens_to_add(pair=False)
        self._special_tokens = tokenizer.num_special_tokens_to_add(pair=True)
        self._from_the_end = tokenizer.truncation_side == "left"

    def cut(self, encoded: EncodedPair, pair: Pair, parameters: QuestionParameters, tokens_max: int) -> list[Window]:
        """The windows of one context, which are of no more than `tokens_max` tokens in all.

        Raises:
            InvalidInput: the question leaves no room, the windows would not move on, or there are too many.
        """
        window_tokens, overlap = self._sizes(parameters)
        start, stop = encoded.context_tokens
        if len(encoded.ids) <= window_tokens:
            return [(start, stop)]
        question_tokens = encoded.fixed_tokens - self._special_tokens
        room = window_tokens - encoded.fixed_tokens
        numbers: dict[str, object] = {"length_tokens": encoded.fixed_tokens, "limit_tokens": window_tokens}
        wider = f" or a larger max_seq_len (at most {self._positions})" if window_tokens < self._positions else ""
        if room < 1:
            raise InvalidInput(
                f"{pair.question_place} is {question_tokens} tokens long, which leaves no room for the context in "
                f"windows of {window_tokens} tokens, {self._special_tokens} of them special: set a shorter one{wider}",
                detail=numbers,
            )
        if overlap >= room:
            raise InvalidInput(
                f"doc_stride = {overlap} does not fit: it is how many tokens of the context two windows share, and "
                f"windows of {window_tokens} tokens have room for {room} beside {pair.question_place}: set doc_stride "
                f"to at most {room - 1}{wider}",
                detail=numbers,
            )
        step = room - overlap
        count = 1 + -(-(stop - start - room) // step)
        if count * window_tokens > tokens_max:
            raise InvalidInput(
                f"{pair.context_place} makes {count} windows of {window_tokens} tokens; one request may have "
                f"{tokens_max} tokens: shorten it, or set a smaller doc_stride",
                detail={"length_tokens": count * window_tokens, "limit_tokens": tokens_max},
            )
        if self._from_the_end:
            return [(max(stop - index * step - room, start), stop - index * step) for index in range(count)]
        return [(start + index * step, min(start + index * step + room, stop)) for index in range(count)]

    def _sizes(self, parameters: QuestionParameters) -> tuple[int, int]:
        """Tokens of a window, and how many of them two windows share."""
        window_tokens, overlap = parameters.max_window_tokens, parameters.overlap_tokens
        if window_tokens is None:
            window_tokens = self.default_window_tokens
        if overlap is None:
            overlap = min(window_tokens // 2, _DEFAULT_OVERLAP_TOKENS)
        fitting = window_tokens - self._special_tokens_alone
        if overlap > (window_tokens if fitting < 0 else fitting):
            raise InvalidInput(
                f"doc_stride = {overlap} is larger than max_seq_len = {window_tokens} allows: it is how many tokens "
                "two windows share; set a smaller doc_stride or a larger max_seq_len"
            )
        # As with the pipeline, a number that even the special tokens fill up means that nothing is to be cut.
        cuts = window_tokens > self._special_tokens
        return min(window_tokens, self._positions) if cuts else self._positions, overlap

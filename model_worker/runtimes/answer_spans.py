"""From logits to answers: the arithmetic of extractive question answering, in numpy. Finish thread only.

Owns the scores: softmax over what may be an answer, the best spans of each window, "no answer", and the sum of what
several windows say. Refuses tokenizers, devices and numbers that are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from model_worker.runtimes.question_parameters import QuestionParameters
from model_worker.runtimes.question_windows import EncodedPair, Positions, Window
from shared.errors import Code, RequestError

Scores = NDArray[np.float32]
Answer = dict[str, object]
"""`score`, and `start`, `end` and `answer` of the context, or 0, 0 and "" for none."""

# Not minus infinity: where nothing at all is allowed, all is equally likely.
_RULED_OUT = np.float32(-10_000.0)
# Longer windows have no full table of spans, of 4 bytes each and several times that while it is sorted.
_TABLE_TOKENS_MAX = 2_048


def best_answers(
    encoded: EncodedPair, windows: Sequence[Window], logits: Sequence[Scores], parameters: QuestionParameters
) -> Answer | list[Answer]:
    """The best `top_k` answers, best first; one alone is not in a list.

    `logits` are float32 [2, tokens] for each window: of the start and of the end. Windows that find the same text, in
    whatever case, add their scores up, so a score may be above 1; the first of them says how it is written and where.

    Raises:
        RequestError: the logits are not numbers any more.
    """
    found: dict[str, tuple[float, int, int]] = {}
    null_score = np.inf
    for window, (start_logits, end_logits) in zip(windows, logits, strict=True):
        positions = encoded.positions(window)
        is_allowed = encoded.is_allowed[positions]
        start, end = _probabilities(start_logits, is_allowed), _probabilities(end_logits, is_allowed)
        null_score = min(null_score, float(start[0] * end[0]))
        # The first token took part in the softmax; from here on it is no answer, but a place to point at.
        start[0] = end[0] = 0.0
        is_allowed[0] = True
        firsts, lasts, scores = best_spans(start, end, parameters.candidates, parameters.max_answer_tokens)
        kept = is_allowed[firsts] & is_allowed[lasts]
        starts, stops = encoded.characters(
            window, positions[firsts[kept]], positions[lasts[kept]], align_to_words=parameters.align_to_words
        )
        for score, begin, stop in zip(scores[kept].tolist(), starts.tolist(), stops.tolist(), strict=True):
            key = encoded.context[begin:stop].lower()
            before = found.get(key)
            found[key] = (score, begin, stop) if before is None else (before[0] + score, *before[1:])
    ranked = list(found.values())
    if parameters.may_be_unanswered:
        ranked.append((null_score, 0, 0))
    ranked.sort(key=itemgetter(0), reverse=True)
    answers: list[Answer] = [
        {"score": score, "start": begin, "end": stop, "answer": encoded.context[begin:stop]}
        for score, begin, stop in ranked[: parameters.top_k]
    ]
    return answers[0] if len(answers) == 1 else answers


def best_spans(start: Scores, end: Scores, count: int, max_tokens: int) -> tuple[Positions, Positions, Scores]:
    """First token, last token and score of the best `count` spans of at most `max_tokens` tokens, best first.

    A span's score is `start[first] * end[last]`. Where fewer than `count` are above 0, any pairs of tokens follow,
    with a score of 0; of a long window spans alone.
    """
    tokens = len(start)
    width = min(max_tokens, tokens)
    # Row by row the spans that begin at one token: [tokens, width], not [tokens, tokens].
    band = start[:, np.newaxis] * sliding_window_view(np.pad(end, (0, width - 1)), width)
    if tokens > _TABLE_TOKENS_MAX or np.count_nonzero(band) >= count:
        scores = band.ravel()
        cells = _largest(scores, count)
        cells = cells[cells // width + cells % width < tokens]
        firsts = cells // width
        return firsts, firsts + cells % width, scores[cells]
    scores = np.tril(np.triu(np.outer(start, end)), width - 1).ravel()
    cells = _largest(scores, count)
    return cells // tokens, cells % tokens, scores[cells]


def _largest(scores: Scores, count: int) -> Positions:
    """Where the `count` largest stand, largest first."""
    candidates = np.arange(len(scores)) if count >= len(scores) else np.argpartition(-scores, count)[:count]
    return candidates[np.argsort(-scores[candidates])]


def _probabilities(logits: Scores, is_allowed: NDArray[np.bool_]) -> Scores:
    masked = np.where(is_allowed, logits, _RULED_OUT)
    with np.errstate(invalid="ignore"):
        powers = np.exp(masked - masked.max())
        probabilities: Scores = powers / powers.sum()
    if np.isnan(probabilities).any():
        raise RequestError("the model computed numbers that are not finite (NaN or infinite)", code=Code.MODEL_ERROR)
    return probabilities

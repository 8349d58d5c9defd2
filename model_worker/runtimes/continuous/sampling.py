"""The next token of every row at once, each row with settings and random numbers of its own.

Owns penalties, truncation, drawing, and log-probabilities, without a loop over rows or tokens in Python; only rows with
a guide, which says what may come next, are looked at one by one. Refuses to know texts and caches. transformers' own
processors hold one setting for a whole batch, so these are written anew, after the same formulas; the tests compare the
two.

Draws are by inversion: one number from 0 to 1 per token, taken from the row's own generator, chooses the first token at
which the running sum of the probabilities exceeds it. What a row draws depends on its seed, on its settings, and on its
scores, not on its neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from model_worker.runtimes.continuous.sequences import Guide, Sampling, TokenScore
from model_worker.runtimes.transfer import on_device, to_device

# With top_p alone it is not known beforehand how many tokens are needed. Nearly always these are enough, and finding
# them costs a twentieth of sorting a vocabulary (50,000 tokens on a CPU); where they are not, more are looked at.
_NUCLEUS_GUESS = 256
_NUCLEUS_GROWTH = 16
# The largest number below 1 by which a float32 sum can be multiplied and is sure to become less.
_BELOW_ONE = 1.0 - 2.0**-23


class Draw:
    """What sampling knows of one row, from its first token to its last."""

    def __init__(self, settings: Sampling, prompt_ids: Sequence[int], guide: Guide | None = None) -> None:
        self.settings = settings
        self.guide = guide
        self.prompt_ids = prompt_ids
        # Mersenne Twister, whose `random` is the same in every version of Python.
        self.random = random.Random(settings.seed)
        self.counts: torch.Tensor | None = None
        """float32 [vocabulary]: how often each token stands in the answer. Only for penalties."""
        self.seen: torch.Tensor | None = None
        """bool [vocabulary]: whether it stands in the prompt or the answer. Only for penalties."""


@dataclass(frozen=True, slots=True)
class Chosen:
    token_ids: list[int]
    is_finite: list[bool]
    """False: the row's scores are not numbers, and its token means nothing."""
    scores: list[TokenScore | None]


class SamplingPlan:
    """Chooses tokens for a fixed list of rows; make another one when a row joins or leaves. Main thread only."""

    def __init__(self, draws: Sequence[Draw], vocabulary: int, device: torch.device) -> None:
        self._draws = draws
        self._device = device
        settings = [draw.settings for draw in draws]
        self._reported = [index for index, one in enumerate(settings) if one.logprobs is not None]
        self._reported_rows = self._rows(self._reported)
        self._top_count = max((one.logprobs or 0 for one in settings), default=0)
        self._guides = [(index, draw.guide) for index, draw in enumerate(draws) if draw.guide is not None]
        self._penalties = _Penalties(draws, vocabulary, device) if any(one.is_penalised for one in settings) else None
        # Rows with a short list to draw from, and rows that draw from all tokens.
        drawn = [index for index, one in enumerate(settings) if one.is_drawn]
        narrow = [index for index in drawn if settings[index].top_k > 0 or settings[index].top_p < 1.0]
        wide = [index for index in drawn if index not in set(narrow)]
        self._parts = [
            (part, self._rows(part), _Truncation([settings[index] for index in part], device), draw)
            for part, draw in ((narrow, _draw_from_few), (wide, _draw_from_all))
            if part
        ]

    def choose(self, logits: torch.Tensor) -> Chosen:
        """`logits` are [rows, vocabulary], of any floating type; they are not changed."""
        raw = logits.float()
        scores = raw if self._penalties is None else self._penalties.apply(raw)
        if self._guides:
            scores = self._guided(scores)
        # One pass finds the greedy token and anything that is not a number: a maximum over NaN is NaN. Minus infinity
        # is how a model rules a token out, plus infinity and a row of nothing but minus infinity come from one gone
        # wrong.
        best, tokens = scores.max(dim=-1)
        for part, rows, truncation, draw in self._parts:
            numbers = [self._draws[index].random.random() for index in part]
            points = on_device(numbers, self._device).clamp_(max=_BELOW_ONE)
            tokens[rows] = draw(scores[rows] / truncation.temperature, truncation, points)
        if self._penalties is not None:
            self._penalties.count(tokens)
        token_ids, is_finite = torch.stack((tokens, best.isfinite().long())).tolist()
        for index, guide in self._guides:
            if is_finite[index]:
                guide.advance(token_ids[index])
        return Chosen(token_ids, [bool(flag) for flag in is_finite], self._report(raw, token_ids))

    def _guided(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores in which tokens that may not come have none."""
        scores = scores.clone()
        for index, guide in self._guides:
            allowed = to_device(guide.allowed()[: scores.shape[-1]], self._device)
            scores[index, : len(allowed)].masked_fill_(~allowed, -torch.inf)
            scores[index, len(allowed) :] = -torch.inf
        return scores

    def _report(self, raw: torch.Tensor, token_ids: list[int]) -> list[TokenScore | None]:
        reports: list[TokenScore | None] = [None] * len(token_ids)
        if not self._reported:
            return reports
        logprobs = raw[self._reported_rows].log_softmax(dim=-1)
        ids = on_device([token_ids[index] for index in self._reported], self._device)
        chosen = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
        values, indices = (found.tolist() for found in logprobs.topk(min(self._top_count, raw.shape[-1]), dim=-1))
        for place, index in enumerate(self._reported):
            count = self._draws[index].settings.logprobs or 0
            top = tuple(zip(indices[place][:count], values[place][:count], strict=True))
            reports[index] = TokenScore(token_ids[index], chosen[place], top)
        return reports

    def _rows(self, indices: Sequence[int]) -> torch.Tensor:
        return on_device(indices, self._device, torch.long)


class _Truncation:
    """The settings of some rows as columns, float32 or int64 [rows, 1]."""

    def __init__(self, settings: Sequence[Sampling], device: torch.device) -> None:
        def column(values: Sequence[float]) -> torch.Tensor:
            return on_device(values, device).unsqueeze(1)

        self.temperature = column([one.temperature for one in settings])
        self.top_p = column([one.top_p for one in settings])
        self.top_k = column([one.top_k for one in settings])
        # p < min_p * p_best, written for the logarithms.
        self.min_p = column([one.min_p for one in settings]).log()
        self.has_min_p = any(one.min_p > 0.0 for one in settings)
        self.is_all_top_k = all(one.top_k > 0 for one in settings)
        self.candidates = max((one.top_k or _NUCLEUS_GUESS for one in settings), default=0)

    def of(self, rows: torch.Tensor) -> _Truncation:
        part = object.__new__(_Truncation)
        part.temperature, part.top_p, part.top_k, part.min_p = (
            values[rows] for values in (self.temperature, self.top_p, self.top_k, self.min_p)
        )
        part.has_min_p, part.is_all_top_k, part.candidates = self.has_min_p, self.is_all_top_k, self.candidates
        return part


_Drawing = Callable[[torch.Tensor, _Truncation, torch.Tensor], torch.Tensor]


def _draw_from_all(scores: torch.Tensor, truncation: _Truncation, points: torch.Tensor) -> torch.Tensor:
    """Draws from the whole vocabulary, in its own order; int64 [rows]."""
    scores = scores - scores.amax(dim=-1, keepdim=True)
    weights = scores.exp()
    if truncation.has_min_p:
        # As in transformers' MinPLogitsWarper.
        weights = weights.masked_fill(scores < truncation.min_p, 0.0)
    return _invert(weights, points)


def _draw_from_few(scores: torch.Tensor, truncation: _Truncation, points: torch.Tensor) -> torch.Tensor:
    """Draws from the most likely tokens, the most likely first; int64 [rows].

    The order is that of transformers: top_k, then top_p of what is left (TopKLogitsWarper, TopPLogitsWarper: a token is
    kept as long as those before it have less than top_p together; Holtzman et al. 2019), then min_p.
    """
    size = scores.shape[-1]
    count = min(truncation.candidates, size)
    ordered, ids = scores.topk(count, dim=-1)
    best = ordered[:, :1]
    weights = (ordered - best).exp()
    ranks = torch.arange(count, device=scores.device)
    has_top_k = truncation.top_k > 0
    weights = weights.masked_fill(has_top_k & (ranks >= truncation.top_k), 0.0)
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    if not truncation.is_all_top_k:
        total = torch.where(has_top_k, total, (scores - best).exp_().sum(dim=-1, keepdim=True))
    limit = truncation.top_p * total
    if count < size:
        lacking = (~has_top_k & (sums[:, -1:] < limit)).squeeze(1)
        if bool(lacking.any()):
            return _draw_from_more(scores, truncation, points, lacking)
    weights = weights.masked_fill(sums - weights >= limit, 0.0)
    if truncation.has_min_p:
        weights = weights.masked_fill(ordered - best < truncation.min_p, 0.0)
    return ids.gather(-1, _invert(weights, points).unsqueeze(1)).squeeze(1)


def _draw_from_more(
    scores: torch.Tensor, truncation: _Truncation, points: torch.Tensor, lacking: torch.Tensor
) -> torch.Tensor:
    """Looks at more tokens for the rows that need it, and only for them."""
    tokens = torch.empty(len(points), dtype=torch.long, device=scores.device)
    more = truncation.candidates * _NUCLEUS_GROWTH
    for chosen, candidates in ((lacking, more), (~lacking, truncation.candidates)):
        rows = chosen.nonzero().squeeze(1)
        if len(rows):
            part = truncation.of(rows)
            part.candidates = candidates
            tokens[rows] = _draw_from_few(scores[rows], part, points[rows])
    return tokens


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The first place at which the running sum of a row's `weights` exceeds its point's part of their sum."""
    sums = weights.cumsum(dim=-1)
    target = points.unsqueeze(1) * sums[:, -1:]
    # Rows of NaN find no place; their token is thrown away, but it has to be one.
    return torch.searchsorted(sums, target, right=True).squeeze(1).clamp_(max=weights.shape[-1] - 1)


class _Penalties:
    """Repetition penalty (Keskar et al. 2019, as in transformers' RepetitionPenaltyLogitsProcessor: positive scores of
    tokens that were seen are divided by it, negative ones multiplied), then frequency and presence penalty (as the
    OpenAI API defines them: score - count * frequency - (count > 0) * presence, counted in the answer alone)."""

    def __init__(self, draws: Sequence[Draw], vocabulary: int, device: torch.device) -> None:
        indices = [index for index, draw in enumerate(draws) if draw.settings.is_penalised]
        rows = [draws[index] for index in indices]
        self._rows = on_device(indices, device)
        self._is_all = len(indices) == len(draws)
        for row in rows:
            if row.seen is None:
                row.counts = torch.zeros(vocabulary, device=device)
                row.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
                row.seen[on_device(row.prompt_ids, device)] = True
        self._counts = torch.stack([row.counts for row in rows if row.counts is not None])
        self._seen = torch.stack([row.seen for row in rows if row.seen is not None])
        for row, counts, seen in zip(rows, self._counts, self._seen, strict=True):
            row.counts, row.seen = counts, seen

        def column(values: Sequence[float]) -> torch.Tensor:
            return on_device(values, device).unsqueeze(1)

        self._repetition = column([row.settings.repetition_penalty for row in rows])
        self._frequency = column([row.settings.frequency_penalty for row in rows])
        self._presence = column([row.settings.presence_penalty for row in rows])

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of all rows with the penalties taken off; the given ones stay as they are."""
        own = scores[self._rows]
        repeated = torch.where(own < 0, own * self._repetition, own / self._repetition)
        own = torch.where(self._seen, repeated, own)
        own = own - self._counts * self._frequency - (self._counts > 0) * self._presence
        return own if self._is_all else scores.index_copy(0, self._rows, own)

    def count(self, tokens: torch.Tensor) -> None:
        """Takes note of the tokens that all rows have chosen."""
        own = tokens[self._rows].unsqueeze(1)
        self._counts.scatter_add_(1, own, torch.ones_like(own, dtype=self._counts.dtype))
        self._seen.scatter_(1, own, True)

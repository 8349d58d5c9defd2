"""What the benchmarks ask: texts of known lengths, questions with contexts, and bodies as they go over HTTP.

Owns the distributions. Pure, and the same on every run: a seed decides the order and nothing else.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence

# Each of them is one token for BERT's uncased vocabulary, so that the words of a text are counted like its tokens.
_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so said what up its about "
    "than into them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many before must through back years where much your way well down should because "
    "each just those people how too little state good very make world still own see men work long get here between "
    "both life being under never day same another know while last might us great old year off come since against go "
    "came right used take three"
)
WORDS = tuple(_WORDS.split())

SHORT_TEXT_TOKENS = (8, 16)
LONGEST_TEXT_TOKENS = 256
# `[CLS]` and `[SEP]`.
SPECIAL_TOKENS = 2


def log_normal_lengths(count: int, *, mean: float, median: float, maximum: int, minimum: int = 4) -> list[int]:
    """`count` whole numbers, in order, that are log-normal with this median and cut at both ends.

    The quantiles of the distribution in place of random draws: every run, and every seed, has the same lengths. The
    width is chosen so that the mean comes out as asked in spite of the cut.
    """
    quantiles = [statistics.NormalDist().inv_cdf((position + 0.5) / count) for position in range(count)]

    def lengths(sigma: float) -> list[int]:
        return [min(maximum, max(minimum, round(median * math.exp(sigma * quantile)))) for quantile in quantiles]

    narrow, wide = 0.0, 3.0
    for _ in range(60):
        middle = (narrow + wide) / 2
        if statistics.fmean(lengths(middle)) < mean:
            narrow = middle
        else:
            wide = middle
    return lengths(wide)


def evenly_spread(count: int, low: int, high: int) -> list[int]:
    """`count` whole numbers from `low` to `high`, in order and equally far apart."""
    return [round(low + (high - low) * position / max(1, count - 1)) for position in range(count)]


def words(count: int, chooser: random.Random) -> str:
    return " ".join(chooser.choices(WORDS, k=count))


def text_of_tokens(tokens: int, chooser: random.Random) -> str:
    """A text that an uncased BERT tokenizer turns into this many tokens, special ones included."""
    return words(max(1, tokens - SPECIAL_TOKENS), chooser)


def mixed_texts(count: int = 512, seed: int = 0) -> list[str]:
    """The texts of the embedding load, shuffled: mean 47, median 31, at most 256 tokens."""
    chooser = random.Random(seed)
    lengths = log_normal_lengths(count, mean=47, median=31, maximum=LONGEST_TEXT_TOKENS)
    chooser.shuffle(lengths)
    return [text_of_tokens(length, chooser) for length in lengths]


def short_texts(count: int = 128, seed: int = 1) -> list[str]:
    chooser = random.Random(seed)
    return [text_of_tokens(chooser.randint(*SHORT_TEXT_TOKENS), chooser) for _ in range(count)]


def longest_text(seed: int = 2) -> str:
    return text_of_tokens(LONGEST_TEXT_TOKENS, random.Random(seed))


def questions(count: int = 96, seed: int = 3) -> list[dict[str, str]]:
    """Questions of eight words about contexts of 20 to 400 words, shuffled."""
    chooser = random.Random(seed)
    lengths = evenly_spread(count, 20, 400)
    chooser.shuffle(lengths)
    return [{"question": words(8, chooser) + "?", "context": words(length, chooser)} for length in lengths]


def prompts(count: int, seed: int) -> list[str]:
    """Beginnings of texts, of 8 to 32 words, shuffled; with another seed, others."""
    chooser = random.Random(seed)
    lengths = evenly_spread(count, 8, 32)
    chooser.shuffle(lengths)
    return [words(length, chooser) for length in lengths]


def random_texts(length_max: int, seed: int = 4) -> Iterator[str]:
    """Texts of 1 to `length_max` words without end, no two alike but by chance."""
    chooser = random.Random(seed)
    while True:
        yield words(chooser.randint(1, length_max), chooser)


def bodies(inputs: Sequence[object]) -> list[bytes]:
    """As JSON request bodies; every system in the benchmarks takes the same ones."""
    return [json.dumps({"inputs": entry}).encode() for entry in inputs]


ECHO_INPUTS = "a sentence of about fifty characters, as is usual."
ECHO_BODY = bodies([ECHO_INPUTS])[0]

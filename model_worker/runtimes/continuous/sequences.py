"""What goes into an engine and what comes out of it after each step.

Owns the records and their defaults; refuses to check a caller's values, which is `generation_parameters`' part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from shared.errors import Code, RequestError

FinishReason = Literal["stop", "length"]


class Guide(Protocol):
    """Which tokens may come next in one answer. Main thread only."""

    def allowed(self) -> torch.Tensor:
        """bool [tokens], on the CPU; tokens behind its end are not allowed. None at all: see `failure`."""
        ...

    def advance(self, token_id: int) -> None:
        """Takes note of the token that was chosen."""
        ...

    def failure(self) -> RequestError | None:
        """Why it cannot go on; None: it can."""
        ...


class Grammar(Protocol):
    """What an answer is kept to."""

    def start(self) -> Guide:
        """For one answer, from its beginning."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy."""

    temperature: float = 0.0
    """0.0: the most likely token, whatever `top_p`, `top_k` and `min_p` say."""
    top_p: float = 1.0
    """Share of the probability to draw from, above 0.0."""
    top_k: int = 0
    """How many of the most likely tokens to draw from; 0: all."""
    min_p: float = 0.0
    """Tokens less likely than this part of the most likely one are left out."""
    repetition_penalty: float = 1.0
    """For tokens of the prompt and of the answer; above 1.0 makes them less likely."""
    frequency_penalty: float = 0.0
    """Taken off a token's score for each time it stands in the answer."""
    presence_penalty: float = 0.0
    """Taken off a token's score once, if it stands in the answer."""
    seed: int | None = None
    """None: another one each time."""
    logprobs: int | None = None
    """How many of the most likely tokens to report at each step, besides the chosen one; None: report nothing."""

    @property
    def is_drawn(self) -> bool:
        return self.temperature > 0.0

    @property
    def is_penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(eq=False, slots=True)
class Sequence:
    """One prompt to be continued. Compared by identity: the same prompt may run twice."""

    prompt_ids: list[int]
    """At least one token."""
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    skip_special_tokens: bool = True
    end_ids: frozenset[int] | None = None
    """Tokens that end the answer; None: the engine's own."""
    grammar: Grammar | None = None
    """None: anything may be said. It ends an answer by allowing nothing but an end token."""
    owner: object = None
    """For whoever joins it; the engine hands it on and never looks at it."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely the chosen token was, and which ones were likelier. Natural logarithms of probabilities under the
    model's own distribution: before penalties, temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), the most likely first; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did for one sequence."""

    sequence: Sequence
    text: str
    """What can be shown now: whole characters, and nothing that may turn out to be a stop string. Often empty."""
    token_ids: tuple[int, ...] = ()
    """The new tokens, the one that ended the answer included."""
    scores: tuple[TokenScore, ...] = ()
    """One for each of `token_ids` if they were asked for."""
    ending: FinishReason | Exception | None = None
    """None: it goes on. The last event of a sequence, unless it was made to leave, has something else here."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine could still take."""

    rows: int
    """Sequences, if they are short enough."""
    cells: int
    """Cache tokens that nobody will need, even if everything that runs goes on to its end."""


def not_finite() -> RequestError:
    return RequestError(
        "the model computed numbers that are not finite (NaN or infinite), so there is no next token",
        code=Code.MODEL_ERROR,
    )


def not_wanted() -> RequestError:
    return RequestError("nobody waits for this answer any more", code=Code.CANCELLED)

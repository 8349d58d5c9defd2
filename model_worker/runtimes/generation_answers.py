"""Text generation's items and answers, and what callers see of them.

Owns the one shape of an answer, however it was computed: whole, or in pieces and then once more as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from model_worker.runtimes.continuous.sequences import FinishReason, Grammar, TokenScore
from model_worker.runtimes.generation_parameters import GenerationParameters

# Some tokenizers drop a space at the start of what they decode, or make one character of several tokens; text is
# therefore decoded together with this many tokens before it.
_CONTEXT_TOKENS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One request, ready to be computed."""

    prompt: str
    ids: list[int]
    max_new_tokens: int
    parameters: GenerationParameters
    grammar: Grammar | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it shares no static batch."""
        # A sampled answer draws from a generator of its own. The penalty would count the padding as text.
        return self.parameters.sampling.is_drawn or self.parameters.sampling.is_penalised


@dataclass(frozen=True, slots=True)
class Output:
    """A whole answer."""

    item: Item
    generated_ids: list[int]
    finish_reason: FinishReason
    text: str | None = None
    """None: it is still to be decoded."""
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step has added to an answer that can be shown."""

    text: str
    scores: tuple[TokenScore, ...]


def piece_value(piece: Piece, decoder: Any) -> dict[str, object]:
    value: dict[str, object] = {"text": piece.text}
    if piece.scores:
        value["logprobs"] = _scores(piece.scores, decoder)
    return value


def answer_value(output: Output, decoder: Any) -> dict[str, object]:
    item, settings = output.item, output.item.parameters
    text = output.text
    if text is None:
        text = decoded(decoder, item.ids, output.generated_ids, settings.skip_special_tokens)
        # A stop string is not part of the answer, nor is what came after it in the same token.
        text = text[: min((found for stop in settings.stop if (found := text.find(stop)) >= 0), default=len(text))]
    value: dict[str, object] = {
        "generated_text": item.prompt + text if settings.return_full_text else text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(item.ids),
        "generated_tokens": len(output.generated_ids),
    }
    if settings.sampling.logprobs is not None:
        value["logprobs"] = _scores(output.scores, decoder)
    return value


def decoded(decoder: Any, before: Sequence[int], ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of `ids` as it stands behind `before`."""
    context = list(before[-_CONTEXT_TOKENS:])
    keywords = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    head = cast(str, decoder.decode(context, **keywords))
    whole = cast(str, decoder.decode([*context, *ids], **keywords))
    if whole.startswith(head):
        return whole[len(head) :]
    # The context ends inside a character that the new tokens complete: those alone are the best there is.
    return cast(str, decoder.decode(list(ids), **keywords))


def _scores(scores: Iterable[TokenScore], decoder: Any) -> list[dict[str, object]]:
    special_ids = frozenset(decoder.all_special_ids)

    def told(token_id: int, logprob: float) -> dict[str, object]:
        # A token that is only part of a character shows as a replacement character; its id says which one it is.
        token = {"token": decoder.decode([token_id]), "token_id": token_id, "logprob": logprob}
        return {**token, "special": True} if token_id in special_ids else token

    return [
        {
            **told(score.token_id, score.logprob),
            **({"top": [told(*likely) for likely in score.top]} if score.top else {}),
        }
        for score in scores
    ]

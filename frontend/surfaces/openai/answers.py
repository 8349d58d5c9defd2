"""Writes what a text generation model has told as OpenAI's clients read it: whole, or in chunks.

Owns the shapes of chat and text completions. Refuses values that are no answers of such a model: a class of the user's
own may tell anything.

Pure: values in, plain data and events out.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from frontend.pending import Answer
from frontend.responses import server_sent_event
from frontend.surfaces.openai import errors
from frontend.surfaces.openai.bodies import Generation
from shared.errors import Code, RequestError
from shared.json_text import dump_json
from shared.version import VERSION

DONE = b"data: [DONE]\n\n"
_FINGERPRINT = f"headwaiter-{VERSION}"
# Stands for a probability of nothing, whose logarithm JSON has no word for.
_LOGPROB_MIN = -9999.0

Told = Mapping[str, Any]
"""What a model says of one token: `token`, `token_id`, `logprob`, and `top`, the likeliest ones."""


@dataclass(frozen=True, slots=True)
class Text:
    """One answer of a model, as it tells it."""

    text: str
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    logprobs: list[Told]

    @property
    def mean_logprob(self) -> float:
        return sum(_logprob(token) for token in self.logprobs) / max(len(self.logprobs), 1)


def read_text(value: object) -> Text:
    """
    Raises:
        RequestError: `model_error`, if it is no such answer.
    """
    if not isinstance(value, dict) or not isinstance(value.get("generated_text"), str):
        text = "the model's answer is no generated text: it has to be an object with generated_text"
        raise RequestError(text, code=Code.MODEL_ERROR)
    return Text(
        text=value["generated_text"],
        finish_reason=str(value.get("finish_reason", "stop")),
        prompt_tokens=int(value.get("prompt_tokens", 0)),
        generated_tokens=int(value.get("generated_tokens", 0)),
        logprobs=value.get("logprobs") or [],
    )


class Format(ABC):
    """One of the two shapes; made anew for each response, which it gives its id and its time."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, request: Generation) -> None:
        self.request = request
        self._head = {
            "id": f"{self.id_prefix}{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": _FINGERPRINT,
        }

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """One response with everything."""
        texts = [read_text(answer.value) for answer in answers]
        groups = [texts[start : start + self.request.attempts] for start in range(0, len(texts), self.request.attempts)]
        chosen = [text for group in groups for text in self._likeliest(group)]
        choices = [self.choice(index, text) for index, text in enumerate(chosen)]
        return dump_json({"object": self.kind, **self._head, "choices": choices, "usage": self.usage(texts)})

    def _likeliest(self, group: list[Text]) -> list[Text]:
        if self.request.attempts == self.request.choices:
            return group
        return sorted(group, key=lambda text: text.mean_logprob, reverse=True)[: self.request.choices]

    def chunk(self, choices: list[dict[str, object]], usage: dict[str, int] | None = None) -> bytes:
        """One event of a streamed response."""
        value = {"object": self.chunk_kind, **self._head, "choices": choices}
        if self.request.include_usage:
            value["usage"] = usage
        return server_sent_event(dump_json(value))

    def usage(self, texts: Sequence[Text]) -> dict[str, int]:
        """A prompt counts once, however many answers it gets."""
        prompt_tokens = sum(text.prompt_tokens for text in texts[:: self.request.attempts])
        completion_tokens = sum(text.generated_tokens for text in texts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    @abstractmethod
    def choice(self, index: int, text: Text) -> dict[str, object]:
        """A whole one."""

    @abstractmethod
    def first(self, index: int) -> dict[str, object] | None:
        """What comes before the first piece, if anything does."""

    @abstractmethod
    def piece(self, index: int, text: str, logprobs: list[Told]) -> dict[str, object]: ...

    @abstractmethod
    def last(self, index: int, finish_reason: str) -> dict[str, object]: ...


class ChatFormat(Format):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(self, index: int, text: Text) -> dict[str, object]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text.text},
            "logprobs": self._logprobs(text.logprobs),
            "finish_reason": text.finish_reason,
        }

    def first(self, index: int) -> dict[str, object]:
        return _delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, logprobs: list[Told]) -> dict[str, object]:
        return _delta(index, {"content": text}, logprobs=self._logprobs(logprobs))

    def last(self, index: int, finish_reason: str) -> dict[str, object]:
        return _delta(index, {}, finish_reason=finish_reason)

    def _logprobs(self, tokens: list[Told]) -> dict[str, object] | None:
        if not self.request.wants_logprobs:
            return None
        content = [{**_token(token), "top_logprobs": list(map(_token, token.get("top", ())))} for token in tokens]
        return {"content": content, "refusal": None}


def _delta(
    index: int, delta: dict[str, str], *, logprobs: object = None, finish_reason: str | None = None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _token(token: Told) -> dict[str, object]:
    text = str(token["token"])
    # A part of a character has no text, and what its bytes are is not told.
    whole = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": _logprob(token), "bytes": whole}


def _logprob(token: Told) -> float:
    return max(float(token["logprob"]), _LOGPROB_MIN)


class CompletionFormat(Format):
    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, request: Generation) -> None:
        super().__init__(request)
        # Characters of each streamed answer's tokens so far.
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, text: Text) -> dict[str, object]:
        return _text(index, text.text, self._logprobs(index, text.logprobs), text.finish_reason)

    def first(self, index: int) -> dict[str, object] | None:
        prompt = self.request.prompts[index // self.request.attempts]
        return _text(index, prompt) if self.request.echo and isinstance(prompt, str) else None

    def piece(self, index: int, text: str, logprobs: list[Told]) -> dict[str, object]:
        return _text(index, text, self._logprobs(index, logprobs))

    def last(self, index: int, finish_reason: str) -> dict[str, object]:
        return _text(index, "", finish_reason=finish_reason)

    def _logprobs(self, index: int, tokens: list[Told]) -> dict[str, object] | None:
        if not self.request.wants_logprobs:
            return None
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [_logprob(token) for token in tokens],
            # The chosen token is always among them.
            "top_logprobs": [
                {likely["token"]: _logprob(likely) for likely in (*token.get("top", ()), token)} for token in tokens
            ],
            "text_offset": offsets,
        }


def _text(index: int, text: str, logprobs: object = None, finish_reason: str | None = None) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass(slots=True)
class Events:
    """The events of a streamed response; see `EventFormat`."""

    format: Format
    _whole: dict[int, object] = field(default_factory=dict)
    """Answers that came in one piece: models that do not stream send them so."""
    _texts: dict[int, Text] = field(default_factory=dict)

    def begin(self) -> bytes:
        request = self.format.request
        firsts = (self.format.first(index) for index in range(len(request.prompts) * request.choices))
        return b"".join(self.format.chunk([first]) for first in firsts if first is not None)

    def piece(self, value: tuple[int, object]) -> bytes:
        index, piece = value
        if isinstance(piece, Answer):
            text = read_text(self._whole.get(index) if piece.value is None else piece.value)
            self._texts[index] = text
            return self.format.chunk([self.format.last(index, text.finish_reason)])
        if isinstance(piece, dict) and isinstance(piece.get("text"), str):
            return self.format.chunk([self.format.piece(index, piece["text"], piece.get("logprobs") or [])])
        text = read_text(piece)
        self._whole[index] = piece
        return self.format.chunk([self.format.piece(index, text.text, text.logprobs)])

    def end(self, answer: list[Answer]) -> bytes:
        if not self.format.request.include_usage:
            return DONE
        texts = [self._texts[index] for index in sorted(self._texts)]
        return self.format.chunk([], self.format.usage(texts)) + DONE

    def error(self, error: RequestError) -> bytes:
        return server_sent_event(errors.body_of(error))

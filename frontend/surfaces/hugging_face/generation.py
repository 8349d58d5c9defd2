"""Text generation as Hugging Face's clients ask for it and read it: the parameters, answers and events of its own
server (TGI).

Owns the translation of both. Refuses what would change the answer in a way that is not possible here, and to check what
a model checks itself.

Pure: values in, plain data and events out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.json_bodies import json_type
from frontend.pending import Answer
from frontend.responses import server_sent_event
from frontend.surfaces.hugging_face.errors import body_in_stream
from frontend.surfaces.openai.answers import Text, Told, read_text
from shared.errors import InvalidInput, RequestError
from shared.json_text import dump_json

Parameters = dict[str, object]
Token = dict[str, object]

# By name: the values that change nothing, and why others are refused.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "adapter_id": ((), "a model here has one set of weights"),
    "best_of": ((1,), "one answer is made to each request; /v1/completions has best_of"),
    "decoder_input_details": ((False,), "models here tell nothing of a prompt's tokens"),
    "typical_p": ((1,), "tokens are drawn by temperature, top_p, top_k and min_p"),
    "watermark": ((False,), "answers are not marked"),
}


@dataclass(frozen=True, slots=True)
class Generation:
    """One request for a text."""

    parameters: Parameters
    """For the model."""
    names: dict[str, str]
    """The caller's name for each thing that the model's errors may name."""
    details: bool
    seed: object

    def whole(self, value: object) -> object:
        """The response that is not streamed, made of the model's answer."""
        text = read_text(value)
        if not self.details:
            return [{"generated_text": text.text}]
        details = {
            "finish_reason": _finish_reason(text),
            "generated_tokens": text.generated_tokens,
            "seed": self.seed,
            "prefill": [],
            "tokens": [_token(told) for told in text.logprobs],
        }
        if any(told.get("top") for told in text.logprobs):
            details["top_tokens"] = [_likely(told) for told in text.logprobs]
        return [{"generated_text": text.text, "details": details}]


def read(given: Mapping[str, object]) -> Generation:
    """
    Raises:
        InvalidInput: what is asked for cannot be done here.
    """
    parameters = {name: value for name, value in given.items() if value is not None}
    for name, (harmless, why) in _REFUSED.items():
        value = parameters.pop(name, None)
        if value is not None and value not in harmless:
            raise InvalidInput(f"{name} is not supported: {why}")
    details = parameters.pop("details", False)
    if not isinstance(details, bool):
        raise InvalidInput(f"details is {json_type(details)}, not true or false")
    names = {}
    likely = parameters.pop("top_n_tokens", None)
    if details:
        # The only way in which a model tells its tokens.
        parameters["logprobs"] = True if likely is None else likely
        names["logprobs"] = "details" if likely is None else "top_n_tokens"
    if "grammar" in parameters:
        parameters["json_schema"] = _schema(parameters.pop("grammar"))
        names["json_schema"] = "grammar"
    return Generation(parameters, names, details, parameters.get("seed"))


def _schema(grammar: object) -> object:
    match grammar:
        case {"type": "json", "value": schema}:
            return _read_schema(schema)
        case {"type": "json_schema", "value": {"schema": schema}}:
            return _read_schema(schema)
    kind = grammar.get("type") if isinstance(grammar, dict) else grammar
    raise InvalidInput(f'grammar must be {{"type": "json", "value": a JSON schema}}, got the type {str(kind)[:60]!r}')


def _read_schema(schema: object) -> object:
    """It may come as text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError as error:
        raise InvalidInput(f"grammar.value is no JSON schema: {error}") from None


def _finish_reason(text: Text) -> str:
    if text.finish_reason == "length":
        return "length"
    # What ends an answer by itself is a special token; a stop string is none.
    ended_by_token = not text.logprobs or bool(text.logprobs[-1].get("special"))
    return "eos_token" if ended_by_token else "stop_sequence"


def _token(told: Told, text: str | None = None) -> Token:
    return {
        "id": told.get("token_id"),
        "text": told["token"] if text is None else text,
        "logprob": told["logprob"],
        "special": bool(told.get("special")),
    }


def _likely(told: Told) -> list[Token]:
    return [_token(likely) for likely in told.get("top", ())]


def _nameless(text: str, *, special: bool = False) -> Token:
    """A token of which only its text is known, since nobody asked for more."""
    return {"id": None, "text": text, "logprob": None, "special": special}


@dataclass(slots=True)
class TokenEvents:
    """The events of a streamed answer; see `EventFormat`. All texts together are the answer.

    With `details` there is one event for each token, and the last one of these tells the end; so each is sent when the
    next one has come. Without them each piece is sent at once, and the end has an event of its own.
    """

    generation: Generation
    _held: dict[str, object] | None = None
    _index: int = 0
    _whole: object = None
    """An answer that came in one piece: models that do not stream send it so."""

    def begin(self) -> bytes:
        return b""

    def piece(self, value: object) -> bytes:
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            text, scores = value["text"], value.get("logprobs") or []
        else:
            whole = read_text(value)
            self._whole, text, scores = value, whole.text, whole.logprobs
        if not self.generation.details:
            return _event(self._next(_nameless(text))) if text else b""
        events = [self._flushed(following) for following in self._tokens(text, scores)]
        return b"".join(events)

    def end(self, answer: Answer) -> bytes:
        text = read_text(self._whole if answer.value is None else answer.value)
        last = self._held or self._next(_nameless("", special=True))
        last["generated_text"] = text.text
        if self.generation.details:
            last["details"] = {
                "finish_reason": _finish_reason(text),
                "generated_tokens": text.generated_tokens,
                "input_length": text.prompt_tokens,
                "seed": self.generation.seed,
            }
        return _event(last)

    def error(self, error: RequestError) -> bytes:
        return self._flushed(None) + server_sent_event(body_in_stream(error))

    def _tokens(self, text: str, scores: Sequence[Told]) -> list[dict[str, object]]:
        if not scores:
            return [self._next(_nameless(text))]
        # A text that several tokens have made together comes with the last of them.
        texts = [""] * (len(scores) - 1) + [text]
        return [self._next(_token(told, text), _likely(told)) for told, text in zip(scores, texts, strict=True)]

    def _next(self, token: Token, likely: Sequence[Token] = ()) -> dict[str, object]:
        self._index += 1
        top = {"top_tokens": likely} if likely else {}
        return {"index": self._index, "token": token, **top, "generated_text": None, "details": None}

    def _flushed(self, following: dict[str, object] | None) -> bytes:
        """What was held back, in whose place `following` is held."""
        held, self._held = self._held, following
        return b"" if held is None else _event(held)


def _event(value: Mapping[str, Any]) -> bytes:
    return server_sent_event(dump_json(value))

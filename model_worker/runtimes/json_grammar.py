"""Answers that are JSON of a given schema: which tokens may come next.

Owns the grammar that llguidance makes of a schema, and its state within one answer. Refuses schemas that it cannot keep
to in full: half a promise is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from model_worker.runtimes import loading
from model_worker.runtimes.continuous.sequences import Guide
from shared.errors import Code, InvalidInput, RequestError

# Compiling takes time that grows with the text, and everybody's prompts wait for it.
_SCHEMA_CHARACTERS_MAX = 64 * 1024
# Programs ask for the same few schemas again and again.
_COMPILED_MAX = 32
# One space, or a line break with an indentation: without a bound, a model may go on with blanks for ever.
_WHITESPACE = r"( |\n {0,16})"


class Grammar:
    """One compiled schema. Made in the prepare stage; `start` is called on the main thread."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> Guide:
        """For one answer, from its beginning."""
        return _JsonGuide(self._matcher.deep_copy())


class _JsonGuide:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> torch.Tensor:
        # One byte for each token, 0 or not.
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8).bool()
        # Where it has given up it would allow the end.
        return torch.zeros_like(allowed) if self._matcher.is_error() else allowed

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def failure(self) -> RequestError | None:
        if not self._matcher.is_error():
            return None
        reason = _first_line(self._matcher.get_error())
        return RequestError(f"the answer cannot be kept to the schema any more: {reason}", code=Code.MODEL_ERROR)


class Grammars:
    """Compiles schemas for one tokenizer. Prepare thread only."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = sorted(end_ids)
        self._vocabulary: Any = None
        self._compiled: dict[str, Grammar] = {}

    def compile(self, schema: Mapping[str, Any]) -> Grammar:
        """
        Raises:
            InvalidInput: the schema, or this model, is not fit for it.
        """
        text = json.dumps(schema, sort_keys=True)
        if len(text) > _SCHEMA_CHARACTERS_MAX:
            raise InvalidInput(f"json_schema has {len(text)} characters; at most {_SCHEMA_CHARACTERS_MAX} are read")
        grammar = self._compiled.pop(text, None) or self._compile(text)
        # Back at the end: the first one is that which was not asked for the longest.
        self._compiled[text] = grammar
        if len(self._compiled) > _COMPILED_MAX:
            del self._compiled[next(iter(self._compiled))]
        return grammar

    def _compile(self, text: str) -> Grammar:
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError:
            raise InvalidInput("json_schema needs the package llguidance, which is not installed here") from None
        vocabulary = self._known_vocabulary()
        with loading.refuse_panics():
            source = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
            refusal = LLMatcher.validate_grammar(source, vocabulary)
            if refusal:
                raise InvalidInput(f"json_schema cannot be kept to: {_first_line(refusal)}")
            matcher = LLMatcher(vocabulary, source, log_level=0)
            if matcher.is_error():
                raise InvalidInput(f"json_schema cannot be kept to: {_first_line(matcher.get_error())}")
        return Grammar(matcher)

    def _known_vocabulary(self) -> Any:
        if self._vocabulary is None:
            if not getattr(self._tokenizer, "is_fast", False) or not self._end_ids:
                raise InvalidInput("json_schema needs a model with an end token and a tokenizer.json")
            from llguidance import hf

            # Takes up to a second, so models that are never asked for JSON do without.
            self._vocabulary = hf.from_tokenizer(self._tokenizer, eos_token=self._end_ids)
        return self._vocabulary


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    return lines[0] if len(lines) < 2 or not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"

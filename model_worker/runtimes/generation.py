"""Text generation: answers that stream, computed in a batch that requests join and leave between any two tokens.

Owns prompts (plain text, chat messages through the model's own template, or token ids) and the choice how they are
computed: step by step, where an engine can drive the model (`generation_steps`), else in whole batches
(`generation_batches`). Refuses prompts that do not fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from model_worker.runtimes import (
    checks,
    compiling,
    generation_batches,
    generation_parameters,
    generation_steps,
    loading,
    padding,
    samples,
)
from model_worker.runtimes.base import Model, Progress
from model_worker.runtimes.continuous.engines import Choice
from model_worker.runtimes.generation_answers import Item, Output, Piece, answer_value, piece_value
from model_worker.runtimes.generation_parameters import GenerationParameters
from model_worker.runtimes.generation_steps import Steps
from model_worker.runtimes.json_grammar import Grammars
from model_worker.specs import RuntimeSpec
from shared.errors import InvalidInput, LoadError, RequestError

_OPTIONS = ("cache_tokens", "continuous_batching", "max_new_tokens", "prefill_tokens", "prefix_tokens")
_MAX_NEW_TOKENS = 256
# For models that know no number of positions: no answer may hold the device for ever.
_POSITIONS_WITHOUT_LIMIT = 32_768
_PROBE_NEW_TOKENS = 4
_WARM_UP_NEW_TOKENS = 2
_SETTINGS_THAT_CHANGE_ANSWERS = frozenset(
    {"do_sample", "max_length", "max_new_tokens", "min_p", "no_repeat_ngram_size", "num_beams", "repetition_penalty"}
    | {"temperature", "top_k", "top_p", "typical_p"}
)


class GenerationModel(Model):
    """Prompts to answers.

    Options: `max_new_tokens`, the number for requests that name none; `cache_tokens`, the size of the cache that the
    running requests share; `prefill_tokens`, how much of the prompts one step reads; `prefix_tokens`, how much is kept
    of what several prompts begin with; `continuous_batching = false` computes whole batches.
    """

    mixes_parameters = True

    def __init__(self, spec: RuntimeSpec) -> None:
        self._spec = spec
        self._model: Any = None
        self._tokenizer: Any = None  # prepare stage
        self._decoder: Any = None  # a copy that only ever decodes, which changes nothing in it: main and finish stage
        self._limit_tokens = _POSITIONS_WITHOUT_LIMIT
        self._token_id_limit: int | None = None
        self._known_token_ids = 0
        self._end_ids: frozenset[int] = frozenset()
        self._pad_token_id = 0
        self._own_settings: dict[str, object] = {}
        self._solo_reason = ""
        self._default_max_new_tokens = _MAX_NEW_TOKENS
        self._cache_tokens: int | None = None
        self._prefill_tokens: int | None = None
        self._prefix_tokens: int | None = None
        self._may_step = True
        self._choice = Choice(None, "not asked for")
        self._steps: Steps | None = None
        self._grammars: Grammars  # prepare stage

    def load(self, device: str) -> None:
        self._read_options()
        if self._spec.compile:
            raise compiling.refuse(self._spec.source, "of text generation, each step would be compiled anew")
        checkpoint = loading.Checkpoint(self._spec, self.report_progress)
        config = checkpoint.load_config()
        self._tokenizer = checkpoint.load_tokenizer()
        self._decoder = loading.copy_tokenizer(self._tokenizer)
        self._model = checkpoint.load_model([AutoModelForCausalLM], config, device)
        self._limit_tokens = loading.position_limit(self._model, self._tokenizer) or _POSITIONS_WITHOUT_LIMIT
        self._token_id_limit = loading.token_id_limit(self._model, self._tokenizer)
        self._known_token_ids = loading.known_token_ids(self._model, self._tokenizer)
        self._pad_token_id = loading.pad_token_id(self._tokenizer)
        self._take_over_settings()
        self._grammars = Grammars(self._tokenizer, self._end_ids)
        self.max_batch_cost = padding.default_batch_cost(device, generates=True)
        if self._may_step:
            self._choice = self._choose_engine()
        if self._choice.engine is None:
            self._solo_reason = self._probe_batching()
        else:
            self._steps = Steps(self._choice.engine)
            self.continuous_batching = True

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> Item:
        settings = generation_parameters.read(parameters)
        if self._steps is None:
            self._refuse_what_needs_steps(parameters)
        prompt, ids = self._encode(inputs, settings)
        if not ids:
            raise InvalidInput("inputs hold no tokens: give some text")
        if settings.truncate is not False:
            room = self._longest_tokens - (settings.max_new_tokens or 1)
            keep = max(room, 1) if settings.truncate is True else settings.truncate
            ids = ids[-keep:]
        grammar = None if settings.json_schema is None else self._grammars.compile(settings.json_schema)
        return Item(prompt, ids, self._max_new_tokens(len(ids), settings), settings, grammar)

    def _max_new_tokens(self, prompt_tokens: int, settings: GenerationParameters) -> int:
        """What was asked for, or the default, if there is room for it.

        Raises:
            InvalidInput: there is none.
        """
        room = self._longest_tokens - prompt_tokens
        if room < 1:
            # One position is left for the first new token.
            raise checks.too_long("inputs", prompt_tokens, self._longest_tokens - 1, "shorten it, or set truncate")
        wanted = settings.max_new_tokens or min(self._default_max_new_tokens, room)
        room = self._limit_tokens - prompt_tokens
        if wanted > room:
            raise InvalidInput(
                f"max_new_tokens = {wanted} and a prompt of {prompt_tokens} tokens do not fit: the model has "
                f"{self._limit_tokens} positions, so at most {room} here",
                detail={"length_tokens": prompt_tokens, "limit_tokens": self._limit_tokens},
            )
        refusal = self._steps and self._steps.refusal(prompt_tokens, wanted)
        if refusal:
            raise refusal
        return wanted

    @property
    def _longest_tokens(self) -> int:
        """Of a prompt and its answer together: by the model's positions, and by the cache."""
        return min(self._limit_tokens, self._steps.engine.limits.cache_tokens) if self._steps else self._limit_tokens

    def _refuse_what_needs_steps(self, parameters: dict[str, Any]) -> None:
        for name in generation_parameters.CONTINUOUS_ONLY:
            # An empty schema asks for something: any JSON.
            if parameters.get(name) not in (None, False, 0):
                raise InvalidInput(
                    f"{name} needs continuous batching, which this model is not computed with: {self._choice.reason}"
                )

    def cost(self, item: Item) -> int:
        return len(item.ids) + item.max_new_tokens

    # --- step by step ---

    def can_join(self, item: Item) -> bool:
        return self._engine_steps().can_join(item)

    def join(self, item: Item) -> None:
        self._engine_steps().join(item)

    def leave(self, item: Item) -> None:
        self._engine_steps().leave(item)

    def step(self) -> list[Progress]:
        return self._engine_steps().step()

    def _engine_steps(self) -> Steps:
        assert self._steps is not None, "only with continuous_batching"
        return self._steps

    # --- in whole batches ---

    def group(self, item: Item) -> Hashable:
        return id(item) if item.is_alone or self._solo_reason else None

    def forward(self, items: Sequence[Item]) -> list[Output | RequestError]:
        if len(items) > 1 and any(item.is_alone for item in items):
            return [output for item in items for output in self.forward([item])]
        return generation_batches.generate(
            self, self._model, self._decoder, items, end_ids=self._end_ids, pad_token_id=self._pad_token_id
        )

    # --- either way ---

    def finish(self, output: Output | Piece) -> dict[str, object]:
        if isinstance(output, Piece):
            return piece_value(output, self._decoder)
        return answer_value(output, self._decoder)

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        if self._steps is not None:
            return self._examples_of_steps(self._steps)
        longest = padding.warm_up_tokens(str(self._model.device), self._limit_tokens - _WARM_UP_NEW_TOKENS)
        longer = samples.text_of(self._tokenizer, longest)
        return [(longer, {"max_new_tokens": _WARM_UP_NEW_TOKENS}), ("a", {"max_new_tokens": 1})]

    def _examples_of_steps(self, steps: Steps) -> Sequence[tuple[Any, dict[str, Any]]]:
        """As many short ones as there are rows, then one that fills a step with its prompt."""
        limits = steps.engine.limits
        longest = min(limits.prefill_tokens, limits.cache_tokens // 2, self._limit_tokens - _WARM_UP_NEW_TOKENS)
        parameters = {"max_new_tokens": _WARM_UP_NEW_TOKENS}
        return [("a", parameters), (samples.text_of(self._tokenizer, max(1, longest)), parameters)]

    def describe(self) -> dict[str, object]:
        return {
            **loading.describe_model(self._model),
            **self._describe_batching(),
            "padding_side": "left",
            "limit_tokens": self._limit_tokens,
            "max_new_tokens": self._default_max_new_tokens,
            "sampling": "greedy unless asked",
            "settings_not_used": self._own_settings,
            "chat_template": self._tokenizer.chat_template is not None,
            "parameters": sorted(generation_parameters.PARAMETERS),
        }

    def _describe_batching(self) -> dict[str, object]:
        if self._choice.engine is not None:
            return self._choice.describe()
        how = f"one by one: {self._solo_reason}" if self._solo_reason else "whole answers, padded together"
        return {"batching": how, "no_continuous_batching": self._choice.reason}

    # --- load ---

    def _read_options(self) -> None:
        options = self._spec.options
        try:
            checks.refuse_unknown(options, _OPTIONS)
            numbers = {
                name: checks.whole_number(name, options[name], at_least=0 if name == "prefix_tokens" else 1)
                for name in ("cache_tokens", "max_new_tokens", "prefill_tokens", "prefix_tokens")
                if name in options
            }
            self._may_step = checks.boolean("continuous_batching", options.get("continuous_batching", True))
        except InvalidInput as error:
            raise LoadError(f"options of model {self._spec.name!r}: {error.message}", permanent=True) from None

        self._default_max_new_tokens = numbers.get("max_new_tokens", _MAX_NEW_TOKENS)
        self._cache_tokens = numbers.get("cache_tokens")
        self._prefill_tokens = numbers.get("prefill_tokens")
        self._prefix_tokens = numbers.get("prefix_tokens")

    def _choose_engine(self) -> Choice:
        return generation_steps.choose(
            self._model,
            self._decoder,
            cache_tokens=self._cache_tokens,
            prefill_tokens=self._prefill_tokens,
            prefix_tokens=self._prefix_tokens,
            rows_max=self.max_batch_size,
            limit_tokens=self._limit_tokens,
            end_ids=self._end_ids,
            pad_token_id=self._pad_token_id,
        )

    def _take_over_settings(self) -> None:
        """Keeps the model's end tokens and puts its other generation settings out of reach of `generate`."""
        own = self._model.generation_config
        ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        self._end_ids = frozenset(int(end) for end in (*ends, self._tokenizer.eos_token_id) if end is not None)
        self._own_settings = {
            name: value for name, value in own.to_diff_dict().items() if name in _SETTINGS_THAT_CHANGE_ANSWERS
        }
        self._model.generation_config = GenerationConfig()

    def _probe_batching(self) -> str:
        """Generates two answers together and alone; returns what is wrong with together, or nothing."""
        parameters = {"max_new_tokens": min(_PROBE_NEW_TOKENS, max(self._limit_tokens // 4, 1))}
        longer = samples.text_of(self._tokenizer, min(16, max(self._limit_tokens // 2, 1)))
        items = [self.prepare(text, parameters) for text in (longer, "a")]
        try:
            together = self.forward(items)
        except Exception as error:
            return f"{type(error).__name__}: {loading.one_line(error)}"
        if self._model.dtype != torch.float32:
            # In half precision the shape of a batch alone changes the last bits, and with them now and then a token.
            return ""
        alone = [output for item in items for output in self.forward([item])]
        same = all(
            isinstance(one, Output) and isinstance(other, Output) and one.generated_ids == other.generated_ids
            for one, other in zip(together, alone, strict=True)
            if not isinstance(other, RequestError)
        )
        return "" if same else "padding changes the answers"

    # --- prepare ---

    def _encode(self, inputs: object, settings: GenerationParameters) -> tuple[str, list[int]]:
        if isinstance(inputs, list) and inputs and isinstance(inputs[0], int):
            for index, token_id in enumerate(inputs):
                checks.whole_number(f"inputs[{index}]", token_id, at_least=0, at_most=self._known_token_ids - 1)
            return self._tokenizer.decode(inputs, skip_special_tokens=settings.skip_special_tokens), inputs
        prompt, ids = self._encode_text(inputs)
        checks.token_ids("inputs", max(ids, default=0), self._token_id_limit)
        return prompt, ids

    def _encode_text(self, inputs: object) -> tuple[str, list[int]]:
        if isinstance(inputs, str):
            return inputs, self._tokenizer(inputs)["input_ids"]
        if not isinstance(inputs, list) or not inputs or not isinstance(inputs[0], dict):
            raise InvalidInput(
                'inputs must be a string, a list of messages {"role", "content"}, or a list of token ids, '
                f"got {checks.shown(inputs)}"
            )
        messages = [_message(f"inputs[{index}]", message) for index, message in enumerate(inputs)]
        if self._tokenizer.chat_template is None:
            raise InvalidInput("this model has no chat template, so it takes text and no messages")
        # A chat that ends with the assistant's words is to be continued, not answered.
        goes_on = messages[-1]["role"] == "assistant"
        try:
            prompt: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on
            )
        except Exception as error:
            # The template is a program that came with the model; what it raises is about these messages.
            raise InvalidInput(f"the chat template refuses these messages: {loading.one_line(error)}") from error
        # The template writes the special tokens itself.
        return prompt, self._tokenizer(prompt, add_special_tokens=False)["input_ids"]


def _message(where: str, message: object) -> dict[str, str]:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise InvalidInput(f'{where} must be a message {{"role", "content"}}, got {checks.shown(message)}')
    role = checks.text(f"{where}.role", message["role"])
    content = message["content"]
    if isinstance(content, list):
        content = "".join(_text_part(f"{where}.content[{index}]", part) for index, part in enumerate(content))
    return {**message, "role": role, "content": checks.text(f"{where}.content", content)}


def _text_part(where: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidInput(f'{where} must be a text part {{"type": "text", "text"}}, got {checks.shown(part)}')
    return checks.text(f"{where}.text", part.get("text"))

"""Text generation: whole answers, batched with padding on the left.

Owns prompts (plain text, or chat messages through the model's own template), the end of each answer (end token, stop
string, number of tokens), and the independence of each answer from those beside it: greedy ones share a batch, sampled
and penalised ones are computed alone. Refuses prompts that do not fit and numbers that are not numbers any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from model_worker.runtimes import checks, generation_parameters, loading, padding, samples
from model_worker.runtimes.base import Model
from model_worker.runtimes.generation_parameters import GenerationParameters
from model_worker.specs import RuntimeSpec
from shared.errors import Code, InvalidInput, LoadError, RequestError

FinishReason = Literal["stop", "length"]

_OPTIONS = ("max_new_tokens",)
_MAX_NEW_TOKENS = 256
# For models that know no number of positions: no answer may hold the device for ever.
_POSITIONS_WITHOUT_LIMIT = 32_768
# Some tokenizers drop a space at the start of what they decode, or make one character of several tokens; text is
# therefore decoded together with this many tokens before it.
_CONTEXT_TOKENS = 6
_PROBE_NEW_TOKENS = 4
_SETTINGS_THAT_CHANGE_ANSWERS = frozenset(
    {"do_sample", "max_length", "max_new_tokens", "min_p", "no_repeat_ngram_size", "num_beams", "repetition_penalty"}
    | {"temperature", "top_k", "top_p", "typical_p"}
)


@dataclass(frozen=True, slots=True)
class _Item:
    prompt: str
    ids: list[int]
    max_new_tokens: int
    parameters: GenerationParameters

    @property
    def is_alone(self) -> bool:
        # A sampled answer draws from a generator of its own. The penalty would count the padding as text.
        return self.parameters.sampling is not None or self.parameters.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class _Output:
    item: _Item
    generated_ids: list[int]
    finish_reason: FinishReason


class GenerationModel(Model):
    """Prompts to answers. Option: `max_new_tokens`, the number for requests that name none."""

    mixes_parameters = True

    def __init__(self, spec: RuntimeSpec) -> None:
        self._spec = spec
        self._model: Any = None
        self._tokenizer: Any = None  # prepare thread
        self._decoder: Any = None  # a copy that only ever decodes, which changes nothing in it: main and finish thread
        self._limit_tokens = _POSITIONS_WITHOUT_LIMIT
        self._token_id_limit: int | None = None
        self._end_ids: frozenset[int] = frozenset()
        self._pad_token_id = 0
        self._own_settings: dict[str, object] = {}
        self._solo_reason = ""
        self._default_max_new_tokens = _MAX_NEW_TOKENS

    def load(self, device: str) -> None:
        self._read_options()
        checkpoint = loading.Checkpoint(self._spec, self.report_progress)
        config = checkpoint.load_config()
        self._tokenizer = checkpoint.load_tokenizer()
        self._decoder = loading.copy_tokenizer(self._tokenizer)
        self._model = checkpoint.load_model([AutoModelForCausalLM], config, device)
        self._limit_tokens = loading.position_limit(self._model, self._tokenizer) or _POSITIONS_WITHOUT_LIMIT
        self._token_id_limit = loading.token_id_limit(self._model, self._tokenizer)
        self._pad_token_id = loading.pad_token_id(self._tokenizer)
        self._take_over_settings()
        self.max_batch_cost = padding.default_batch_cost(device, generates=True)
        self._solo_reason = self._probe_batching()

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> _Item:
        settings = generation_parameters.read(parameters)
        prompt, ids = self._encode(inputs)
        if not ids:
            raise InvalidInput("inputs hold no tokens: give some text")
        checks.token_ids("inputs", max(ids), self._token_id_limit)
        if settings.truncate is not False:
            room = self._limit_tokens - (settings.max_new_tokens or 1)
            keep = max(room, 1) if settings.truncate is True else settings.truncate
            ids = ids[-keep:]
        room = self._limit_tokens - len(ids)
        if room < 1:
            # One position is left for the first new token.
            raise checks.too_long("inputs", len(ids), self._limit_tokens - 1, "shorten it, or set truncate")
        if settings.max_new_tokens is not None and settings.max_new_tokens > room:
            raise InvalidInput(
                f"max_new_tokens = {settings.max_new_tokens} and a prompt of {len(ids)} tokens do not fit: the model "
                f"has {self._limit_tokens} positions, so at most {room} here",
                detail={"length_tokens": len(ids), "limit_tokens": self._limit_tokens},
            )
        max_new_tokens = settings.max_new_tokens or min(self._default_max_new_tokens, room)
        return _Item(prompt, ids, max_new_tokens, settings)

    def cost(self, item: _Item) -> int:
        return len(item.ids) + item.max_new_tokens

    def group(self, item: _Item) -> Hashable:
        return id(item) if item.is_alone or self._solo_reason else None

    def forward(self, items: Sequence[_Item]) -> list[_Output | RequestError]:
        if len(items) > 1 and any(item.is_alone for item in items):
            return [output for item in items for output in self.forward([item])]
        lengths = [len(item.ids) for item in items]
        device = self._model.device
        rows = _Rows(self, items, self._decoder, self._end_ids)
        with torch.inference_mode(), _seeded(items, device):
            self._model.generate(
                input_ids=padding.pad([item.ids for item in items], self._pad_token_id, "left").to(device),
                attention_mask=padding.attention_mask(lengths, "left").to(device),
                generation_config=self._settings(items),
                logits_processor=LogitsProcessorList([rows.guard]),
                stopping_criteria=StoppingCriteriaList([rows]),
            )
        return rows.outputs()

    def finish(self, output: _Output) -> dict[str, object]:
        item, settings = output.item, output.item.parameters
        text = _decoded(self._decoder, item.ids, output.generated_ids, settings.skip_special_tokens)
        # A stop string is not part of the answer, nor is what came after it in the same token.
        text = text[: min((found for stop in settings.stop if (found := text.find(stop)) >= 0), default=len(text))]
        return {
            "generated_text": item.prompt + text if settings.return_full_text else text,
            "finish_reason": output.finish_reason,
            "prompt_tokens": len(item.ids),
            "generated_tokens": len(output.generated_ids),
        }

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        longest = padding.warm_up_tokens(str(self._model.device), self._limit_tokens - 2)
        return [(samples.text_of(self._tokenizer, longest), {"max_new_tokens": 2}), ("a", {"max_new_tokens": 1})]

    def describe(self) -> dict[str, object]:
        return {
            **loading.describe_model(self._model),
            "batching": f"one by one: {self._solo_reason}" if self._solo_reason else "whole answers, padded together",
            "padding_side": "left",
            "limit_tokens": self._limit_tokens,
            "max_new_tokens": self._default_max_new_tokens,
            "sampling": "greedy unless asked",
            "settings_not_used": self._own_settings,
            "chat_template": self._tokenizer.chat_template is not None,
            "parameters": sorted(generation_parameters.PARAMETERS),
        }

    # --- load ---

    def _read_options(self) -> None:
        options = self._spec.options
        try:
            checks.refuse_unknown(options, _OPTIONS)
            if "max_new_tokens" in options:
                value = options["max_new_tokens"]
                self._default_max_new_tokens = checks.whole_number("max_new_tokens", value, at_least=1)
        except InvalidInput as error:
            raise LoadError(f"options of model {self._spec.name!r}: {error.message}", permanent=True) from None

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
            isinstance(one, _Output) and isinstance(other, _Output) and one.generated_ids == other.generated_ids
            for one, other in zip(together, alone, strict=True)
            if not isinstance(other, RequestError)
        )
        return "" if same else "padding changes the answers"

    # --- prepare ---

    def _encode(self, inputs: object) -> tuple[str, list[int]]:
        if isinstance(inputs, str):
            return inputs, self._tokenizer(inputs)["input_ids"]
        if not isinstance(inputs, list) or not inputs or not isinstance(inputs[0], dict):
            raise InvalidInput(
                f'inputs must be a string, or a list of messages {{"role", "content"}}, got {checks.shown(inputs)}'
            )
        messages = [_message(f"inputs[{index}]", message) for index, message in enumerate(inputs)]
        if self._tokenizer.chat_template is None:
            raise InvalidInput("this model has no chat template: send inputs as one string, not as messages")
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

    # --- forward ---

    def _settings(self, items: Sequence[_Item]) -> GenerationConfig:
        """One configuration for the batch; what differs between its rows is left to `_Rows`."""
        keywords: dict[str, object] = {
            "max_new_tokens": max(item.max_new_tokens for item in items),
            "pad_token_id": self._pad_token_id,
            "do_sample": False,
        }
        first = items[0].parameters
        if first.repetition_penalty != 1.0:
            keywords["repetition_penalty"] = first.repetition_penalty
        if first.sampling is not None:
            keywords.update(
                do_sample=True,
                temperature=first.sampling.temperature,
                top_p=first.sampling.top_p,
                top_k=first.sampling.top_k,
            )
        return GenerationConfig(**keywords)


class _Rows(StoppingCriteria):
    """Ends each row of a batch by itself: at its end token, its stop strings, its number of tokens, or its NaNs, and as
    soon as nobody waits for it any more."""

    def __init__(self, model: Model, items: Sequence[_Item], decoder: Any, end_ids: frozenset[int]) -> None:
        self._model = model
        self._items = items
        self._decoder = decoder
        self._end_ids = end_ids
        self._generated: list[list[int]] = [[] for _ in items]
        self._endings: list[FinishReason | RequestError | None] = [None] * len(items)
        self.guard = _NanGuard(self)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        """Called after each step; bool [rows], True for rows that are done."""
        self._model.report_step()
        for index, token in enumerate(input_ids[:, -1].tolist()):
            if self._endings[index] is None and not self._model.is_wanted(self._items[index]):
                self._endings[index] = RequestError("nobody waits for this answer any more", code=Code.CANCELLED)
            if self._endings[index] is None:
                self._generated[index].append(token)
                self._endings[index] = self._ending(index, token)
        return torch.tensor([ending is not None for ending in self._endings], device=input_ids.device)

    def fail(self, index: int) -> None:
        """Ends a row without an answer."""
        if self._endings[index] is None:
            self._endings[index] = RequestError(
                "the model computed numbers that are not finite (NaN or infinite), so there is no next token",
                code=Code.MODEL_ERROR,
            )

    def outputs(self) -> list[_Output | RequestError]:
        """What became of each row."""
        return [
            ending if isinstance(ending, RequestError) else _Output(item, generated, ending or "length")
            for item, generated, ending in zip(self._items, self._generated, self._endings, strict=True)
        ]

    def _ending(self, index: int, token: int) -> FinishReason | None:
        item, generated = self._items[index], self._generated[index]
        if token in self._end_ids or self._holds_stop(item, generated):
            return "stop"
        return "length" if len(generated) >= item.max_new_tokens else None

    def _holds_stop(self, item: _Item, generated: list[int]) -> bool:
        stops = item.parameters.stop
        if not stops:
            return False
        # A token stands for at least one byte, so a stop string that ends here began within this many tokens.
        reach = max(len(stop.encode()) for stop in stops)
        before, last = generated[:-reach], generated[-reach:]
        text = _decoded(self._decoder, [*item.ids, *before], last, item.parameters.skip_special_tokens)
        return any(stop in text for stop in stops)


class _NanGuard(LogitsProcessor):
    """Ends rows whose scores are not numbers, before something is drawn from them."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Minus infinity is how a token is ruled out; NaN and plus infinity come from a model gone wrong.
        broken = (torch.isnan(scores) | torch.isposinf(scores)).any(dim=-1)
        if bool(broken.any()):
            for index in broken.nonzero().flatten().tolist():
                self._rows.fail(index)
            # Sampling from NaN raises, and on an accelerator ends the process for everybody.
            scores = torch.where(broken.unsqueeze(-1), torch.zeros_like(scores), scores)
        return scores


@contextlib.contextmanager
def _seeded(items: Sequence[_Item], device: torch.device) -> Iterator[None]:
    """Gives a sampled item random numbers of its own, the same for the same seed whatever ran before."""
    sampling = items[0].parameters.sampling
    if sampling is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(sampling.seed)
        yield


def _decoded(decoder: Any, before: Sequence[int], ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of `ids` as it stands behind `before`."""
    context = list(before[-_CONTEXT_TOKENS:])
    keywords = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    head = cast(str, decoder.decode(context, **keywords))
    whole = cast(str, decoder.decode([*context, *ids], **keywords))
    if whole.startswith(head):
        return whole[len(head) :]
    # The context ends inside a character that the new tokens complete: those alone are the best there is.
    return cast(str, decoder.decode(list(ids), **keywords))


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

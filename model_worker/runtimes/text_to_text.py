"""Summaries, translations, and other texts made of texts by an encoder and a decoder (BART, T5, Marian, mBART, …).

transformers 5 has the models and has removed the pipelines. The answers here have the shapes of those pipelines, and
are what the model's own `generate` writes for the text alone. Unlike plain text generation this keeps the settings that
came with the weights (beams, lengths): models for these tasks are trained to be used with them.

Refuses text longer than the model reads, unless `truncation` is set, and what `generate` takes beyond the task, such as
code to run in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers import StoppingCriteriaList as Criteria

from model_worker.runtimes import batching, checks, compiling, loading, padding, samples, tasks
from model_worker.runtimes.base import Model
from model_worker.runtimes.continuous.sequences import not_finite
from model_worker.runtimes.transfer import to_device
from model_worker.specs import RuntimeSpec
from shared.errors import InvalidInput, LoadError

_ANSWER_KEYS = {
    tasks.SUMMARIZATION: "summary_text",
    tasks.TRANSLATION: "translation_text",
    tasks.TEXT_TO_TEXT: "generated_text",
}
_TRUNCATIONS = ("longest_first", "only_first", "only_second", "do_not_truncate")
_BEAMS_MAX = 64
# For models that know no limit of their own.
_LENGTH_MAX = 32_768
# What the removed pipelines took where neither the model nor the caller names a number.
_MAX_NEW_TOKENS = 256
_WARM_UP_NEW_TOKENS = 2
_NESTED = "generate_parameters"
_LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "length_penalty": (-100.0, 100.0),
    "repetition_penalty": (0.01, 100.0),
    "temperature": (0.01, 100.0),
    "top_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
}
_FLAGS = ("do_sample", "early_stopping")
_GENERATION = frozenset({*_LENGTHS, *_NUMBERS, *_FLAGS, "no_repeat_ngram_size", "num_beams", "top_k"})
_OTHERS = frozenset({"clean_up_tokenization_spaces", "truncation", _NESTED})
_LANGUAGES = frozenset({"src_lang", "tgt_lang"})

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Item:
    rows: list[list[int]]
    is_list: bool
    settings: Settings
    """For `generate`, on top of the model's own."""
    is_drawn: bool
    cleans_up: bool | None
    """None: as the tokenizer does."""
    cost: int


@dataclass(frozen=True, slots=True)
class _Output:
    item: _Item
    rows: list[list[int]]


class TextToTextModel(Model):
    """Texts to texts. `options` are default values of the parameters."""

    mixes_parameters = True

    def __init__(self, spec: RuntimeSpec) -> None:
        self._spec = spec
        self._task = tasks.canonical(spec.task)
        self._model: Any = None
        self._tokenizer: Any = None  # prepare stage
        self._decoder: Any = None  # finish thread
        self._limit_tokens: int | None = None
        self._token_id_limit: int | None = None
        self._pad_token_id = 0
        self._own_settings: Any = None
        self._own_task_settings: dict[str, Any] = {}

    def load(self, device: str) -> None:
        if self._spec.compile:
            raise compiling.refuse(self._spec.source, "each step of an answer would be compiled anew")
        checkpoint = loading.Checkpoint(self._spec, self.report_progress)
        config = checkpoint.load_config()
        self._tokenizer = checkpoint.load_tokenizer()
        self._decoder = loading.copy_tokenizer(self._tokenizer)
        self._model = checkpoint.load_model([AutoModelForSeq2SeqLM], config, device)
        self._limit_tokens = loading.position_limit(self._model, self._tokenizer)
        self._token_id_limit = loading.token_id_limit(self._model, self._tokenizer)
        self._pad_token_id = loading.pad_token_id(self._tokenizer)
        self._own_task_settings = getattr(config, "task_specific_params", None) or {}
        # Out of the reach of `generate`, which else fills up with it what a caller has left out on purpose.
        self._own_settings, self._model.generation_config = self._model.generation_config, GenerationConfig()
        own = self._own_settings
        own.update(**{k: v for k, v in self._own_task_settings.get(self._task, {}).items() if k in _GENERATION})
        if not {"max_length", "max_new_tokens"} & own.to_diff_dict().keys():
            own.max_new_tokens = min(_MAX_NEW_TOKENS, self._limit_tokens or _MAX_NEW_TOKENS)
        self.max_batch_cost = padding.default_batch_cost(device, generates=True)
        try:
            self._read(dict(self._spec.options))
        except InvalidInput as error:
            raise LoadError(f"options of model {self._spec.name!r}: {error.message}", permanent=True) from None

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> _Item:
        given = self._read({**self._spec.options, **parameters})
        settings = {name: given[name] for name in given if name in _GENERATION}
        prefix, languages = self._languages(given)
        texts = checks.texts("inputs", inputs)
        rows = []
        for index, text in enumerate(texts):
            where = f"inputs[{index}]" if isinstance(inputs, list) else "inputs"
            ids, start = self._encode(prefix + text, languages, may_cut=given["truncation"], where=where)
            rows.append(ids)
            settings.update(start)
        config = self._config(settings)
        longest_answer = config.max_new_tokens or config.max_length or _MAX_NEW_TOKENS
        tokens = sum(map(len, rows))
        limit = padding.request_cost_max(str(self._model.device))
        if tokens > limit:
            raise InvalidInput(f"inputs are {tokens} tokens in all; one request may have {limit}: send several")
        cost = (tokens + len(rows) * longest_answer) * (config.num_beams or 1)
        cleans_up = given.get("clean_up_tokenization_spaces")
        return _Item(rows, isinstance(inputs, list), settings, bool(config.do_sample), cleans_up, cost)

    def cost(self, item: _Item) -> int:
        return item.cost

    def group(self, item: _Item) -> Hashable:
        # What is drawn draws for itself; whatever else shares a batch is written with the same settings.
        return id(item) if item.is_drawn else repr(sorted(item.settings.items()))

    def forward(self, items: Sequence[_Item]) -> list[_Output]:
        work = [row for item in items for row in item.rows]
        batches = batching.split(
            [len(row) for row in work], [None] * len(work), max_batch_cost=self.max_batch_cost, max_batch_size=0
        )
        config = self._config(items[0].settings)
        written: list[list[int]] = [[]] * len(work)
        for positions in batches:
            rows = [work[position] for position in positions]
            try:
                answers = self._generate(rows, config, items)
            except (ValueError, TypeError) as error:
                if not items[0].settings:
                    raise
                names = ", ".join(sorted(items[0].settings))
                raise InvalidInput(f"these parameters do not fit: {names}: {loading.one_line(error)}") from error
            for position, answer in zip(positions, answers, strict=True):
                written[position] = answer
        outputs = []
        for item in items:
            outputs.append(_Output(item, written[: len(item.rows)]))
            written = written[len(item.rows) :]
        return outputs

    def finish(self, output: _Output) -> list[dict[str, str]]:
        """One object for each text, also for a single one, as the pipelines had it."""
        key = _ANSWER_KEYS[self._task]
        return [
            {
                key: self._decoder.decode(
                    row, skip_special_tokens=True, clean_up_tokenization_spaces=output.item.cleans_up
                )
            }
            for row in output.rows
        ]

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        longest = padding.warm_up_tokens(str(self._model.device), self._limit_tokens)
        parameters = {"max_new_tokens": _WARM_UP_NEW_TOKENS, "min_length": 0, "truncation": True}
        if self._needs_languages():
            # Which there are, no one table tells.
            return ()
        return [(samples.text_of(self._tokenizer, longest), parameters), ("a", parameters)]

    def describe(self) -> dict[str, object]:
        return {
            **loading.describe_model(self._model),
            "batching": "whole answers with the same settings, padded together",
            "padding_side": "right",
            "limit_tokens": self._limit_tokens,
            "settings": self._own_settings.to_diff_dict(),
            "parameters": sorted(self._known()),
        }

    # --- prepare ---

    def _known(self) -> frozenset[str]:
        return _GENERATION | _OTHERS | (_LANGUAGES if self._task == tasks.TRANSLATION else frozenset())

    def _read(self, parameters: Settings) -> Settings:
        """
        Raises:
            InvalidInput: an unknown name, or a value that cannot be meant.
        """
        checks.refuse_unknown(parameters, self._known())
        given = {name: value for name, value in parameters.items() if value is not None}
        nested = given.pop(_NESTED, {})
        if not isinstance(nested, dict):
            raise InvalidInput(f"{_NESTED} must be an object, got {checks.shown(nested)}")
        checks.refuse_unknown(nested, _GENERATION)
        given |= {name: value for name, value in nested.items() if value is not None}
        for name, value in given.items():
            self._check(name, value)
        truncation = given.get("truncation", False)
        given["truncation"] = truncation is True or truncation not in (False, "do_not_truncate")
        return given

    def _check(self, name: str, value: object) -> None:
        if name in _LENGTHS:
            checks.whole_number(name, value, at_least=int("max" in name), at_most=self._limit_tokens or _LENGTH_MAX)
        elif name == "num_beams":
            checks.whole_number(name, value, at_least=1, at_most=_BEAMS_MAX)
        elif name in ("no_repeat_ngram_size", "top_k"):
            checks.whole_number(name, value, at_least=0)
        elif name in _NUMBERS:
            checks.number(name, value, at_least=_NUMBERS[name][0], at_most=_NUMBERS[name][1])
        elif name in _LANGUAGES:
            checks.text(name, value)
        elif name == "truncation" and isinstance(value, str):
            checks.choice(name, value, _TRUNCATIONS)
        else:
            checks.boolean(name, value)

    def _needs_languages(self) -> bool:
        is_asked = self._task == tasks.TRANSLATION and not self._spec.options.keys() >= _LANGUAGES
        return is_asked and bool(self._pairs() or hasattr(self._tokenizer, "_build_translation_inputs"))

    def _pairs(self) -> list[str]:
        """The translations that the model has a prefix for, as `en_to_de`."""
        return [name.removeprefix("translation_") for name in self._own_task_settings if "translation_" in name]

    def _languages(self, given: Settings) -> tuple[str, dict[str, str]]:
        """What goes before each text, and what to tell the tokenizer."""
        if self._task != tasks.TRANSLATION:
            return str(self._own_task_settings.get(self._task, {}).get("prefix") or ""), {}
        languages = {name: given[name] for name in sorted(_LANGUAGES) if name in given}
        by_tokenizer, pairs = hasattr(self._tokenizer, "_build_translation_inputs"), self._pairs()
        if len(languages) < len(_LANGUAGES) and (languages or by_tokenizer or pairs):
            told = f": {', '.join(pairs)}" if pairs else ""
            raise InvalidInput(f"src_lang and tgt_lang must both be given: this model has several languages{told}")
        if by_tokenizer or not languages:
            return "", languages
        pair = f"{languages['src_lang']}_to_{languages['tgt_lang']}"
        if pair not in pairs:
            known = ", ".join(pairs) or "one pair alone, and takes no src_lang and tgt_lang"
            raise InvalidInput(f"src_lang and tgt_lang name {pair[:60]!r}; this model has {known}")
        return str(self._own_task_settings[f"translation_{pair}"].get("prefix") or ""), {}

    def _encode(self, text: str, languages: dict[str, str], *, may_cut: bool, where: str) -> tuple[list[int], Settings]:
        """The token ids, and how the answer has to start."""
        cut = {"truncation": True, "max_length": self._limit_tokens} if may_cut and self._limit_tokens else {}
        start: Settings = {}
        if languages:
            try:
                encoded = self._tokenizer._build_translation_inputs(text, return_tensors=None, **languages, **cut)
            except KeyError as error:
                raise InvalidInput(f"src_lang or tgt_lang is not known to this model: {error}") from None
            if encoded["forced_bos_token_id"] in (None, self._tokenizer.unk_token_id):
                raise InvalidInput(f"tgt_lang {checks.shown(languages['tgt_lang'])} is not known to this model")
            start = {"forced_bos_token_id": int(encoded["forced_bos_token_id"])}
        else:
            encoded = self._tokenizer(text, **cut)
        ids: list[int] = encoded["input_ids"]
        if not ids:
            raise InvalidInput(f"{where} holds no tokens: give some text")
        checks.token_ids(where, max(ids), self._token_id_limit)
        if self._limit_tokens is not None and len(ids) > self._limit_tokens:
            raise checks.too_long(where, len(ids), self._limit_tokens, "shorten it, or set truncation to true")
        return ids, start

    def _config(self, settings: Settings) -> Any:
        """The model's own settings with these on top. Any thread: it only reads the former."""
        config = copy.deepcopy(self._own_settings)
        for one, other in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
            # The two say the same thing in two ways.
            if one in settings:
                setattr(config, other, None)
            elif other in settings:
                setattr(config, one, None)
        config.update(**settings)
        return config

    # --- forward ---

    def _generate(self, rows: Sequence[list[int]], config: Any, items: Sequence[_Item]) -> list[list[int]]:
        lengths = [len(row) for row in rows]
        device = self._model.device
        with torch.inference_mode():
            written = self._model.generate(
                input_ids=to_device(padding.pad(rows, self._pad_token_id, "right"), device),
                attention_mask=to_device(padding.attention_mask(lengths, "right"), device),
                generation_config=config,
                logits_processor=LogitsProcessorList([_NanGuard()]),
                stopping_criteria=Criteria([_Watch(self, items)]),
            )
        answers: list[list[int]] = written.tolist()
        return answers


class _Watch(StoppingCriteria):
    """Reports each step, and ends a batch that nobody waits for any more."""

    def __init__(self, model: Model, items: Sequence[_Item]) -> None:
        self._model = model
        self._items = items

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        """Called after each step; bool [rows], True for rows that are done."""
        self._model.report_step()
        is_over = not any(self._model.is_wanted(item) for item in self._items)
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device)


class _NanGuard(LogitsProcessor):
    """Ends a batch whose scores are no numbers; each of its requests is then tried alone."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool(torch.isnan(scores).any()):
            raise not_finite()
        return scores

"""Extractive question answering: the piece of a context that answers a question, with its place and a score.

transformers 5 has the models and no pipeline for them any more; the answers here are those that the pipeline of 4.57
gives. A context of any length is read in windows (`question_windows`), the windows of all requests are rows of the
same batches, and only their logits come back from the device, for the arithmetic of the finish stage
(`answer_spans`). Refuses tokenizers that cannot tell where in the text a token stands, and models that read more
than text.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForQuestionAnswering

from model_worker.runtimes import batching, checks, loading, padding, question_parameters, question_windows, samples
from model_worker.runtimes.answer_spans import Answer, Scores, best_answers
from model_worker.runtimes.base import Model
from model_worker.runtimes.encoder import Encoder
from model_worker.runtimes.question_parameters import Pair, QuestionParameters
from model_worker.runtimes.question_windows import EncodedPair, Window, WindowCutter
from model_worker.specs import RuntimeSpec
from shared.errors import Code, InvalidInput, LoadError, RequestError

# Heads of a body that this task never reads, and that many files therefore lack.
_UNUSED_WEIGHTS = ("pooler.",)
# For models that know no number of positions: attention over a longer window would take all the memory there is.
_POSITIONS_WITHOUT_LIMIT = 32_768
# Tokenising takes time and memory in proportion to the text. One with more characters than this for each token that a
# request may have would be refused afterwards anyhow: it takes about four in most languages.
_CHARACTERS_PER_TOKEN_MAX = 8
# Spans to score, and of those to rank, for one request: a huge max_answer_len or top_k over many windows would keep the
# answers of everybody else waiting. Four million tokens have room for the default max_answer_len.
_SPANS_MAX = 2**26
_CANDIDATES_MAX = 1_000_000
# For requests of our own, whatever the options are: theirs may leave no room for anything.
_DEFAULT_WINDOWS: dict[str, Any] = {"max_seq_len": None, "doc_stride": None}
# How far logits may be from those computed alone before a model counts as one that cannot be batched.
_PROBE_TOLERANCE = 1e-3
_PROBE_TOLERANCE_HALF = 0.1


@dataclass(frozen=True, slots=True)
class _Row:
    """One window, as the model reads it."""

    ids: list[int]
    type_ids: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    pairs: list[EncodedPair]
    windows: list[list[Window]]
    """Of each pair."""
    rows: list[_Row]
    """Of all windows of all pairs, in order."""
    parameters: QuestionParameters

    @property
    def longest_tokens(self) -> int:
        return max((len(row.ids) for row in self.rows), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    item: _Item
    logits: list[Scores]
    """float32 [2, tokens] for each window of each pair, in order: of the start and of the end."""


class QuestionAnsweringModel(Model):
    """Questions and contexts to answers. `options` are default values of the parameters."""

    mixes_parameters = True

    def __init__(self, spec: RuntimeSpec) -> None:
        self._spec = spec
        self._model: Any = None
        self._tokenizer: Any = None  # prepare stage
        self._cutter: WindowCutter
        self._limit_tokens: int | None = None
        self._token_id_limit: int | None = None
        self._encoder: Encoder
        self._solo_reason = ""  # why windows are computed one by one; empty: they are batched
        self._torch_device = "cpu"

    def load(self, device: str) -> None:
        self._torch_device = device
        checkpoint = loading.Checkpoint(self._spec, self.report_progress)
        config = checkpoint.load_config()
        self._tokenizer = checkpoint.load_tokenizer()
        if not self._tokenizer.is_fast:
            raise LoadError(
                f"{self._spec.source}: its tokenizer, {type(self._tokenizer).__name__}, cannot tell where in the text "
                "a token stands, which question answering needs: save it with a tokenizer.json (a fast tokenizer)",
                permanent=True,
            )
        self._model = checkpoint.load_model([AutoModelForQuestionAnswering], config, device, may_lack=_UNUSED_WEIGHTS)
        checkpoint.compile_where_asked(self._model, device)
        self._model.config.use_cache = False  # keys and values for steps that never come
        self._limit_tokens = loading.position_limit(self._model, None)
        self._cutter = WindowCutter(self._tokenizer, self._limit_tokens or _POSITIONS_WITHOUT_LIMIT)
        self._token_id_limit = loading.token_id_limit(self._model, self._tokenizer)
        self._encoder = Encoder(
            self._model,
            _logits,
            pad_token_id=loading.pad_token_id(self._tokenizer),
            takes_token_types=(
                "token_type_ids" in self._tokenizer.model_input_names
                and "token_type_ids" in inspect.signature(self._model.forward).parameters
                and getattr(self._model.config, "type_vocab_size", None) != 1
            ),
        )
        self.max_batch_cost = padding.default_batch_cost(device)
        self._check_options()
        self._solo_reason = self._probe_batching()
        if not self._solo_reason:
            self._encoder.stop_padding(self._spec.name, self._tokenizer)
        self.pads = self._encoder.pads

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> _Item:
        settings = question_parameters.read({**self._spec.options, **parameters})
        item = _Item([], [], [], settings)
        tokens = spans = candidates = 0
        tokens_max = padding.request_cost_max(self._torch_device)
        for pair in question_parameters.read_pairs(inputs):
            encoded, windows = self._encode(pair, settings, tokens_max)
            rows = [
                _Row(encoded.of_window(encoded.ids, window), encoded.of_window(encoded.type_ids, window))
                for window in windows
            ]
            tokens += sum(len(row.ids) for row in rows)
            spans += sum(len(row.ids) * min(settings.max_answer_tokens, len(row.ids)) for row in rows)
            candidates += sum(min(settings.candidates, len(row.ids) ** 2) for row in rows)
            if tokens > tokens_max:
                raise InvalidInput(
                    f"inputs are more than {tokens_max} tokens, which one request may have: send several"
                )
            if spans > _SPANS_MAX:
                raise InvalidInput(
                    f"max_answer_len = {settings.max_answer_tokens} makes more than {_SPANS_MAX} spans over all "
                    "windows: set a smaller one, or shorten the context"
                )
            if candidates > _CANDIDATES_MAX:
                raise InvalidInput(
                    f"top_k = {settings.top_k} makes more than {_CANDIDATES_MAX} candidates over all windows: set a "
                    "smaller one, shorten the context, or send several requests"
                )
            item.pairs.append(encoded)
            item.windows.append(windows)
            item.rows.extend(rows)
        return item

    def cost(self, item: _Item) -> int:
        return item.longest_tokens * len(item.rows) if self.pads else sum(len(row.ids) for row in item.rows)

    def forward(self, items: Sequence[_Item]) -> list[_Output | RequestError]:
        work = [(item, row) for item in items for row in item.rows]
        batches = batching.split(
            [len(row.ids) for _, row in work],
            list(range(len(work))) if self._solo_reason else [None] * len(work),
            max_batch_cost=self.max_batch_cost,
            max_batch_size=0,
            pads=self.pads,
        )
        logits: list[Scores | None] = [None] * len(work)
        with torch.inference_mode():
            for positions in batches:
                wanted = self._wanted(work, positions)
                computed = self._compute([work[position][1] for position in wanted]) if wanted else []
                for position, row_logits in zip(wanted, computed, strict=True):
                    logits[position] = row_logits
                self.report_step()
        outputs: list[_Output | RequestError] = []
        for item in items:
            own, logits = logits[: len(item.rows)], logits[len(item.rows) :]
            computed = [each for each in own if each is not None]
            if len(computed) < len(own):
                outputs.append(RequestError("nobody waits for this answer any more", code=Code.CANCELLED))
            else:
                outputs.append(_Output(item, computed))
        return outputs

    def finish(self, output: _Output) -> Answer | list[Answer] | list[Answer | list[Answer]]:
        """What was found for each pair; of one pair, without a list around it."""
        item, logits = output.item, output.logits
        results = []
        for encoded, windows in zip(item.pairs, item.windows, strict=True):
            own, logits = logits[: len(windows)], logits[len(windows) :]
            results.append(best_answers(encoded, windows, own, item.parameters))
        return results[0] if len(results) == 1 else results

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        longest = padding.warm_up_tokens(self._torch_device, self._cutter.default_window_tokens)
        context = samples.text_of(self._tokenizer, longest)
        return [({"question": "a", "context": text}, dict(_DEFAULT_WINDOWS)) for text in (context, "a")]

    def samples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        if self._solo_reason:
            return ()
        lengths = padding.sample_tokens(self._torch_device, self._cutter.default_window_tokens)
        contexts = [samples.text_of(self._tokenizer, length) for length in lengths]
        return [({"question": "a", "context": text}, dict(_DEFAULT_WINDOWS)) for text in contexts]

    def describe(self) -> dict[str, object]:
        return {
            **loading.describe_model(self._model),
            "batching": f"one by one: {self._solo_reason}" if self._solo_reason else "on",
            "padding": "none" if self._solo_reason else self._encoder.padding,
            "padding_side": "right",
            "limit_tokens": self._limit_tokens,
            "window_tokens": self._cutter.default_window_tokens,
            "parameters": sorted(question_parameters.PARAMETERS),
        }

    # --- load ---

    def _check_options(self) -> None:
        try:
            question_parameters.read(dict(self._spec.options))
        except InvalidInput as error:
            raise LoadError(f"options of model {self._spec.name!r}: {error.message}", permanent=True) from None

    def _probe_batching(self) -> str:
        """Computes two windows of different length together and alone; returns what is wrong, or nothing.

        Raises:
            LoadError: the model computes nothing from text alone.
        """
        longer = samples.text_of(self._tokenizer, min(12, self._cutter.default_window_tokens // 2))
        pair = [{"question": "a", "context": text} for text in (longer, "a")]
        rows = self.prepare(pair, dict(_DEFAULT_WINDOWS)).rows
        with torch.inference_mode():
            try:
                alone = [self._compute([row])[0] for row in rows]
            except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise LoadError(
                    f"{self._spec.source}: {type(self._model).__name__} does not answer a question about a text: "
                    f"{type(error).__name__}: {loading.one_line(error)}",
                    permanent=True,
                ) from error
            try:
                together = self._compute(rows)
            except Exception as error:
                return f"{type(error).__name__}: {loading.one_line(error)}"
        tolerance = _PROBE_TOLERANCE if self._model.dtype == torch.float32 else _PROBE_TOLERANCE_HALF
        same = all(
            np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
            for one, other in zip(together, alone, strict=True)
        )
        return "" if same else "padding changes the results"

    # --- prepare ---

    def _encode(self, pair: Pair, settings: QuestionParameters, tokens_max: int) -> tuple[EncodedPair, list[Window]]:
        characters_max = tokens_max * _CHARACTERS_PER_TOKEN_MAX
        for place, text in ((pair.question_place, pair.question), (pair.context_place, pair.context)):
            if len(text) > characters_max:
                raise InvalidInput(
                    f"{place} has {len(text)} characters; for the {tokens_max} tokens that one request may have, "
                    f"{characters_max} are more than enough: shorten it"
                )
        encoded = question_windows.encode(self._tokenizer, pair)
        if not encoded.ids:
            raise InvalidInput(f"{pair.question_place} and {pair.context_place} hold no tokens: give some text")
        checks.token_ids(
            f"{pair.question_place} or {pair.context_place}", max(encoded.ids, default=0), self._token_id_limit
        )
        return encoded, self._cutter.cut(encoded, pair, settings, tokens_max)

    # --- forward ---

    def _wanted(self, work: Sequence[tuple[_Item, _Row]], positions: Sequence[int]) -> list[int]:
        """Those of `positions` whose item somebody still waits for."""
        items = {id(work[position][0]): work[position][0] for position in positions}
        wanted = {key for key, item in items.items() if self.is_wanted(item)}
        return [position for position in positions if id(work[position][0]) in wanted]

    def _compute(self, rows: Sequence[_Row]) -> list[Scores]:
        """float32 [2, tokens] for each row."""
        logits: dict[int, Scores] = {}
        for block in self._encoder.compute([row.ids for row in rows], [row.type_ids for row in rows]):
            for position, both in zip(block.positions, block.output.numpy(), strict=True):
                logits[position] = both[: len(rows[position].ids)].T
        return [logits[position] for position in range(len(rows))]


def _logits(output: Any) -> torch.Tensor:
    """float32 [rows, tokens, 2]: of the start and of the end. All of them come from the device in one copy."""
    return torch.stack([output.start_logits, output.end_logits], dim=2).float().cpu()

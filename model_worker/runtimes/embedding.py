"""Sentence embeddings: one float32 vector for each text, by the model's own recipe.

Owns the reading of a sentence-transformers directory (`modules.json`: transformer, pooling, dense layers,
normalisation) and the inputs and parameters of the task. Without such a recipe the vector is the mean over the tokens,
not normalised, and `describe` says so. Refuses text longer than the model reads, unless `truncate` is set.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

from model_worker.runtimes import batching, checks, loading, padding, samples
from model_worker.runtimes.base import Model
from model_worker.runtimes.encoder import Encoder
from model_worker.runtimes.pooling import Dense, Pooling
from model_worker.specs import RuntimeSpec
from shared.errors import Code, InvalidInput, LoadError, RequestError

_PARAMETERS = ("details", "dimensions", "normalize", "prompt_name", "truncate", "truncation_direction")
_OPTIONS = ("max_seq_length", "normalize", "pooling")
_UNUSED_WEIGHTS = ("pooler.",)

_Vectors = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What happens to a text, from `modules.json` or by default."""

    pooling: Pooling
    dense: tuple[Dense, ...]
    normalize: bool
    max_seq_length: int | None
    lowercase: bool
    prompts: dict[str, str]
    default_prompt_name: str | None
    origin: str


@dataclass(frozen=True, slots=True)
class _Item:
    sequences: list[list[int]]
    is_list: bool
    prompt_tokens: int
    """Tokens of the prompt at the start of each sequence, special tokens included."""
    normalize: bool
    dimensions: int | None
    details: bool


@dataclass(frozen=True, slots=True)
class _Output:
    vectors: torch.Tensor
    """float32 [sequences, dimensions], on the CPU."""
    is_list: bool
    tokens: int | None
    """Of all sequences together, special tokens and prompts included; None: nobody asked."""


class EmbeddingModel(Model):
    """Texts to vectors. Options: `pooling`, `normalize` and `max_seq_length`, each in place of the model's own."""

    mixes_parameters = True

    def __init__(self, spec: RuntimeSpec) -> None:
        self._spec = spec
        self._recipe: _Recipe
        self._model: Any = None
        self._tokenizer: Any = None  # prepare stage
        self._limit_tokens: int | None = None
        self._token_id_limit: int | None = None
        self._dimensions = 0
        self._encoder: Encoder

    def load(self, device: str) -> None:
        checkpoint = loading.Checkpoint(self._spec, self.report_progress)
        folder, self._recipe = _read_recipe(checkpoint, self._spec)
        config = checkpoint.load_config(folder)
        self._tokenizer = checkpoint.load_tokenizer(folder)
        self._model = checkpoint.load_model([AutoModel], config, device, may_lack=_UNUSED_WEIGHTS, subfolder=folder)
        checkpoint.compile_where_asked(self._model, device)
        for dense in self._recipe.dense:
            dense.to(device)
        limits = (loading.position_limit(self._model, self._tokenizer), self._recipe.max_seq_length)
        self._limit_tokens = min((limit for limit in limits if limit), default=None)
        self._token_id_limit = loading.token_id_limit(self._model, self._tokenizer)
        self._encoder = Encoder(
            self._model,
            _hidden_states,
            pad_token_id=loading.pad_token_id(self._tokenizer),
            takes_token_types="token_type_ids" in self._tokenizer.model_input_names,
        )
        self._encoder.stop_padding(self._spec.name, self._tokenizer)
        self.pads = self._encoder.pads
        self.max_batch_cost = padding.default_batch_cost(device)
        item = self.prepare("a", {})
        with torch.inference_mode():
            self._dimensions = self._pool([(item, item.sequences[0])])[1].shape[1]

    def prepare(self, inputs: Any, parameters: dict[str, Any]) -> _Item:
        checks.refuse_unknown(parameters, _PARAMETERS)
        texts = checks.texts("inputs", inputs)
        normalize = checks.boolean("normalize", parameters.get("normalize", self._recipe.normalize))
        truncate = checks.boolean("truncate", parameters.get("truncate", False))
        direction = checks.choice(
            "truncation_direction", parameters.get("truncation_direction", "right"), ("left", "right")
        )
        details = checks.boolean("details", parameters.get("details", False))
        dimensions = parameters.get("dimensions")
        if dimensions is not None:
            checks.whole_number("dimensions", dimensions, at_least=1, at_most=self._dimensions)
        prompt = self._prompt(parameters)
        sequences = [
            self._encode(
                text, prompt, truncate, direction, f"inputs[{index}]" if isinstance(inputs, list) else "inputs"
            )
            for index, text in enumerate(texts)
        ]
        tokens, limit = sum(map(len, sequences)), padding.request_cost_max(str(self._model.device))
        if tokens > limit:
            raise InvalidInput(f"inputs are {tokens} tokens in all; one request may have {limit}: send several")
        return _Item(
            sequences=sequences,
            is_list=isinstance(inputs, list),
            prompt_tokens=self._prompt_tokens(prompt),
            normalize=normalize,
            dimensions=dimensions,
            details=details,
        )

    def cost(self, item: _Item) -> int:
        return sum(map(len, item.sequences))

    def group(self, item: _Item) -> Hashable:
        return None

    def forward(self, items: Sequence[_Item]) -> list[_Output | RequestError]:
        work = [(item, sequence) for item in items for sequence in item.sequences]
        batches = batching.split(
            [len(sequence) for _, sequence in work],
            [None] * len(work),
            max_batch_cost=self.max_batch_cost,
            max_batch_size=0,
            pads=self.pads,
        )
        rows: list[torch.Tensor] = [torch.empty(0)] * len(work)
        with torch.inference_mode():
            for positions in batches:
                order, pooled = self._pool([work[position] for position in positions])
                # All vectors of a batch come from the device in one copy.
                for index, row in zip(order, pooled.cpu(), strict=True):
                    rows[positions[index]] = row
                self.report_step()
            outputs: list[_Output | RequestError] = []
            for item in items:
                own, rows = rows[: len(item.sequences)], rows[len(item.sequences) :]
                outputs.append(_finished(torch.stack(own), item))
        return outputs

    def finish(self, output: _Output) -> _Vectors | dict[str, object]:
        """float32 [dimensions] for a string, [texts, dimensions] for a list; with `details` also what they cost."""
        vectors: _Vectors = output.vectors.numpy()
        if not output.is_list:
            vectors = vectors[0]
        return vectors if output.tokens is None else {"embeddings": vectors, "prompt_tokens": output.tokens}

    def examples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        longest = padding.warm_up_tokens(str(self._model.device), self._limit_tokens)
        return [(samples.text_of(self._tokenizer, longest), {}), ("a", {})]

    def samples(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        lengths = padding.sample_tokens(str(self._model.device), self._limit_tokens)
        return [(samples.text_of(self._tokenizer, length), {}) for length in lengths]

    def describe(self) -> dict[str, object]:
        recipe = self._recipe
        return {
            **loading.describe_model(self._model),
            "recipe": recipe.origin,
            "pooling": "+".join(recipe.pooling.modes),
            "dense_layers": len(recipe.dense),
            "normalize": recipe.normalize,
            "dimensions": self._dimensions,
            "padding": self._encoder.padding,
            "padding_side": "right",
            "limit_tokens": self._limit_tokens,
            "prompts": sorted(recipe.prompts),
            "parameters": sorted(_PARAMETERS),
        }

    # --- prepare ---

    def _prompt(self, parameters: dict[str, Any]) -> str:
        name = parameters.get("prompt_name", self._recipe.default_prompt_name)
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self._recipe.prompts:
            known = ", ".join(sorted(self._recipe.prompts)) or "none"
            raise InvalidInput(f"prompt_name {checks.shown(name)} is not known; this model's prompts: {known}")
        return self._recipe.prompts[name]

    def _encode(self, text: str, prompt: str, truncate: bool, direction: str, where: str) -> list[int]:
        text = prompt + text.strip()
        if self._recipe.lowercase:
            text = text.lower()
        self._tokenizer.truncation_side = direction
        cut = {"truncation": True, "max_length": self._limit_tokens} if truncate and self._limit_tokens else {}
        ids: list[int] = self._tokenizer(text, **cut)["input_ids"]
        if not ids:
            raise InvalidInput(f"{where} holds no tokens: give some text")
        checks.token_ids(where, max(ids), self._token_id_limit)
        if self._limit_tokens is not None and len(ids) > self._limit_tokens:
            raise checks.too_long(where, len(ids), self._limit_tokens, "shorten it, or set truncate to true")
        return ids

    def _prompt_tokens(self, prompt: str) -> int:
        if not prompt:
            return 0
        ids = self._tokenizer(prompt)["input_ids"]
        closing = {self._tokenizer.sep_token_id, self._tokenizer.eos_token_id} - {None}
        return len(ids) - (1 if ids and ids[-1] in closing else 0)

    # --- forward ---

    def _pool(self, work: Sequence[tuple[_Item, list[int]]]) -> tuple[list[int], torch.Tensor]:
        """float32 [sequences, dimensions], still on the device, and which of `work` each of them belongs to."""
        blocks = self._encoder.compute([sequence for _, sequence in work])
        order = [position for block in blocks for position in block.positions]
        prompts = [item.prompt_tokens for item, _ in work]
        vectors = torch.cat(
            [
                self._recipe.pooling.apply(
                    block.output.float(), block.mask, [prompts[position] for position in block.positions]
                )
                for block in blocks
            ]
        )
        for dense in self._recipe.dense:
            vectors = dense.apply(vectors)
        return order, vectors


def _hidden_states(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0]
    return hidden


def _finished(vectors: torch.Tensor, item: _Item) -> _Output | RequestError:
    if item.dimensions is not None:
        vectors = vectors[:, : item.dimensions]
    if item.normalize:
        vectors = torch.nn.functional.normalize(vectors, dim=1)
    vectors = vectors.contiguous()
    if not torch.isfinite(vectors).all():
        return RequestError("the model computed numbers that are not finite (NaN or infinite)", code=Code.MODEL_ERROR)
    return _Output(vectors, item.is_list, sum(map(len, item.sequences)) if item.details else None)


def _read_recipe(checkpoint: loading.Checkpoint, spec: RuntimeSpec) -> tuple[str, _Recipe]:
    """The folder of the transformer inside the checkpoint, and the recipe."""
    unknown = sorted(set(spec.options) - set(_OPTIONS))
    if unknown:
        raise LoadError(
            f"options of model {spec.name!r}: unknown {unknown[0]!r}; known: {', '.join(_OPTIONS)}", permanent=True
        )
    modules = checkpoint.read_json("modules.json")
    folder, pooling, dense, normalize = "", Pooling(("mean",)), [], False
    for module in modules or []:
        kind, path = str(module["type"]).rpartition(".")[2], str(module["path"])
        if kind == "Transformer":
            folder = path
        elif kind == "Pooling":
            pooling = Pooling.from_config(checkpoint.read_json(f"{path}/config.json"))
        elif kind == "Dense":
            dense.append(Dense(checkpoint.read_json(f"{path}/config.json"), checkpoint.read_weights(path)))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout":
            raise LoadError(
                f"{spec.source}: modules.json names a {kind!r} module, which is not supported", permanent=True
            )
    transformer = checkpoint.read_json(f"{folder}/sentence_bert_config.json" if folder else "sentence_bert_config.json")
    general = checkpoint.read_json("config_sentence_transformers.json") or {}
    options: dict[str, Any] = dict(spec.options)
    if "pooling" in options:
        named = options["pooling"]
        pooling = Pooling(tuple(named) if isinstance(named, list) else (str(named),))
    pooling.check()
    return folder, _Recipe(
        pooling=pooling,
        dense=tuple(dense),
        normalize=bool(options.get("normalize", normalize)),
        max_seq_length=options.get("max_seq_length", (transformer or {}).get("max_seq_length")),
        lowercase=bool((transformer or {}).get("do_lower_case", False)),
        prompts=dict(general.get("prompts") or {}),
        default_prompt_name=general.get("default_prompt_name"),
        origin="modules.json" if modules else "none in the model: mean over the tokens, not normalised",
    )

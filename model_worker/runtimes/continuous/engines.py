"""Whether a loaded model can be driven step by step, tried out with two tiny requests.

Owns the trial and what is said of it. Refuses to fall back in silence: without an engine there is a reason.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from model_worker.runtimes import loading
from model_worker.runtimes.continuous.causal_forward import Unsupported
from model_worker.runtimes.continuous.dense import DenseEngine, Limits
from model_worker.runtimes.continuous.sequences import Progress, Room, Sequence
from model_worker.runtimes.transfer import on_device
from shared.errors import InvalidInput

_TRIAL_NEW_TOKENS = 4


class Engine(Protocol):
    """What a runtime needs of an engine; `DenseEngine` says what each part does. Main thread, `refusal` excepted."""

    limits: Limits

    @property
    def room(self) -> Room: ...
    @property
    def running(self) -> int: ...
    def refusal(self, prompt_tokens: int, max_new_tokens: int) -> InvalidInput | None: ...
    def can_join(self, sequence: Sequence) -> bool: ...
    def join(self, sequence: Sequence) -> None: ...
    def leave(self, sequence: Sequence) -> bool: ...
    def sequences(self) -> list[Sequence]: ...
    def step(self) -> list[Progress]: ...
    def describe(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What came of trying."""

    engine: Engine | None
    """None: this model is computed one whole batch after the other."""
    reason: str
    """Why there is no engine; empty if there is one."""

    def describe(self) -> dict[str, object]:
        if self.engine is None:
            return {"batching": f"static: {self.reason}"}
        return self.engine.describe()


def build(
    model: Any,
    tokenizer: Any,
    limits: Limits,
    *,
    end_ids: frozenset[int],
    pad_token_id: int,
    prompts: Many[list[int]],
) -> Choice:
    """Makes an engine for a causal language model and tries it with `prompts`: two of different length, both with
    positions to spare. Main thread, after the load."""
    try:
        engine = DenseEngine(model, tokenizer, limits, end_ids=end_ids, pad_token_id=pad_token_id)
        answers = _answers(engine, prompts)
        # In half precision the shape of a batch alone changes the last bits, and with them now and then a token.
        if model.dtype == torch.float32 and answers != [_solo(model, prompt, pad_token_id) for prompt in prompts]:
            return Choice(None, "answers computed step by step differ from those computed alone")
    except Unsupported as error:
        return Choice(None, loading.one_line(error))
    except torch.OutOfMemoryError:
        # The cache is too large for the device: another matter than what the model is.
        raise
    except Exception as error:
        return Choice(None, f"{type(error).__name__}: {loading.one_line(error)}")
    return Choice(engine, "")


def _answers(engine: DenseEngine, prompts: Many[list[int]]) -> list[list[int]]:
    """Greedy answers without an end token; the second joins when the first has begun."""
    waiting = [Sequence(prompt, _TRIAL_NEW_TOKENS, end_ids=frozenset()) for prompt in prompts]
    answers: dict[Sequence, list[int]] = {sequence: [] for sequence in waiting}
    while waiting or engine.running:
        if waiting:
            engine.join(waiting.pop(0))
        for event in engine.step():
            if isinstance(event.ending, Exception):
                raise event.ending
            answers[event.sequence].extend(event.token_ids)
    return list(answers.values())


def _solo(model: Any, prompt: list[int], pad_token_id: int) -> list[int]:
    ids = on_device([prompt], model.device)
    # A configuration without an end token, so that none can cut the comparison short.
    settings = GenerationConfig(max_new_tokens=_TRIAL_NEW_TOKENS, do_sample=False, pad_token_id=pad_token_id)
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    finally:
        model.generation_config = own
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer

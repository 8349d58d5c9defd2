"""What a caller may ask of text generation, checked and with every default decided here.

Owns the parameters and their bounds. Refuses to let the model's own generation settings in: without a parameter that
asks for sampling the answer is greedy, whatever came with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_worker.runtimes import checks
from model_worker.runtimes.continuous.sequences import Sampling
from shared.errors import InvalidInput

PARAMETERS = (
    "do_sample",
    "frequency_penalty",
    "json_schema",
    "logprobs",
    "max_new_tokens",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "return_full_text",
    "seed",
    "skip_special_tokens",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "truncate",
)
CONTINUOUS_ONLY = ("frequency_penalty", "json_schema", "logprobs", "presence_penalty")
"""What only an engine for continuous batching can do."""
_STOPS_MAX = 16
_STOP_CHARACTERS_MAX = 256
_TEMPERATURE_MAX = 100.0
_SEED_MAX = 2**63 - 1
# As many as the OpenAI API gives; more would only make answers long.
_LOGPROBS_MAX = 20
_PENALTY_MAX = 2.0
# Values that leave the distribution as it is; asking for them does not ask for sampling.
_NEUTRAL: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class GenerationParameters:
    max_new_tokens: int | None
    """None: the default, or what is left of the model's positions if that is less."""
    sampling: Sampling
    stop: tuple[str, ...]
    json_schema: dict[str, Any] | None
    """What the answer is JSON of; None: it is text."""
    return_full_text: bool
    skip_special_tokens: bool
    truncate: int | bool
    """How many of the prompt's last tokens to keep; True: as many as fit, False: refuse a prompt that does not."""


def read(parameters: Mapping[str, Any]) -> GenerationParameters:
    """
    Raises:
        InvalidInput: an unknown name, or a value that cannot be meant.
    """
    checks.refuse_unknown(parameters, PARAMETERS)
    given = {name: value for name, value in parameters.items() if value is not None}
    max_new_tokens = given.get("max_new_tokens")
    if max_new_tokens is not None:
        checks.whole_number("max_new_tokens", max_new_tokens, at_least=1)
    truncate = given.get("truncate", False)
    if not isinstance(truncate, bool):
        truncate = checks.whole_number("truncate", truncate, at_least=1)
    return GenerationParameters(
        max_new_tokens=max_new_tokens,
        sampling=_read_sampling(given),
        stop=_read_stop(given.get("stop", [])),
        json_schema=_read_schema(given.get("json_schema")),
        return_full_text=checks.boolean("return_full_text", given.get("return_full_text", False)),
        skip_special_tokens=checks.boolean("skip_special_tokens", given.get("skip_special_tokens", True)),
        truncate=truncate,
    )


def _read_sampling(given: Mapping[str, Any]) -> Sampling:
    temperature = checks.number("temperature", given.get("temperature", 1.0), at_least=0.0, at_most=_TEMPERATURE_MAX)
    top_p = checks.number("top_p", given.get("top_p", 1.0), at_least=0.0, at_most=1.0)
    top_k = checks.whole_number("top_k", given.get("top_k", 0), at_least=0)
    min_p = checks.number("min_p", given.get("min_p", 0.0), at_least=0.0, at_most=1.0)
    seed = given.get("seed")
    if seed is not None:
        checks.whole_number("seed", seed, at_least=0, at_most=_SEED_MAX)
    if top_p == 0.0:
        raise InvalidInput("top_p must be above 0: it is the share of the probability to sample from")
    values = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    return Sampling(
        temperature=temperature if _asks_for_sampling(given, values) else 0.0,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=_read_penalty(given, "repetition_penalty", 1.0, at_least=0.01, at_most=100.0),
        frequency_penalty=_read_penalty(given, "frequency_penalty", 0.0, at_least=-_PENALTY_MAX, at_most=_PENALTY_MAX),
        presence_penalty=_read_penalty(given, "presence_penalty", 0.0, at_least=-_PENALTY_MAX, at_most=_PENALTY_MAX),
        seed=seed,
        logprobs=_read_logprobs(given.get("logprobs")),
    )


def _asks_for_sampling(given: Mapping[str, Any], values: Mapping[str, float]) -> bool:
    asked = [name for name, neutral in _NEUTRAL.items() if values[name] != neutral]
    if "do_sample" in given and not checks.boolean("do_sample", given["do_sample"]):
        # A temperature of 0 means greedy as well, so it agrees with this.
        if any(name for name in asked if values[name] != 0.0):
            raise InvalidInput(
                f"do_sample is false, which makes {asked[0]} = {values[asked[0]]:g} meaningless: drop one"
            )
        return False
    if values["temperature"] == 0.0:
        if given.get("do_sample"):
            raise InvalidInput("temperature = 0 means greedy, which do_sample = true contradicts: drop one of them")
        return False
    return bool(asked or given.get("do_sample"))


def _read_penalty(given: Mapping[str, Any], name: str, neutral: float, *, at_least: float, at_most: float) -> float:
    return float(checks.number(name, given.get(name, neutral), at_least=at_least, at_most=at_most))


def _read_logprobs(value: object) -> int | None:
    """`true` asks for the chosen tokens' alone."""
    if value is None or value is False:
        return None
    if value is True:
        return 0
    return checks.whole_number("logprobs", value, at_least=0, at_most=_LOGPROBS_MAX)


def _read_schema(value: object) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise InvalidInput(f'json_schema must be an object, such as {{"type": "object"}}, got {checks.shown(value)}')
    return value


def _read_stop(value: object) -> tuple[str, ...]:
    stops = [] if value == [] else checks.texts("stop", value)
    if len(stops) > _STOPS_MAX:
        raise InvalidInput(f"stop holds {len(stops)} strings; at most {_STOPS_MAX} are looked for")
    for stop in stops:
        if not 0 < len(stop) <= _STOP_CHARACTERS_MAX:
            raise InvalidInput(
                f"stop must hold strings of 1 to {_STOP_CHARACTERS_MAX} characters, got {checks.shown(stop)}"
            )
    return tuple(stops)

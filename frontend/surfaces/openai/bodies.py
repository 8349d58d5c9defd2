"""Reads the bodies of OpenAI's requests: what to ask a model, how often, and how to answer.

Owns which fields mean what. A field that is not known is ignored, as OpenAI's clients expect of a service that is older
or newer than they are; one that would change the answer in a way that is not possible here is refused by name. Refuses
to check what a model checks itself (temperatures, token numbers, stop strings): there is one place for each rule.

Pure: bodies in, records out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from frontend.json_bodies import json_type
from frontend.surfaces.openai.errors import invalid, unsupported

Fields = Mapping[str, object]
Inputs = str | list[int] | list[dict[str, str]]
"""What a text generation model takes: a text, token ids, or messages."""

# What a model takes under the same name. The last ones are not OpenAI's: its SDK sends them as `extra_body`.
_SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop")
_MORE_SAMPLING = ("top_k", "min_p", "repetition_penalty", "skip_special_tokens", "truncate")
_EMBEDDING = ("dimensions", "normalize", "prompt_name", "truncate", "truncation_direction")
# All answers of one request are held together until they are sent.
CHOICES_MAX = 128
# As OpenAI has it for the older of its two routes.
_COMPLETION_TOKENS = 16
_SEEDS = 2**63
_SHOWN_LENGTH_MAX = 60


@dataclass(frozen=True, slots=True)
class Generation:
    """One request for texts."""

    model: str
    prompts: list[Inputs]
    parameters: dict[str, object]
    """The same for each prompt."""
    choices: int
    """Answers to each prompt that are sent."""
    attempts: int
    """Answers to each prompt that are made; if there are more, the likeliest are sent."""
    stream: bool
    include_usage: bool
    wants_logprobs: bool
    echo: bool
    """Whether the prompt stands before its answer."""
    names: dict[str, str] = field(default_factory=dict)
    """The caller's name for each thing that the model's errors may name."""

    def questions(self) -> list[tuple[Inputs, dict[str, object]]]:
        """What to ask the model: all attempts at the first prompt, then those at the next."""
        return [(prompt, self._parameters(attempt)) for prompt in self.prompts for attempt in range(self.attempts)]

    def _parameters(self, attempt: int) -> dict[str, object]:
        seed = self.parameters.get("seed")
        if attempt == 0 or not isinstance(seed, int):
            return self.parameters
        # Repeated with the same seed, the whole request gets the same answers again.
        return {**self.parameters, "seed": (seed + attempt) % _SEEDS}


@dataclass(frozen=True, slots=True)
class Embedding:
    """One request for vectors."""

    model: str
    texts: list[str]
    parameters: dict[str, object]
    is_base64: bool
    names: dict[str, str]


def read_chat(fields: Fields) -> Generation:
    """
    Raises:
        InvalidInput: with `param` and `code` in its detail.
    """
    _refuse_tools(fields)
    _refuse(fields, "logit_bias", "token scores cannot be changed here")
    _refuse(fields, "audio", "answers are text")
    _refuse(fields, "modalities", "answers are text", harmless=(["text"],))
    _refuse(fields, "web_search_options", "models here cannot search")
    limit = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    parameters = _sampling(fields)
    _rename(fields, limit, parameters, "max_new_tokens")
    schema = _schema(fields.get("response_format"))
    if schema is not None:
        parameters["json_schema"] = schema
    wants_logprobs = _boolean(fields, "logprobs")
    if wants_logprobs:
        parameters["logprobs"] = _count(fields, "top_logprobs", default=0, at_least=0)
    elif fields.get("top_logprobs") is not None:
        raise invalid("top_logprobs", "top_logprobs needs logprobs = true")
    choices = _choices(fields, "n", parameters)
    return Generation(
        model=_model(fields),
        prompts=[_messages(fields.get("messages"))],
        parameters=parameters,
        choices=choices,
        attempts=choices,
        **_streaming(fields),
        wants_logprobs=wants_logprobs,
        echo=False,
        names=_names(
            parameters,
            inputs="messages",
            json_schema="response_format",
            max_new_tokens=limit,
            logprobs="logprobs" if fields.get("top_logprobs") is None else "top_logprobs",
        ),
    )


def read_completion(fields: Fields) -> Generation:
    """
    Raises:
        InvalidInput: with `param` and `code` in its detail.
    """
    _refuse(fields, "logit_bias", "token scores cannot be changed here")
    _refuse(fields, "suffix", "models here write on at the end of a text, not in the middle of one")
    prompts = _prompts(fields.get("prompt"))
    streaming = _streaming(fields)
    parameters = _sampling(fields)
    parameters["max_new_tokens"] = _COMPLETION_TOKENS
    _rename(fields, "max_tokens", parameters, "max_new_tokens")
    wants_logprobs = fields.get("logprobs") is not None
    if wants_logprobs:
        parameters["logprobs"] = _count(fields, "logprobs", default=0, at_least=0)
    choices = _choices(fields, "n", parameters)
    attempts = _attempts(fields, choices, streaming["stream"], parameters)
    if len(prompts) * attempts > CHOICES_MAX:
        text = f"{len(prompts)} prompts with {attempts} answers each are more than {CHOICES_MAX}: send several requests"
        raise invalid("prompt", text)
    echo = _boolean(fields, "echo")
    if echo:
        _check_echo(prompts, wants_logprobs, streaming["stream"])
        if not streaming["stream"]:
            parameters["return_full_text"] = True
    return Generation(
        model=_model(fields),
        prompts=prompts,
        parameters=parameters,
        choices=choices,
        attempts=attempts,
        **streaming,
        wants_logprobs=wants_logprobs,
        echo=echo,
        names=_names(parameters, inputs="prompt", max_new_tokens="max_tokens"),
    )


def read_embedding(fields: Fields) -> Embedding:
    """
    Raises:
        InvalidInput: with `param` and `code` in its detail.
    """
    texts = fields.get("input")
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not texts:
        raise invalid("input", f"input must be a text or a list of texts, got {_shown(texts)}")
    for place, text in enumerate(texts):
        if isinstance(text, (int, list)):
            raise unsupported(
                "input", "input holds token ids, which mean another text to each model: send the text itself"
            )
        if not isinstance(text, str):
            raise invalid("input", f"input[{place}] must be a text, got {_shown(text)}")
    encoding = fields.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise invalid("encoding_format", f"encoding_format must be float or base64, got {_shown(encoding)}")
    # `details` brings the number of tokens.
    parameters = {**_given(fields, _EMBEDDING), "details": True}
    return Embedding(_model(fields), texts, parameters, encoding == "base64", _names(parameters, inputs="input"))


# --- what is common ---


def _model(fields: Fields) -> str:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        code = "missing_required_parameter" if model is None else "invalid_value"
        raise invalid(
            "model", f"model must be the name of a model, got {_shown(model)}; GET /v1/models lists them", code
        )
    return model


def _streaming(fields: Fields) -> dict[str, bool]:
    options = fields.get("stream_options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise invalid("stream_options", f"stream_options must be an object, got {json_type(options)}")
    return {
        "stream": _boolean(fields, "stream"),
        "include_usage": _boolean(options, "include_usage", "stream_options."),
    }


def _given(fields: Fields, names: Collection[str]) -> dict[str, object]:
    return {name: fields[name] for name in names if fields.get(name) is not None}


def _sampling(fields: Fields) -> dict[str, object]:
    parameters = _given(fields, (*_SAMPLING, *_MORE_SAMPLING))
    temperature = parameters.get("temperature")
    if isinstance(temperature, (int, float)) and temperature > 0:
        # Our models draw where something asks for it, and a temperature of 1, which changes nothing, does not.
        parameters["do_sample"] = True
    return parameters


def _rename(fields: Fields, name: str, parameters: dict[str, object], own_name: str) -> None:
    if fields.get(name) is not None:
        parameters[own_name] = fields[name]


def _names(parameters: Collection[str], **other: str) -> dict[str, str]:
    return {name: name for name in parameters} | other


def _choices(fields: Fields, name: str, parameters: dict[str, object]) -> int:
    """How many answers, with what makes them differ: for several, tokens are drawn, as they always are at OpenAI."""
    count = _count(fields, name, default=1, at_least=1, at_most=CHOICES_MAX)
    if count > 1 and "temperature" not in parameters:
        parameters |= {"temperature": 1.0, "do_sample": True}
    return count


def _attempts(fields: Fields, choices: int, stream: bool, parameters: dict[str, object]) -> int:
    attempts = _choices({"best_of": choices, **_given(fields, ["best_of"])}, "best_of", parameters)
    if attempts < choices:
        raise invalid("best_of", f"best_of = {attempts} is less than n = {choices}")
    if attempts > choices:
        if stream:
            raise invalid("best_of", "which answers are best is known at the end: best_of above n cannot be streamed")
        # What they are compared by.
        parameters.setdefault("logprobs", 0)
    return attempts


def _boolean(fields: Fields, name: str, where: str = "") -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(where + name, f"{where}{name} must be true or false, got {_shown(value)}")
    return value


def _count(fields: Fields, name: str, *, default: int, at_least: int, at_most: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(name, f"{name} must be a whole number, got {_shown(value)}")
    if value < at_least or (at_most is not None and value > at_most):
        bounds = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise invalid(name, f"{name} must be {bounds}, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """A value as it may stand in an error: short, whatever it is."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _SHOWN_LENGTH_MAX else text[: _SHOWN_LENGTH_MAX - 1] + "…"


def _schema(form: object) -> object:
    """What the answer has to be JSON of; None: it is text."""
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object" | "json", "value": dict(schema)}:
            # Not OpenAI's: what Hugging Face's client makes of `json_schema`.
            return schema
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema"}:
            where = "response_format.json_schema.schema"
            raise invalid(where, f"{where} must be an object, got none")
    text = f"response_format = {_shown(form)} is not supported: its type is text, json_object or json_schema"
    raise unsupported("response_format", text)


# --- what is refused ---


def _refuse(fields: Fields, name: str, why: str, harmless: Collection[object] = ()) -> None:
    value = fields.get(name)
    if value and value not in harmless:
        raise unsupported(name, f"{name} is not supported: {why}")


def _refuse_tools(fields: Fields) -> None:
    """Tools that must not be called need not be known; and without tools, what is said of them means nothing."""
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        why = f"models here call no tools; {choice} = 'none' lets them answer without"
        if fields.get(choice) != "none":
            _refuse(fields, tools, why)
            _refuse(fields, choice, why, harmless=("auto",))


def _check_echo(prompts: list[Inputs], wants_logprobs: bool, stream: bool) -> None:
    if wants_logprobs:
        raise unsupported("echo", "echo with logprobs is not supported: models here tell nothing of a prompt's tokens")
    if stream and not all(isinstance(prompt, str) for prompt in prompts):
        raise unsupported("echo", "echo of token ids cannot be streamed: send text, or do not stream")


# --- prompts ---


def _prompts(value: object) -> list[Inputs]:
    """A text or token ids, or a list of such."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if all(isinstance(entry, str) or (isinstance(entry, list) and _are_ids(entry)) for entry in value):
            return value
    code = "missing_required_parameter" if value is None else "invalid_value"
    text = f"prompt must be a text, a list of texts, a list of token ids, or a list of those, got {_shown(value)}"
    raise invalid("prompt", text, code)


def _are_ids(entries: list[object]) -> bool:
    return all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries)


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        code = "missing_required_parameter" if value is None else "invalid_value"
        raise invalid("messages", f"messages must be a list with at least one message, got {_shown(value)}", code)
    return [_message(f"messages[{place}]", message) for place, message in enumerate(value)]


def _message(where: str, message: object) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(where, f'{where} must be a message {{"role", "content"}}, got {_shown(message)}')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role", f"{where}.role must be a text, got {_shown(role)}")
    if role in ("tool", "function"):
        raise unsupported(f"{where}.role", f"{where}.role = {role!r} is not supported: models here call no tools")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise unsupported(f"{where}.{name}", f"{where}.{name} is not supported: messages here are text")
    read = {
        # The newer name of the same thing, which the templates of models do not know.
        "role": "system" if role == "developer" else role,
        "content": _content(f"{where}.content", message.get("content")),
    }
    speaker = message.get("name")
    return {**read, "name": speaker} if isinstance(speaker, str) else read


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a text or a list of parts, got {_shown(content)}")
    return "".join(_part(f"{where}[{place}]", part) for place, part in enumerate(content))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is not None and kind != "text":
        raise unsupported(f"{where}.type", f"{where}.type = {_shown(kind)} is not supported: parts here are text")
    text = part.get("text") if isinstance(part, dict) else None
    if kind is None or not isinstance(text, str):
        raise invalid(where, f'{where} must be a part {{"type": "text", "text"}}, got {_shown(part)}')
    return text

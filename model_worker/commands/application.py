"""The command line `headwaiter`: its five commands, their flags and their help.

Owns what can be typed. Each command's work is in the module of its name, imported only when it is called.
"""

from __future__ import annotations

import contextlib
import io
import json as json_text
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags
from shared.errors import ConfigurationError
from shared.version import VERSION

EXIT_CODES = """\
\b
Exit codes:
  0   done; for serve: stopped as asked, everything has ended in order
  1   serve: the service ended by itself, or had to be ended at once
  2   the command line cannot be understood
  69  status: no model server answers
  75  status: a model is not ready
  78  the configuration, or this machine, does not allow it; nothing was started
"""

application = typer.Typer(
    name="headwaiter",
    help="Serves transformers models over HTTP: thin web workers in front, one model process per device slot behind.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration file; headwaiter.toml, if there is one."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Serve this model in place of the file's: a directory, a .gguf file, a hub id, package:… or module:Class.",
    ),
]
TaskOption = Annotated[
    str | None, typer.Option("--task", "-t", metavar="TASK", help="The task of --model, such as text-classification.")
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of --model in URLs; made from --model if left out."),
]
DeviceOption = Annotated[
    list[str] | None,
    typer.Option("--device", "-d", metavar="DEVICE", help="Where --model runs: auto, cpu, cuda:N … May be repeated."),
]
ReplicasOption = Annotated[
    int | None, typer.Option("--replicas", metavar="N", help="Processes for --model; one per device if left out.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@application.callback(invoke_without_command=True)
def headwaiter(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(VERSION)
        raise typer.Exit(Exit.OK)


@application.command(epilog=EXIT_CODES)
def serve(
    config: ConfigOption = None,
    model: ModelOption = None,
    task: TaskOption = None,
    name: NameOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Listen at this address.")] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Listen at this port.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Number of web workers.")] = None,
) -> None:
    """Run the service in the foreground, until Ctrl-C.

    Starts nothing unless the plan can work. Ctrl-C finishes what is in progress first; a second one does not.

    \b
    Examples:
      headwaiter serve --model ./my-model --task text-classification
      headwaiter serve --model sentiment:Sentiment --device cpu --port 9000
      headwaiter serve --config headwaiter.toml
      HEADWAITER_HTTP__API_KEYS='["secret"]' headwaiter serve --host 0.0.0.0
    """
    from model_worker.commands.serve import run_serve

    flags = _flags(config, model, task, name, device, replicas, host, port, workers)
    raise typer.Exit(run_serve(flags))


@application.command(epilog=EXIT_CODES)
def plan(
    config: ConfigOption = None,
    model: ModelOption = None,
    task: TaskOption = None,
    name: NameOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = None,
    json: JsonOption = False,
) -> None:
    """Show which process would run where, before any does.

    \b
    Examples:
      headwaiter plan
      headwaiter plan --model ./my-model --task embedding --device cuda:0 --device cuda:1
      headwaiter plan --json
    """
    from model_worker.commands.plan import run_plan

    with _refusal_in(json):
        raise typer.Exit(run_plan(_flags(config, model, task, name, device, replicas), json))


@application.command(epilog=EXIT_CODES)
def status(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show what runs, slot by slot, beside the plan.

    Exits with 0 only if every model that /readyz waits for is ready.

    \b
    Examples:
      headwaiter status
      until headwaiter status; do sleep 1; done
      headwaiter status --json
    """
    from model_worker.commands.status import run_status

    with _refusal_in(json):
        raise typer.Exit(run_status(Flags(config=config), json))


@application.command(epilog=EXIT_CODES)
def check(
    config: ConfigOption = None,
    model: ModelOption = None,
    task: TaskOption = None,
    name: NameOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = None,
    json: JsonOption = False,
) -> None:
    """Diagnose this machine and the configuration, point by point.

    \b
    Examples:
      headwaiter check
      headwaiter check --model ./my-model --task embedding --device cuda
      headwaiter check --json
    """
    from model_worker.commands.check import run_check

    raise typer.Exit(run_check(_flags(config, model, task, name, device, replicas), json))


@application.command(epilog=EXIT_CODES)
def config(
    config: ConfigOption = None,
    model: ModelOption = None,
    task: TaskOption = None,
    name: NameOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = None,
    json: JsonOption = False,
) -> None:
    """Print the configuration in force, with its origins.

    Secrets are masked; the rest can be used as a configuration file.

    \b
    Examples:
      headwaiter config
      HEADWAITER_HTTP__PORT=9000 headwaiter config --json
      headwaiter config --model ./my-model --task embedding > headwaiter.toml
    """
    from model_worker.commands.config import run_config

    with _refusal_in(json):
        raise typer.Exit(run_config(_flags(config, model, task, name, device, replicas), json))


def _flags(
    config: Path | None,
    model: str | None,
    task: str | None,
    name: str | None,
    devices: list[str] | None,
    replicas: int | None,
    host: str | None = None,
    port: int | None = None,
    workers: int | None = None,
) -> Flags:
    described = {"--task": task, "--name": name, "--device": devices, "--replicas": replicas}
    for flag, value in described.items():
        if model is None and value:
            raise typer.BadParameter(f"{flag} says more about --model: give that too, or use a configuration file")
    return Flags(config, model, task, name, tuple(devices or ()), replicas, host, port, workers)


@contextlib.contextmanager
def _refusal_in(json: bool) -> Iterator[None]:
    """With `--json`, standard output is a document even if the configuration is refused."""
    try:
        yield
    except ConfigurationError as error:
        if json:
            print(json_text.dumps({"error": str(error)}, indent=2, ensure_ascii=False))
        raise


def run() -> int:
    """The command line as a whole; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on standard error: what its encoding lacks is written as an escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        application(prog_name="headwaiter")
    except ConfigurationError as error:
        print(f"headwaiter: {error}", file=sys.stderr)
        return Exit.CONFIGURATION
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else Exit.OK
    return Exit.OK

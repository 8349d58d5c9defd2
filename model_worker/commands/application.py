"""The command line `headwaiter`: its commands, their flags and their help.

Owns what can be typed. Each command's work is in the module of its name, imported only when it is called.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json as json_text
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from model_worker.commands.exits import Exit, help_of
from model_worker.commands.flags import Flags, told
from shared.errors import ConfigurationError
from shared.version import VERSION

application = typer.Typer(
    name="headwaiter",
    help="Serves transformers models over HTTP: thin web workers in front, one model process per device slot behind.",
    epilog="What the exit codes of a command mean, its own --help says.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


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
    int | None,
    typer.Option(
        "--replicas", parser=_whole_number, metavar="N", help="Processes for --model; one per device if left out."
    ),
]
HostOption = Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Listen at this address.")]
PortOption = Annotated[
    int | None, typer.Option("--port", parser=_whole_number, metavar="PORT", help="Listen at this port.")
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", parser=_whole_number, metavar="N", help="Number of web workers.")
]
EveryOption = Annotated[
    float, typer.Option("--every", min=0.2, metavar="SECONDS", help="Draw a new frame after so many seconds.")
]
OnceOption = Annotated[bool, typer.Option("--once", help="Print one frame, with rates since the start, and exit.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name in the configuration.")]


@application.callback(invoke_without_command=True)
def headwaiter(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(VERSION)
        raise typer.Exit(Exit.OK)


@application.command(epilog=help_of("serve"))
def serve(
    config: ConfigOption = None,
    model: ModelOption = None,
    task: TaskOption = None,
    name: NameOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = None,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
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

    with _refusals():
        raise typer.Exit(run_serve(_flags(config, model, task, name, device, replicas, host, port, workers)))


@application.command(epilog=help_of("plan"))
def plan(
    config: ConfigOption = None,
    model: ModelOption = None,
    task: TaskOption = None,
    name: NameOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = None,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
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

    flags = _flags(config, model, task, name, device, replicas, host, port, workers)
    with _refusals(json):
        raise typer.Exit(run_plan(flags, json))


@application.command(epilog=help_of("status"))
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

    with _refusals(json, has_flags=False):
        raise typer.Exit(run_status(Flags(config=config), json))


@application.command(epilog=help_of("top"))
def top(config: ConfigOption = None, every: EveryOption = 2.0, once: OnceOption = False) -> None:
    """Watch what runs, live, until q or Ctrl-C.

    The tables of status, with rates, latencies and what went wrong of late. The same in a browser is at /dashboard.

    \b
    Examples:
      headwaiter top
      headwaiter top --every 0.5
      headwaiter top --once
    """
    from model_worker.commands.top import run_top

    with _refusals(has_flags=False):
        raise typer.Exit(run_top(Flags(config=config), every, once))


@application.command(epilog=help_of("reload"))
def reload(model: ModelArgument, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Give each replica of a model a new process, while it serves.

    Each loads the model's files as they are now. Shows how they come up, and ends when all of them have. Ctrl-C stops
    the waiting, and not the reload.

    \b
    Examples:
      headwaiter reload sentiment
      headwaiter reload sentiment --json
    """
    _order("reload", config, json, model)


@application.command(epilog=help_of("scale"))
def scale(
    model: ModelArgument,
    replicas: Annotated[
        int, typer.Argument(parser=_whole_number, metavar="N", help="How many replicas it is to have.")
    ],
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Change the number of a model's replicas, while it serves.

    It lasts until the model server ends; replicas in the configuration is what the next one begins with.

    \b
    Examples:
      headwaiter scale sentiment 2
      headwaiter scale sentiment 1 --json
    """
    _order("scale", config, json, model, replicas)


@application.command(epilog=help_of("load"))
def load(model: ModelArgument, config: ConfigOption = None, json: JsonOption = False) -> None:
    """Load a model that was unloaded, is idle, or has failed.

    \b
    Examples:
      headwaiter load sentiment
    """
    _order("load", config, json, model)


@application.command(epilog=help_of("unload"))
def unload(model: ModelArgument, config: ConfigOption = None, json: JsonOption = False) -> None:
    """End the processes of a model, until it is loaded again.

    \b
    Examples:
      headwaiter unload sentiment && headwaiter status
    """
    _order("unload", config, json, model)


@application.command(epilog=help_of("drain"))
def drain(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Refuse new requests, and finish those there are.

    Ends when the last one is answered. The models stay loaded; headwaiter resume opens the door again.

    \b
    Examples:
      headwaiter drain
      headwaiter drain && headwaiter reload sentiment && headwaiter resume
    """
    _order("drain", config, json)


@application.command(epilog=help_of("resume"))
def resume(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Take requests again after a drain.

    \b
    Examples:
      headwaiter resume
    """
    _order("resume", config, json)


def _order(action: str, config: Path | None, json: bool, model: str = "", replicas: int = 0) -> None:
    from model_worker.commands.orders import Order, run_order

    with _refusals(json, has_flags=False):
        raise typer.Exit(run_order(Flags(config=config), Order(action, model, replicas), json))


@application.command(epilog=help_of("logs"))
def logs(
    about: Annotated[
        str,
        typer.Argument(
            metavar="SLOT|MODEL|PROGRAM", help="Whose lines: sentiment/0, sentiment, frontend, model_worker."
        ),
    ] = "",
    config: ConfigOption = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", parser=_whole_number, metavar="N", help="How many of the last lines.")
    ] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    request: Annotated[
        str, typer.Option("--request", metavar="ID", help="Only what is about the request with this X-Request-Id.")
    ] = "",
) -> None:
    """Show what the service has written, all of it or about one thing.

    Of a service that headwaiter serve runs. What the code of a model prints stands in the log as it is, and is shown
    where nothing is picked.

    \b
    Examples:
      headwaiter logs
      headwaiter logs sentiment --follow
      headwaiter logs frontend --request 4f1c0b --lines 1000
    """
    from model_worker.commands.logs import Wanted, run_logs

    if lines < 0:
        raise typer.BadParameter(f"--lines {lines} is less than none")
    with _refusals(has_flags=False):
        raise typer.Exit(run_logs(Flags(config=config), Wanted(about, request), lines, follow))


@application.command(epilog=help_of("check"))
def check(
    config: ConfigOption = None,
    model: ModelOption = None,
    task: TaskOption = None,
    name: NameOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = None,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
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

    raise typer.Exit(run_check(_flags(config, model, task, name, device, replicas, host, port, workers), json))


@application.command(epilog=help_of("config"))
def config(
    config: ConfigOption = None,
    model: ModelOption = None,
    task: TaskOption = None,
    name: NameOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = None,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
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

    flags = _flags(config, model, task, name, device, replicas, host, port, workers)
    with _refusals(json):
        raise typer.Exit(run_config(flags, json))


def _flags(
    config: Path | None,
    model: str | None,
    task: str | None,
    name: str | None,
    devices: list[str] | None,
    replicas: int | None,
    host: str | None,
    port: int | None,
    workers: int | None,
) -> Flags:
    described = {"--task": task, "--name": name, "--device": devices, "--replicas": replicas}
    for flag, value in described.items():
        if model is None and value not in (None, []):
            raise typer.BadParameter(f"{flag} says more about --model: give that too, or use a configuration file")
    return Flags(config, model, task, name, tuple(devices or ()), replicas, host, port, workers)


@contextlib.contextmanager
def _refusals(json: bool = False, has_flags: bool = True) -> Iterator[None]:
    """Words a refusal for this command line; with `--json`, standard output is a document then as well."""
    try:
        yield
    except ConfigurationError as error:
        text = told(error) if has_flags else str(error)
        if json:
            print(json_text.dumps({"error": text}, indent=2, ensure_ascii=False))
        print(f"headwaiter: {text}", file=sys.stderr)
        raise typer.Exit(Exit.CONFIGURATION) from None


def run() -> int:
    """The command line as a whole; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on standard error: what its encoding lacks is written as an escape.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        application(prog_name="headwaiter")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"headwaiter: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.FAILED
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else Exit.OK
    return Exit.OK

"""What can be typed, what it exits with, and what importing `headwaiter` costs."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import headwaiter as public_face
from frontend.client import ModelClient
from model_worker.commands.exits import BY_COMMAND, Exit
from model_worker.runtimes.base import Model
from shared.errors import InvalidInput
from shared.version import VERSION
from tests.command_line import environment, headwaiter
from tests.topology import ROOT

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
ORDERS = ("reload", "scale", "load", "unload", "drain", "resume")
COMMANDS = ("serve", "plan", "status", "top", *ORDERS, "logs", "check", "config")


def python(code: str, *flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help_with_runnable_examples_and_the_exit_codes(tmp_path: Path, command: str) -> None:
    completed = headwaiter(command, "--help", cwd=tmp_path)
    assert completed.returncode == Exit.OK
    assert f"  headwaiter {command}" in completed.stdout
    listed = completed.stdout.partition("Exit codes:\n")[2].splitlines()
    # Those that this command can end with, and no others.
    assert [int(line.split()[0]) for line in listed] == [code.value for code in BY_COMMAND[command]]


def test_plan_check_and_config_take_the_command_line_of_serve(tmp_path: Path) -> None:
    commands = ("serve", "plan", "check", "config")
    flags = {command: set(FLAG.findall(headwaiter(command, "--help", cwd=tmp_path).stdout)) for command in commands}
    assert flags["serve"] <= flags["plan"] == flags["check"] == flags["config"]


PROGRAMS: list[tuple[str, ...]] = [
    *(("-P", "-m", "headwaiter", command) for command in COMMANDS),
    ("-P", "-m", "model_worker"),
    ("-P", "-m", "frontend"),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[-1])
def test_a_remedy_names_only_flags_that_the_command_has(tmp_path: Path, program: tuple[str, ...]) -> None:
    def run(*arguments: str, **variables: str) -> str:
        completed = subprocess.run(
            [sys.executable, *program, *arguments],
            cwd=tmp_path,
            env=environment({"HEADWAITER_RUN_DIR": str(tmp_path / "run"), **variables}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        return completed.stdout + completed.stderr

    known = set(FLAG.findall(run("--help")))
    models = '[{"name": "m", "model": "org/name", "device": "cpu"}]'
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = [
            run(HEADWAITER_MODELS="[]", HEADWAITER_HTTP__PORT=port),
            run(HEADWAITER_MODELS=models, HEADWAITER_HTTP__PORT=port),
            run(HEADWAITER_HTTP__HOST="192.0.2.1", HEADWAITER_HTTP__PORT="0"),
        ]
    for text in said:
        assert "Traceback" not in text
        assert set(FLAG.findall(text)) <= known, text


def test_flags_are_named_by_the_command_line_alone() -> None:
    """What the programs share is said in keys of the configuration; the command line adds the flags that it has."""
    at_home = {"model_worker/commands/application.py", "model_worker/commands/flags.py", "model_worker/__main__.py"}
    at_home |= {"frontend/__main__.py"}
    elsewhere = []
    for file in (file for folder in ("shared", "frontend", "model_worker") for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text())
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        elsewhere += [
            f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents
            if FLAG.search(node.value) and str(file.relative_to(ROOT)) not in at_home
        ]
    # A request for curl, a refusal that knows of the flag, and the text of a page.
    assert {line.partition(":")[0] for line in elsewhere} <= {
        "model_worker/commands/addresses.py",
        "shared/config_refusals.py",
        "shared/reference.py",
    }


def test_the_overview_names_every_command_in_full_sentences(tmp_path: Path) -> None:
    completed = headwaiter("--help", cwd=tmp_path)
    for command in COMMANDS:
        [line] = [line for line in completed.stdout.splitlines() if line.startswith(f"  {command} ")]
        # The framework cuts what is too long for a line.
        assert line.endswith(".")
        assert not line.endswith("...")


def test_version(tmp_path: Path) -> None:
    assert headwaiter("--version", cwd=tmp_path).stdout == VERSION + "\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "--prot", "80"), "--prot"),
        (("serve", "--port", "many"), "'--port': 'many' is not a whole number"),
        (("plan", "--replicas", "1.5", "-m", "m:M"), "'--replicas': '1.5' is not a whole number"),
        (("plan", "--replicas", "0"), "--model"),
        (("serve", "--task", "embedding"), "--model"),
        (("start",), "start"),
    ],
)
def test_a_command_line_that_cannot_be_understood_exits_with_2(
    tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    completed = headwaiter(*arguments, cwd=tmp_path)
    assert completed.returncode == Exit.USAGE
    assert named in completed.stderr
    assert "Traceback" not in completed.stderr


def test_the_public_names_are_the_real_ones() -> None:
    assert public_face.Model is Model
    assert public_face.ModelClient is ModelClient
    assert public_face.InvalidInput is InvalidInput
    assert set(public_face.__all__) <= set(dir(public_face))
    assert all(getattr(public_face, name).__name__ == name for name in public_face.__all__)


def test_an_unknown_public_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"pipeline.*InvalidInput, LoadError, Model, ModelClient"):
        _ = public_face.pipeline


HEAVY = ("torch", "transformers", "zmq", "fastapi", "pydantic", "typer", "asyncio", "numpy")


def test_importing_headwaiter_imports_nothing_heavy() -> None:
    completed = python(f"import sys, headwaiter; print([m for m in {HEAVY} if m in sys.modules])")
    assert completed.stdout == "[]\n", completed.stderr


def test_the_model_class_costs_no_socket_and_no_framework() -> None:
    heavy = tuple(module for module in HEAVY if module != "numpy")
    completed = python(f"import sys; from headwaiter import Model; print([m for m in {heavy} if m in sys.modules])")
    assert completed.stdout == "[]\n", completed.stderr


@pytest.mark.parametrize("package", ["shared", "frontend", "model_worker"])
def test_a_package_of_the_users_under_our_name_is_reported_with_the_remedy(tmp_path: Path, package: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    # Without -P the working directory comes first, as it does for `python -m` and for a script beside the package.
    completed = subprocess.run(
        [sys.executable, "-m", "headwaiter", "plan"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == Exit.CONFIGURATION
    assert repr(package) in completed.stderr
    assert str(tmp_path / package) in completed.stderr
    assert "rename" in completed.stderr
    assert len(completed.stderr.splitlines()) == 1


def test_the_public_names_report_a_shadowed_package_too(tmp_path: Path) -> None:
    (tmp_path / "shared.py").touch()
    completed = python("from headwaiter import Model", cwd=tmp_path)
    assert completed.returncode == 1
    assert "ImportError: headwaiter needs its own package 'shared'" in completed.stderr
    assert str(tmp_path / "shared.py") in completed.stderr


@pytest.mark.parametrize(
    "program",
    [["-m", "model_worker"], ["-m", "frontend"], ["-m", "uvicorn", "frontend.app:app"]],
    ids=lambda program: program[1],
)
def test_a_program_that_finds_another_package_named_shared_says_what_to_do(tmp_path: Path, program: list[str]) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").touch()
    completed = subprocess.run(
        [sys.executable, *program], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert completed.returncode != 0
    last = completed.stderr.splitlines()[-1]
    assert f"needs its own package 'shared', in {ROOT / 'shared'}, but Python finds {tmp_path}" in last
    assert "python -P" in last

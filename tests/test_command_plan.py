"""`headwaiter plan` and `headwaiter check`: what is known before anything starts."""

from __future__ import annotations

import json
import resource
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.commands import check
from model_worker.commands.check import Outcome
from model_worker.commands.exits import Exit
from model_worker.commands.plan import core_ranges
from model_worker.devices import Accelerator, Driver, Inventory
from tests.command_line import COMMAND, ECHO, document, environment, headwaiter, only_line, write_config
from tests.topology import ROOT

# A machine on which neither the scheduler nor a GPU of the developer's changes what is planned.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def write_weights(directory: Path, numbers: int) -> Path:
    """A model directory that holds one float32 tensor."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    tensor = {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}
    header = json.dumps({"weight": tensor}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * numbers))
    return directory


def test_the_plan_lists_every_slot_with_its_place_and_pins(tmp_path: Path) -> None:
    write_config(tmp_path, {**ECHO, "replicas": 2}, {**ECHO, "name": "other"})
    completed = headwaiter("plan", "--json", cwd=tmp_path, variables=NO_GPU)
    assert completed.returncode == Exit.OK, completed.stderr
    plan = document(completed)
    assert [slot["name"] for slot in plan["slots"]] == ["echo/0", "echo/1", "other/0"]
    for slot in plan["slots"]:
        assert slot["device"] == "cpu"
        assert slot["threads"] == int(slot["environment"]["OMP_NUM_THREADS"])
    assert [(use["device"], use["slots"]) for use in plan["devices"]] == [("cpu", 3)]
    assert plan["fits"] is True


def test_the_same_plan_twice_is_the_same_text(tmp_path: Path) -> None:
    write_config(tmp_path, ECHO)
    first, second = (headwaiter("plan", cwd=tmp_path, variables=NO_GPU) for _ in range(2))
    assert first.stdout == second.stdout
    assert "echo/0" in first.stdout


def test_cuda_on_a_machine_without_it_is_refused_and_never_falls_back(tmp_path: Path) -> None:
    write_config(tmp_path, {**ECHO, "device": "cuda"})
    for command in ("plan", "serve"):
        completed = headwaiter(command, cwd=tmp_path, variables=NO_GPU)
        assert completed.returncode == Exit.CONFIGURATION
        line = only_line(completed.stderr)
        assert "echo/0" in line
        assert "cuda" in line
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_refused_with_its_path(tmp_path: Path) -> None:
    write_config(tmp_path, {"name": "a", "model": "./nowhere/model", "task": "embedding", "device": "cpu"})
    completed = headwaiter("plan", cwd=tmp_path)
    assert completed.returncode == Exit.CONFIGURATION
    assert str(tmp_path / "nowhere" / "model") in only_line(completed.stderr)


def test_an_unknown_task_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    completed = headwaiter("plan", "--model", "./model", "--task", "text-clasification", cwd=tmp_path)
    assert completed.returncode == Exit.CONFIGURATION
    assert "'text-clasification' is not known (did you mean 'text-classification'?)" in only_line(completed.stderr)


def test_no_model_at_all_is_refused_with_the_two_ways_to_name_one(tmp_path: Path) -> None:
    completed = headwaiter("plan", cwd=tmp_path)
    assert completed.returncode == Exit.CONFIGURATION
    assert "[[models]]" in only_line(completed.stderr)
    assert "--model" in completed.stderr


def test_weights_that_cannot_fit_are_shown_and_then_refused(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "big", 1_000_000)
    model = {"name": "big", "model": str(weights), "task": "embedding", "device": "cpu"}
    write_config(tmp_path, model, server={"memory_fraction_max": 1e-9})
    shown = headwaiter("plan", cwd=tmp_path)
    assert shown.returncode == Exit.CONFIGURATION
    assert "big/0" in shown.stdout
    assert "3.8 MiB" in shown.stdout
    assert "memory_fraction_max" in only_line(shown.stderr)
    as_json = headwaiter("plan", "--json", cwd=tmp_path)
    assert document(as_json)["fits"] is False
    assert document(as_json)["refusal"] in as_json.stderr
    served = headwaiter("serve", cwd=tmp_path)
    assert served.returncode == Exit.CONFIGURATION
    assert not (tmp_path / "run").exists()


def test_flags_alone_make_a_plan(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def load(self, device): ...\n    def forward(self, items): ...\n"
    )
    completed = headwaiter("plan", "--json", "--model", "mine:Mine", "--device", "cpu", "--name", "m", cwd=tmp_path)
    assert completed.returncode == Exit.OK, completed.stderr
    assert [slot["name"] for slot in document(completed)["slots"]] == ["m/0"]


def test_a_name_that_is_taken_for_a_hub_id_says_so_with_what_may_be_meant(tmp_path: Path) -> None:
    write_weights(tmp_path / "sentiment", 10)
    flags = ("--model", "sentimnet", "--task", "embedding", "--device", "cpu", "--port", "0")
    said = f"there is no directory {tmp_path}/sentimnet (did you mean './sentiment'?); for a directory, write './sent"
    planned = headwaiter("plan", *flags, cwd=tmp_path)
    assert planned.returncode == Exit.OK
    assert "sentimnet (hub id)" in planned.stdout
    assert said in planned.stdout
    [remark] = document(headwaiter("plan", "--json", *flags, cwd=tmp_path))["remarks"]
    assert said in remark["text"]
    checked = document(headwaiter("check", "--json", *flags, cwd=tmp_path))
    [finding] = [finding for finding in checked if finding["point"] == "model sentimnet"]
    assert finding["outcome"] == "warn"
    assert said in finding["detail"]
    for name in ("./sentimnet", "sentimnet/", "a/b/sentimnet", "~/sentimnet"):
        refused = headwaiter("plan", *("-m", name), *flags[2:], cwd=tmp_path, variables={"HOME": str(tmp_path)})
        assert refused.returncode == Exit.CONFIGURATION
        assert "no such file or directory" in only_line(refused.stderr)


def test_the_model_server_logs_what_it_was_not_told_for_certain(tmp_path: Path) -> None:
    (tmp_path / "sentiment").mkdir()
    models = [{"name": name, "model": name, "task": "embedding", "device": "cpu"} for name in ("sentimnet", "gpt2")]
    # It gets no further than to a run directory that cannot be made.
    write_config(tmp_path, *models, top={"run_dir": "/dev/null/run"})
    command = [sys.executable, "-P", "-m", "model_worker"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(NO_GPU), capture_output=True, text=True, timeout=60)
    assert done.returncode == Exit.CONFIGURATION
    [doubtful, plain] = [line for line in done.stderr.splitlines() if "taken for a hub id" in line]
    assert "warning" in doubtful.lower()
    assert "did you mean './sentiment'" in doubtful
    assert "warning" not in plain.lower()


@pytest.mark.parametrize("command", ["plan", "check", "config", "status", "serve", "reload m", "logs"])
def test_a_working_directory_that_is_gone_is_one_clear_line(tmp_path: Path, command: str) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    script = f"rmdir {directory} && exec {shlex.join(COMMAND)} {command} -c relative.toml"
    completed = subprocess.run(
        ["sh", "-c", script],
        cwd=directory,
        env=environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == Exit.CONFIGURATION
    said = completed.stdout if command == "check" else only_line(completed.stderr)
    assert "the working directory has been deleted: change to another one" in said
    assert "Traceback" not in completed.stderr


def test_more_replicas_than_cores_are_planned_with_a_warning(tmp_path: Path) -> None:
    write_config(tmp_path, {**ECHO, "replicas": 500}, http={"port": 0})
    planned = headwaiter("plan", cwd=tmp_path, variables=NO_GPU)
    assert planned.returncode == Exit.OK
    assert "! cpu: 500 model processes (echo 500) share" in planned.stdout.splitlines()[-1]
    checked = document(headwaiter("check", "--json", cwd=tmp_path, variables=NO_GPU))
    [finding] = [finding for finding in checked if finding["point"] == "plan"]
    assert finding["outcome"] == "warn"
    assert "lower replicas to" in finding["detail"]


def test_check_judges_the_open_files_that_the_programs_will_have(tmp_path: Path) -> None:
    """Not the soft limit of the shell: both programs raise it to the hard one."""
    write_config(tmp_path, ECHO, http={"port": 0})
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limits, outcome in (((64, hard), "ok"), ((64, 1000), "warn"), ((64, 100), "fail")):
        command = f"ulimit -Sn {limits[0]} && ulimit -Hn {limits[1]} && exec {shlex.join(COMMAND)} check --json"
        checked = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment(NO_GPU), capture_output=True, text=True, timeout=60
        )
        [finding] = [finding for finding in document(checked) if finding["point"] == "open files"]
        assert finding["outcome"] == outcome, finding


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_of_another_machine_is_refused_also_with_any_free_port(tmp_path: Path, host: str) -> None:
    write_config(tmp_path, ECHO, http={"port": 0, "host": host})
    served = headwaiter("serve", cwd=tmp_path, variables=NO_GPU)
    assert served.returncode == Exit.CONFIGURATION
    assert f"http.host = '{host}'" in only_line(served.stderr)
    checked = document(headwaiter("check", "--json", cwd=tmp_path, variables=NO_GPU))
    assert [finding["outcome"] for finding in checked if finding["point"] == "port"] == ["fail"]


@pytest.mark.parametrize("command", ["plan", "check", "config"])
def test_output_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, command: str) -> None:
    write_config(tmp_path, ECHO)
    with open("/dev/full", "w") as full:
        completed = subprocess.run(
            [*COMMAND, command], cwd=tmp_path, env=environment(NO_GPU), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert completed.returncode == Exit.FAILED
    assert only_line(completed.stderr) == "headwaiter: standard output cannot be written: No space left on device"


def test_core_ranges_are_what_taskset_reads() -> None:
    assert core_ranges((3, 1, 2, 8)) == "1-3,8"
    assert core_ranges((5,)) == "5"
    assert core_ranges(()) == ""


def test_check_reports_every_point_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    good = headwaiter("check", "--json", cwd=write_config(tmp_path, ECHO, http={"port": 0}).parent, variables=NO_GPU)
    assert good.returncode == Exit.OK, good.stdout
    points = {finding["point"]: finding["outcome"] for finding in document(good)}
    expected = {"python", "versions", "accelerators", "cores", "memory", "configuration", "run directory", "port"}
    assert expected | {"packages", "model echo", "plan"} <= set(points)
    assert "fail" not in points.values()

    broken = {"name": "a", "model": "./nowhere/model", "task": "embedding"}
    write_config(tmp_path, broken, ECHO, top={"run_dir": "/dev/null/run"})
    bad = headwaiter("check", "--json", cwd=tmp_path, variables=NO_GPU)
    assert bad.returncode == Exit.CONFIGURATION
    outcomes = {finding["point"]: finding["outcome"] for finding in document(bad)}
    assert outcomes["run directory"] == outcomes["model a"] == "fail"
    assert outcomes["model echo"] == "ok"


def test_check_tells_what_each_model_is_made_of(tmp_path: Path) -> None:
    plain, own_code = write_weights(tmp_path / "plain", 1000), write_weights(tmp_path / "own", 1000)
    (plain / "config.json").write_text('{"architectures": ["RobertaForQuestionAnswering"]}')
    (own_code / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_own.Own"}}')
    models: list[dict[str, Any]] = [
        {"name": "plain", "model": str(plain), "device": "cpu"},
        {"name": "own", "model": str(own_code), "task": "embedding", "device": "cpu"},
        {"name": "trusted", "model": str(own_code), "task": "embedding", "device": "cpu", "trust_remote_code": True},
        {"name": "wrong", "model": str(plain), "task": "fill-mask", "device": "cpu"},
    ]
    write_config(tmp_path, *models, ECHO, http={"port": 0})
    found = document(headwaiter("check", "--json", cwd=tmp_path, variables=NO_GPU))
    details = {finding["point"].removeprefix("model "): finding["detail"] for finding in found}
    made_of = "question-answering; RobertaForQuestionAnswering; safetensors F32; 3.9 KiB of weights"
    assert details["plain"] == f"{plain}: {made_of}"
    assert "code of its own, which runs only with trust_remote_code = true" in details["own"]
    assert "code of its own, which is allowed" in details["trusted"]
    assert "wrong task for the weights" in details["wrong"]
    assert "a class of your own" in details["echo"]


@pytest.mark.parametrize(
    ("driver", "built_for", "outcome", "said"),
    [
        (Driver("580.95", (13, 0)), (12, 8), Outcome.OK, "NVIDIA 580.95 runs CUDA 13.0, torch is built for 12.8"),
        (Driver("550.54", (12, 4)), (12, 8), Outcome.OK, "torch is built for 12.8"),
        (Driver("550.54", (12, 4)), (13, 0), Outcome.FAIL, "update the driver"),
        (Driver("550.54", (12, 4)), None, Outcome.WARN, "install the CUDA build"),
    ],
)
def test_check_compares_the_driver_with_what_torch_is_built_for(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, built_for: tuple[int, int] | None, outcome: Outcome, said: str
) -> None:
    gpu = Accelerator("cuda", 0, "GPU-1", "A GPU", 80 * 2**30)
    inventory = Inventory((gpu,), cores=(0,), core_count=1, memory_bytes=2**30, cuda_visible_devices="3")
    monkeypatch.setattr(check, "take_inventory", lambda: inventory)
    monkeypatch.setattr(check, "read_driver", lambda: driver)
    monkeypatch.setattr(check, "cuda_of_torch", lambda: built_for)
    findings = list(check.machine())
    [found] = [finding for finding in findings if finding.point == "driver"]
    assert found.outcome is outcome
    assert said in found.detail
    assert any(finding.detail.startswith("CUDA_VISIBLE_DEVICES=3") for finding in findings)


def test_check_reads_what_torch_is_built_for_without_importing_it() -> None:
    assert check.cuda_of_torch() == (
        None if torch.version.cuda is None else tuple(map(int, torch.version.cuda.split(".")))
    )


def test_check_warns_about_an_open_door(tmp_path: Path) -> None:
    write_config(tmp_path, ECHO, http={"host": "0.0.0.0", "port": 0})
    findings = document(headwaiter("check", "--json", cwd=tmp_path, variables=NO_GPU))
    [access] = [finding for finding in findings if finding["point"] == "access"]
    assert access["outcome"] == "warn"
    assert "api_keys" in access["detail"]


@pytest.mark.parametrize("arguments", [("check",), ("plan",)])
def test_tables_for_people_are_not_cut_in_a_pipe(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    write_config(tmp_path, {**ECHO, "name": "a-name-of-some-length-" + "x" * 40}, http={"port": 0})
    completed = headwaiter(*arguments, cwd=tmp_path, variables=NO_GPU)
    assert "a-name-of-some-length-" + "x" * 40 in completed.stdout
    assert "…" not in completed.stdout
    assert not any(line.endswith(" ") for line in completed.stdout.splitlines())


def test_a_terminal_without_unicode_gets_the_same_plan(tmp_path: Path) -> None:
    write_config(tmp_path, {**ECHO, "options": {"words": "ü"}})
    completed = headwaiter("plan", cwd=tmp_path, variables={"PYTHONIOENCODING": "ascii"} | NO_GPU)
    assert completed.returncode == Exit.OK, completed.stderr
    assert "echo/0" in completed.stdout
    assert headwaiter("config", cwd=tmp_path, variables={"PYTHONIOENCODING": "ascii"}).returncode == Exit.OK

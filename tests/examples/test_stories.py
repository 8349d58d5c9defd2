"""The stories are told, shortened, as a user would run them; what they claim on a GPU is tried with a pretended one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from examples import made_models, story_workers
from examples.stage import Differs, Report, Stage
from model_worker.devices import Accelerator
from tests.topology import ROOT, alive, wait_for

# Each story starts a dozen interpreters with torch in them, which takes minutes on a machine that is busy.
PATIENCE_S = 400
pytestmark = pytest.mark.timeout(PATIENCE_S + 60)


def tell(story: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"examples.{story}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


def test_four_copies_come_up_each_time_although_each_load_holds_the_gil() -> None:
    # Longer than the 5 s after which a web server's master kills a worker that does not answer.
    told = tell("story_workers", "--shape", "gpt-j", "--load-seconds", "6", "--restarts", "1")
    assert told.returncode == 0, told.stdout + told.stderr
    assert "✗" not in told.stdout
    assert "4 processes, none killed while it loaded" in told.stdout
    assert "gpt-j, start 2 with 2 fronts: 10 of 10 claims hold" in told.stdout
    assert "the same slot table at each of 2 starts" in told.stdout


def test_question_answering_stays_up_whatever_its_model_starts() -> None:
    told = tell("story_qa", "--requests", "24")
    assert told.returncode == 0, told.stdout + told.stderr
    assert "✗" not in told.stdout
    assert told.stdout.count("the same front worker") == 3
    assert "24 answers, each a piece of its own context" in told.stdout
    assert "the same model process, still loaded" in told.stdout


class Pretended:
    """Lists what a driver would: a copy of the weights in each model process of the stages that it is told."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.weights_bytes = 0

    def processes(self) -> dict[int, int]:
        pids = [pid for stage in self.stages for pid in stage.model_processes()]
        return dict.fromkeys(pids, self.weights_bytes)

    def used_bytes(self) -> int:
        return sum(self.processes().values())


def test_the_telling_for_a_gpu_compares_the_drivers_list_with_the_slot_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Pretended()

    class WatchedStage(Stage):
        def start(self) -> None:
            super().start()
            weights = (tmp_path / "gpt-j" / "model.safetensors").stat().st_size
            device.stages, device.weights_bytes = [self], weights

    monkeypatch.setattr(story_workers, "Stage", WatchedStage)
    monkeypatch.setattr(story_workers, "REPLICAS", 2)
    # This process has torch already.
    monkeypatch.setattr(story_workers, "make_apart", made_models.make)
    code = story_workers.tell_device(tmp_path, "gpt-j", "cpu", device, within_s=120)
    told = capsys.readouterr().out
    assert code == 0, told
    assert told.count("the driver's own list has the 2 processes of the slot table") == 2
    assert "kill -9 of gpt-j/1: it is back in the same place" in told
    assert "afterwards nothing of it is on the device" in told


@pytest.mark.parametrize(
    ("listed", "differs"),
    [
        ({11, 12}, False),
        ({11, 12, 13}, True),  # one too many
        ({11}, True),  # one is missing
        ({901, 902}, False),  # pids of the host, seen from a container
        ({901, 902, 903}, True),
        (set(), False),  # a container that is shown none: nothing to compare
    ],
)
def test_a_process_too_many_or_too_few_on_the_device_is_a_difference(
    listed: set[int], differs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("")
    story_workers.check_device(report, listed, {11, 12})
    assert report.end() == int(differs), capsys.readouterr().out


@pytest.mark.parametrize(
    ("gigabytes", "problem", "disk_bytes", "refusal"),
    [
        (None, "", 10**12, "this machine has none"),
        (None, "the driver does not answer", 10**12, "the driver does not answer"),
        (40, "", 10**12, "has 40"),
        (80, "", 10**9, "14 GB of disk; 1 are free"),
        (80, "", 10**12, ""),
    ],
)
def test_the_telling_for_a_gpu_is_refused_in_one_line_where_it_cannot_be(
    gigabytes: int | None, problem: str, disk_bytes: int, refusal: str
) -> None:
    gpus = [] if gigabytes is None else [Accelerator("cuda", 0, "GPU-a", "a GPU", gigabytes * 10**9)]
    said = story_workers.refuse_full(gpus, problem, disk_bytes)
    assert refusal in said if refusal else said == ""
    assert "\n" not in said


def test_a_claim_that_does_not_hold_shows_in_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("a story")
    with report.group("a part", in_full=False):
        report.claim("the same pid", False, 17)
        report.claim("one load", True)
    assert report.end() == 1
    told = capsys.readouterr().out
    assert "✗ the same pid: saw 17" in told
    assert "✗ a part: 1 of 2 claims hold" in told


def test_a_stage_goes_with_the_script_that_set_it_up() -> None:
    model = {"name": "m", "model": "examples.sentiment:Sentiment", "device": "cpu"}
    script = (
        "import time; from examples.stage import Stage\n"
        f"with Stage([{model}]) as stage:\n"
        "    stage.wait_ready(60); print(*[process.pid for process in stage.family()], flush=True); time.sleep(600)"
    )
    # Its directory is what a killed script cannot remove.
    variables = os.environ | {"TMPDIR": tempfile.mkdtemp(prefix="hw-")}
    try:
        with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=variables, stdout=subprocess.PIPE) as told:
            assert told.stdout
            pids = [int(pid) for pid in told.stdout.readline().split()]
            told.kill()
        assert pids
        wait_for(lambda: not any(alive(pid) for pid in pids), "all that it started has ended", 30)
    finally:
        shutil.rmtree(variables["TMPDIR"])


def test_ctrl_c_ends_a_story_in_one_line_and_leaves_nothing() -> None:
    model = {"name": "m", "model": "examples.sentiment:Sentiment", "device": "cpu"}
    script = (
        "import signal, time; from examples.stage import Stage, tell_and_exit\n"
        # A program that a shell has put into the background ignores it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def story():\n"
        f"    with Stage([{model}]) as stage:\n"
        "        stage.wait_ready(60); print(*[process.pid for process in stage.family()], flush=True)\n"
        "        time.sleep(600)\n"
        "tell_and_exit('story_m', story)"
    )
    with tempfile.TemporaryDirectory(prefix="hw-") as directory:
        variables = os.environ | {"TMPDIR": directory}
        with subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as told:
            assert told.stdout
            assert told.stderr
            pids = [int(pid) for pid in told.stdout.readline().split()]
            told.send_signal(signal.SIGINT)
            said = told.stderr.read().decode()
        assert pids
        assert not any(alive(pid) for pid in pids)
        assert not list(Path(directory).glob("hw-*"))
    assert (told.returncode, said) == (130, "story_m: interrupted; all that it started has ended\n")


def test_a_stage_that_ends_is_a_difference_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Differs, match="serve ended with"), Stage([{"name": "m", "model": "examples.no:One"}]) as stage:
        stage.wait_ready(60)
    assert not stage.directory.exists()
    assert "examples.no" in capsys.readouterr().err

"""How far a load is: what the libraries would draw reaches whoever asks, from bars as they are used and from a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tqdm.std
from huggingface_hub.utils.tqdm import tqdm as untyped_bar
from transformers.utils import logging as transformers_logging

from model_worker.runtimes.loading import quiet_libraries
from tests import tiny_models
from tests.command_line import headwaiter
from tests.local_hub import local_hub
from tests.topology import ROOT, Service, wait_for

hub_bar: Any = untyped_bar
Heard = list[tuple[bool, float]]


@pytest.fixture
def heard(capfd: pytest.CaptureFixture[str]) -> Iterator[Heard]:
    """What is told inside; afterwards nothing was drawn, and bars are what they were."""
    moves: Heard = []
    # Whatever ran in this process before may have switched them off, which nothing does in a model process.
    transformers_logging.enable_progress_bar()
    before = dict(vars(tqdm.std.tqdm))
    with quiet_libraries(on_progress=lambda is_download, fraction: moves.append((is_download, fraction))):
        yield moves
    assert all(vars(tqdm.std.tqdm)[name] is before[name] for name in ("__init__", "update", "__iter__"))
    assert capfd.readouterr() == ("", "")


def test_files_that_are_downloaded_at_once_are_one_progress(heard: Heard) -> None:
    with hub_bar(total=100, unit="B", desc="a") as first, hub_bar(total=300, unit="B", desc="b", initial=100) as second:
        first.update(50)
        second.update(200)
        first.update(50)
    assert heard == [(True, 0.375), (True, 0.875), (True, 1.0)]


def test_download_that_begins_again_goes_back(heard: Heard) -> None:
    with hub_bar(total=100, unit="B") as bar:
        bar.update(80)
        bar.update(-80)
        bar.update(100)
    assert heard == [(True, 0.8), (True, 0.0), (True, 1.0)]


def test_size_that_becomes_known_later_counts_then(heard: Heard) -> None:
    with hub_bar(total=0, unit="B") as bar:
        bar.update(10)
        bar.total = 100
        bar.update(10)
    assert heard == [(True, 0.2)]


def test_counted_files_say_nothing_beside_their_bytes(heard: Heard) -> None:
    assert list(hub_bar(range(3), desc="Fetching 3 files")) == [0, 1, 2]
    assert heard == []


def test_weights_that_are_put_into_place_are_counted(heard: Heard) -> None:
    assert list(transformers_logging.tqdm("abcd", desc="Loading weights")) == list("abcd")
    assert heard == [(False, 0.25), (False, 0.5), (False, 0.75), (False, 1.0)]


def test_bars_that_move_on_many_threads_lose_nothing(heard: Heard) -> None:
    with hub_bar(total=4000, unit="B") as bar:
        threads = [threading.Thread(target=lambda: [bar.update(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert heard[-1] == (True, 1.0)
    assert len(heard) == 4000


BRING_UP = """
import json, sys
from huggingface_hub import constants
from model_worker.replica.process import bring_up
from model_worker.specs import ReplicaSpec, RuntimeSpec

# So that the few files of a small model come in several pieces as well.
constants.DOWNLOAD_CHUNK_SIZE = 4096


def report(phase, fraction=-1.0, text=""):
    print(json.dumps([phase, fraction, text]), flush=True)


runtime = RuntimeSpec("m", "org/model", "text-classification")
bring_up(ReplicaSpec("m/0", 1, "", "cpu", {}, (), 1, runtime, max_batch_size=4, max_batch_cost=64), report)
"""


def test_model_from_a_hub_tells_how_far_its_download_and_its_load_are(tmp_path: Path) -> None:
    files = tiny_models.save(tmp_path / "files", "BertForSequenceClassification", labels=["a", "b"])
    with local_hub(files) as endpoint:
        variables = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", BRING_UP]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    weights = [
        fraction for phase, fraction, text in reports if (phase, text) == ("downloading", "download its weights")
    ]
    assert len(weights) > 1
    assert all(earlier <= later for earlier, later in pairwise(weights))
    assert weights[-1] == 1.0
    loads = [fraction for phase, fraction, text in reports if (phase, text) == ("loading", "load its weights")]
    assert loads[-1] == 1.0
    phases = [phase for phase, _, _ in reports]
    last_load = len(phases) - 1 - phases[::-1].index("loading")
    assert phases.index("downloading") < last_load < phases.index("warming")
    assert done.stderr == "", "nothing is drawn"


def test_progress_of_a_load_is_shown_wherever_one_may_look(tmp_path: Path) -> None:
    release = tmp_path / "release"
    model = {
        "name": "m",
        "model": "tests.stub_models:SlowLoader",
        "device": "cpu",
        "options": {"release": str(release)},
    }
    with Service([model]) as service:
        wait_for(lambda: service.slots()["m/0"]["progress"] == 0.5, "/status shows it")
        slot = service.slots()["m/0"]
        assert (slot["state"], slot["reason"]) == ("loading", "second part")
        shown = headwaiter("status", "--config", service.config_file, cwd=tmp_path)
        assert "loading 50%" in shown.stdout
        (on_page,) = service.http.get("/dashboard/data").json()["status"]["slots"]
        assert on_page["progress"] == 0.5
        assert (
            "loading 50%, second part"
            in service.http.post("/models/m", json={"inputs": 1}, headers={"X-Request-Timeout": "0.2"}).text
        )
        release.touch()
        service.wait_ready()

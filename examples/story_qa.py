"""Story 2: question answering behind one web worker, which neither stops nor loads its model again.

    python -m examples.story_qa                    all four parts, about a minute and a half
    python -m examples.story_qa --part reload      one of: answers, pools, reload

`RobertaForQuestionAnswering` from a directory, in a web worker, started a child in each call, loaded the model again in
the child, and shut the server down when the child was told to end. Here the model has a process of its own, which may
start whatever it likes. Exits with 0 if everything that is claimed was seen.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from examples.made_models import make_apart
from examples.stage import ROOT, Report, Stage, alive, tell_and_exit, wait_for
from examples.story_models import noted

PARTS = ("answers", "pools", "reload")
METHODS = ("fork", "spawn")
AT_ONCE = 8
READY_S = 180.0
CONTEXTS = (
    ("Who owns the red hat?", "The owner of the red hat is Kate, and the hat is on the table."),
    ("Who lives in Paris?", "My name is Joe and I live in Paris, the capital of France."),
    ("How many plates?", "A waiter carries twelve plates at once, and forgets nobody. " * 12),
)
# uvicorn says it in these words when it stops.
SHUTDOWN_WORDS = ("shutting down", "finished server process", "front_stopped")
RELOAD_PATIENCE_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.story_qa", description="Question answering that stays up."
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default: all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="story-") as directory:
        return tell(Path(directory), arguments.part or PARTS, arguments.requests)


def tell(directory: Path, parts: Collection[str], requests: int) -> int:
    report = Report(f"question answering, {requests} requests, {AT_ONCE} at a time, one front worker")
    if "answers" in parts:
        with report.group("a RoBERTa from a local directory", in_full=True):
            tell_answers(report, directory, requests)
    if "pools" in parts:
        for method in METHODS:
            with report.group(f"a model that opens and closes a pool in every call ({method})", in_full=True):
                tell_pools(report, directory, method, requests)
    if "reload" in parts:
        with report.group("editing the web workers' code under --reload", in_full=True):
            tell_reload(report, directory)
    return report.end()


def tell_answers(report: Report, directory: Path, requests: int) -> None:
    model = {
        "name": "qa",
        "model": str(make_apart("roberta-qa", directory / "qa")),
        "task": "question-answering",
        "device": "cpu",
    }
    with Stage([model]) as stage:
        stage.wait_ready(READY_S)
        bodies = [
            {"inputs": {"question": question, "context": context}}
            for question, context in (CONTEXTS[number % len(CONTEXTS)] for number in range(requests))
        ]
        with undisturbed(report, stage, "qa/0", may_have_children=False):
            start_s = time.monotonic()
            answers = stage.post_many("qa", bodies, AT_ONCE)
            report.say(f"{requests} answers in {time.monotonic() - start_s:.1f} s")
        wrong = [
            answer
            for body, answer in zip(bodies, answers, strict=True)
            if body["inputs"]["context"][answer["start"] : answer["end"]] != answer["answer"]
        ]
        report.claim(f"{requests} answers, each a piece of its own context", not wrong, wrong[:3])
        stop(report, stage)


def tell_pools(report: Report, directory: Path, method: str, requests: int) -> None:
    journal = directory / f"{method}.journal"
    model = {
        "name": "pools",
        "model": "examples.story_models:PoolInEachCall",
        "device": "cpu",
        "max_batch_size": 1,
        "options": {"journal": str(journal), "method": method},
    }
    with Stage([model]) as stage:
        stage.wait_ready(READY_S)
        with undisturbed(report, stage, "pools/0", may_have_children=True):
            start_s = time.monotonic()
            answers = stage.post_many("pools", [{"inputs": -number} for number in range(requests)], AT_ONCE)
            took_s = time.monotonic() - start_s
        pools = noted(journal, "pool")
        report.say(f"{requests} answers in {took_s:.1f} s, through {len(pools)} pools")
        report.claim(f"{requests} right answers", answers == list(range(requests)))
        report.claim("one load, whatever the children import", len(noted(journal, "loaded")) == 1)
        stop(report, stage)


def tell_reload(report: Report, directory: Path) -> None:
    """On a copy of the packages: a story does not edit the checkout that it is told from."""
    copy = directory / "packages"
    for package in ("frontend", "shared", "model_worker", "examples"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("headwaiter.py", "supervisord.conf"):
        shutil.copy(ROOT / file, copy)
    journal = directory / "reload.journal"
    model = {
        "name": "pools",
        "model": "examples.story_models:PoolInEachCall",
        "device": "cpu",
        "options": {"journal": str(journal), "method": "fork"},
    }
    with Stage([model], packages=copy, http={"reload": True}) as stage:
        stage.wait_ready(READY_S)
        fronts, slot = stage.front_workers(), stage.slots()["pools/0"]
        source = copy / "frontend" / "app.py"
        source.write_text(source.read_text() + "\n# Touched.\n")
        start_s = time.monotonic()
        wait_for(lambda: set(stage.front_workers()).isdisjoint(fronts), "another front worker", RELOAD_PATIENCE_S)
        wait_for(stage.all_ready, "the new front worker answers", RELOAD_PATIENCE_S)
        report.say(f"the new front worker answered {time.monotonic() - start_s:.1f} s after the file was written")
        report.claim("another front worker", bool(stage.front_workers()), fronts)
        after = stage.slots()["pools/0"]
        report.claim("the same model process, still loaded", after["pid"] == slot["pid"], after)
        report.claim("one load", len(noted(journal, "loaded")) == 1, noted(journal, "loaded"))
        report.claim("it answers", stage.post("pools", {"inputs": -1}) == 1)
        stop(report, stage)


@contextmanager
def undisturbed(report: Report, stage: Stage, slot: str, *, may_have_children: bool) -> Iterator[None]:
    """What must be the same before and after: who speaks HTTP, who holds the model, and how often it was loaded."""
    fronts, before = stage.front_workers(), stage.slots()[slot]
    watch = ChildWatch([*fronts] if may_have_children else [*fronts, before["pid"]])
    log_length = len(stage.log())
    with watch:
        yield
    after = stage.slots()[slot]
    report.claim("the same front worker", stage.front_workers() == fronts and len(fronts) == 1, stage.front_workers())
    report.claim("the same model process", after["pid"] == before["pid"], after)
    report.claim("one load, no restart", (after["loads"], after["restarts"]) == (1, 0), after)
    who = "the front worker" if may_have_children else "the front worker or the model process"
    report.claim(f"no child of {who} at any of {watch.looks} looks", not watch.seen, watch.seen)
    if may_have_children:
        left = lasting_children(before["pid"])
        report.claim("no child of the model process is left", not left, left)
    said = stage.log()[log_length:].lower()
    found = [words for words in SHUTDOWN_WORDS if words in said]
    report.claim("no word of a shutdown in the log", not found, found)


class ChildWatch(threading.Thread):
    """Looks for children of the processes again and again, until the end of its `with` block."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(name="child-watch")
        self.seen: set[str] = set()
        self.looks = 0
        self._pids = pids
        self._over = threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.01):
            self.looks += 1
            for pid in self._pids:
                self.seen.update(lasting_children(pid))


def lasting_children(pid: int) -> list[str]:
    """Command lines of its children, without multiprocessing's own bookkeeper, which stays as long as its parent."""
    try:
        children = [" ".join(child.cmdline()) for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []
    return [words for words in children if words and "resource_tracker" not in words]


def stop(report: Report, stage: Stage) -> None:
    family = [process.pid for process in stage.family()]
    code = stage.stop()
    left = [pid for pid in family if alive(pid)]
    report.claim("SIGTERM: everything ends, with code 0", code == 0 and not left, f"code {code}, left {left}")


if __name__ == "__main__":
    tell_and_exit("story_qa", main)

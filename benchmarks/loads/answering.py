"""Question answering with a model of RoBERTa-base's shape, contexts of 20 to 400 words, against its own limit."""

from __future__ import annotations

from benchmarks import inputs, shapes
from benchmarks.load_generator import in_turn, lanes, rates
from benchmarks.loads.embedding import OFFLINE
from benchmarks.offline import offline
from benchmarks.run import Run
from benchmarks.systems import HEADWAITER, headwaiter
from model_worker.runtimes.tasks import known_tasks

LOAD = "answering"
TASK = "question-answering"
CONCURRENCY = 32
WINDOW_S = 20.0
WARM_UP_S = 5.0


def measure(run: Run) -> None:
    if TASK not in known_tasks():
        run.leave_out(LOAD, f"this headwaiter has no runtime for the task {TASK!r}")
        return
    run.say(f"{LOAD}: writes the model, once")
    directory = str(shapes.roberta_base("RobertaForQuestionAnswering", layers=2 if run.quick else 12))
    entries = inputs.questions()
    bodies = inputs.bodies(entries)
    model = {"name": "qa", "model": directory, "task": TASK, "device": "cpu"}
    system = headwaiter([model], name=HEADWAITER, sample=entries[0])
    seconds = run.seconds(WINDOW_S)
    with offline(TASK, directory) as limit, run.all_running(LOAD, [system]) as endpoints:
        for number in range(1, run.rounds + 1):
            run.record(LOAD, f"c={CONCURRENCY}", OFFLINE, number, limit.ask("limit"))
            plan = [in_turn(range(len(bodies)))] * CONCURRENCY
            warm_up_s = run.seconds(WARM_UP_S)
            exchanges = lanes(endpoints[system].port, system.path, bodies, plan, seconds=seconds, warm_up_s=warm_up_s)
            run.record(LOAD, f"c={CONCURRENCY}", HEADWAITER, number, rates(exchanges, seconds))

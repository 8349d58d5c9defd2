"""The model process: one incarnation of one slot, from its first instruction to its exit.

Owns the order of its life: guards, HELLO, load, warm-up, READY, batches, exit. The broker hears of each step, and of
the cause in one line if one fails. Refuses to know the broker: it speaks the wire protocol and nothing else.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from model_worker.launchers import guard_child
from model_worker.replica import accelerator, faults, returns
from model_worker.replica.calibration import calibrate
from model_worker.replica.exit_codes import ReplicaExit
from model_worker.replica.forward_stage import Progress
from model_worker.replica.host_stages import Limits
from model_worker.replica.link import BrokerLink
from model_worker.replica.stages import Stages, run_guarded
from model_worker.runtimes import registry
from model_worker.runtimes.base import Model
from model_worker.specs import ReplicaSpec
from shared import logs, wire
from shared.errors import LoadError
from shared.logs import log_event
from shared.messages import Phase, State
from shared.tracing import start as start_tracing

if TYPE_CHECKING:
    from model_worker.replica.spans import ReplicaSpans

logger = logging.getLogger("model_worker")

# More often than this nobody reads it, and a loader may report every tensor.
REPORT_S = 0.1

Report = Callable[..., None]
"""Sends a phase, and optionally how far it is and in a few words what it does."""


def run(spec: ReplicaSpec) -> None:
    """The target of `multiprocessing`'s spawn; does not return: the process ends with a code of `ReplicaExit`."""
    guard_child(spec)
    # Not through `sys.stderr`, which the model's code may close or replace: then no cause of any end could be told.
    own_stderr = open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - for good
    logs.configure(spec.log_level, spec.log_format, program=spec.slot, stream=own_stderr)
    progress = Progress()
    link = BrokerLink(spec, progress)
    link.start()
    run_guarded(lambda: _live(spec, link, progress), link.leave)


def _live(spec: ReplicaSpec, link: BrokerLink, progress: Progress) -> None:
    started_s = time.monotonic()
    report = partial(State, spec.slot, spec.incarnation)
    try:
        model, limits, origin = bring_up(spec, lambda *how_far: link.state(report(*how_far)))
        ready = report(
            Phase.READY,
            mixes_parameters=bool(model.mixes_parameters),
            max_batch_cost=limits.max_batch_cost,
            max_batch_size=limits.max_batch_size,
            choices={**returns.description_of(model), **_budget(model, limits, origin)},
            concurrency=limits.concurrency(model),
            pads=bool(model.pads),
        )
        wire.check(ready)
    except BaseException as error:
        cause = faults.describe_with_cause(error)
        permanent = isinstance(error, LoadError) and error.permanent
        link.state(report(Phase.FAILED, detail=cause, permanent=permanent))
        link.leave(ReplicaExit.LOAD_FAILED, cause, error)
    progress.sample_memory()
    model.report_step = progress.end_part
    spans = _spans(spec) if spec.tracing else None
    if spans is not None:
        link.before_exit = spans.close
    stages = Stages(model, limits, link, progress, link.leave, spans)
    link.serve(stages)
    link.state(ready)
    seconds = round(time.monotonic() - started_s, 3)
    log_event(logger, "info", "model_ready", slot=spec.slot, seconds=seconds, choices=ready.choices)
    stages.serve()
    link.wait()


def _spans(spec: ReplicaSpec) -> ReplicaSpans:
    """Imported here: a process that does not trace loads nothing for it."""
    tracing = start_tracing(f"{spec.slot}-{spec.incarnation}")
    from model_worker.replica.spans import ReplicaSpans

    return ReplicaSpans(tracing, spec.slot, spec.runtime.name)


def bring_up(spec: ReplicaSpec, report: Report) -> tuple[Model, Limits, str]:
    """Builds, loads, measures and warms the model; returns it with the limits that its batches must keep, and where
    that of their cost comes from. Main thread only.

    Raises:
        LoadError: the model or its warm-up refused.
        BaseException: whatever the model's own code raised.
    """
    report(Phase.LOADING)
    model = registry.build(spec.runtime)
    model.report_progress = _Reporter(report)
    accelerator.set_threads(spec.threads)
    model.max_batch_size = spec.max_batch_size
    started_s = time.monotonic()
    model.load(spec.torch_device)
    load_s = time.monotonic() - started_s
    # Once more for a model that imported torch only now.
    accelerator.set_threads(spec.threads)
    report(Phase.WARMING)
    # A model that splits a request's many texts by itself keeps the same budget.
    model.max_batch_cost = spec.max_batch_cost or model.max_batch_cost
    limits, origin = _warm_up_and_measure(spec, model, load_s)
    model.max_batch_cost, model.max_batch_size = limits.max_batch_cost, limits.max_batch_size
    # What was made so far lives as long as the process: no later collection needs to look through it.
    gc.collect()
    gc.freeze()
    return model, limits, origin


def _warm_up_and_measure(spec: ReplicaSpec, model: Model, load_s: float) -> tuple[Limits, str]:
    """What a batch may hold, and where its cost comes from: the configuration, a calibration, or the model itself."""
    limits = warm_up(model, Limits(model.max_batch_cost, spec.max_batch_size))
    if spec.max_batch_cost or model.continuous_batching:
        return limits, "configured"
    model.max_batch_cost = limits.max_batch_cost
    try:
        found = calibrate(model, limits, load_s)
    except Exception as error:
        raise LoadError(f"calibration failed: {faults.describe_with_cause(error)}") from error
    if found.max_batch_cost > limits.max_batch_cost:
        # Everything that was made ready so far is smaller.
        limits = warm_up(model, Limits(found.max_batch_cost, limits.max_batch_size))
    elif found.max_batch_cost:
        limits = Limits(found.max_batch_cost, limits.max_batch_size)
    fields = {"slot": spec.slot, "max_batch_cost": limits.max_batch_cost, "how": found.text}
    log_event(logger, "info", "batch_cost_chosen", **fields)
    return limits, found.text


def _budget(model: Model, limits: Limits, origin: str) -> dict[str, object]:
    """The limit of a batch's cost, for `headwaiter status`. Continuous batching knows none."""
    if model.continuous_batching:
        return {}
    return {"max_batch_cost": limits.max_batch_cost, "max_batch_cost_origin": origin}


class _Reporter:
    """Turns what a model says about its load into reports, and thins them out."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._next_s = 0.0
        self._text = ""

    def __call__(self, fraction: float, text: str) -> None:
        now_s = time.monotonic()
        if text == self._text and now_s < self._next_s and fraction < 1.0:
            return
        self._next_s = now_s + REPORT_S
        self._text = text
        phase = Phase.DOWNLOADING if text.startswith("download") else Phase.LOADING
        self._report(phase, fraction if 0.0 <= fraction <= 1.0 else -1.0, faults.one_line(text))


def warm_up(model: Model, limits: Limits) -> Limits:
    """Runs the model's examples through all three stages: the first one, the largest, as the fullest batch allowed.

    If that does not fit into memory, smaller batches are tried, and what fits becomes the limit.

    Raises:
        LoadError: an example failed; the first real request would have.
    """
    for number, (inputs, parameters) in enumerate(returns.examples_of(model)):
        try:
            cost = returns.cost_of(model, model.prepare(inputs, dict(parameters)))
            count = _fullest(0 if model.continuous_batching else cost, limits) if number == 0 else 1
            fitting = _largest_that_fits(model, inputs, parameters, count)
        except Exception as error:
            raise LoadError(f"warm-up failed: {faults.describe_with_cause(error)}") from error
        if fitting < count:
            if model.continuous_batching:
                limits = Limits(limits.max_batch_cost, fitting)
            else:
                limits = Limits(max(1, cost) * fitting, limits.max_batch_size)
            log_event(
                logger,
                "warning",
                "batch_limit_lowered",
                reason="out of memory",
                max_batch_cost=limits.max_batch_cost,
                max_batch_size=limits.max_batch_size,
            )
    return limits


def _fullest(cost: int, limits: Limits) -> int:
    sizes = [limits.max_batch_size or 1]
    if limits.max_batch_cost and cost:
        sizes.append(limits.max_batch_cost // cost)
    return max(1, min(sizes))


def _largest_that_fits(model: Model, inputs: object, parameters: dict[str, object], count: int) -> int:
    while True:
        try:
            _run_stages(model, [model.prepare(inputs, dict(parameters)) for _ in range(count)])
        except Exception as error:
            if count == 1 or not faults.is_out_of_memory(error):
                raise
        else:
            return count
        # Only here: until the error is gone, its stack keeps the tensors of the failed forward alive.
        accelerator.release_memory()
        count //= 2


def _run_stages(model: Model, items: list[object]) -> None:
    if model.continuous_batching:
        _run_steps(model, items)
        return
    outputs = returns.one_output_per_item(model, items)
    accelerator.synchronize()
    for output in outputs:
        if isinstance(output, Exception):
            raise output
        if isinstance(output, Iterator):
            # One step is as good as all of them: the shapes that follow are no larger.
            output = next(output, None)
        returns.packed(model, model.finish(output))


def _run_steps(model: Model, items: list[object]) -> None:
    """As many of the items as there is room for, to their ends."""
    joined: dict[int, object] = {}
    for item in items:
        if not joined or (id(item) not in joined and model.can_join(item)):
            model.join(item)
            joined[id(item)] = item
    try:
        while joined:
            for progress in returns.progress_of(model):
                if progress.ended:
                    del joined[id(progress.item)]
                if isinstance(progress.output, Exception):
                    raise progress.output
                if progress.piece is not None:
                    returns.packed(model, model.finish(progress.piece))
                if progress.ended and progress.output is not None:
                    returns.packed(model, model.finish(progress.output))
    except BaseException:
        for item in joined.values():
            model.leave(item)
        raise
    accelerator.synchronize()

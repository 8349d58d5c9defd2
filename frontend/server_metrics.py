"""The model server's numbers as Prometheus families, made from one `Snapshot`.

Owns the names and help texts of these families. Counts nothing itself: the model server does, for all fronts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.messages import ModelCounters, SlotState, Snapshot


class ServerCollector(Collector):
    """Families for one scrape; `snapshot` is None if the model server did not answer it."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        up = "Whether the model server answers."
        yield GaugeMetricFamily("headwaiter_model_server_up", up, value=0 if self._snapshot is None else 1)
        if self._snapshot is not None:
            yield from _server(self._snapshot)
            yield from _models(self._snapshot)
            yield from _workers(self._snapshot.slots)
            yield from _totals(self._snapshot.counters)


def _server(snapshot: Snapshot) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "headwaiter_model_server_uptime_seconds", "Time since the model server was started.", value=snapshot.uptime_s
    )
    yield GaugeMetricFamily("headwaiter_fronts", "Front workers that the model server knows.", snapshot.fronts)
    yield GaugeMetricFamily(
        "headwaiter_clients", "Clients in other programs that the model server knows.", snapshot.clients
    )
    yield CounterMetricFamily(
        "headwaiter_malformed_messages", "Messages that the model server could not read.", snapshot.malformed
    )


def _models(snapshot: Snapshot) -> Iterator[Metric]:
    depth = GaugeMetricFamily("headwaiter_queue_depth", "Requests that wait for a model.", labels=("model",))
    ready = GaugeMetricFamily("headwaiter_replicas_ready", "Replicas of a model that take work.", labels=("model",))
    total = GaugeMetricFamily("headwaiter_replicas", "Replicas of a model, by plan.", labels=("model",))
    for model in snapshot.models:
        depth.add_metric((model.name,), model.queued)
        ready.add_metric((model.name,), model.replicas_ready)
        total.add_metric((model.name,), model.replicas_total)
    yield from (depth, ready, total)


def _workers(slots: tuple[SlotState, ...]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "headwaiter_worker_up", "Whether the model process of a slot is ready.", labels=("model", "slot", "device")
    )
    age = GaugeMetricFamily(
        "headwaiter_worker_heartbeat_age_seconds",
        "Time since a model process was last heard.",
        labels=("model", "slot"),
    )
    memory = GaugeMetricFamily(
        "headwaiter_worker_memory_bytes", "Memory that a model process holds on its device.", labels=("model", "slot")
    )
    steps = CounterMetricFamily(
        "headwaiter_worker_steps", "Forward steps of a model process since its start.", labels=("model", "slot")
    )
    items = CounterMetricFamily(
        "headwaiter_worker_step_items",
        "Items in the steps of a model process that batches continuously: about the tokens that it made.",
        labels=("model", "slot"),
    )
    for slot in slots:
        steps.add_metric((slot.model, slot.slot), slot.steps)
        items.add_metric((slot.model, slot.slot), slot.step_items)
        up.add_metric((slot.model, slot.slot, slot.device), float(slot.state == "ready"))
        if slot.heard_ms_ago >= 0:
            age.add_metric((slot.model, slot.slot), slot.heard_ms_ago / 1000)
        memory.add_metric((slot.model, slot.slot), slot.memory_bytes)
    yield from (up, age, memory, steps, items)


def _totals(counters: tuple[ModelCounters, ...]) -> Iterator[Metric]:
    yield _histogram(
        "headwaiter_batch_size",
        "Requests in a batch.",
        counters,
        lambda model: (model.batch_size_buckets, float(model.batch_size_sum)),
    )
    yield _histogram(
        "headwaiter_queue_wait_seconds",
        "Time from a request's arrival at the model server to the start of its batch.",
        counters,
        lambda model: (model.queue_s_buckets, model.queue_s_sum),
    )
    yield _histogram(
        "headwaiter_inference_duration_seconds",
        "Time that a model took for a request.",
        counters,
        lambda model: (model.forward_s_buckets, model.forward_s_sum),
    )
    admitted = CounterMetricFamily("headwaiter_admitted", "Requests taken into a model's queue.", labels=("model",))
    retried = CounterMetricFamily("headwaiter_retried", "Requests given to a model once more.", labels=("model",))
    for model in counters:
        admitted.add_metric((model.model,), model.admitted)
        retried.add_metric((model.model,), model.retried)
    yield from (admitted, retried)
    yield _by_reason(
        "headwaiter_ended", "Admitted requests that ended, by how.", "code", counters, lambda model: model.ended
    )
    yield _by_reason(
        "headwaiter_rejected", "Requests refused on arrival.", "reason", counters, lambda model: model.rejected
    )
    yield _by_reason(
        "headwaiter_worker_restarts",
        "Model processes that were replaced, by what ended them.",
        "reason",
        counters,
        lambda model: model.restarts,
    )


def _histogram(
    name: str,
    text: str,
    counters: tuple[ModelCounters, ...],
    of: Callable[[ModelCounters], tuple[Mapping[str, int], float]],
) -> Metric:
    """`of` gives cumulative counts by upper bound, the last one `+Inf`, and the sum."""
    family = HistogramMetricFamily(name, text, labels=("model",))
    for model in counters:
        buckets, total = of(model)
        family.add_metric(
            (model.model,), buckets=[(bound, float(count)) for bound, count in buckets.items()], sum_value=total
        )
    return family


def _by_reason(
    name: str,
    text: str,
    label: str,
    counters: tuple[ModelCounters, ...],
    of: Callable[[ModelCounters], Mapping[str, int]],
) -> Metric:
    family = CounterMetricFamily(name, text, labels=("model", label))
    for model in counters:
        for reason, count in of(model).items():
            family.add_metric((model.model, reason), count)
    return family

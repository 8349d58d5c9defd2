"""The scale study: it loses nothing, is the same each time, and the document shows what its results say."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from benchmarks.report import placed
from benchmarks.scale import hops, study
from benchmarks.scale.__main__ import CHART, DOCUMENT, PUBLISHED
from benchmarks.scale.cluster import Cluster, Rates, Size
from benchmarks.scale.figures import draw, needs, render

RESULTS = json.loads(PUBLISHED.read_text())
SMALL = Size(gpus=6, fronts=3, queued=200, load_s=3.0)


def silent(line: str) -> None:
    """Progress is for those who wait."""


def test_the_document_shows_what_the_committed_results_say() -> None:
    document = DOCUMENT.read_text()
    assert placed(document, render(RESULTS)) == document, "run: python -m benchmarks.scale --publish"
    assert CHART.read_text() == draw(RESULTS)


def test_counts_of_the_committed_results_are_those_of_this_core() -> None:
    gpus = study.DEATH_GPUS[0]
    assert study.death(gpus) == RESULTS["deaths"][str(gpus)], "run: python -m benchmarks.scale"


def test_nothing_is_lost_in_the_committed_results() -> None:
    assert [held["facts"]["lost"] for held in RESULTS["failing"].values()] == [0, 0]
    assert RESULTS["failing"][str(study.FACTOR)]["facts"]["processes_died"] > 0


def test_a_small_cluster_with_many_failures_is_the_same_each_time_and_loses_nothing() -> None:
    first, second = (study.failing(20_000.0, SMALL, 30.0, silent) for _ in range(2))
    assert first == second
    facts = first["facts"]
    assert facts["lost"] == 0
    assert facts["processes_died"] > 0
    assert facts["ended"]["ok"] > 100


def test_every_workload_keeps_its_gpus_busy_and_its_queue() -> None:
    for workload, _ in study.LARGE_RUNS:
        cluster = Cluster(workload, SMALL, Rates())
        cluster.fill()
        assert len(cluster.broker.models["m"].backlog) == SMALL.queued
        held = [sum(len(batch.open) for batch in replica.batches()) for replica in cluster.broker.keeper.replicas()]
        assert held == [workload.concurrency or 2 * workload.batch_size] * SMALL.gpus
        cluster.run(0.5)
        cluster.broker.validate(cluster.now_s)
        assert bool(cluster.facts["pieces relayed"]) == bool(workload.pieces_per_s)


def test_one_death_leaves_most_of_a_cluster_at_work() -> None:
    for held in RESULTS["deaths"].values():
        assert held["facts"]["worst"] > 0.4


def test_a_hop_costs_more_for_a_message_than_for_a_record() -> None:
    costs = hops.measure()
    assert set(costs) == {"submits", "batches", "results", "replies", "chunks"}
    assert all(cost["message_us"] > cost["record_us"] > 0 for cost in costs.values())


def test_the_chart_is_well_formed_and_has_colours_for_dark_pages() -> None:
    root = ElementTree.fromstring(CHART.read_text())
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {need.name for need in needs(RESULTS)} <= set(texts)
    assert "prefers-color-scheme: dark" in CHART.read_text()

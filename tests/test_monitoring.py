"""The dashboard and the alert rules of docs/monitoring ask for what `/metrics` really has, and the rules were tried."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fronts import Front
from tests.stub_broker import Answer, Piece, Request, Step, StubBroker
from tests.topology import ROOT

DIRECTORY = ROOT / "docs" / "monitoring"
# What Prometheus adds to every series, and what the dashboard's variables stand for.
ADDED_LABELS = {"instance", "job"}
METRIC = re.compile(r"(headwaiter_\w+)(?:{([^}]*)})?")
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed; it comes with Prometheus"
)


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """The labels of each series that a scrape shows."""
    with Front() as front, StubBroker(front.run_dir, behave=generate) as broker:
        front.wait_ready()
        assert front.post("/models/echo", json={"inputs": "x", "stream": True}).status_code == 200
        assert broker.requests
        text = front.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def generate(request: Request) -> list[Step]:
    told = {"generated_text": "ab", "prompt_tokens": 3, "generated_tokens": 2}
    return [*(Piece(value={"text": text}, index=index) for index, text in enumerate("ab")), Answer(value=told)]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DIRECTORY / "grafana.json").read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str, list[str]]]:
    """Where each stands, and the labels that are shown of what it gives."""
    for panel in panels():
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"])
    rules = (DIRECTORY / "alerts.yml").read_text().split("- alert: ")[1:]
    assert rules
    for rule in rules:
        name, _, rest = rule.partition("\n")
        expression = rest.partition("expr:")[2].partition("labels:")[0]
        yield name, expression, re.findall(r"\$labels\.(\w+)", rest)


def test_every_name_and_label_is_one_that_a_scrape_shows(exposed: dict[str, set[str]]) -> None:
    for place, expression, shown in expressions():
        metrics = METRIC.findall(expression)
        assert metrics, place
        allowed = set(ADDED_LABELS)
        for name, matchers in metrics:
            assert name in exposed, f"{place}: {name}"
            matched = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
            assert matched <= exposed[name] | ADDED_LABELS, f"{place}: {name}{{{matchers}}}"
            allowed |= exposed[name]
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        assert grouped <= allowed, f"{place}: by {grouped}"
        assert set(shown) <= (grouped or allowed), f"{place}: {shown}"


def test_tokens_and_the_wait_for_the_first_are_counted() -> None:
    with Front() as front, StubBroker(front.run_dir, behave=generate) as broker:
        front.wait_ready()
        for stream in (True, True, False):
            assert front.post("/models/echo", json={"inputs": "x", "stream": stream}).status_code == 200
            # Whole answers have no pieces.
            broker.answer_with(Answer(value={"prompt_tokens": 10, "generated_tokens": 20}))
        broker.answer_with(Answer(value={"prompt_tokens": "many"}))
        assert front.ask("x").status_code == 200
        text = front.get("/metrics").text
    assert 'headwaiter_tokens_total{direction="in",model="echo"} 23.0' in text
    assert 'headwaiter_tokens_total{direction="out",model="echo"} 42.0' in text
    assert 'headwaiter_time_to_first_token_seconds_count{model="echo"} 1.0' in text


def test_the_document_tells_of_every_family(exposed: dict[str, set[str]]) -> None:
    told = set(re.findall(r"`(headwaiter_\w+)`", (ROOT / "docs" / "monitoring.md").read_text()))
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exposed}
    assert families == told


def test_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads((DIRECTORY / "grafana.json").read_text())
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    assert "id" not in dashboard, "which is given by the Grafana that it is imported into"
    places = [tuple(panel["gridPos"].values()) for panel in panels()]
    assert len(places) == len(set(places))
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels())
    variables = {entry["name"] for entry in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", json.dumps(panels()))) - {"__rate_interval"} <= variables
    assert set(re.findall(r"\${(\w+)}", json.dumps(panels()))) == {"datasource"}


@promtool
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")])
def test_rules_are_valid_and_raise_what_they_should(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=DIRECTORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@promtool
def test_every_expression_of_the_dashboard_is_valid(tmp_path: Path) -> None:
    lines = ["groups:", "  - name: dashboard", "    rules:"]
    for number, (_, expression, _) in enumerate(expressions()):
        if "$" in expression:
            plain = re.sub(r"\$__rate_interval", "5m", expression).replace("$", "")
            lines += [f"      - record: expression:{number}", f"        expr: {json.dumps(plain)}"]
    (tmp_path / "rules.yml").write_text("\n".join(lines) + "\n")
    done = subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_was_tried() -> None:
    alerts = re.findall(r"- alert: (\w+)", (DIRECTORY / "alerts.yml").read_text())
    tried = (DIRECTORY / "alerts.test.yml").read_text()
    for alert in alerts:
        assert re.search(rf"alertname: {alert}, exp_alerts: \[\]", tried), f"{alert} stays silent where all is well"
        assert re.search(rf"alertname: {alert}\n\s+exp_alerts:\n\s+- exp_labels", tried), f"{alert} is raised"

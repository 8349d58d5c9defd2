"""The documents say what is true: their links lead somewhere, their examples run, their tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.topology import ROOT, Service

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(
        file
        for folder in ("docs", "shared", "tests", "examples", "benchmarks")
        for file in (ROOT / folder).rglob("*.md")
    ),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_that_exist(document: Path) -> None:
    for target, place in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", document.read_text()):
        if "://" in target:
            continue
        file = document.parent / target if target else document
        assert file.exists(), f"{document.name} links to {target}"
        assert file.resolve().is_relative_to(ROOT), f"{document.name} links to {target}, which is not of this project"
        if place and file.suffix == ".md":
            assert place in anchors(file), f"{document.name} links to {target}#{place}"


def anchors(document: Path) -> set[str]:
    """What a link may name behind `#`: each heading, as the web shows it, in lower case and with hyphens."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", ["docs/architecture.md", "tests/README.md"])
def test_each_promise_names_tests_that_exist(document: str) -> None:
    promised = set(re.findall(r"`(test_\w+)`", (ROOT / document).read_text()))
    assert promised
    existing = {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert promised <= existing, f"{document} names {sorted(promised - existing)}"


def test_the_example_that_steps_is_the_documents_and_answers_whole_and_in_pieces() -> None:
    document = (ROOT / "docs" / "custom-models.md").read_text()
    match = re.search(r"```python\n(from headwaiter import Model, Progress\n.*?)```", document, re.DOTALL)
    assert match
    assert without_types((ROOT / "examples" / "counter.py").read_text()) == without_types(match.group(1))
    model = {"name": "counter", "model": "examples.counter:Counter", "device": "cpu", "max_batch_size": 4}
    with Service([model]) as service:
        service.wait_ready()
        # More than share a step: some join when others have ended.
        waiting = [service.ask_later("counter", to) for to in (3, 1, 40, 5, 2, 7)]
        assert [later.result().json() for later in waiting] == [list(range(1, to + 1)) for to in (3, 1, 40, 5, 2, 7)]
        stream = service.http.post("/models/counter", json={"inputs": 3, "stream": True}).text
        assert re.findall(r"data: (.+)", stream) == ["1", "2", "3", "[1,2,3]"]
        assert service.ask("counter", "many").status_code == 500


def without_types(source: str) -> str:
    """The class in a program, as people write it who do not write types."""
    [found] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            node.body = [
                ast.Assign([line.target], line.value, lineno=0)
                if isinstance(line, ast.AnnAssign) and line.value
                else line
                for line in node.body
            ]
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(found)


def test_the_example_model_answers_as_the_document_says() -> None:
    document = (ROOT / "docs" / "custom-models.md").read_text()
    match = re.search(r"curl \S+/models/sentiment -d '(.+)'\n(.+)\n", document)
    assert match
    model = {
        "name": "sentiment",
        "model": "examples.sentiment:Sentiment",
        "device": "cpu",
        "options": {"words": "good great splendid"},
    }
    with Service([model]) as service:
        service.wait_ready()
        answer = service.http.post("/models/sentiment", content=match.group(1))
        assert answer.status_code == 200
        assert answer.text == match.group(2)

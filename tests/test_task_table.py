"""The table of tasks says what the program does."""

from __future__ import annotations

import pytest

from model_worker.runtimes import tasks
from tests import task_cases, task_table


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning")
def test_the_table_of_tasks_is_what_the_models_answer() -> None:
    written = task_table.DOCUMENT.read_text()
    assert task_table.written() == written, "run python -m tests.task_table"
    named = {case.task for case in (*task_cases.CASES, *task_cases.OWN_RUNTIMES)} | set(task_cases.UNTRIED)
    assert named == set(tasks.known_tasks()) - set(tasks.ALIASES)

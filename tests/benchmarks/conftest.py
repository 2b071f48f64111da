"""Benchmarks are no part of the package: their tests are slow ones, but for the pages' own tables and plots."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main

HERE = Path(__file__).parent
QUICK = {"test_tables.py", "test_plots.py"}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def measured(tmp_path):
    """``measured(name, word, …, status=0)`` runs a benchmark, which ends so; its rows by variant."""

    def rows(*words, status=0):
        path = tmp_path / "rows.json"
        assert main([*words, "--json", str(path)]) == status
        return {row["variant"]: row for row in json.loads(path.read_text())["rows"]}

    return rows

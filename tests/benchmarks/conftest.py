import json

import pytest

from benchmarks.__main__ import main


@pytest.fixture
def measured(tmp_path):
    """``measured(name, word, …, status=0)`` runs a benchmark, which ends so; its rows by variant."""

    def rows(*words, status=0):
        path = tmp_path / "rows.json"
        assert main([*words, "--json", str(path)]) == status
        return {row["variant"]: row for row in json.loads(path.read_text())["rows"]}

    return rows

"""Rows: what is written and read, and the table."""

import json

import pytest
from rich.console import Console

from benchmarks import rows
from benchmarks.rows import Row, columns, print_table, ratios, read_rows, write_rows


def test_what_is_written_is_read_again_without_private_fields(tmp_path):
    path = tmp_path / "rows.json"
    write_rows([Row(variant="a", total_s=0.5, _group="g")], path, "the command", ["lightning_llm/ops"])
    record = json.loads(path.read_text())
    assert (record["command"], record["files"]) == ("the command", ["lightning_llm/ops"])
    (row,) = read_rows(path)
    assert vars(row) == {"variant": "a", "total_s": 0.5}
    assert row.peak_bytes is None


def test_rows_of_a_copy_without_git_name_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "commit_of_package", lambda: None)
    for commit in (None, "c0ffee"):
        rows.write_rows([], tmp_path / "rows.json", "x", commit=commit)
        assert json.loads((tmp_path / "rows.json").read_text())["commit"] == commit


def test_a_table_for_each_group_leaves_empty_columns_out(capsys):
    measured = [Row(variant="a", total_s=0.0125, _group="first"), Row(variant="b", tokens_per_s=2000, _group="second")]
    print_table(measured, Console(width=80), columns("ms", "tokens/s"))
    first, second = capsys.readouterr().out.split("second")
    assert "12.50" in first
    assert "tokens/s" not in first
    assert "2,000" in second
    assert "ms" not in second


def test_ratios_are_taken_within_each_round():
    found = ratios([2.0, 30.0, 8.0], [1.0, 10.0, 2.0])
    assert found["ratio"] == 3
    assert found["ratio_p20"] == pytest.approx(2.4)
    assert found["ratio_p80"] == pytest.approx(3.6)

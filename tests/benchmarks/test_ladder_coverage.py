"""The simulated coverage of extrapolated intervals: what is counted, and when it fails."""

from functools import partial

import pytest

from benchmarks import ladder


@pytest.fixture
def rows_of(measured, monkeypatch):
    monkeypatch.setattr(ladder, "DRAWS", 240)
    return partial(measured, "ladder", "--shapes", "coverage")


def test_smooth_curves_are_covered_and_a_bend_is_not(rows_of, monkeypatch):
    monkeypatch.setattr(ladder, "GATE", (0.75, 1.0))  # so few draws
    monkeypatch.setattr(ladder, "CURVES", {"linear": lambda x: -0.03 + 0.006 * x})
    rows = rows_of()
    assert rows["linear, 4 times the compute"]["covered"] > 0.8
    assert rows["linear, 4 times the compute"]["promised"] > 0.8
    assert rows["linear, 16 times the compute"]["half_width"] > rows["linear, 4 times the compute"]["half_width"] > 0
    assert rows["bends after the third size, 16 times the compute"]["covered"] < 0.7
    assert (
        rows["linear, 4 times the compute"]["lowest"]
        <= rows["linear, 4 times the compute"]["covered"]
        <= rows["linear, 4 times the compute"]["highest"]
    )


def test_intervals_that_do_not_cover_fail(rows_of, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "CURVES", {"bend": ladder.bend})
    rows_of(status=2)
    assert "bend, 16 times: " in capsys.readouterr().err

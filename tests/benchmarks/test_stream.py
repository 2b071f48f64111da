"""The bench of the stream: shares of useless and of true ideas, and when it fails."""

from functools import partial

import numpy as np
import pytest

from benchmarks import stream
from benchmarks.__main__ import main


@pytest.fixture
def rows_of(measured, monkeypatch):
    monkeypatch.setattr(stream, "STREAMS", 3)
    monkeypatch.setattr(stream, "IDEAS", 20)
    monkeypatch.setattr(stream, "TRUE", 4)
    return partial(measured, "stream")


def test_the_rule_stands_beside_keeping_whatever_is_lower(rows_of):
    rows = rows_of("--shapes", "useless", "true")
    assert rows["normal; the rule"]["any"] == 0
    assert rows["normal; keep if one pair is lower"]["any"] == 1
    assert 4 <= rows["normal; the rule"]["pairs"] < 8
    assert rows["2 sd; the rule"]["power"] > 0.8
    assert rows["2 sd; keep if one pair is lower"]["false"] > 0.5


def test_adoptions_of_useless_ideas_fail(rows_of, monkeypatch, capsys):
    monkeypatch.setitem(stream.NOISE, "normal", lambda rng, n: rng.standard_normal(n) - 3)
    rows_of("--shapes", "useless", status=2)
    assert "normal: 100.0% of streams have an adoption" in capsys.readouterr().err
    assert main(["stream", "--shapes", "luck"]) == 2
    assert "there are useless, true" in capsys.readouterr().err


@pytest.mark.parametrize("name", stream.NOISE)
def test_noise_has_mean_0_and_standard_deviation_1(name):
    drawn = stream.NOISE[name](np.random.default_rng(0), 400_000)
    assert drawn.mean() == pytest.approx(0, abs=0.01)
    assert drawn.std() == pytest.approx(1, abs=0.03)

"""The bench of the stream: shares of useless and of true ideas, and when it fails."""

import json
from functools import partial

import numpy as np
import pytest
from scipy import stats

from benchmarks import stream
from benchmarks.__main__ import main
from lightning_llm.statistics.batch import POWER as BATCH_POWER
from lightning_llm.statistics.stream import CONFIRMED_AFTER, POWER, THOROUGH
from tests.ablate.test_experiment import ROOT
from tests.benchmarks.test_smoke import NO_BARS


@pytest.fixture
def rows_of(measured, monkeypatch):
    monkeypatch.setattr(stream, "STREAMS", 3)
    monkeypatch.setattr(stream, "IDEAS", 20)
    monkeypatch.setattr(stream, "TRUE", 4)
    return partial(measured, "stream")


def test_the_rule_stands_beside_keeping_whatever_is_lower(rows_of, monkeypatch):
    for bar, value in NO_BARS.items():
        monkeypatch.setattr(stream, bar, value)
    rows = rows_of("--shapes", "useless", "true")
    assert rows["normal; the rule"]["any"] == 0
    assert rows["normal; keep if one pair is lower"]["any"] == 1
    assert 3 <= rows["normal; the rule"]["pairs"] < 8
    assert rows["2 sd; the rule"]["power"] > 0.8
    assert 0.8 < rows["2 sd; the rule"]["gain"] < 1.2
    assert rows["2 sd; thorough"]["runs"] > rows["2 sd; the rule"]["runs"]
    assert rows["2 sd; keep if one pair is lower"]["false"] > 0.5


def test_adoptions_of_useless_ideas_fail(rows_of, monkeypatch, capsys):
    monkeypatch.setitem(stream.NOISE, "normal", lambda rng, n: rng.standard_normal(n) - 3)
    rows_of("--shapes", "useless", status=2)
    assert "normal: up to 100.0% of streams have an adoption" in capsys.readouterr().err
    assert main(["stream", "--shapes", "luck"]) == 2
    assert "there are useless, true, batch" in capsys.readouterr().err


def test_a_batch_finds_what_is_useful_and_seldom_more(rows_of, monkeypatch):
    for bar, value in NO_BARS.items():
        monkeypatch.setattr(stream, bar, value)
    monkeypatch.setattr(stream, "STREAMS", 40)
    rows = rows_of("--shapes", "batch")
    assert rows["batch: normal"]["any"] <= 0.1 < rows["batch: exponential, mostly better"]["any"]
    power = [rows[f"batch: {effect:g} sd, baselines shared"]["power"] for effect in stream.EFFECTS]
    assert power == sorted(power)
    assert abs(power[1] - BATCH_POWER[1.0]) < 0.2
    assert rows["batch: normal"]["pairs"] < 8
    monkeypatch.setitem(stream.NOISE, "normal", lambda rng, n: rng.standard_normal(n) - 1)
    monkeypatch.setattr(stream, "MOST_FALSE", 0.05)
    rows_of("--shapes", "batch", status=2)


@pytest.mark.parametrize("name", stream.NOISE)
def test_noise_has_mean_0_and_standard_deviation_1(name):
    drawn = stream.NOISE[name](np.random.default_rng(0), 400_000)
    assert drawn.mean() == pytest.approx(0, abs=0.01)
    assert drawn.std() == pytest.approx(1, abs=0.03)


def test_bounds_of_a_share_are_those_of_clopper_and_pearson():
    assert stream.bounds_of_share(0, 100) == pytest.approx((0.0, 1 - 0.05 ** (1 / 100)))
    assert stream.bounds_of_share(100, 100) == pytest.approx((0.05 ** (1 / 100), 1.0))
    low, high = stream.bounds_of_share(30, 100)
    assert stats.binom.sf(29, 100, low) == pytest.approx(0.05)
    assert stats.binom.cdf(30, 100, high) == pytest.approx(0.05)


def test_the_power_that_users_are_told_is_the_measured_one():
    rows = json.loads((ROOT / "docs" / "benchmarks" / "stream-cpu.json").read_text())["rows"]
    power = {row["variant"]: row["power"] for row in rows if row.get("power") is not None}
    for looks, way in ((CONFIRMED_AFTER, stream.RULE), (THOROUGH, stream.THOROUGH_RULE)):
        for effect, share in POWER[looks].items():
            assert power[f"{effect:g} sd; {way}"] == pytest.approx(share, abs=0.006)

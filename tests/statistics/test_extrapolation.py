"""Extrapolated differences: against an ordinary regression, known curves, and what an interval answers."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_llm.statistics.extrapolation import RATIOS, AtSize, SpreadBySize, answer, predict


def sizes_of(means, sd=0.006, pairs=8):
    return [AtSize(float(x), mean, sd, pairs) for x, mean in enumerate(means)]


def test_one_curve_is_a_weighted_regression(monkeypatch):
    monkeypatch.setattr("lightning_llm.statistics.extrapolation.RATIOS", (1.0,))
    means = [-0.03, -0.022, -0.019, -0.01]
    sizes = sizes_of(means)
    spread = SpreadBySize(math.log(0.006), 0.0, 56.0)
    found = predict(sizes, spread, 4.0, 8)
    slope, intercept = np.polyfit(range(4), means, 1)
    assert found.mean == pytest.approx(intercept + 4 * slope)
    error = 0.006 / math.sqrt(8) * math.sqrt(1 / 4 + (4 - 1.5) ** 2 / 5)
    quantile = stats.t.ppf(0.95, 56)
    assert found.interval[1] - found.mean == pytest.approx(quantile * error)
    with_own = quantile * math.hypot(error, 0.006 / math.sqrt(8))
    assert found.mean - found.prediction_interval[0] == pytest.approx(with_own)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_curve_of_the_family_is_continued(ratio):
    def curve(x):
        return -0.03 + 0.01 * (x if ratio == 1 else (1 - ratio**x) / (1 - ratio))

    found = predict(sizes_of([curve(x) for x in range(4)], sd=1e-6), SpreadBySize(math.log(1e-6), 0.0, 56.0), 5.0, 8)
    assert found.ratios == (ratio,)
    assert found.mean == pytest.approx(curve(5))
    assert found.interval[0] < curve(5) < found.interval[1]


def test_where_no_curve_fits_the_variances_are_those_of_the_residuals(monkeypatch):
    monkeypatch.setattr("lightning_llm.statistics.extrapolation.RATIOS", (1.0,))
    spread, quantile = SpreadBySize(math.log(0.006), 0.0, 56.0), stats.t.ppf(0.95, 56)
    for height, is_wider in ((0.001, False), (0.02, True)):  # the middle size is so much off a line
        found = predict(sizes_of([0.0, height, 0.0]), spread, 3.0, 8)
        own = 0.006**2 / 8
        misfit = height**2 * 2 / 3 / own  # of one degree of freedom
        scale = misfit if is_wider else 1.0
        variance = own * (1 / 3 + (3 - 1) ** 2 / 2)
        assert found.mean == pytest.approx(height / 3)
        assert found.interval[1] - found.mean == pytest.approx(quantile * math.sqrt(scale * variance))
        with_own = quantile * math.sqrt(scale * (variance + own))
        assert found.prediction_interval[1] - found.mean == pytest.approx(with_own)
        assert found.ratios == (1.0,)


def test_places_count_from_the_smallest_size():
    means = [-0.03, -0.02, -0.015]
    spread = SpreadBySize(math.log(0.006), 0.0, 42.0)
    near = predict(sizes_of(means), spread, 3.0, 8)
    far = predict([AtSize(size.x + 20, size.mean, size.sd, size.pairs) for size in sizes_of(means)], spread, 23.0, 8)
    assert far.interval == pytest.approx(near.interval)


def test_the_spread_is_log_linear_and_without_the_bias_of_a_logarithm():
    rng = np.random.default_rng(0)
    drawn = [AtSize(x, 0.0, 0.01 * 0.8**x * math.sqrt(rng.chisquare(3) / 3), 4) for x in range(4) for _ in range(2000)]
    spread = SpreadBySize.of(drawn)
    assert spread.at(0) == pytest.approx(0.01, rel=0.02)
    assert spread.at(5) == pytest.approx(0.01 * 0.8**5, rel=0.05)
    assert spread.freedom == 3 * 8000
    assert SpreadBySize.of([AtSize(0, 0, 0.0, 4)]).at(0) == 0


@pytest.mark.parametrize(
    ("sizes", "target", "says"),
    [
        (sizes_of([0, 0]), 2.0, "a prediction needs differences at 3 sizes or more, got 2"),
        ([*sizes_of([0, 0]), AtSize(1.0, 0, 0.006, 8)], 2.0, "got 2"),
        (
            sizes_of([0, 0, 0]),
            4.5,
            "the target has 32 times the compute of the largest size, expected at most 16 times",
        ),
    ],
)
def test_what_cannot_be_predicted(sizes, target, says):
    with pytest.raises(ValueError, match=says):
        predict(sizes, SpreadBySize(-5.0, 0.0, 20.0), target, 8)


def test_equal_differences_have_no_interval():
    with pytest.raises(ValueError, match="all differences are equal"):
        predict(sizes_of([0, 0, 0], sd=0.0), SpreadBySize.of(sizes_of([0, 0, 0], sd=0.0)), 3.0, 8)


@pytest.mark.parametrize(
    ("interval", "direction", "delta", "expected"),
    [
        ((-0.03, -0.01), -1, 0.005, "holds"),
        ((0.01, 0.03), 1, 0.005, "holds"),
        ((0.01, 0.03), -1, 0.005, "flips"),
        ((-0.03, 0.01), -1, 0.005, "unknown"),
        ((-0.004, 0.003), -1, 0.005, "fades"),
        ((-0.004, -0.001), -1, 0.005, "fades"),  # shown to be both
        ((-0.004, -0.001), -1, None, "holds"),
        ((-0.03, -0.01), 0, 0.005, "unknown"),
    ],
)
def test_answers(interval, direction, delta, expected):
    assert answer(interval, direction, delta) == expected

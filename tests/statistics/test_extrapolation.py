"""Differences one size up: decay and drift against what was drawn, formulas by hand, and what an interval answers."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from lightning_llm.statistics.extrapolation import (
    FEWEST_STEPS,
    AtSize,
    Drift,
    SpreadBySize,
    Step,
    answer,
    predict,
    steps_of,
)
from lightning_llm.statistics.known_steps import STEPS

SPREAD = SpreadBySize(math.log(0.006), 0.0)
ERROR = 0.006 / math.sqrt(8)


def sizes_of(means, sd=0.006, pairs=8):
    return [AtSize(float(x), mean, sd, pairs) for x, mean in enumerate(means)]


def drawn_steps(rng, count, decay, base, share, error=0.002):
    true = rng.normal(0, 0.05, count)
    after = decay * true + np.hypot(base, share * true) * rng.standard_normal(count)
    noise = error * rng.standard_normal((2, count))
    return [Step(1.0, one, other, error, error) for one, other in zip(true + noise[0], after + noise[1], strict=True)]


def test_the_mean_and_the_variances_are_those_of_the_formula():
    drift = Drift(decay=0.7, base=0.01, share=0.3, steps=100)
    found = predict(sizes_of([0.5, 0.08]), SPREAD, drift, 1.9, 8)
    h, quantile = 0.9, stats.t.isf(0.05, 5)
    assert found.mean == pytest.approx(0.7**h * 0.08)
    variance = 0.7 ** (2 * h) * ERROR**2 + h * (0.01**2 + 0.3**2 * (0.08**2 - ERROR**2))
    assert found.interval == pytest.approx([found.mean + sign * quantile * math.sqrt(variance) for sign in (-1, 1)])
    with_own = quantile * math.sqrt(variance + ERROR**2)
    assert found.prediction_interval == pytest.approx([found.mean - with_own, found.mean + with_own])


def test_the_order_of_sizes_does_not_matter_and_places_count_from_anywhere():
    drift, sizes = Drift(0.7, 0.01, 0.3, 100), sizes_of([0.5, 0.2, 0.08])
    near = predict(sizes, SPREAD, drift, 3.0, 8)
    assert predict(sizes[::-1], SPREAD, drift, 3.0, 8) == near
    far = predict([dataclasses.replace(size, x=size.x + 20) for size in sizes], SPREAD, drift, 23.0, 8)
    assert far.interval == pytest.approx(near.interval)


def test_an_interval_has_the_freedom_of_the_drift():
    def half_width(freedom):
        found = predict(sizes_of([0.1, 0.1]), SPREAD, Drift(1.0, 0.01, 0.3, 3, freedom), 2.0, 8)
        return found.interval[1] - found.mean

    assert half_width(1) / half_width(5) == pytest.approx(stats.t.isf(0.05, 1) / stats.t.isf(0.05, 5))


def test_few_steps_have_little_freedom():
    steps = drawn_steps(np.random.default_rng(0), 20, decay=1.0, base=0.01, share=0.3)
    assert [Drift.of(steps[:count]).freedom for count in (1, 2, 4, 7, 20)] == [1, 1, 2, 5, 5]


def test_decay_and_drift_are_learned():
    steps = drawn_steps(np.random.default_rng(0), 4000, decay=0.7, base=0.01, share=0.3)
    drift = Drift.of(steps)
    assert drift.decay == pytest.approx(0.7, abs=0.02)
    assert 0.007 < drift.base < 0.013  # with t errors, scales are below those of normal ones
    assert 0.2 < drift.share < 0.33
    assert drift.steps == 4000


def test_nine_of_ten_next_differences_are_in_the_interval():
    for count, decay in ((60, 0.7), (8, 0.7), (4, 1.0)):
        held = []
        for seed in range(60):
            rng = np.random.default_rng(seed)
            drift = Drift.of(drawn_steps(rng, count, decay, 0.01, 0.3, ERROR))
            for step in drawn_steps(rng, 200, decay, 0.01, 0.3, ERROR):
                low, high = predict(sizes_of([0.0, step.before]), SPREAD, drift, 2.0, 8).prediction_interval
                held.append(low <= step.after <= high)
        assert 0.86 < np.mean(held) < 0.98


def test_below_eight_steps_a_difference_persists():
    steps = drawn_steps(np.random.default_rng(0), FEWEST_STEPS, decay=0.4, base=0.002, share=0.05)
    assert Drift.of(steps[:-1]).decay == 1.0
    assert Drift.of(steps).decay < 0.7
    assert Drift.of(steps, is_decaying=False).decay == 1.0
    assert Drift.of(steps[:1]).base > 0


def test_a_drift_has_the_unit_of_the_metric():
    steps = drawn_steps(np.random.default_rng(0), 40, decay=0.7, base=0.01, share=0.3)
    times = [Step(step.h, *(1000 * number for number in dataclasses.astuple(step)[1:])) for step in steps]
    nats, millinats = Drift.of(steps), Drift.of(times)
    assert millinats.decay == pytest.approx(nats.decay, abs=1e-3)
    assert millinats.base == pytest.approx(1000 * nats.base, rel=1e-2)
    assert millinats.share == pytest.approx(nats.share, rel=1e-2)


def test_without_a_step_there_is_no_drift():
    for steps in ([], [Step(1.0, 0.1, 0.1, 0.0, 0.0)]):
        with pytest.raises(ValueError, match="no step between two sizes is known"):
            Drift.of(steps)


def test_steps_go_from_each_size_to_the_next():
    first, second = steps_of(sizes_of([0.3, 0.2, 0.1])[::-1], SPREAD)
    assert dataclasses.astuple(first) == pytest.approx((1.0, 0.3, 0.2, ERROR, ERROR))
    assert (second.before, second.after) == (0.2, 0.1)
    assert steps_of(sizes_of([0.3]), SPREAD) == []


def test_the_known_steps_shrink():
    drift = Drift.of(STEPS)
    assert drift.steps == len(STEPS) > 60
    assert 0.5 < drift.decay < 0.85  # effects shrink by a third to a half for 4 times the compute
    assert all(0.7 < step.h < 1.1 for step in STEPS)


def test_the_spread_is_log_linear_and_without_the_bias_of_a_logarithm():
    rng = np.random.default_rng(0)
    drawn = [AtSize(x, 0.0, 0.01 * 0.8**x * math.sqrt(rng.chisquare(3) / 3), 4) for x in range(4) for _ in range(2000)]
    spread = SpreadBySize.of(drawn)
    assert spread.at(0) == pytest.approx(0.01, rel=0.02)
    assert spread.at(5) == pytest.approx(0.01 * 0.8**5, rel=0.05)
    assert spread.error(5, 4) == spread.at(5) / 2
    assert SpreadBySize.of([AtSize(0, 0, 0.0, 4)]).at(0) == 0
    one_size = [AtSize(19.131837534116038, 0.0, 0.01 + 0.001 * place, 8) for place in range(12)]
    assert 0.01 < SpreadBySize.of(one_size).at(20.0) < 0.025


@pytest.mark.parametrize(
    ("sizes", "target", "says"),
    [
        (sizes_of([0]), 1.0, "a prediction needs differences at 2 sizes or more, got 1"),
        ([*sizes_of([0]), AtSize(0.0, 0, 0.006, 8)], 1.0, "got 1"),
        (sizes_of([0, 0]), 2.2, "the target has 5.28 times the compute of the largest size, expected at most 5 times"),
    ],
)
def test_what_cannot_be_predicted(sizes, target, says):
    with pytest.raises(ValueError, match=says):
        predict(sizes, SPREAD, Drift(0.7, 0.01, 0.3, 100), target, 8)


def test_equal_differences_have_no_interval():
    sizes = sizes_of([0, 0, 0], sd=0.0)
    with pytest.raises(ValueError, match="all differences are equal"):
        predict(sizes, SpreadBySize.of(sizes), Drift(0.7, 0.01, 0.3, 100), 3.0, 8)


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

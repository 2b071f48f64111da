"""What chance alone does in the log of a keep-if-better loop, against enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lightning_llm.statistics.audit import (
    chance_gain,
    chance_keeps,
    false_keeps_beside,
    harmonic,
    noise_of,
    p_of_gain,
    p_of_step,
    shown_from,
)


def records(order):
    """Tries that are below all before them; the first run is none."""
    return sum(value < min(order[:place]) for place, value in enumerate(order) if place)


def test_keeps_are_those_of_all_orders():
    tries = 5
    counts = [records(order) for order in itertools.permutations(range(tries + 1))]
    for keeps in range(tries + 1):
        found = chance_keeps(tries, keeps)
        assert found.p == pytest.approx(np.mean([count >= keeps for count in counts]))
    assert found.mean == pytest.approx(np.mean(counts))
    assert found.most == np.quantile(counts, 0.95, method="inverted_cdf")


@pytest.mark.parametrize(("tries", "mean"), [(10, 2.0), (50, 3.5), (100, 4.2), (300, 5.3), (1000, 6.5)])
def test_expected_keeps(tries, mean):
    assert chance_keeps(tries, 0).mean == pytest.approx(mean, abs=0.05)
    assert chance_keeps(100, 0).most == 7


@pytest.mark.parametrize(("true_gains", "most"), [(2, 9), (5, 15), (10, 21)])
def test_true_gains_make_more_false_keeps(true_gains, most):
    assert false_keeps_beside(true_gains, 100) == pytest.approx(most, abs=0.5)
    assert false_keeps_beside(0, 100) == pytest.approx(harmonic(101) - 1)


@pytest.mark.parametrize("tries", [1, 10, 100])
def test_the_gain_of_chance_is_that_of_simulated_logs(tries):
    runs = np.random.default_rng(0).standard_normal((40_000, tries + 1))
    gains = runs[:, 0] - runs.min(axis=1)
    found = chance_gain(tries)
    assert found.mean == pytest.approx(gains.mean(), abs=0.03)
    assert found.low == pytest.approx(np.quantile(gains, 0.05), abs=0.06)
    assert found.high == pytest.approx(np.quantile(gains, 0.95), abs=0.06)
    for gain in (0.5, 2.0, 3.5):
        assert p_of_gain(gain, tries) == pytest.approx((gains >= gain).mean(), abs=0.01)
    assert p_of_gain(0.0, tries) == 1.0
    assert 0 < p_of_gain(9.0, tries) < 1e-6


@pytest.mark.parametrize(("tries", "least"), [(10, 3.6), (100, 4.7), (1000, 5.5)])
def test_a_step_is_shown_from(tries, least):
    assert shown_from(tries, 1.0) == pytest.approx(least, abs=0.06)
    assert p_of_step(shown_from(tries, 2.0), 2.0) == pytest.approx(0.05 / tries)


def test_useless_steps_are_rarely_shown():
    tries, logs = 20, 4000
    runs = np.random.default_rng(1).standard_normal((logs, tries + 1))
    bars = np.minimum.accumulate(runs, axis=1)[:, :-1]
    shown = ((bars - runs[:, 1:]) >= shown_from(tries, 1.0)).any(axis=1)
    assert shown.mean() <= 0.05
    assert shown.any() or shown.mean() < 0.05  # safe: the bar is lucky


def test_noise_is_pooled_over_code_that_ran_again():
    groups = [[1.0, 1.2, 1.1], [5.0], [3.0, 3.4]]
    squares = 2 * 0.1**2 + 2 * 0.2**2
    found = noise_of(groups)
    assert found.sd == pytest.approx(math.sqrt(squares / 3))
    assert found.freedom == 3
    low, high = stats.chi2.ppf([0.975, 0.025], 3)
    assert found.interval == pytest.approx((math.sqrt(squares / low), math.sqrt(squares / high)))
    assert noise_of([[1.0], [2.0]]) is None
    assert noise_of([[1.0, 1.0]]) is None


@pytest.mark.parametrize(("tries", "keeps"), [(0, 0), (3, 4), (3, -1)])
def test_more_keeps_than_tries_are_refused(tries, keeps):
    with pytest.raises(ValueError, match="keeps must be from 0"):
        chance_keeps(tries, keeps)

"""Estimates, tests and noise: against scipy.stats, hand-computed values, and simulations."""

import itertools

import numpy as np
import pytest
from scipy import stats

from lightning_llm.statistics.estimates import (
    Estimate,
    correlation,
    correlation_interval,
    p_of_failures,
    paired,
    sd_interval,
    seeds_saved,
    student,
    unpaired,
)

BASELINE = [2.01, 1.97, 2.05, 2.00, 1.99]
VARIANT = [1.99, 1.96, 2.02, 2.00, 1.95, 2.02]


def test_the_paired_interval_and_p_are_those_of_scipy():
    found, truth = paired(BASELINE, VARIANT[:5]), stats.ttest_rel(VARIANT[:5], BASELINE)
    assert found.p == pytest.approx(truth.pvalue)
    assert found.t() == pytest.approx(truth.statistic)
    assert found.interval(student(0.05, found.freedom)) == pytest.approx([*truth.confidence_interval()])
    # by hand: differences -0.02, -0.01, -0.03, 0, -0.04
    assert (found.difference, found.sd**2) == (pytest.approx(-0.02), pytest.approx(0.001 / 4))
    assert found.t() == pytest.approx(-0.02 / (0.001 / 4 / 5) ** 0.5)


def test_the_unpaired_interval_and_p_are_welchs():
    found, truth = unpaired(BASELINE, VARIANT), stats.ttest_ind(VARIANT, BASELINE, equal_var=False)
    assert (found.p, found.freedom) == (pytest.approx(truth.pvalue), pytest.approx(truth.df))
    assert found.interval(student(0.05, found.freedom)) == pytest.approx([*truth.confidence_interval()])


def test_runs_that_do_not_differ_have_p_1_and_those_that_always_differ_alike_p_0():
    same, shifted = paired([1.0, 2.0], [1.0, 2.0]), paired([1.0, 2.0], [1.5, 2.5])
    assert (same.p, same.interval(3.0)) == (1.0, (0.0, 0.0))
    assert (shifted.p, shifted.t()) == (0.0, np.inf)
    assert unpaired([1.0, 1.0], [1.0, 1.0]).p == 1.0


@pytest.mark.parametrize("pairs", [3, 5, 16])
def test_the_interval_covers_95_of_100(pairs):
    draws = np.random.default_rng(pairs).normal(0.3, 1, (20_000, pairs))
    half = student(0.05, pairs - 1) * draws.std(1, ddof=1) / pairs**0.5
    assert np.mean(np.abs(draws.mean(1) - 0.3) <= half) == pytest.approx(0.95, abs=0.006)


def test_correlation_and_the_seeds_that_pairing_saved():
    baseline = np.random.default_rng(2).normal(size=400)
    variant = 0.9 * baseline + np.random.default_rng(3).normal(size=400) * (1 - 0.81) ** 0.5
    assert correlation(baseline, variant) == pytest.approx(np.corrcoef(baseline, variant)[0, 1])
    saved, low, high = seeds_saved(baseline, variant)
    alone = baseline.var(ddof=1) + variant.var(ddof=1)
    assert saved == round(400 * (alone / (variant - baseline).var(ddof=1) - 1))  # by its definition
    assert low < 400 * (1 / (1 - 0.9) - 1) < high  # the truth, for a correlation of 0.9
    assert seeds_saved(baseline[:8], -baseline[:8])[0] < 0  # negatively correlated: pairing cost some
    assert seeds_saved(baseline[:7], variant[:7]) is None  # too few pairs to say
    assert correlation([1.0, 2.0], [1.0, 3.0]) is None
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


def test_intervals_of_noise_hold_the_truth_95_times_in_100():
    rng, held = np.random.default_rng(6), np.zeros(3)
    for _ in range(2000):
        shared, own = rng.normal(size=12), rng.normal(size=(2, 12))
        base, variant = shared + own[0] * 0.5, shared + own[1] * 0.5  # correlation 0.8, differences of sd 0.5 √2
        low, high = sd_interval(float(np.std(variant - base, ddof=1)), 12)
        held[0] += low < 0.5 * 2**0.5 < high
        low, high = correlation_interval(correlation(base, variant), 12)
        held[1] += low < 0.8 < high
        _, low, high = seeds_saved(base, variant)
        held[2] += low <= 12 * (1 / (1 - 0.8) - 1) <= high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


def test_counts_of_diverged_runs_are_judged_by_fishers_exact_test():
    assert p_of_failures(4, 4, 0, 4) == pytest.approx(2 / 70)
    assert p_of_failures(0, 4, 4, 4) == pytest.approx(2 / 70)
    assert p_of_failures(0, 4, 0, 4) == 1.0
    for lost, base in itertools.product(range(9), range(13)):
        one_sided = [
            stats.fisher_exact([[lost, 8 - lost], [base, 12 - base]], alternative=side).pvalue
            for side in ("greater", "less")
        ]
        expected = min(1.0, 2 * one_sided[lost * 12 < base * 8])
        assert p_of_failures(lost, 8, base, 12) == pytest.approx(expected)


def test_an_infinite_interval_is_none():
    assert Estimate(0.0, 1.0, 3, 1.0).interval(float("inf")) is None

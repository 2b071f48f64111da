"""Estimates, tests and power: against scipy.stats, hand-computed values, and simulations."""

import itertools

import numpy as np
import pytest
from scipy import stats

from lightning_llm.ablate import statistics
from lightning_llm.ablate.statistics import (
    EXACT_PAIRS,
    Estimate,
    correlation,
    equivalence_power,
    holm,
    paired,
    pairs_for_difference,
    pairs_for_equivalence,
    power,
    seeds_saved,
    sign_flip,
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


def test_the_sign_flip_test_tries_all_signs():
    values = [0.5, -0.2, 0.9, 0.4]
    all_signs = itertools.product((-1, 1), repeat=4)
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in all_signs]
    assert sign_flip(values).p == sum(each >= sum(values) - 1e-12 for each in sums) / 16 == 0.25
    assert sign_flip([1, 1, 1, 1, 1]).p == sign_flip([1, 1, 1, 1, 1]).smallest == 2 / 32  # five pairs never reach 0.05
    assert sign_flip([0.1, 0.2, 0.3]).p == 0.25  # 0.1 + 0.2 is not 0.3 in binary
    assert sign_flip([0.0, 0.0]).p == 1.0


def test_the_sign_flip_test_draws_signs_for_many_pairs():
    values = np.random.default_rng(3).normal(0.4, 1, EXACT_PAIRS + 10)
    assert sign_flip(values).p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)
    far = sign_flip([1.0] * (EXACT_PAIRS + 1))
    assert far.p == far.smallest == pytest.approx(1e-5, rel=1e-3)


def test_holm_multiplies_the_smallest_by_their_number():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.01]) == pytest.approx([0.9, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_makes_one_error_in_20_over_correlated_variants():
    draws = np.random.default_rng(0).normal(size=(4000, 6, 3))
    draws = draws - draws[:, :, :1] * 0.5  # a common baseline
    t = draws.mean(1) / draws.std(1, ddof=1) * 6**0.5
    errors = [min(holm(list(row))) <= 0.05 for row in statistics.two_sided(t, 5)]
    assert 0.03 < np.mean(errors) < 0.06


def test_pairs_for_80_percent_power():
    assert [pairs_for_difference(effect) for effect in (0.5, 0.75, 1, 1.5, 2, 3)] == [34, 16, 10, 6, 5, 4]
    assert [pairs_for_equivalence(margin) for margin in (1, 1.5, 2)] == [11, 6, 4]
    assert pairs_for_difference(0.01) is None


@pytest.mark.parametrize(("pairs", "effect"), [(2, 3.0), (10, 1.0), (100, 0.1), (1000, 0.5)])
def test_power_is_that_of_the_noncentral_t(pairs, effect):
    critical = student(0.05, pairs - 1)
    assert power(pairs, effect, critical) == pytest.approx(stats.nct.sf(critical, pairs - 1, effect * pairs**0.5))


@pytest.mark.parametrize("effect", [0.0, 0.5])
def test_power_of_equivalence_is_the_share_of_intervals_inside(effect):
    draws = np.random.default_rng(1).normal(effect, 1, (20_000, 8))
    critical = student(0.1, 7)
    half = critical * draws.std(1, ddof=1) / 8**0.5
    inside = (draws.mean(1) - half > -1.2) & (draws.mean(1) + half < 1.2)
    assert equivalence_power(8, effect, 1.2, critical) == pytest.approx(inside.mean(), abs=0.012)


def test_correlation_and_the_seeds_that_pairing_saved():
    baseline = np.random.default_rng(2).normal(size=400)
    variant = 0.9 * baseline + np.random.default_rng(3).normal(size=400) * (1 - 0.81) ** 0.5
    assert correlation(baseline, variant) == pytest.approx(np.corrcoef(baseline, variant)[0, 1])
    # by hand: variances 1 and 4, that of the differences 0, 1, 2 is 1: 3 pairs do what 15 seeds on each side would
    assert seeds_saved([1.0, 2.0, 3.0], [1.0, 3.0, 5.0]) == 12
    assert seeds_saved([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == -2  # negatively correlated: pairing cost half
    assert seeds_saved([1.0, 2.0], [2.0, 3.0]) is None
    assert seeds_saved([1.0, 2.0], [2.0, 3.5]) is None  # two pairs say nothing about it
    assert correlation([1.0, 2.0], [1.0, 3.0]) is None
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


def test_an_infinite_interval_is_none():
    assert Estimate(0.0, 1.0, 3, 1.0).interval(float("inf")) is None

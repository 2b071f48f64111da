"""Differences of ratios: against the paired t test, the delete-one jackknife, a direct formula, and simulations."""

import numpy as np
import pytest

from lightning_llm.statistics.estimates import paired, student
from lightning_llm.statistics.ratios import compare_ratios

BASELINE = [30.0, 12.0, 55.0, 8.0, 21.0]
VARIANT = [28.0, 12.5, 50.0, 7.5, 20.0]
SIZES = [10.0, 4.0, 18.0, 3.0, 7.0]
OTHER_SIZES = [9.0, 5.0, 17.0, 3.0, 6.0]


def test_units_of_one_size_give_the_paired_t_test():
    found = compare_ratios(BASELINE, [2.0] * 5, VARIANT, [2.0] * 5)
    truth = paired([value / 2 for value in BASELINE], [value / 2 for value in VARIANT])
    for name in ("difference", "error", "freedom", "sd"):
        assert getattr(found.estimate, name) == pytest.approx(getattr(truth, name)), name
    assert (found.units, found.effective_units, found.is_doubtful) == (5, pytest.approx(5), False)


def test_one_size_for_both_sides_gives_the_ratio_estimator():
    """Cochran 1977, section 6.4: v(R) = Σ (d - R x)² / (n (n - 1) mean(x)²)."""
    found = compare_ratios(BASELINE, SIZES, VARIANT, SIZES)
    differences = np.subtract(VARIANT, BASELINE)
    sizes = np.array(SIZES)
    ratio = differences.sum() / sizes.sum()
    variance = ((differences - ratio * sizes) ** 2).sum() / (5 * 4 * sizes.mean() ** 2)
    assert found.difference == pytest.approx(ratio)
    assert found.estimate.error == pytest.approx(variance**0.5)
    assert found.estimate.freedom == pytest.approx(sizes.sum() ** 2 / (sizes**2).sum() - 1)


def test_the_error_of_two_sizes_is_near_that_of_the_jackknife():
    generator = np.random.default_rng(0)
    units = 200
    sizes, other = generator.uniform(5, 15, (2, units))
    base = 3 * sizes + generator.normal(0, 1, units)
    own = 2.9 * other + 0.5 * (base - 3 * sizes) + generator.normal(0, 1, units)
    found = compare_ratios(base, sizes, own, other)
    without = [
        np.delete(own, i).sum() / np.delete(other, i).sum() - np.delete(base, i).sum() / np.delete(sizes, i).sum()
        for i in range(units)
    ]
    jackknife = np.sqrt((units - 1) / units * ((without - np.mean(without)) ** 2).sum())
    assert found.estimate.error == pytest.approx(jackknife, rel=0.02)


def test_intervals_cover_the_truth_also_with_unequal_sizes():
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        sizes = generator.lognormal(0, 1, 10)
        base = 2 * sizes
        own = base + sizes * generator.normal(0.1, 1, 10) + np.sqrt(sizes) * generator.normal(0, 0.5, 10)
        estimate = compare_ratios(base, sizes, own, sizes).estimate
        low, high = estimate.interval(float(student(0.05, estimate.freedom)))
        covered += low <= 0.1 <= high
    assert 0.92 < covered / 2000 < 0.97  # with n - 1 degrees of freedom: 0.88


@pytest.mark.parametrize(("base", "own"), [([3.0], [4.0]), ([3.0, 6.0], [3.0, 6.0]), ([0.3, 0.6], [0.4, 0.8])])
def test_what_does_not_vary_has_no_estimate(base, own):
    sizes = [1.0, 2.0][: len(base)]
    found = compare_ratios(base, sizes, own, sizes)
    assert found.estimate is None
    assert found.difference == pytest.approx((sum(own) - sum(base)) / sum(sizes))


@pytest.mark.parametrize(("sizes", "is_doubtful"), [([1, 1, 1, 1], False), ([9, 1, 1, 1], True), ([1, 2] * 20, False)])
def test_few_units_of_unequal_sizes_are_doubtful(sizes, is_doubtful):
    values = list(np.arange(len(sizes)) ** 2)
    found = compare_ratios(values, sizes, values[::-1], sizes)
    assert found.is_doubtful == is_doubtful
    variation = np.std(sizes, ddof=1) / np.mean(sizes) / len(sizes) ** 0.5
    assert (variation > 0.1) == is_doubtful


@pytest.mark.parametrize("size", [0.1, 0.7, 123456789.0, 94906267.0])
def test_units_of_one_size_count_in_full(size):
    found = [compare_ratios(range(n), [size] * n, range(1, n + 1), [size] * n).effective_units for n in range(2, 40)]
    assert found == list(range(2, 40))

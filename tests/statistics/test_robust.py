"""The second look at the differences: signs, median, skewness and outliers."""

import itertools

import numpy as np
import pytest
from scipy import stats

from lightning_llm.statistics.robust import EXACT_PAIRS, outliers, robust, sign_flip, skewness


def test_the_sign_flip_test_tries_all_signs():
    values = [0.5, -0.2, 0.9, 0.4]
    all_signs = itertools.product((-1, 1), repeat=4)
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in all_signs]
    assert sign_flip(values)[0] == sum(each >= sum(values) - 1e-12 for each in sums) / 16 == 0.25
    assert sign_flip([1, 1, 1, 1, 1]) == (2 / 32, 2 / 32)  # five pairs never reach 0.05
    assert sign_flip([0.1, 0.2, 0.3])[0] == 0.25  # 0.1 + 0.2 is not 0.3 in binary
    assert sign_flip([0.0, 0.0])[0] == 1.0


def test_the_sign_flip_test_draws_signs_for_many_pairs():
    values = np.random.default_rng(3).normal(0.4, 1, EXACT_PAIRS + 10)
    assert sign_flip(values)[0] == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)
    p, smallest = sign_flip([1.0] * (EXACT_PAIRS + 1))
    assert p == smallest == pytest.approx(1e-5, rel=1e-3)


def test_skewness_is_scipys_and_silent_about_a_few_pairs():
    values = np.random.default_rng(5).exponential(size=12)
    assert skewness(values) == pytest.approx(stats.skew(values, bias=False))
    assert skewness(values[:7]) is None
    assert skewness([1.0] * 8) is None


@pytest.mark.parametrize(("pairs", "share"), [(6, 0.041), (8, 0.026), (16, 0.007)])
def test_normal_differences_rarely_have_outliers(pairs, share):
    draws = np.random.default_rng(pairs).normal(size=(8000, pairs))
    assert np.mean([bool(outliers(row)) for row in draws]) == pytest.approx(share, abs=0.006)


def test_an_outlier_is_named_and_the_mean_without_it():
    found = robust([0.01, 0.012, 0.009, 0.011, 0.5, 0.01])
    assert (found.outliers, found.without_outliers) == ([4], pytest.approx(0.0104))
    assert found.median == pytest.approx(0.0105)
    assert outliers([0.01, 0.012, 0.5]) == []  # too few to say


def test_a_direction_that_rests_on_few_pairs_is_doubted():
    """Typical runs are a little better and one in ten far worse: the median and the mean disagree."""
    spikes = robust([-0.01, -0.012, -0.011, -0.009, -0.01, -0.011, -0.01, 0.3])
    assert any("median difference -0.0100 has the other sign" in each for each in spikes.doubts(0.03, 0.05))
    assert any("sign-flip test does not confirm it" in each for each in spikes.doubts(0.03, 0.05))
    skewed = robust([0.01, 0.011, 0.01, 0.012, 0.01, 0.011, 0.01, 0.03])
    assert any("the differences are skewed (+" in each for each in skewed.doubts(0.013, 0.05))
    clear = robust([0.01, 0.012, 0.011, 0.009, 0.01, 0.011, 0.01, 0.012])
    assert clear.doubts(0.012, 0.05) == []


@pytest.mark.parametrize(
    ("pairs", "alpha", "smallest"), [(4, 0.05, "0.12"), (5, 0.05, "0.062"), (6, 0.05 / 3, "0.031")]
)
def test_a_direction_that_no_sign_flip_test_of_so_few_pairs_confirms_is_doubted(pairs, alpha, smallest):
    few = robust([0.01 + 0.001 * number for number in range(pairs)])
    (doubt,) = few.doubts(0.01, alpha)
    assert doubt.startswith(f"too few pairs for the sign-flip test (its p is at least {smallest}, ")
    more = robust([0.01 + 0.001 * number for number in range(pairs + 2)])
    assert more.doubts(0.01, alpha) == []

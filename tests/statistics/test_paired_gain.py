"""What pairing gained, in numbers and in words."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_llm.statistics.paired_gain import gain

BASELINE = [2.01, 1.97, 2.05, 2.00, 1.99, 2.03, 1.95, 2.02]
VARIANT = [1.99, 1.96, 2.02, 2.00, 1.95, 2.02, 1.93, 2.01]


def test_both_standard_deviations_and_the_correlation_are_those_of_scipy():
    found, truth = gain(BASELINE, VARIANT), stats.pearsonr(BASELINE, VARIANT)
    variances = [np.var(side, ddof=1) for side in (BASELINE, VARIANT)]
    assert found.sd == pytest.approx(np.std(np.subtract(VARIANT, BASELINE), ddof=1))
    assert found.unpaired_sd == pytest.approx(math.sqrt(sum(variances)))
    assert found.correlation == pytest.approx(truth.statistic)
    assert found.interval == pytest.approx([*truth.confidence_interval(0.95)], rel=1e-3)
    # so many independent runs have the standard error of the pairs
    assert found.seeds == round(8 * (sum(variances) / found.sd**2 - 1)) == 100


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        (
            VARIANT,
            "a pair 0.013, without pairing 0.047, correlation 0.93 (0.64 to 0.99), pairing saved about 100 seeds ",
        ),
        ([1.0, 1.1] * 4, "pairing saved about 1 seed per variant"),
        (BASELINE[4:] + BASELINE[:4], "correlation -0.96 (-0.99 to -0.79), pairing cost up to 4 seeds per variant"),
        (sorted(VARIANT), "pairing cost up to 1 seed per variant"),
        ([2.0] * 8, "standard deviation of a pair 0.032, without pairing 0.032, pairing saved no seeds"),
    ],
)
def test_a_sentence_says_what_pairing_saved_or_cost(variant, says):
    assert says in gain(BASELINE, variant).sentence


@pytest.mark.parametrize(
    ("pairs", "has_correlation", "has_interval", "has_seeds"),
    [(2, False, False, False), (3, True, False, False), (4, True, True, False), (7, True, True, False)],
)
def test_few_pairs_do_not_tell_everything(pairs, has_correlation, has_interval, has_seeds):
    found = gain(BASELINE[:pairs], VARIANT[:pairs])
    tells = (found.correlation is not None, found.interval is not None, found.seeds is not None)
    assert tells == (has_correlation, has_interval, has_seeds)
    assert ("correlation" in found.sentence, "seed" in found.sentence) == (has_correlation, has_seeds)


def test_pairs_without_spread_have_no_number_of_seeds():
    assert gain(BASELINE, BASELINE).seeds is None


@pytest.mark.parametrize("sides", [([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0, 3.0])])
def test_both_sides_need_the_same_number_of_at_least_two(sides):
    with pytest.raises(ValueError, match="got {} and {} values".format(*map(len, sides))):
        gain(*sides)

"""Time ratios: the interval of a median, and what a report says where it contains 1."""

import math

import numpy as np
import pytest

from lightning_llm.ablate.ratios import StepCost, is_one, median_interval, ratio_in_words


@pytest.mark.parametrize(("values", "low", "high"), [(6, 1, 6), (9, 2, 8), (20, 6, 15), (100, 40, 61), (300, 133, 168)])
def test_the_interval_is_the_shortest_between_ranks_that_misses_at_most_5_percent(values, low, high):
    shuffled = np.random.default_rng(0).permutation(values) + 1.0
    assert median_interval(shuffled) == (low, high)
    missed = 2 * sum(math.comb(values, below) for below in range(low)) / 2**values
    wider = missed + 2 * math.comb(values, low) / 2**values
    assert missed <= 0.05 < wider


def test_too_few_values_have_no_interval():
    assert median_interval([1.0] * 5) is None
    assert median_interval([]) is None
    assert median_interval([1.0] * 6) == (1.0, 1.0)


def test_the_interval_holds_the_median_of_a_skewed_distribution_in_95_percent():
    rng, rounds, samples = np.random.default_rng(0), 40, 2000
    drawn = rng.lognormal(sigma=1.0, size=(samples, rounds)) + 3 * (rng.random((samples, rounds)) < 0.1)
    median = np.median(rng.lognormal(sigma=1.0, size=10**6) + 3 * (rng.random(10**6) < 0.1))
    held = np.mean([low <= median <= high for low, high in map(median_interval, drawn)])
    assert 0.94 < held < 0.98  # 0.962 by the binomial distribution


@pytest.mark.parametrize(
    ("interval", "is_it"),
    [((0.99, 1.02), True), ((0.9, 1.0), True), ((1.001, 1.02), False), ((0.9, 0.99), False), (None, True)],
)
def test_one_inside_of_the_interval(interval, is_it):
    assert is_one(interval) is is_it


def test_a_side_is_known_to_be_as_fast_as_itself():
    times = dict.fromkeys(("step_s", "step_p20_s", "step_p80_s", "ratio", "ratio_p20", "ratio_p80"), 1.0)
    step = StepCost(**times, ratio_interval=(1.0, 1.0), peak_bytes=None)
    assert ratio_in_words(step) == "1.000"

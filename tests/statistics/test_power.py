"""What an experiment will find, against simulated experiments."""

import numpy as np
import pytest

from lightning_llm.statistics.design import BETTER, EQUIVALENT, UNDECIDED, WORSE, Design
from lightning_llm.statistics.power import further_pairs, power_analysis

LOOKS = (8, 12, 16)


@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize("truth", [0.0, 1.0])
def test_the_outlook_is_what_single_pairs_give(delta, truth):
    design, rng = Design(0.05, LOOKS, delta), np.random.default_rng(7)
    found, words, pairs_used = power_analysis(design, truth, 1.0), [], []
    for row in rng.normal(truth, 1.0, (3000, 16)):
        for pairs in LOOKS:
            part = row[:pairs]
            half = design.rule(pairs).critical(0.05) * part.std(ddof=1) / pairs**0.5
            if design.ends(part.mean() - half, part.mean() + half, pairs):
                break
        words.append(design.answer(part.mean() - half, part.mean() + half, pairs).word)
        pairs_used.append(pairs)
    for word in (BETTER, WORSE, EQUIVALENT, UNDECIDED):
        assert found.probabilities[word] == pytest.approx(words.count(word) / 3000, abs=0.03)
    assert found.pairs == pytest.approx(np.mean(pairs_used), abs=0.2)
    assert sum(found.probabilities.values()) == pytest.approx(1)


def test_further_pairs_are_a_range_that_begins_with_the_planned_looks():
    design = Design(0.05, LOOKS, 0.005)
    found = further_pairs(design, 0.008, 0.008, 8)
    assert found.low == 4  # the next look
    assert found.low <= found.expected <= (found.high or found.expected)
    near_zero = further_pairs(design, 0.0001, 0.008, 16)
    assert near_zero.expected > 20  # to be smaller than delta
    without = further_pairs(Design(0.05, LOOKS), 0.0, 0.008, 16)
    assert (without.expected, without.high) == (None, None)  # nothing to find, if it is 0
    assert further_pairs(design, 0.001, 0.0, 8) is None  # the pairs do not vary
    assert further_pairs(design, 0.008, 0.008, 7, left_out=1).low == 4  # from 8 pairs, one of which is left out


def test_the_outlook_says_how_far_each_look_gets():
    found = power_analysis(Design(0.05, LOOKS), 1.0, 1.0)
    assert found.ended[8] < found.ended[12] < found.ended[16] == pytest.approx(found.direction, abs=1e-9)
    ends = [found.ended[8], found.ended[12] - found.ended[8], 1 - found.ended[12]]
    assert found.pairs == pytest.approx(np.dot(ends, LOOKS))
    assert found.longest(1) == pytest.approx(found.pairs)
    # by hand, for two variants: the later of both
    both = [found.ended[8] ** 2, found.ended[12] ** 2 - found.ended[8] ** 2, 1 - found.ended[12] ** 2]
    assert found.longest(2) == pytest.approx(np.dot(both, LOOKS))
    goal = power_analysis(Design(0.05, LOOKS, half_width=0.7), 1.0, 1.0)
    assert goal.ended[16] > 0.5
    with pytest.raises(ValueError, match="the spread must be from 1e-09 to 1e"):
        power_analysis(Design(0.05, LOOKS), 1.0, 1e7)


def test_further_pairs_do_what_they_promise():
    """From 8 pairs of a known mean and spread, the expected number ends 80 % of the comparisons."""
    design, rng = Design(0.05, (8,)), np.random.default_rng(3)
    expected = further_pairs(design, 0.5, 1.0, 8).expected
    start = np.array([0.5 + sign for sign in (-1, 1)] * 4) * 1.0
    start = 0.5 + (start - 0.5) * (7 / 8) ** 0.5  # mean 0.5 and standard deviation 1
    ended, pairs = 0, 8 + expected
    for row in rng.normal(0.5, 1, (2000, expected)):
        both = np.concatenate([start, row])
        half = design.rule(pairs).critical(0.05) * both.std(ddof=1) / pairs**0.5
        ended += design.ends(both.mean() - half, both.mean() + half, pairs)
    assert ended / 2000 > 0.77

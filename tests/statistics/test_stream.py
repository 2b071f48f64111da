"""The rule for a stream of ideas: evidence against its integral, the bar, and what happens to an idea."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from lightning_llm.statistics.stream import CONFIRMATION, StreamRule, e_value_of, interval_of

RULE = StreamRule()
BETTER = [-1.0, -1.2, -0.9, -1.1, -1.05, -0.95]


@pytest.mark.parametrize(
    "differences", [[-1.0, -0.2], [-1.0, -0.7, -1.3, 0.1], [0.5, 0.1, 0.9], [0.3, -0.3, 0.2, -0.25]]
)
def test_the_evidence_is_the_likelihood_ratio_of_t_over_a_half_normal_effect(differences):
    pairs, improvements = len(differences), -np.array(differences)
    t = improvements.mean() / improvements.std(ddof=1) * math.sqrt(pairs)

    def weighted(effect):
        return 2 * stats.norm.pdf(effect) * stats.nct.pdf(t, pairs - 1, effect * math.sqrt(pairs))

    expected = integrate.quad(weighted, 0, 8)[0] / stats.t.pdf(t, pairs - 1)
    assert e_value_of(differences) == pytest.approx(expected, rel=2e-3)


def test_evidence_ignores_the_unit_and_knows_nothing_of_one_pair():
    assert e_value_of([-1.0]) == e_value_of([]) == e_value_of([0.0, 0.0]) == 1.0
    assert e_value_of([-1.0, -0.5, 0.1]) == pytest.approx(e_value_of([-1e-3, -5e-4, 1e-4]))
    assert e_value_of(BETTER) > 20 > 1 > e_value_of([-value for value in BETTER])


@pytest.mark.slow
def test_the_e_value_of_a_useless_idea_is_one_on_average():
    paths = np.random.default_rng(0).standard_normal((20_000, 5))
    values = [e_value_of(path) for path in paths]
    assert np.mean(values) == pytest.approx(1.0, abs=0.05)
    assert np.mean(np.array(values) >= 20) <= 0.05


def test_the_bar_rises_with_the_place_and_falls_with_adoptions():
    shares = [1 / (0.05 * RULE.threshold(place, 0)) for place in range(1, 20_000)]
    assert 0.85 < sum(shares[:10_000]) < 1 - 1 / (2.11 * math.log(20_000)) + 0.01
    assert RULE.threshold(10, 0) > RULE.threshold(9, 0)
    assert RULE.threshold(10, 1) == pytest.approx(RULE.threshold(10, 0) / 2)
    assert StreamRule(alpha=0.1).threshold(10, 0) == pytest.approx(RULE.threshold(10, 0) / 2)


def test_an_idea_is_confirmed_before_it_is_adopted():
    assert RULE.next([], [], 20).step == "pair"
    assert RULE.next(BETTER, [], 20).step == "confirm"
    fresh = [-0.5, -0.6, -0.4, -0.7, -0.5, -0.3, -0.6, -0.5]
    assert len(fresh) == CONFIRMATION
    assert RULE.next(BETTER, fresh[:-1], 20).step == "confirm"
    assert RULE.next(BETTER, fresh, 20).step == "adopted"
    assert RULE.next(BETTER, [*fresh[:-1], 3.0], 20).step == "rejected"
    assert RULE.next([*BETTER, 9.0], fresh, 20).step == "adopted"  # what has reached the bar has reached it
    assert RULE.next(BETTER, [], 1e9).step == "pair"


def test_an_idea_without_evidence_is_given_up():
    assert RULE.next([0.1, 0.2, 0.1], [], 20).step == "pair"
    assert RULE.next([0.1, 0.2, 0.1, 0.2], [], 20).step == "rejected"
    assert RULE.next([0.0] * 4, [], 20).step == "rejected"  # another name of the baseline
    weak = [-1.0, -0.9, -1.1, -0.8, *[0.6, -0.9, 0.5, -1.1, 0.4, -0.9] * 3, 0.6, -0.9]
    assert e_value_of(weak) > 1
    assert StreamRule(most=24).next(weak, [], 1e6).step == "out of pairs"
    assert StreamRule(most=25).next(weak, [], 1e6).step == "pair"


def test_the_interval_of_a_confirmation_is_that_of_a_t_test():
    fresh = [-0.5, -0.6, -0.4, -0.7]
    expected = stats.ttest_1samp(fresh, 0).confidence_interval(0.95)
    assert interval_of(fresh) == pytest.approx((expected.low, expected.high))


def test_pairs_beyond_the_one_that_ends_the_comparison_do_not_count():
    useless = [0.1, 0.2, 0.1, 0.2]
    assert RULE.next([*useless, *[-9.0] * 20], [], 2) == ("rejected", 4)
    assert RULE.next([*BETTER, 9.0, 9.0], [], 20) == ("confirm", 4)
    assert StreamRule(most=5).next([-1.0, -0.9, -1.1, -0.8, 0.6, -9.0], [], 1e6) == ("out of pairs", 5)


def test_the_interval_that_is_shown_is_the_one_that_decides():
    rng = np.random.default_rng(0)
    words = set()
    for _ in range(60):
        fresh = list(rng.normal(-0.8, 1, CONFIRMATION))
        step = RULE.next(BETTER, fresh, 20).step
        words.add(step)
        assert (step == "adopted") == (interval_of(fresh)[1] < 0)
    assert words == {"adopted", "rejected"}
    assert interval_of([1.0]) is interval_of([math.inf, 1.0]) is None


def test_an_idea_that_diverges_is_rejected_unless_it_was_adopted_before():
    assert RULE.next([-1.0, math.inf], [], 20) == ("rejected", 2)
    assert RULE.next([*BETTER, math.inf], [], 20) == ("confirm", 4)
    assert RULE.next(BETTER, [-1.0, math.inf], 20).step == "rejected"

"""The rule for a stream of ideas: its screen, its confirmation, its levels, and Hall's t."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_llm.statistics.looks import PlannedLook
from lightning_llm.statistics.stream import (
    CONFIRMED_AFTER,
    HOPELESS,
    SCREEN,
    THOROUGH,
    Decision,
    StreamRule,
    interval_of,
    skewness_corrected,
)

RULE = StreamRule()
BETTER = [-1.0, -1.2, -0.9, -1.1, -1.05, -0.95, -1.0, -1.1]
FRESH = [-0.5, -0.6, -0.4, -0.7, -0.5, -0.3, -0.6, -0.5, -0.4, -0.6, -0.5, -0.7]
LEVEL = RULE.level(1, 0)


def t_of(differences):
    return stats.ttest_1samp([-value for value in differences], 0).statistic


# ---- the screen


def test_an_idea_is_screened_after_three_and_after_eight_pairs():
    assert RULE.next([], [], LEVEL) == Decision("screen", 0, wanted=3)
    assert RULE.next(BETTER[:2], [], LEVEL) == Decision("screen", 2, wanted=3)
    third = RULE.next(BETTER[:3], [], LEVEL)
    assert third[:4] == ("screen", 3, 0, 8)
    assert third.t == pytest.approx(t_of(BETTER[:3]))
    assert RULE.next(BETTER[:7], [], LEVEL)[:4] == ("screen", 7, 0, 8)
    assert RULE.next(BETTER, [], LEVEL)[:4] == ("confirm", 8, 0, 12)


@pytest.mark.parametrize(("pairs", "least"), SCREEN)
def test_the_screen_gives_up_just_below_its_limit(pairs, least):
    spread = np.resize([1.0, -1.0], pairs) - np.resize([1.0, -1.0], pairs).mean()
    spread /= spread.std(ddof=1)
    for t, is_given_up in ((least - 0.01, True), (least + 0.01, False)):
        seen = sorted(-spread - t / math.sqrt(pairs))  # the best ones first, which pass the look after three
        assert t_of(seen) == pytest.approx(t)
        decision = RULE.next(seen, [], LEVEL)
        assert (decision.step == "rejected", decision.pairs) == (is_given_up, pairs)


def test_pairs_beyond_the_look_that_ends_the_comparison_do_not_count():
    useless = [0.1, 0.2, 0.1]
    assert RULE.next([*useless, *[-9.0] * 5], FRESH, LEVEL)[:3] == ("rejected", 3, 0)
    assert RULE.next([*BETTER, 9.0, math.inf], FRESH, LEVEL)[:3] == ("adopted", 8, 12)


def test_another_name_of_the_baseline_is_rejected():
    assert RULE.next([0.0] * 3, [], LEVEL)[:2] == ("rejected", 3)


def test_an_idea_that_fails_to_train_is_rejected_unless_it_was_adopted_before():
    assert RULE.next([-1.0, math.inf], [], LEVEL)[:2] == ("rejected", 2)
    assert RULE.next([*BETTER[:5], math.inf], [], LEVEL)[:2] == ("rejected", 6)
    assert RULE.next(BETTER, [-0.5, math.inf], LEVEL)[:3] == ("rejected", 8, 2)
    assert RULE.next(BETTER, [*FRESH, math.inf], LEVEL).step == "adopted"


# ---- the confirmation


def test_only_fresh_pairs_adopt():
    decision = RULE.next(BETTER, FRESH, LEVEL)
    assert decision[:4] == ("adopted", 8, 12, 0)
    assert decision.p == RULE.p_at(0, FRESH) < LEVEL
    assert RULE.next(BETTER, FRESH[:11], LEVEL)[:4] == ("confirm", 8, 11, 12)
    assert RULE.next(BETTER, FRESH, decision.p * 0.999)[:4] == ("confirm", 8, 12, 20)
    assert RULE.next(BETTER, FRESH, decision.p).step == "adopted"


def test_a_hopeless_confirmation_ends_at_its_first_look():
    useless = [0.1, -0.2, 0.15, -0.1, 0.2, -0.15, 0.1, -0.2, 0.15, -0.05, 0.1, -0.1]
    assert RULE.p_at(0, useless) > HOPELESS
    assert RULE.next(BETTER, useless, LEVEL)[:3] == ("rejected", 8, 12)
    weak = [value - 0.06 for value in useless]
    assert LEVEL < RULE.p_at(0, weak) < HOPELESS
    assert RULE.next(BETTER, weak, LEVEL)[:4] == ("confirm", 8, 12, 20)
    assert RULE.next(BETTER, [*weak, *weak[:8]], LEVEL)[:4] == ("rejected", 8, 20, 0)


def test_p_is_one_sided_and_that_of_planned_looks():
    t = skewness_corrected(FRESH)
    expected = PlannedLook(CONFIRMED_AFTER, 0, (0.36, 1.0)).p(t) / 2
    assert RULE.p_at(0, FRESH) == pytest.approx(float(expected))
    assert RULE.p_at(0, FRESH) == pytest.approx(stats.t.sf(t, 11) / 0.36)
    assert RULE.p_at(0, [-value for value in FRESH]) == 1.0
    assert StreamRule(looks=THOROUGH).p_at(1, FRESH * 4) < 1e-4


@pytest.mark.slow
def test_p_is_at_most_u_with_a_probability_of_at_most_u():
    paths = np.random.default_rng(0).standard_normal((20_000, 20))
    p = np.array([[RULE.p_at(0, path[:12]), RULE.p_at(1, path)] for path in paths])
    for u in (0.05, 0.01):
        share = (p <= u).any(1).mean()
        assert share <= u + 2 * math.sqrt(u * (1 - u) / len(paths))
        assert share >= u / 2  # and the promise is used


def test_a_minimal_gain_has_to_be_exceeded():
    rule = StreamRule(minimal_gain=0.45)
    assert rule.p_at(0, FRESH) == pytest.approx(RULE.p_at(0, [value + 0.45 for value in FRESH]))
    assert rule.next(BETTER, FRESH, LEVEL).step == "confirm"
    assert StreamRule(minimal_gain=0.2).next(BETTER, FRESH, LEVEL).step == "adopted"
    assert StreamRule(minimal_gain=2.0).next(BETTER[:3], [], LEVEL)[:2] == ("rejected", 3)
    upper = stats.t.ppf(0.8, 2) * np.std(BETTER[:3], ddof=1) / math.sqrt(3) - np.mean(BETTER[:3])
    for gain, step in ((upper - 1e-6, "screen"), (upper + 1e-6, "rejected")):
        assert StreamRule(minimal_gain=gain).next(BETTER[:3], [], LEVEL).step == step


# ---- levels


def test_levels_add_up_to_alpha_and_rise_with_adoptions():
    levels = [RULE.level(number, 0) for number in range(1, 100_001)]
    assert sum(levels) == pytest.approx(0.05, rel=1e-3)
    assert sum(levels) < 0.05
    assert levels[0] == pytest.approx(0.05 / 11)
    assert RULE.level(16, 2) == pytest.approx(3 * levels[15])
    assert StreamRule(alpha=0.1).level(4, 0) == pytest.approx(2 * levels[3])


# ---- the statistic


@pytest.mark.parametrize("seed", range(4))
def test_the_statistic_is_halls_cubic_where_improvements_are_skewed_to_the_left(seed):
    drawn = np.random.default_rng(seed).exponential(size=12) - 1.5
    improvements = -drawn
    mean, spread = improvements.mean(), improvements.std(ddof=1)
    third = np.mean((improvements - mean) ** 3)
    skewness, ratio = third / spread**3, mean / spread
    assert skewness < 0
    hall = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / 72
    assert skewness_corrected(drawn) == pytest.approx(math.sqrt(12) * min(hall, ratio))
    assert skewness_corrected(drawn) <= t_of(drawn)
    to_the_right = -drawn - 2 * mean  # the same mean improvement
    assert -np.mean(to_the_right) == pytest.approx(mean)
    assert skewness_corrected(to_the_right) == pytest.approx(t_of(to_the_right))


def test_the_statistic_ignores_the_unit_and_knows_pairs_that_do_not_vary():
    assert skewness_corrected(BETTER) == pytest.approx(skewness_corrected([value * 1e-6 for value in BETTER]))
    assert skewness_corrected([-0.1] * 5) == math.inf
    assert skewness_corrected([0.1] * 5) == -math.inf
    assert skewness_corrected([0.0] * 5) == 0.0


def test_the_interval_of_a_mean_is_that_of_a_t_test():
    fresh = [-0.5, -0.6, -0.4, -0.7]
    expected = stats.ttest_1samp(fresh, 0).confidence_interval(0.95)
    assert interval_of(fresh) == pytest.approx((expected.low, expected.high))
    assert interval_of([1.0]) is interval_of([math.inf, 1.0]) is None

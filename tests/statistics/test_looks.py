"""Planned and further looks: their error under the null, by simulation, and their boundaries."""

import numpy as np
import pytest

from lightning_llm.statistics.estimates import student
from lightning_llm.statistics.looks import RHO, OneLook, PlannedLook, ShortLook, boundaries, further_looks, spending

LOOKS = (4, 6, 8, 12, 16)
SPENT = spending(LOOKS, 1.0, reserve=0)
RULES = [PlannedLook(LOOKS, number, SPENT) for number in range(len(LOOKS))]  # each pair spends the same


def statistics_at(draws, pairs):
    part = draws[:, :pairs]
    return part.mean(1) / part.std(1, ddof=1) * pairs**0.5


def rejected(draws, rules, alpha=0.05):
    """The share of rows that one of the rules, by number of pairs, rejects."""
    found = np.zeros(len(draws), dtype=bool)
    for pairs, rule in rules.items():
        found |= rule.p(statistics_at(draws, pairs)) <= alpha
    return found.mean()


@pytest.fixture(scope="module")
def null():
    return np.random.default_rng(11).normal(size=(40_000, 24))


def test_boundaries_spend_alpha_in_proportion_to_the_pairs():
    found = [rule.critical(0.05) for rule in RULES]
    assert found == pytest.approx([5.41, 4.16, 3.52, 2.81, 2.57], abs=0.03)
    assert found[0] == pytest.approx(student(0.05 / 4, 3))
    assert PlannedLook((9,), 0, (1.0,)).critical(0.05) == pytest.approx(OneLook(8).critical(0.05))


@pytest.mark.parametrize("rho", [1.0, RHO])
def test_planned_looks_reject_5_percent_and_peeking_15(null, rho):
    planned = {pairs: PlannedLook(LOOKS, number, spending(LOOKS, rho, reserve=0)) for number, pairs in enumerate(LOOKS)}
    assert rejected(null, planned) == pytest.approx(0.05, abs=0.004)
    assert rejected(null, planned, 0.1) == pytest.approx(0.1, abs=0.005)
    assert rejected(null, planned, 0.01) == pytest.approx(0.01, abs=0.0015)
    assert rejected(null, {16: OneLook(15)}) == pytest.approx(0.05, abs=0.004)
    assert rejected(null, {pairs: OneLook(pairs - 1) for pairs in LOOKS}) == pytest.approx(0.149, abs=0.006)


@pytest.mark.parametrize(
    ("rho", "spent"),
    [
        (1.0, [0.25, 0.375, 0.5, 0.75, 1]),
        (2.0, [0.0625, 0.140625, 0.25, 0.5625, 1]),
        (3.0, [1 / 64, 27 / 512, 0.125, 27 / 64, 1]),
    ],
)
def test_up_to_a_look_its_share_is_spent(null, rho, spent):
    rules = [PlannedLook(LOOKS, number, spending(LOOKS, rho, reserve=0)) for number in range(len(LOOKS))]
    for number, share in enumerate(spent):
        until = dict(zip(LOOKS[: number + 1], rules, strict=False))
        assert rejected(null, until, 0.2) == pytest.approx(0.2 * share, abs=0.001 + 0.006 * share**0.5)


def test_a_larger_exponent_saves_alpha_for_the_last_look():
    first, last = (
        [PlannedLook(LOOKS, number, spending(LOOKS, rho, reserve=0)).critical(0.05) for rho in (1.0, 2.0, 3.0)]
        for number in (0, len(LOOKS) - 1)
    )
    assert first == pytest.approx([student(0.05 * 0.25**rho, 3) for rho in (1, 2, 3)])
    assert last == pytest.approx([2.57, 2.34, 2.25], abs=0.02)
    assert spending(LOOKS) == spending(LOOKS, RHO)


def test_a_look_that_spends_almost_nothing_rejects_almost_nothing(null):
    # 0.1 % of 1 %, of a simulation of 500,000 paths: 5 would make the boundary
    looks = (4, 5, 40)
    rules = {
        pairs: PlannedLook(looks, number, spending(looks, 3.0, reserve=0)) for number, pairs in enumerate(looks[:2])
    }
    assert rules[5].critical(0.01) == pytest.approx(student(0.01 * (5**3 - 4**3) / 40**3, 4), rel=1e-3)
    assert (np.diff(boundaries(looks, spending(looks, 3.0, reserve=0)), axis=0) <= 0).all()
    assert rejected(null, rules, 0.01) < 5e-4


def test_heavy_tails_do_not_raise_the_error():
    draws = np.random.default_rng(5).standard_t(3, size=(40_000, 16))
    assert rejected(draws, dict(zip(LOOKS, RULES, strict=True))) == pytest.approx(0.036, abs=0.004)


def test_power_of_planned_looks(null):
    shifted = null[:, :16] + 1
    assert rejected(shifted, dict(zip(LOOKS, RULES, strict=True))) == pytest.approx(0.92, abs=0.01)


def test_the_share_of_alpha_up_to_each_look():
    assert spending((8, 12, 16), 2.0, reserve=0.2) == pytest.approx((0.2, 0.45, 0.8))
    assert spending((8, 16), 1.0, further=3, reserve=0.2) == pytest.approx((0.4, 0.8, 0.9, 0.8 + 0.4 / 3, 0.95))
    assert further_looks(16)[:3] == [24, 36, 54]
    assert further_looks(4)[:4] == [6, 9, 14, 21]
    assert further_looks(900) == []


@pytest.mark.parametrize(
    "rule", [OneLook(7), *RULES, PlannedLook(LOOKS, 1, spending(LOOKS, 3.0)), ShortLook(RULES[2], 6)]
)
def test_the_critical_value_is_where_p_is_alpha(rule):
    for alpha in (0.5, 0.05, 0.03, 2e-4):
        if (critical := rule.critical(alpha)) < float("inf"):
            assert rule.p(critical) == pytest.approx(alpha, rel=1e-6)
            assert (rule.p(np.array([critical, -critical])) == rule.p(critical)).all()
    assert rule.critical(0.03) < float("inf")
    assert rule.critical(1e-6) >= rule.critical(2e-4) > rule.critical(0.03)


def test_beyond_the_simulation_p_is_bounded():
    for rule in RULES:
        assert rule.p(40.0) < 1e-3
        assert rule.p(rule.critical(1e-6)) <= 1.01e-6
        assert rule.p(float("inf")) == 0.0


def test_boundaries_are_simulated_once_and_the_same_each_time():
    first = boundaries((3, 5), (0.5, 1.0))
    assert boundaries((3, 5), (0.5, 1.0)) is first
    boundaries.cache_clear()
    assert (boundaries((3, 5), (0.5, 1.0)) == first).all()

"""Effects of combined factors: contrasts against brute force, the rates of their errors, and their words."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lightning_llm.statistics.design import BETTER, NOT_SHOWN, WORSE
from lightning_llm.statistics.factorial import ADD_UP, LESS, MORE, cells_of, factorial

MAINS = (-0.5, -0.3, 0.2, -0.1, 0.05)


def losses_of(count, twos=None, *, seeds=6, noise=0.0, seed=0, three=0.0):
    """Losses of all cells: main effects, two-way interactions by pair, and noise around each seed's own level."""
    rng = np.random.default_rng(seed)
    level = rng.normal(size=seeds)
    found = {}
    for cell in cells_of(count):
        loss = 3 + level + noise * rng.normal(size=seeds)
        loss = loss + sum(effect for effect, is_set in zip(MAINS, cell, strict=False) if is_set)
        loss = loss + sum(value for (one, other), value in (twos or {}).items() if cell[one] and cell[other])
        found[cell] = (loss + three * all(cell[:3])).tolist()
    return found


def by_name(effects):
    return {(effect.kind, effect.factors): effect for effect in effects}


@pytest.mark.parametrize(("count", "cells"), [(2, 4), (3, 8), (4, 8), (5, 17), (6, 8), (9, 11)])
def test_the_cells_of_each_number_of_factors_begin_with_the_baseline_and_end_with_all(count, cells):
    found = cells_of(count)
    assert len(found) == len({*found}) == cells
    assert (found[0], found[-1]) == ((0,) * count, (1,) * count)


def test_one_factor_has_no_cells_to_combine():
    with pytest.raises(ValueError, match="two factors or more, got 1"):
        cells_of(1)


def test_cells_of_another_design_and_unequal_seeds_are_refused():
    losses = losses_of(3)
    with pytest.raises(ValueError, match="3 factors need 8 cells with the same seeds"):
        factorial({cell: values for cell, values in losses.items() if sum(cell) < 3})
    with pytest.raises(ValueError, match="the same seeds"):
        factorial({**losses, (0, 0, 0): losses[0, 0, 0][:-1]})


@pytest.mark.parametrize("count", [2, 3])
def test_each_contrast_is_that_of_the_loops_over_all_cells(count):
    losses = losses_of(count, noise=0.1, seeds=7)
    effects = by_name(factorial(losses))
    assert len(effects) == 2**count - 1 + 2
    y = {cell: np.array(values) for cell, values in losses.items()}
    for size in range(1, count + 1):
        for places in itertools.combinations(range(count), size):
            contrast = np.zeros(7)
            rest = [place for place in range(count) if place not in places]
            for others in itertools.product((0, 1), repeat=len(rest)):
                for signs in itertools.product((0, 1), repeat=size):
                    cell = [0] * count
                    for place, value in zip((*places, *rest), (*signs, *others), strict=True):
                        cell[place] = value
                    contrast += (-1) ** (size - sum(signs)) * y[tuple(cell)] / 2 ** len(rest)
            effect = effects["main" if size == 1 else "interaction", places]
            np.testing.assert_allclose(np.subtract(effect.second, effect.first), contrast, atol=1e-12)
            reach = stats.t.interval(1 - effect.alpha, 6, contrast.mean(), stats.sem(contrast))
            assert effect.interval == pytest.approx(reach)
            assert effect.p == pytest.approx(stats.ttest_1samp(contrast, 0).pvalue)
    every = tuple(range(count))
    none, all_set = y[(0,) * count], y[(1,) * count]
    alone = sum(y[tuple(int(place == one) for place in every)] - none for one in every)
    together, against = effects["together", every], effects["sum", every]
    np.testing.assert_allclose(np.subtract(together.second, together.first), all_set - none)
    np.testing.assert_allclose(np.subtract(against.second, against.first), all_set - none - alone)


def test_families_share_alpha():
    alphas = {
        count: {kind: effect.alpha for (kind, factors), effect in by_name(factorial(losses_of(count))).items()}
        for count in (2, 4, 5, 6)
    }
    assert alphas[2] == {"main": 0.025, "interaction": 0.05, "together": 0.05, "sum": 0.05}
    assert alphas[4]["interaction"] == pytest.approx(0.05 / 3)  # six are confounded in three pairs
    assert alphas[5]["interaction"] == pytest.approx(0.05 / 10)
    assert alphas[6] == {"main": pytest.approx(0.05 / 6), "together": 0.05}


def test_four_factors_confound_interactions_in_pairs_and_name_them():
    twos = {(0, 1): 0.4, (2, 3): 0.1, (0, 2): -0.2, (1, 2): 0.3}
    effects = by_name(factorial(losses_of(4, twos)))
    interactions = {places: effect for (kind, places), effect in effects.items() if kind == "interaction"}
    assert {places: effect.aliases for places, effect in interactions.items()} == {
        (0, 1): ((2, 3),),
        (0, 2): ((1, 3),),
        (0, 3): ((1, 2),),
    }
    assert interactions[0, 1].difference == pytest.approx(0.5)
    assert interactions[0, 3].difference == pytest.approx(0.3)
    assert effects["sum", (0, 1, 2, 3)].difference == pytest.approx(sum(twos.values()))
    assert effects["main", (3,)].difference == pytest.approx(MAINS[3] + 0.1 / 2)  # clear of all but its own
    assert all(effect.is_estimated for (kind, _), effect in effects.items() if kind != "together")


def test_five_factors_tell_all_interactions_apart():
    twos = {pair: 0.1 * number for number, pair in enumerate(itertools.combinations(range(5), 2))}
    effects = by_name(factorial(losses_of(5, twos)))
    found = {places: effect.difference for (kind, places), effect in effects.items() if kind == "interaction"}
    assert found == pytest.approx(twos)
    assert effects["sum", (0, 1, 2, 3, 4)].difference == pytest.approx(sum(twos.values()))
    assert effects["together", (0, 1, 2, 3, 4)].difference == pytest.approx(sum(MAINS) + sum(twos.values()))


def test_six_factors_say_what_each_adds_to_the_others():
    effects = by_name(factorial(losses_of(6, {(0, 1): 0.4})))
    assert {kind for kind, _ in effects} == {"main", "together"}
    assert effects["main", (0,)].difference == pytest.approx(MAINS[0] + 0.4)
    assert effects["main", (3,)].difference == pytest.approx(MAINS[3])


def word_of(interaction, *, noise=0.01, delta=None, seeds=8):
    return by_name(factorial(losses_of(2, {(0, 1): interaction}, noise=noise, seeds=seeds), delta=delta))


def test_words_follow_the_interval_and_nothing_adds_up_without_delta():
    assert word_of(0.2)["interaction", (0, 1)].word == LESS
    assert word_of(-0.2)["sum", (0, 1)].word == MORE
    assert word_of(0.2)["main", (0,)].word == BETTER
    nothing = word_of(0.0)
    assert nothing["interaction", (0, 1)].interval[0] < 0 < nothing["interaction", (0, 1)].interval[1]
    assert nothing["interaction", (0, 1)].word == nothing["sum", (0, 1)].word == NOT_SHOWN
    assert word_of(0.0, delta=0.001)["sum", (0, 1)].word == NOT_SHOWN
    assert word_of(0.0, delta=0.1)["sum", (0, 1)].word == ADD_UP
    assert word_of(0.0, delta=0.1)["together", (0, 1)].word == BETTER  # only effects that interact can add up
    worse = {cell: [-value for value in values] for cell, values in losses_of(2, noise=0.01).items()}
    assert by_name(factorial(worse))["main", (0,)].word == WORSE


def test_a_three_way_interaction_has_an_interval_and_no_words():
    effect = by_name(factorial(losses_of(3, noise=0.01, three=1.0), delta=5.0))["interaction", (0, 1, 2)]
    assert (effect.word, effect.alpha) == ("", 0.05)
    assert effect.interval[0] < 1 < effect.interval[1]


def test_few_seeds_and_no_spread_show_nothing():
    few = word_of(0.5, seeds=3)["interaction", (0, 1)]
    assert (few.word, few.note) == (NOT_SHOWN, "a verdict needs at least 4 pairs")
    assert few.interval is not None
    one = word_of(0.5, seeds=1)["interaction", (0, 1)]
    assert (one.interval, one.note) == (None, "fewer than two seeds: no interval")
    same = word_of(0.5, noise=0.0)["interaction", (0, 1)]
    assert (same.interval, same.word, same.note) == (None, NOT_SHOWN, "the contrast does not vary: no interval")
    assert same.difference == pytest.approx(0.5)


def test_a_run_that_failed_leaves_no_contrast_of_its_cell_and_a_baseline_takes_its_seed_out():
    losses = losses_of(3, noise=0.01)
    losses[1, 1, 0][2] = None
    losses[1, 0, 0][1] = math.nan
    effects = by_name(factorial(losses))
    assert effects["main", (2,)].interval is None
    assert effects["main", (2,)].note == "2 runs that it is a contrast of failed to train"
    assert effects["sum", (0, 1, 2)].note == "1 run that it is a contrast of failed to train"
    assert effects["together", (0, 1, 2)].interval is not None
    losses = losses_of(2, noise=0.01)
    losses[0, 0][3] = None
    kept = {cell: [value for place, value in enumerate(values) if place != 3] for cell, values in losses.items()}
    found, without = by_name(factorial(losses)), by_name(factorial(kept))
    assert found["sum", (0, 1)].interval == without["sum", (0, 1)].interval
    assert found["sum", (0, 1)].note == "1 run of the baseline failed to train"


def normal_losses(rng, mains, interaction, seeds):
    """Two factors; the difference of two cells has a standard deviation of 1, and cells correlate by 0.5."""
    shared = rng.standard_normal(seeds) * math.sqrt(0.5)
    own = {cell: shared + rng.standard_normal(seeds) * math.sqrt(0.5) for cell in cells_of(2)}
    return {(a, b): (values + mains * (a + b) + interaction * a * b).tolist() for (a, b), values in own.items()}


def test_the_rates_of_errors_and_the_power_are_those_of_the_design():
    """With 16 pairs and an interaction of one standard deviation: 75% of 1,500 experiments in an own simulation."""
    rng = np.random.default_rng(0)
    shown = [by_name(factorial(normal_losses(rng, -1, 1, 16)))["interaction", (0, 1)].word for _ in range(800)]
    assert {*shown} <= {LESS, NOT_SHOWN}
    assert shown.count(LESS) / 800 == pytest.approx(0.75, abs=0.05)
    false_mains = false_interactions = 0
    for _ in range(1200):
        effects = by_name(factorial(normal_losses(rng, 0, 0, 16)))
        false_mains += any(effects["main", (place,)].word != NOT_SHOWN for place in (0, 1))
        false_interactions += effects["interaction", (0, 1)].word != NOT_SHOWN
    assert 0.035 < false_mains / 1200 < 0.065
    assert 0.035 < false_interactions / 1200 < 0.065


def test_effects_that_do_not_add_up_rarely_seem_to():
    """At an interaction of exactly delta, the interval is inside ±delta in at most alpha / 2."""
    rng = np.random.default_rng(1)
    words = [
        by_name(factorial(normal_losses(rng, -1, 1.5, 24), delta=1.5))["interaction", (0, 1)].word for _ in range(1200)
    ]
    assert 0.012 < words.count(ADD_UP) / 1200 < 0.04

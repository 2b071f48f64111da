"""A batch of ideas: the evidence of pairs against its definition, and e-BH by hand."""

import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from lightning_llm.statistics.batch import (
    LOOKS,
    NOT_ADOPTED,
    adopted,
    batch_verdicts,
    e_value_of,
    is_decided,
    log_e_values,
    threshold,
)
from lightning_llm.statistics.verdict import Sample, verdicts


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
    better = [-1.0, -1.2, -0.9, -1.1, -1.05, -0.95]
    assert e_value_of(better) > 20 > 1 > e_value_of([-value for value in better])
    assert e_value_of([*better, math.inf]) == 0  # its run failed to train


@pytest.mark.parametrize("pairs", [4, 24])
def test_the_e_value_of_a_useless_idea_is_one_on_average(pairs):
    u = np.linspace(-1, 1, 4001)[1:-1]
    log_density = (pairs - 3) / 2 * np.log1p(-(u**2)) - special.betaln(0.5, (pairs - 1) / 2)  # of t / √(t² + n - 1)
    expected = integrate.trapezoid(np.exp(log_e_values(u, pairs) + log_density), u)
    assert expected == pytest.approx(1.0, abs=0.002)


def test_the_ideas_with_the_largest_e_values_are_adopted():
    assert threshold(1, 20, 0.05) == pytest.approx(400)
    assert threshold(4, 20, 0.05) == pytest.approx(100)
    e_values = {"a": 150.0, "b": 500.0, "c": 150.0, "d": 1.0} | {f"useless {place}": 0.1 for place in range(16)}
    assert adopted(e_values, 0.05) == {"a", "b", "c"}  # three reach 400 / 3
    assert adopted({**e_values, "c": 120.0}, 0.05) == {"b"}  # the second would need 200
    assert adopted({**e_values, "b": 100.0}, 0.05) == set()
    assert adopted(dict.fromkeys(e_values, 21.0), 0.05) == set(e_values)


def test_an_idea_is_tried_until_its_evidence_is_gone_or_enough():
    assert not is_decided(1.1, 4, 20, 0.05)
    assert is_decided(1.0, 4, 20, 0.05)
    assert is_decided(400.0, 4, 20, 0.05)
    assert not is_decided(399.0, 20, 20, 0.05)
    assert is_decided(399.0, 24, 20, 0.05)


def samples(*differences):
    base = [2.0 + 0.01 * seed for seed in range(LOOKS[-1])]
    return {
        str(place): Sample(base[: len(own)], [loss + added for loss, added in zip(base, own, strict=False)])
        for place, own in enumerate(differences)
    }


def test_nothing_is_adopted_before_all_ideas_are_decided():
    rng = np.random.default_rng(0)
    better, maybe = -0.03 + 0.01 * rng.standard_normal(24), -0.004 + 0.01 * rng.standard_normal(24)
    early = batch_verdicts(samples(better[:12], maybe[:4]), 0.05)
    assert [found.sentence.partition(":")[0] for found in early.values()] == ["enough evidence", "not decided yet"]
    assert [found.has_ended for found in early.values()] == [True, False]
    late = batch_verdicts(samples(better[:12], maybe), 0.05)
    assert [found.verdict for found in late.values()] == ["better", "undecided"]
    assert late["0"].sentence.startswith("adopted: e-value ")
    assert late["1"].sentence == f"{NOT_ADOPTED}: e-value {late['1'].e_value:.3g}, 20 needed by each of 2 ideas"
    assert late["1"].note == ""
    assert late["0"].e_value == pytest.approx(e_value_of(better[:12]))
    assert all(found.has_ended for found in late.values())


def test_an_interval_is_that_of_an_idea_by_itself_at_its_look():
    own = samples(-0.01 + 0.01 * np.random.default_rng(0).standard_normal(8))
    alone = verdicts(own, alpha=0.05, looks=LOOKS)["0"]
    assert batch_verdicts(own, 0.05)["0"].interval == alone.interval


def test_a_run_that_fails_ends_its_idea_and_one_of_the_baseline_is_left_out():
    first = Sample([2.0, 2.1, 2.2, 2.3], [1.9, 2.0, None, 2.2])
    second = Sample([2.0, None, 2.2, 2.3], [1.9, 2.0, 2.12, 2.19])
    found = batch_verdicts({"fails": first, "lacks": second}, 0.05)
    assert (found["fails"].e_value, found["fails"].has_ended) == (0, True)
    assert found["lacks"].e_value == pytest.approx(e_value_of([-0.1, -0.08, -0.11]))
    alone = batch_verdicts({"lacks": Sample([None, None, 2.2, None], [1.9, 2.0, 2.1, 2.2])}, 0.05)["lacks"]
    assert (alone.e_value, alone.has_ended) == (1.0, False)  # one pair says nothing


def test_what_is_given_up_says_so_before_the_end():
    found = batch_verdicts(samples([0.1, 0.12, 0.09, 0.11], [-0.01, 0.01, -0.02, -0.01]), 0.05)
    assert found["0"].sentence.startswith("given up: e-value ")
    assert found["1"].sentence.endswith(", at most 40 needed")

"""The simulation of planned looks: its paths, its rule, and small runs of all its parts."""

import json
import math

import numpy as np
import pytest

from benchmarks import ablate_looks
from benchmarks.__main__ import main
from benchmarks.ablate_looks import (
    BETTER,
    CHOSEN,
    EQUIVALENT,
    NOISES,
    UNDECIDED,
    WORSE,
    Candidate,
    Paths,
    draws,
    judged,
    long_paths,
    moderated,
    summary,
)
from benchmarks.harness import Request
from lightning_llm.ablate.experiment import LOOKS
from lightning_llm.statistics.design import Design
from lightning_llm.statistics.estimates import paired
from lightning_llm.statistics.looks import RESERVE, RHO

SMALL = {"PATHS": 4000, "LONG_PATHS": 4000, "LOOKS": ((4, 8), CHOSEN.looks), "RHOS": (1.0, CHOSEN.rho)}


@pytest.fixture(scope="module")
def rows():
    """The rows of all parts by shape and variant, small."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(ablate_looks, name, value)
        for name, part in ablate_looks.PARTS.items():
            written = (vars(row) for row in part(Request(bench="ablate", shape=name, sizes=part)))
            found[name] = {row["variant"]: json.loads(json.dumps(row)) for row in written}
    return found


def test_the_command_writes_the_rows(tmp_path, monkeypatch, rows):
    for name, value in SMALL.items():
        monkeypatch.setattr(ablate_looks, name, value)
    path = tmp_path / "rows.json"
    assert main(["ablate", "--json", str(path), "--shapes", "tuned"]) == 0
    assert {row["variant"]: row["found"] for row in json.loads(path.read_text())["rows"]} == {
        name: row["found"] for name, row in rows["tuned"].items()
    }


@pytest.mark.parametrize("noise", NOISES)
def test_noise_has_no_true_difference_and_a_standard_deviation_of_1(noise):
    found = draws(noise, 50_000)
    assert found.shape == (50_000, 16)
    expected = math.sqrt(1 + 15**2 * 0.09) if noise == "unstable" else 1
    assert found.mean() == pytest.approx(0, abs=0.004 * expected)
    assert found.std() == pytest.approx(expected, rel=0.02)
    if noise == "unstable":  # with the effect, nine of ten runs are 1 better
        assert np.median(found + ablate_looks.UNSTABLE_EFFECT) == pytest.approx(-0.86, abs=0.02)


@pytest.mark.parametrize(("effect", "delta"), [(0.0, None), (1.0, None), (0.0, 1.2), (-0.5, 0.8)])
def test_the_rule_for_all_paths_is_that_of_ablate_for_each(effect, delta):
    differences, looks, words = draws("normal", 300, seed=3), (4, 7, 16), [UNDECIDED, WORSE, EQUIVALENT, BETTER]
    design, names = (
        Design(0.3, looks, delta),
        dict(zip(words, ("undecided", "worse", "equivalent", "better"), strict=True)),
    )
    stops = judged(Paths.of(differences, looks), Candidate(looks, RHO, RESERVE).critical(0.3), effect, delta)
    for row, each in enumerate(differences + effect):
        for pairs in looks:
            estimate = paired([0.0] * pairs, each[:pairs])
            low, high = estimate.interval(design.rule(pairs).critical(0.3))
            if design.ends(low, high, pairs):
                break
        assert (names[stops.word[row]], stops.look[row]) == (design.answer(low, high, pairs).word, looks.index(pairs))
        assert (stops.estimate[row], stops.half[row]) == pytest.approx((estimate.difference, (high - low) / 2))
    assert len(set(stops.word)) > 1


def test_long_paths_are_those_of_differences():
    at = (4, 24, 81)
    found, expected = long_paths(at, 20_000), Paths.of(np.random.default_rng(5).normal(size=(20_000, 81)), at)
    for one, other in zip(found, expected, strict=True):
        assert one.std(1) == pytest.approx(other.std(1), rel=0.05)
        assert one.mean(1) == pytest.approx(other.mean(1), abs=0.01)
        assert np.corrcoef(one) == pytest.approx(np.corrcoef(other), abs=0.03)


def test_a_part_that_is_held_back_is_not_spent():
    whole, held = (Candidate((6, 16), 2.0, part) for part in (0.0, 0.5))
    assert held.critical(0.1) == pytest.approx(whole.critical(0.05), rel=1e-3)


def test_variances_are_shrunk_only_as_far_as_they_agree():
    rng, freedom = np.random.default_rng(4), 7
    equal = rng.chisquare(freedom, (2000, 6)) / freedom
    shrunk, weights = moderated(equal, freedom)
    assert np.log(shrunk).var() < 0.4 * np.log(equal).var()
    assert np.median(weights) == 6 * freedom
    unequal = equal * np.array([1, 1e3, 1e6, 1, 1e3, 1e6])
    _, weights = moderated(unequal, freedom)
    assert weights.max() < 1.2 * freedom
    # a prior of 8 degrees of freedom with a variance of 3, found again from many variances
    prior = 3 * 8 / rng.chisquare(8, (1, 40_000))
    variances = prior * rng.chisquare(freedom, (1, 40_000)) / freedom
    shrunk, weights = moderated(variances, freedom)
    assert weights[0, 0] - freedom == pytest.approx(8, rel=0.05)
    assert shrunk == pytest.approx((8 * 3 + freedom * variances) / (8 + freedom), rel=0.05)


def test_candidates_have_their_costs_and_their_errors(rows):
    found = rows["looks"]
    assert len(found) == 2 * 2 * 2
    assert [row["variant"] for row in found.values() if row["is_chosen"]] == [CHOSEN.label]
    for row in found.values():
        assert row["family"] == pytest.approx(0.05 * (1 - row["held"]), abs=0.025)
        assert row["direction"] == [row["direction"][0], *sorted(row["direction"][1:])]
        assert row["coverage"][0] == pytest.approx(1 - row["direction"][0], abs=1e-4)
        assert row["mean_pairs"][0] > row["mean_pairs"][-1] >= row["looks"][0]
        assert row["shapes"]["exponential"]["family"] > 2 * row["family"]
        assert row["shapes"]["unstable"]["wrong"] > 0.1
        assert row["falsely_equivalent"] == pytest.approx([0, 0, 0], abs=0.02)
        assert row["found"] == row["direction"][3]
    chosen = found[CHOSEN.label]
    assert chosen["direction"][3] == pytest.approx(0.825, abs=0.02)
    assert chosen["exaggeration_first"][3] == pytest.approx(1.35, abs=0.05)
    assert chosen["equivalent"] == pytest.approx([0.03, 0.64, 1.0], abs=0.03)
    linear = found[CHOSEN._replace(rho=1.0).label]
    assert linear["first"][3] > chosen["first"][3]
    assert linear["direction"][3] < chosen["direction"][3]


def test_the_chosen_looks_are_the_default():
    assert Candidate(LOOKS, RHO, RESERVE) == CHOSEN


def test_default_looks_are_judged_for_each_noise_and_number_of_variants(rows):
    found = rows["default-looks"]
    assert set(found) == {f"{noise}, {many}" for noise in NOISES for many in ("1 variant", "3 variants", "5 variants")}
    assert found["exponential, 5 variants"]["family"] > found["exponential, 1 variant"]["family"] > 0.07
    assert found["unstable, 1 variant"]["direction"][1] < 0.01
    assert 0.9 < found["normal, 1 variant"]["coverage_first"][3] < 1
    assert found["unstable, 1 variant"]["wrong"][1] > 0.2


def test_a_mean_needs_enough_verdicts(monkeypatch):
    monkeypatch.setattr(ablate_looks, "PATHS", 3000)
    monkeypatch.setattr(ablate_looks, "FEWEST", 3000)
    found = summary(CHOSEN, 1, "normal")
    assert found["exaggeration"][1] is None
    assert found["exaggeration"][-1] == pytest.approx(1, abs=0.02)


def test_two_one_sided_tests_are_equivalent_more_often(rows):
    for row in rows["equivalence"].values():
        assert row["two_equal"] >= row["one_equal"]
        assert row["one_delta"] <= row["two_delta"] < 0.06 / row["variants"] + 0.01
    assert rows["equivalence"]["1 variant, delta 1 sd"]["two_equal"] == pytest.approx(0.93, abs=0.02)


def test_a_pooled_variance_is_wrong_where_the_variances_differ(rows):
    assert len(rows["pooled"]) == 3 * 3 * 2
    equal, twice = (rows["pooled"][f"8 pairs, sd {ratio}, independent"] for ratio in (1, 2))
    for name in ("own", "pooled", "moderated"):
        assert equal[f"{name}_any"] == pytest.approx(0.01, abs=0.006)
    assert equal["own_power"] < 0.6 < 0.75 < equal["moderated_power"]
    assert twice["own_odd"] == pytest.approx(twice["level"], abs=0.004)
    assert twice["pooled_odd"] > 10 * twice["level"]
    assert twice["moderated_odd"] > 4 * twice["level"]


def test_added_pairs_spend_what_was_held_back(rows):
    for row in rows["added-pairs"].values():
        assert row["false_planned"] == pytest.approx(0.04, abs=0.012)
        assert row["false_planned"] <= row["false_36"] <= row["false_81"] <= row["false_200"] < 0.062
        assert row["power_planned"] < row["power_36"] < row["power_81"]
    found = rows["added-pairs"][f"{CHOSEN.label}; 1 variant"]
    assert found["further"] == [24, 36, 54, 81, 122, 183]
    assert found["power_planned"] == pytest.approx(0.385, abs=0.03)
    assert found["power_81"] == pytest.approx(0.9, abs=0.02)


def test_two_families_have_an_alpha_each(rows):
    found = {(row["correlation"], row["held"]): row for row in rows["tuned"].values() if row["variants"] == 1}
    assert found[0.0, 0.0]["found"] == pytest.approx(0.0975, abs=0.015)
    assert found[0.8, 0.0]["found"] == pytest.approx(0.081, abs=0.015)
    assert found[0.0, 0.2]["found"] == pytest.approx(0.0784, abs=0.015)

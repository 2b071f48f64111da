"""The verdict rule: its words, its error, diverged runs, single pairs, several variants."""

import dataclasses
import json
import math

import numpy as np
import pytest

from lightning_llm.ablate import statistics
from lightning_llm.ablate.sequential import PlannedLook
from lightning_llm.ablate.verdict import BETTER, EQUIVALENT, UNDECIDED, WORSE, Sample, verdicts

LOOKS = (4, 6, 8, 12, 16)
BASELINE = [2.01, 1.97, 2.05, 2.00]


def one(variant, baseline=BASELINE, *, is_paired=True, **options):
    return verdicts({"a": Sample(baseline, variant, is_paired)}, **options)["a"]


def shifted(*differences):
    return [value + difference for value, difference in zip(BASELINE, differences, strict=True)]


def test_lower_is_better():
    found = one(shifted(-0.1, -0.11, -0.09, -0.1))
    assert (found.verdict, found.pairs, found.rule, found.note) == (BETTER, 4, "one look", "")
    assert found.difference == pytest.approx(-0.1)
    low, high = found.interval
    assert low < -0.1 < high < 0
    assert found.p == found.p_adjusted < 0.001
    assert found.further_pairs is None
    assert one(shifted(0.1, 0.11, 0.09, 0.1)).verdict == WORSE
    assert json.loads(json.dumps(dataclasses.asdict(found)))["interval"] == [low, high]


def test_undecided_says_about_how_many_more_pairs():
    found = one(shifted(-0.03, 0.02, -0.02, 0.01))
    assert found.verdict == UNDECIDED
    effect = abs(found.difference) / found.sd
    assert found.further_pairs == statistics.pairs_for_difference(effect) - 4
    soon = one(shifted(-0.03, 0.02, -0.02, 0.01), delta=0.03)  # to be equivalent
    assert soon.further_pairs < found.further_pairs
    assert one(shifted(-0.03, 0.03, -0.02, 0.02)).further_pairs is None  # no difference: no number of pairs will do


def test_further_pairs_of_a_plan_are_those_of_its_next_looks_then_of_the_e_process():
    found = one(shifted(-0.03, 0.005, -0.02, -0.01), looks=LOOKS)
    assert found.verdict == UNDECIDED
    assert found.further_pairs in (2, 4, 8, 12)
    weak = one(shifted(-0.03, 0.02, -0.02, 0.01), looks=LOOKS)
    assert weak.further_pairs > 12
    assert weak.further_pairs > one(shifted(-0.03, 0.02, -0.02, 0.01)).further_pairs  # the price of looking


def test_equivalent_is_two_one_sided_tests():
    variant = shifted(-0.001, 0.002, 0.0, 0.001)
    found = one(variant, delta=0.005)
    estimate = statistics.paired(BASELINE, variant)
    p = max(statistics.special.stdtr(3, -estimate.t(-0.005)), statistics.special.stdtr(3, estimate.t(0.005)))
    assert found.verdict == EQUIVALENT
    assert p < 0.05
    tight = dataclasses.replace(found, verdict=UNDECIDED)
    for delta in np.linspace(0.0005, 0.004, 40):
        low, high = estimate.t(-delta), estimate.t(delta)
        p = max(statistics.special.stdtr(3, -low), statistics.special.stdtr(3, high))
        assert (one(variant, delta=delta).verdict == EQUIVALENT) == (p <= 0.05)
    assert one(variant).verdict == tight.verdict  # without a delta no difference is small


def test_a_real_difference_is_better_even_if_it_is_smaller_than_delta():
    assert one(shifted(-0.01, -0.011, -0.009, -0.01), delta=0.05).verdict == BETTER


def test_runs_that_are_the_same_to_the_bit():
    assert one(BASELINE, delta=0.005).verdict == EQUIVALENT
    found = one(BASELINE)
    assert (found.verdict, found.interval, found.p, found.further_pairs) == (UNDECIDED, (0.0, 0.0), 1.0, None)
    assert (found.seeds_saved, found.correlation) == (None, pytest.approx(1))


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), None])
def test_a_diverged_run_is_counted_and_never_better(lost):
    found = one([1.0, 1.01, lost, 1.02], delta=10)
    assert (found.verdict, found.diverged, found.pairs, found.baseline_diverged) == (UNDECIDED, 1, 4, 0)
    assert found.difference is found.interval is found.p is found.p_adjusted is None
    assert found.note == "1 of 4 runs of the variant diverged"
    other = one([1.0, 1.01, 1.0, 1.02], baseline=[2.0, lost, 2.0, lost])
    assert (other.verdict, other.difference, other.baseline_diverged) == (UNDECIDED, None, 2)
    assert other.note == "2 of 4 runs of the baseline diverged"


def test_a_diverged_variant_counts_among_the_others():
    good = Sample(BASELINE, shifted(-0.1, -0.13, -0.07, -0.1))
    lost = Sample(BASELINE, [1.0, math.nan, 1.0, 1.0])
    alone, beside = verdicts({"a": good})["a"], verdicts({"a": good, "b": lost})["a"]
    assert beside.p_adjusted == pytest.approx(2 * alone.p_adjusted)
    assert beside.interval[0] < alone.interval[0]


def test_one_pair_has_no_interval_and_says_so():
    found = one([1.9], baseline=[2.0], looks=LOOKS, delta=1)
    assert (found.verdict, found.interval, found.p, found.pairs) == (UNDECIDED, None, None, 1)
    assert found.difference == pytest.approx(-0.1)
    assert found.note == "one pair: no interval"
    assert one([1.9], baseline=[2.0, 2.1], is_paired=False).note == "one run on one side: no interval"
    assert one([], baseline=[]).note == "no pair: no interval"


def test_a_look_that_was_not_planned_takes_the_e_process():
    variant = [*shifted(-0.1, -0.1, -0.11, -0.1), 1.9]
    found = one(variant, baseline=[*BASELINE, 2.0], looks=LOOKS)
    assert (found.rule, found.verdict, found.note) == ("e-process", BETTER, "5 pairs are no planned look")
    extended = one([*variant, 1.89], baseline=[*BASELINE, 2.0, 1.99], looks=LOOKS, is_extended=True)
    assert (extended.rule, extended.note) == ("e-process", "pairs were added to the plan")
    few = one([1.9, 1.8], baseline=[2.0, 1.91], looks=LOOKS)
    assert (few.interval, few.note) == (None, "2 pairs are no planned look: too few for an interval")


def test_unpaired_runs_are_compared_by_welch():
    variant = [1.90, 1.93, 1.95]
    found = one(variant, is_paired=False, looks=LOOKS)
    truth = statistics.unpaired(BASELINE, variant)
    assert (found.p, found.difference, found.pairs) == (pytest.approx(truth.p), pytest.approx(truth.difference), 0)
    assert found.rule == "one look"
    assert found.correlation is found.seeds_saved is found.further_pairs is None


def test_several_variants_share_alpha():
    draws = np.random.default_rng(4)
    samples = {name: Sample(BASELINE, shifted(*(draws.normal(-0.05, 0.02, 4)))) for name in "abc"}
    together = verdicts(samples)
    alone = {name: verdicts({name: sample})[name] for name, sample in samples.items()}
    assert [together[n].p_adjusted for n in "abc"] == pytest.approx(statistics.holm([alone[n].p for n in "abc"]))
    half = (together["a"].interval[1] - together["a"].interval[0]) / 2
    assert half == pytest.approx(statistics.student(0.05 / 3, 3) * together["a"].sd / 2)
    for each in together.values():  # an interval without 0 is always a verdict
        assert each.verdict == BETTER or each.interval[0] < 0 < each.interval[1]


def test_values_that_are_too_large_to_calculate_with():
    found = one([1e308, -1e308, 1.0, 2.0])
    assert (found.verdict, found.difference, found.interval) == (UNDECIDED, None, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": 0}, "alpha must be above 0 and below 0.5, got 0"),
        ({"delta": -1.0}, "delta must be above 0, got -1.0"),
        ({"looks": (1, 4)}, r"looks must be increasing numbers of pairs from 2 on, got \[1, 4\]"),
        ({"looks": (4, 4)}, "looks must be increasing"),
        ({"baseline": [1.0]}, "a has 4 values and its baseline 1: every pair needs both"),
    ],
)
def test_arguments_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        one(BASELINE, **options)


# ---- over many experiments


def decided(differences, looks=LOOKS, delta=None):
    """The verdict of an experiment that stops at the first look that decides."""
    for pairs in looks or [len(differences)]:
        found = verdicts({"a": Sample([0.0] * pairs, list(differences[:pairs]))}, delta=delta, looks=looks)["a"]
        if found.verdict != UNDECIDED:
            break
    return found.verdict


@pytest.fixture
def quick(monkeypatch):
    """Without what takes most of the time and decides nothing."""
    monkeypatch.setattr("lightning_llm.ablate.verdict._Case._further", lambda *args: None)
    for name in ("correlation", "seeds_saved"):
        monkeypatch.setattr(f"lightning_llm.ablate.statistics.{name}", lambda *args: None)


@pytest.mark.parametrize("looks", [(), LOOKS])
def test_4000_null_variants_reject_5_percent(quick, looks):
    draws = np.random.default_rng(8).normal(size=(4000, 16)) * 0.01
    words = [decided(row, looks) for row in draws]
    assert 0.04 < np.mean([word != UNDECIDED for word in words]) < 0.06
    assert words.count(BETTER) == pytest.approx(words.count(WORSE), abs=60)


def test_a_difference_of_delta_is_equivalent_in_5_percent():
    """The rule's own arithmetic, for all rows at once: the repeated interval at a look is inside the margin."""
    draws = np.random.default_rng(9).normal(2.0, 1, (40_000, 16))
    found, rejected = np.zeros(len(draws), dtype=bool), np.zeros(len(draws), dtype=bool)
    for number, pairs in enumerate(LOOKS):
        part, rule = draws[:, :pairs], PlannedLook(LOOKS, number)
        error = part.std(1, ddof=1) / pairs**0.5
        half = rule.critical(0.1) * error
        rejected |= (rule.p(part.mean(1) / error) <= 0.05) & ~found
        found |= (part.mean(1) + half < 2.0) & (part.mean(1) - half > -2.0)
    assert found.mean() == pytest.approx(0.05, abs=0.004)
    assert rejected.mean() > 0.99  # it is a real difference: it comes before


def test_the_rule_makes_these_errors_with_equivalence_too(quick):
    rng = np.random.default_rng(10)
    at_the_margin = [decided(row, delta=1.0) for row in rng.normal(1.0, 1, (800, 16))]
    assert at_the_margin.count(EQUIVALENT) / 800 < 0.06
    assert at_the_margin.count(WORSE) / 800 > 0.85
    none = [decided(row, delta=1.0) for row in rng.normal(0.0, 1, (800, 16))]
    assert none.count(EQUIVALENT) / 800 > 0.75
    assert (none.count(BETTER) + none.count(WORSE)) / 800 < 0.07

"""The verdict rule: both answers, their error, diverged runs, single pairs, several variants."""

import dataclasses
import json
import math

import numpy as np
import pytest

from lightning_llm.statistics import estimates
from lightning_llm.statistics.design import BETTER, EQUIVALENT, LARGER, NOT_SHOWN, SMALLER, UNDECIDED, WORSE, Design
from lightning_llm.statistics.looks import RESERVE
from lightning_llm.statistics.verdict import Sample, verdicts, with_window_error
from lightning_llm.statistics.windows import WindowError

LOOKS = (4, 6, 8, 12, 16)
BASELINE = [2.01, 1.97, 2.05, 2.00]


def one(variant, baseline=BASELINE, *, is_paired=True, more_baseline=(), **options):
    return verdicts({"a": Sample(baseline, variant, is_paired, more_baseline)}, **options)["a"]


def shifted(*differences):
    return [value + difference for value, difference in zip(BASELINE, differences, strict=True)]


def test_lower_is_better():
    found = one(shifted(-0.1, -0.11, -0.09, -0.1))
    assert (found.verdict, found.direction, found.pairs, found.rule, found.note) == (BETTER, BETTER, 4, "one look", "")
    assert found.difference == pytest.approx(-0.1)
    low, high = found.interval
    assert low < -0.1 < high < 0
    assert found.p == found.p_adjusted < 0.001
    assert (found.has_ended, found.level) == (True, 0.95)
    assert [warning.partition(" (")[0] for warning in found.warnings] == ["too few pairs for the sign-flip test"]
    assert one(shifted(0.1, 0.11, 0.09, 0.1)).verdict == WORSE
    assert json.loads(json.dumps(dataclasses.asdict(found)))["interval"] == [low, high]


def test_equivalent_is_an_interval_inside_delta_whatever_its_sign():
    variant = shifted(-0.001, 0.002, 0.0, 0.001)
    found = one(variant, delta=0.005)
    assert (found.verdict, found.against_delta, found.direction) == (EQUIVALENT, SMALLER, NOT_SHOWN)
    half = estimates.student(0.05, 3) * found.sd / 2
    assert found.interval == pytest.approx((found.difference - half, found.difference + half))
    for delta in np.linspace(0.0005, 0.006, 40):
        assert (one(variant, delta=delta).verdict == EQUIVALENT) == (found.difference + half < delta)
    assert one(variant).verdict == UNDECIDED  # without a delta no difference is small
    small = one(shifted(-0.01, -0.011, -0.009, -0.01), delta=0.05)
    assert (small.verdict, small.sentence) == (EQUIVALENT, "better, by less than 0.05")
    large = one(shifted(0.1, 0.11, 0.09, 0.1), delta=0.05)
    assert (large.verdict, large.against_delta, large.sentence) == (WORSE, LARGER, "worse, by more than 0.05")


def test_runs_that_are_bit_identical():
    assert one(BASELINE, delta=0.005).verdict == EQUIVALENT
    found = one(BASELINE)
    assert (found.verdict, found.interval, found.p, found.noise) == (UNDECIDED, None, None, None)


def test_a_word_never_contradicts_its_interval_with_several_variants():
    rng = np.random.default_rng(11)
    for _ in range(40):
        samples = {
            name: Sample([0.0] * 8, list(rng.normal(rng.choice([-1, 0, 1]), 1, 8))) for name in ("a", "b", "c", "d")
        }
        for found in verdicts(samples, delta=0.7, looks=(8, 12)).values():
            low, high = found.interval
            assert (found.direction != NOT_SHOWN) == (not low <= 0 <= high) == (found.p_adjusted < 0.05)
            assert (found.against_delta == SMALLER) == (low > -0.7 and high < 0.7)
            assert found.level == pytest.approx(1 - 0.05 / 4)


def test_what_others_find_changes_nothing():
    """With Holm, an equivalent of 4 pairs became worse when the other variants were rejected at 6."""
    own = Sample([0.0] * 4, [0.0009, 0.0011, 0.0016, 0.0004])
    for others in ([0.1, -0.1, 0.2, -0.2, 0.1, 0.1], [1.0, 1.01, 0.99, 1.0, 1.0, 1.0]):
        samples = {"a": own} | {name: Sample([0.0] * 6, others) for name in "bcd"}
        found = verdicts(samples, delta=0.005, looks=(4, 6))["a"]
        assert (found.verdict, found.p_adjusted) == (EQUIVALENT, pytest.approx(0.31, abs=0.01))


def test_a_verdict_at_an_early_look_is_likely_exaggerated():
    variant = shifted(-0.1, -0.11, -0.09, -0.1)
    assert one(variant, looks=LOOKS).note == "it stopped at look 1 of 5, so the true difference is probably smaller"
    assert one(variant, looks=LOOKS, half_width=0.001).note == ""  # a verdict does not stop it
    assert one(variant, looks=(4,)).note == ""


def test_a_goal_of_half_width_wants_more_pairs_than_a_verdict():
    variant = shifted(-0.1, -0.11, -0.09, -0.1)
    found = one(variant, looks=LOOKS, half_width=0.001)
    assert (found.verdict, found.has_ended) == (BETTER, False)
    assert one(variant, looks=LOOKS, half_width=0.1).has_ended


# ---- runs that diverged


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), None])
def test_a_diverged_run_is_counted_and_never_better(lost):
    found = one([1.0, 1.01, lost, 1.02], delta=10)
    assert (found.verdict, found.diverged, found.pairs, found.baseline_diverged) == (UNDECIDED, 1, 4, 0)
    assert found.difference is found.interval is found.p is found.p_adjusted is None
    assert found.note == "1 of 4 runs of the variant failed to train"
    assert found.p_diverged == 1.0


def test_four_of_four_against_none_is_worse():
    found = one([None] * 4, delta=1)
    assert (found.verdict, found.against_delta, found.has_ended) == (WORSE, None, True)
    assert found.p_diverged == pytest.approx(2 / 70)
    assert found.sentence == "worse: 4 of 4 runs failed to train, and 0 of 4 of the baseline"
    planned = one([None] * 4, more_baseline=BASELINE, looks=(4, 6))  # the null variant's runs are like the baseline's
    assert (planned.verdict, planned.p_diverged) == (WORSE, pytest.approx(2 / 495))
    assert planned.sentence == "worse: 4 of 4 runs failed to train, and 0 of 8 of the baseline and the null variant"
    assert one([None] * 4, looks=(4, 6)).verdict == UNDECIDED  # a plan looks more than once
    assert one([None, None, 2.0, 2.0]).verdict == UNDECIDED
    assert one([None] * 3, baseline=BASELINE[:3]).verdict == UNDECIDED
    never_better = one([None] + [2.0] * 7, baseline=[None] * 8)  # 1 of 8 against 8 of 8
    assert (never_better.verdict, never_better.has_ended) == (UNDECIDED, False)
    lost = Sample([2.0] * 8, [None] * 5 + [2.0] * 3, more_baseline=[2.0] * 8)
    assert verdicts(dict.fromkeys("abc", lost), looks=(8, 12, 16))["a"].verdict == WORSE  # 5 of 8, three variants
    saved = one(BASELINE, baseline=[None] * 4)
    assert (saved.verdict, saved.sentence) == (
        BETTER,
        "better: 0 of 4 runs failed to train, and 4 of 4 of the baseline",
    )


def test_counts_do_not_overrule_an_interval_that_says_worse():
    """Most runs of the baseline diverge, and those that do not are better than the variant's."""
    rest = [2.0, 2.01, 1.99, 2.0, 2.02]
    found = one([2.2] * 11 + [2.2, 2.2, 2.2, 2.21, 2.21], baseline=[None] * 11 + rest, looks=(8, 12, 16))
    assert found.p_diverged < 0.001
    assert (found.verdict, found.interval[0] > 0) == (WORSE, True)


def test_variants_that_are_not_compared_share_alpha_too():
    variant = shifted(-0.1, -0.11, -0.09, -0.1)
    alone, of_three = one(variant), verdicts({"a": Sample(BASELINE, variant)}, variants=3)["a"]
    assert (of_three.level, of_three.p_adjusted) == (pytest.approx(1 - 0.05 / 3), pytest.approx(3 * alone.p_adjusted))
    assert of_three.critical == pytest.approx(estimates.student(0.05 / 3, 3))


def test_a_diverged_run_of_the_baseline_takes_only_its_pair_out():
    baseline, variant = [2.0, 2.02, None, 2.01, 1.99, 2.0], [1.9, 1.93, 1.9, 1.9, 1.9, 1.89]
    found = one(variant, baseline=baseline, looks=(6, 8))
    assert (found.pairs, found.baseline_diverged, found.diverged) == (6, 1, 0)
    assert found.difference == pytest.approx(np.mean([-0.1, -0.09, -0.11, -0.09, -0.11]))
    assert (found.verdict, found.rule) == (BETTER, "look 1")
    whole = one([*variant[:2], 1.9, *variant[3:]], baseline=[*baseline[:2], 2.0, *baseline[3:]], looks=(6, 8))
    assert found.interval[1] - found.interval[0] > whole.interval[1] - whole.interval[0]  # five pairs say less
    assert found.note == (
        "1 of 6 runs of the baseline failed to train; "
        "it stopped at look 1 of 2, so the true difference is probably smaller"
    )


def test_looks_with_pairs_left_out_keep_their_level():
    """A tenth of the baseline's runs diverge, whatever the variant does."""
    rng, design, is_false = np.random.default_rng(13), Design(0.05, (8, 12, 16)), np.zeros(4000, dtype=bool)
    differences, is_there = rng.normal(size=(4000, 16)), rng.random((4000, 16)) > 0.1
    for pairs in design.looks:
        for row in range(4000):
            part = differences[row, :pairs][is_there[row, :pairs]]
            rule = design.rule(len(part), pairs - len(part))
            t = part.mean() / part.std(ddof=1) * len(part) ** 0.5
            is_false[row] |= abs(t) > rule.critical(0.05)
            assert (abs(t) > rule.critical(0.05)) == (rule.p(t) < 0.05)
    assert is_false.mean() == pytest.approx(0.05 * (1 - RESERVE), abs=0.01)


def test_false_verdicts_by_counts_are_rare_at_all_looks_together():
    """Both sides diverge with the same probability; a plan looks five times, and once more."""
    rng = np.random.default_rng(12)
    for probability in (0.1, 0.5):
        false = 0
        for _ in range(600):
            lost = rng.random((2, 24)) < probability
            sides = [[None if each else 0.0 for each in row] for row in lost]
            for pairs in (4, 6, 8, 12, 16, 24):
                found = one(sides[1][:pairs], baseline=sides[0][:pairs], looks=LOOKS)
                if found.verdict != UNDECIDED:
                    false += 1
                    break
        assert false / 600 < 0.05


def test_a_diverged_variant_counts_among_the_others():
    good = Sample(BASELINE, shifted(-0.1, -0.13, -0.07, -0.1))
    lost = Sample(BASELINE, [1.0, math.nan, 1.0, 1.0])
    alone, together = verdicts({"a": good})["a"], verdicts({"a": good, "b": lost})["a"]
    assert together.p_adjusted == pytest.approx(2 * alone.p_adjusted)
    assert together.interval[0] < alone.interval[0]


# ---- few pairs, other numbers of pairs, no pairs


def test_one_pair_has_no_interval_and_says_so():
    found = one([1.9], baseline=[2.0], looks=LOOKS, delta=1)
    assert (found.verdict, found.interval, found.p, found.pairs) == (UNDECIDED, None, None, 1)
    assert found.difference == pytest.approx(-0.1)
    assert found.note == "one pair: no interval"
    assert one([1.9], baseline=[2.0, 2.1], is_paired=False).note == "one run on one side: no interval"
    assert one([], baseline=[]).note == "no pair: no interval"


def test_a_verdict_takes_four_pairs():
    found = one([1.9, 1.91, 1.89], baseline=[2.0, 2.0, 2.0], delta=0.5)
    assert (found.verdict, found.direction, found.against_delta) == (UNDECIDED, NOT_SHOWN, NOT_SHOWN)
    assert found.interval[1] < 0
    assert found.note == "a verdict needs at least 4 pairs"
    assert one([1.9, 1.91], is_paired=False).note == "a verdict needs at least 4 runs on each side"


def test_further_looks_follow_the_planned_ones():
    variant, baseline = [1.9, 1.9, 1.91, 1.9, 1.89, 1.9], [2.0, 2.0, 2.0, 2.01, 2.0, 2.0]
    found = one(variant, baseline=baseline, looks=(4,))
    assert (found.rule, found.verdict, found.note) == ("look 2", BETTER, "")
    with pytest.raises(ValueError, match="5 pairs are no look: there are 4"):
        one(variant[:5], baseline=baseline[:5], looks=(4,))


def test_unpaired_runs_are_compared_by_welch():
    variant = [1.90, 1.93, 1.95, 1.92, 1.91]
    found = one(variant, is_paired=False)
    truth = estimates.unpaired(BASELINE, variant)
    assert (found.p, found.difference, found.pairs) == (pytest.approx(truth.p), pytest.approx(truth.difference), 0)
    assert (found.rule, found.verdict) == ("one look", BETTER)
    assert found.correlation is found.noise is found.robust is None


def test_several_variants_share_alpha():
    draws = np.random.default_rng(4)
    samples = {name: Sample(BASELINE, shifted(*(draws.normal(-0.05, 0.02, 4)))) for name in "abc"}
    together = verdicts(samples)
    for name, sample in samples.items():
        assert together[name].p_adjusted == pytest.approx(min(1, 3 * verdicts({name: sample})[name].p))
    half = (together["a"].interval[1] - together["a"].interval[0]) / 2
    assert half == pytest.approx(estimates.student(0.05 / 3, 3) * together["a"].sd / 2)


def test_outliers_and_a_sign_flip_that_disagrees_are_warnings():
    baseline = [2.0] * 8
    variant = [1.99, 1.988, 1.989, 1.991, 1.99, 1.989, 1.99, 2.3]
    found = one(variant, baseline=baseline)
    assert found.verdict == UNDECIDED
    assert found.warnings == ["1 pair is an outlier: without it, the difference is -0.0104"]
    assert found.robust.outliers == [7]


def test_values_that_are_too_large_to_calculate_with():
    found = one([1e308, -1e308, 1.0, 2.0])
    assert (found.verdict, found.difference, found.interval) == (UNDECIDED, None, None)
    assert found.note == "values too large for an interval"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": 0}, "alpha must be above 0 and below 0.5, got 0"),
        ({"delta": -1.0}, "delta must be above 0, got -1.0"),
        ({"half_width": 0.0}, "half_width must be above 0, got 0.0"),
        ({"looks": (1, 4)}, r"looks must be increasing numbers of pairs from 2 on, got \[1, 4\]"),
        ({"looks": (4, 4)}, "looks must be increasing"),
        ({"baseline": [1.0]}, "a has 4 values and its baseline 1: every pair needs both"),
    ],
)
def test_arguments_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        one(BASELINE, **options)


# ---- over many experiments


@pytest.mark.parametrize(("looks", "level"), [((), 0.05), (LOOKS, 0.05 * (1 - RESERVE))])
def test_null_variants_are_found_different_in_5_percent(looks, level):
    draws, words = np.random.default_rng(8).normal(size=(1000, 16)) * 0.01, []
    for row in draws:
        for pairs in looks or [16]:
            found = one(list(row[:pairs]), baseline=[0.0] * pairs, looks=looks)
            if found.has_ended:
                break
        words.append(found.verdict)
    assert np.mean([word != UNDECIDED for word in words]) == pytest.approx(level, abs=0.015)
    assert words.count(BETTER) == pytest.approx(words.count(WORSE), abs=40)


LARGER_BASE = [3.0, 3.1, 3.05, 3.2, 3.15, 3.1, 3.02, 3.12]
LARGER_OWN = [base + 0.02 + change for base, change in zip(LARGER_BASE, [0.001, -0.001] * 4, strict=True)]


@pytest.mark.parametrize("sign", [1, -1])
def test_by_more_than_delta_takes_a_large_error_over_windows_into_account(sign):
    base, own = (LARGER_BASE, LARGER_OWN) if sign == 1 else (LARGER_OWN, LARGER_BASE)
    found = verdicts({"a": Sample(base, own)}, delta=0.005)["a"]
    assert found.against_delta == "larger"
    room = abs(found.difference) - 0.005
    seeds = found.sd / math.sqrt(found.pairs)
    limit = math.sqrt((room / found.critical) ** 2 - seeds**2)  # at this error, the widened interval reaches delta
    below, above = (WindowError(pair=found.sd, mean=factor * limit, blocks=8) for factor in (0.999, 1.001))
    assert with_window_error(found, below, 0.005) == found
    weighed = with_window_error(found, above, 0.005)
    assert (weighed.verdict, weighed.direction, weighed.interval) == (found.verdict, found.direction, found.interval)
    assert weighed.against_delta == "not shown"
    assert weighed.sentence == f"{found.direction}; whether by more than 0.005 is not shown"
    assert weighed.note == "by more than 0.005 on these validation windows alone"


def test_a_small_error_over_windows_changes_nothing():
    found = verdicts({"a": Sample(LARGER_BASE, LARGER_OWN)}, delta=0.005)["a"]
    for pair, is_same in ((0.25 * found.sd, True), (0.251 * found.sd, False)):
        error = WindowError(pair=pair, mean=1.0, blocks=8)
        assert (with_window_error(found, error, 0.005) == found) == is_same
    assert with_window_error(found, None, 0.005) == found
    small = verdicts({"a": Sample(LARGER_BASE, LARGER_OWN)}, delta=0.5)["a"]
    assert with_window_error(small, WindowError(1.0, 1.0, 8), 0.5) == small

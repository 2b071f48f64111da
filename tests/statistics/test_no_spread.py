"""Pairs that all differ by the same amount: no interval, and what is said in its place."""

import numpy as np
import pytest

from lightning_llm.statistics.design import BETTER, EQUIVALENT, UNDECIDED, WORSE
from lightning_llm.statistics.no_spread import ALL_ALIKE, NO_EFFECT, NO_SEED, no_spread
from lightning_llm.statistics.verdict import Sample, verdicts

BASELINE = [3.12, 2.97, 3.05, 2.02, 3.33]
ROUNDED = [value + 1e-15 for value in BASELINE]


def one(variant, baseline=BASELINE, *, is_paired=True, **options):
    return verdicts({"a": Sample(baseline, variant, is_paired)}, **options)["a"]


def shifted(shift, values=BASELINE):
    """As a file has them: with decimals, so that their differences are not exact."""
    return [round(value + shift, 2) for value in values]


@pytest.mark.parametrize(
    ("variant", "options", "word", "sentence", "note"),
    [
        (shifted(0.01), {}, WORSE, "worse", ALL_ALIKE),
        (shifted(-0.01), {"delta": 0.005}, BETTER, "better, by more than 0.005", ALL_ALIKE),
        (shifted(0.01), {"delta": 0.05}, EQUIVALENT, "worse, by less than 0.05", ALL_ALIKE),
        (BASELINE, {}, UNDECIDED, "neither better nor worse is shown", NO_EFFECT),
        (ROUNDED, {"delta": 0.005}, EQUIVALENT, "differs by less than 0.005, in either direction", NO_EFFECT),
        (shifted(0.01), {"looks": (5, 8)}, WORSE, "worse", ALL_ALIKE),
    ],
)
def test_a_shift_of_all_pairs_has_no_interval_and_ends_a_comparison(variant, options, word, sentence, note):
    found = one(variant, **options)
    assert (found.verdict, found.sentence, found.note, found.has_ended) == (word, sentence, note, True)
    assert (found.interval, found.p, found.p_adjusted, found.critical, found.noise) == (None,) * 5
    assert found.difference == pytest.approx(np.mean(variant) - np.mean(BASELINE))
    assert found.sd < 1e-14


@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize(("value", "note"), [(3.2, NO_SEED), (3.1, NO_EFFECT)])
def test_copies_of_one_run_show_nothing(is_paired, value, note):
    found = one([value] * 5, [3.1] * 5, is_paired=is_paired, delta=0.005)
    assert (found.verdict, found.note) == (UNDECIDED if note == NO_SEED else EQUIVALENT, note)
    assert (found.interval, found.has_ended) == (None, True)


def test_a_metric_that_no_seed_changes_keeps_its_interval():
    memory = Sample([2.0] * 4, [1.5] * 4, is_paired=False, has_seeds=False)
    found = verdicts({"a": memory})["a"]
    assert (found.verdict, found.interval, found.note) == (BETTER, (-0.5, -0.5), "")


def test_a_few_pairs_may_be_alike_by_chance():
    found = one(shifted(0.01)[:3], BASELINE[:3])
    assert (found.verdict, found.interval, found.has_ended) == (UNDECIDED, None, False)
    assert found.note == "the differences do not vary: no interval; a verdict needs at least 4 pairs"


@pytest.mark.parametrize(
    ("variant", "is_paired"),
    [
        ([*shifted(0.01)[:4], 3.35], True),  # one digit apart
        ([value * (1 + 1e-12) for value in BASELINE], True),
        (shifted(0.01), False),  # without pairs, it is the runs that vary
        ([1e308, -1e308, 1.0, 2.0, 3.0], True),
    ],
)
def test_others_have_a_spread(variant, is_paired):
    assert no_spread(BASELINE, variant, is_paired=is_paired) is None


def test_a_baseline_that_failed_takes_its_pair_out():
    found = one(shifted(0.01), [None, *BASELINE[1:]])
    assert (found.verdict, found.note) == (WORSE, f"1 of 5 runs of the baseline failed to train; {ALL_ALIKE}")

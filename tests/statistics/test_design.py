"""Both answers are read off one interval, and a design says in advance what it will find."""

import numpy as np
import pytest

from lightning_llm.statistics.design import (
    BETTER,
    EQUIVALENT,
    FEWEST,
    LARGER,
    NOT_SHOWN,
    SMALLER,
    UNDECIDED,
    WORSE,
    Answer,
    Design,
)
from lightning_llm.statistics.looks import RESERVE, OneLook, PlannedLook, ShortLook, spending
from lightning_llm.statistics.power import power_analysis

LOOKS = (8, 12, 16)


@pytest.mark.parametrize(
    ("interval", "direction", "size", "word", "sentence"),
    [
        ((0.006, 0.02), WORSE, LARGER, WORSE, "worse, by more than 0.005"),
        ((0.001, 0.02), WORSE, NOT_SHOWN, WORSE, "worse; whether by more than 0.005 is not shown"),
        ((0.001, 0.004), WORSE, SMALLER, EQUIVALENT, "worse, by less than 0.005"),
        ((-0.001, 0.004), NOT_SHOWN, SMALLER, EQUIVALENT, "differs by less than 0.005, in either direction"),
        ((-0.001, 0.02), NOT_SHOWN, NOT_SHOWN, UNDECIDED, "neither better nor worse is shown"),
        ((-0.004, -0.001), BETTER, SMALLER, EQUIVALENT, "better, by less than 0.005"),
        ((-0.02, -0.001), BETTER, NOT_SHOWN, BETTER, "better; whether by more than 0.005 is not shown"),
        ((-0.02, -0.006), BETTER, LARGER, BETTER, "better, by more than 0.005"),
        ((0.0, 0.005), NOT_SHOWN, NOT_SHOWN, UNDECIDED, "neither better nor worse is shown"),  # the ends count
    ],
)
def test_direction_and_size_are_two_answers(interval, direction, size, word, sentence):
    found = Design(0.05, LOOKS, 0.005).answer(*interval, 8)
    assert (found.direction, found.size, found.word, found.sentence(0.005)) == (direction, size, word, sentence)


def test_without_a_delta_there_is_no_size():
    found = Design(0.05, LOOKS).answer(0.001, 0.004, 8)
    assert (found, found.word, found.sentence(None)) == (Answer(WORSE, None), WORSE, "worse")
    assert Design(0.05, LOOKS).answer(-0.001, 0.004, 8).sentence(None) == "neither better nor worse is shown"


def test_fewer_than_four_pairs_show_nothing():
    for pairs in range(2, FEWEST):
        assert Design(0.05, (), 1.0).answer(0.1, 0.2, pairs) == Answer(NOT_SHOWN, NOT_SHOWN)
        assert not Design(0.05, (), 1.0, half_width=1.0).ends(0.1, 0.2, pairs)
    assert Design(0.05, (), 1.0).answer(0.1, 0.2, FEWEST).word == EQUIVALENT


def test_a_goal_of_half_width_ends_a_comparison_instead_of_a_verdict():
    design = Design(0.05, LOOKS, 0.005, half_width=0.002)
    assert not design.ends(0.010, 0.016, 8)  # worse, but not known well enough
    assert design.ends(0.010, 0.0139, 8)
    assert design.ends(-0.001, 0.001, 8)


def test_planned_looks_and_added_pairs_share_the_level():
    design = Design(0.04, LOOKS)
    assert design.further[:4] == [24, 36, 54, 81]  # half as many pairs again
    assert design.rule(12) == PlannedLook(LOOKS, 1, spending(LOOKS))
    later = (*LOOKS, 24, 36, 54, 81, 122)
    assert design.rule(24) == PlannedLook(later, 3, spending(LOOKS, further=5))
    alone = PlannedLook((*LOOKS, 24), 3, spending(LOOKS, further=1))
    assert design.rule(24).critical(0.04) == alone.critical(0.04)  # later looks do not change it
    assert design.rule(11, left_out=1) == ShortLook(design.rule(12), 11)
    with pytest.raises(ValueError, match="13 pairs are no look: there are 8, 12, 16"):
        design.rule(13)
    assert [design.look_with(pairs) for pairs in (8, 9, 16, 17, 25)] == [8, 12, 16, 24, 36]
    with pytest.raises(ValueError, match="2000 pairs are too many: the last look is at 930"):
        design.look_with(2000)
    assert (Design(0.04).rule(9), Design(0.04).further) == (OneLook(8), [])


def test_added_pairs_make_the_interval_narrower():
    design = Design(0.05, LOOKS)
    halves = [design.rule(pairs).critical(0.05) / pairs**0.5 for pairs in (*LOOKS, *design.further[:4])]
    assert halves == sorted(halves, reverse=True)
    assert halves[3] < 0.92 * halves[2]


def test_nothing_is_shown_wrongly_in_more_than_5_percent_even_if_pairs_are_added():
    """True differences of 0, delta / 2 and delta: any false answer at any look, planned or further."""
    rng, design = np.random.default_rng(4), Design(0.05, LOOKS, 1.0)
    for truth in (0.0, 0.5, 1.0):
        draws = rng.normal(truth, 1, (6000, 81))
        is_false, at_looks = np.zeros(6000, dtype=bool), np.zeros(6000, dtype=bool)
        for pairs in (*LOOKS, *design.further[:4]):
            part = draws[:, :pairs]
            half = design.rule(pairs).critical(0.05) * part.std(1, ddof=1) / pairs**0.5
            misses = np.abs(part.mean(1) - truth) > half
            is_false |= misses
            at_looks |= misses & (pairs in LOOKS)
        assert at_looks.mean() == pytest.approx(0.05 * (1 - RESERVE), abs=0.007)
        assert is_false.mean() == pytest.approx(0.05 * (1 - RESERVE / 5), abs=0.008)  # after four further looks


def test_a_difference_of_half_of_delta_becomes_equivalent_with_more_pairs():
    """The word does not stay a toss of a coin between worse and equivalent: more pairs show the size."""
    words = [power_analysis(Design(0.05, (pairs,), 1.0), 0.5, 1.0).probabilities for pairs in (16, 40, 100)]
    shares = [each[EQUIVALENT] for each in words]
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.99

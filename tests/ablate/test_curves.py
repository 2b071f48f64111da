"""Losses during training: differences of pairs, and at equal time."""

import numpy as np
import pytest

from lightning_llm.ablate.curves import Curves, curves_of
from lightning_llm.ablate.report import report_of
from lightning_llm.ablate.results import load_experiment


def test_curves_are_compared_in_pairs_and_at_equal_time(done):
    loaded = load_experiment(done.out)
    curves = curves_of(loaded)
    steps, differences = curves.differences("a")
    assert steps == [3, 6]
    assert differences.shape == (4, 2)
    assert differences[:, -1] == pytest.approx([-0.5, -0.5005, -0.501, -0.5], abs=1e-6)
    sides = report_of(loaded)["cost"]["variants"]
    # when the variant ends, after 3 s, the baseline is at step 3: its loss is 1 above its end
    assert curves.at_equal_time("a", sides) == pytest.approx(-1.500375, abs=1e-5)
    assert curves.at_equal_time("lost", sides) == pytest.approx(-1.0, abs=1e-5)  # of its seed that did not


def test_no_loss_is_made_up_before_the_first_validation(done):
    loaded = load_experiment(done.out)
    sides = report_of(loaded)["cost"]["variants"]
    sides["a"]["step_s"] = 0.4  # it ends after 2.4 s; the baseline is first validated after 3 s
    assert curves_of(loaded).at_equal_time("a", sides) is None


def curves_with(*validations):
    """Of losses 1 + 10 / step; the variant's are 0.5 below."""
    steps, losses = {}, {}
    for name, below in (("baseline", 0.0), ("a", 0.5)):
        steps[name] = list(validations)
        losses[name] = np.array([[1 + 10 / step - below for step in validations]])
    return Curves(steps, losses, {"baseline": [0], "a": [0]})


PACES = {"baseline": {"step_s": 1.0}, "a": {"step_s": 0.95}}  # the variant ends when the baseline is at step 95


@pytest.mark.parametrize(
    ("validations", "delta", "is_shown"),
    [
        ([80, 90, 100], 0.005, True),  # off by about 10 / 90³ · 5 · 5
        ([80, 90, 100], 0.001, False),
        ([20, 60, 100], 0.005, False),
        ([20, 60, 100], None, False),  # the default delta
        ([20, 60, 100], 0.1, True),
        ([20, 60, 95, 100], 0.001, True),  # a validation at that moment
        ([60, 100], 1.0, False),  # no neighbor tells how far the line is off
        ([100], 1.0, False),
    ],
)
def test_equal_time_needs_validations_close_to_the_moment(validations, delta, is_shown):
    found = curves_with(*validations).at_equal_time("a", PACES, delta)
    assert (found is not None) == is_shown
    if is_shown:
        true = (1 + 10 / 100 - 0.5) - (1 + 10 / 95)
        assert found == pytest.approx(true, abs=delta / 4)


def test_equal_time_is_the_end_where_times_cannot_be_distinguished():
    paces = {**PACES, "a": {"step_s": 0.95, "ratio_interval": [0.9, 1.02]}}
    assert curves_with(20, 100).at_equal_time("a", paces, 0.001) == pytest.approx(-0.5)

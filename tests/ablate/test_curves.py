"""Losses during training: differences of pairs, and at equal time."""

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_llm.ablate.curves import Curves, curves_of
from lightning_llm.ablate.ratios import StepCost
from lightning_llm.ablate.results import load_experiment
from lightning_llm.statistics.estimates import student


def test_curves_are_compared_in_pairs_and_at_equal_time(done):
    loaded = load_experiment(done.out)
    curves = curves_of(loaded)
    steps, differences = curves.differences("a")
    assert steps == [3, 6]
    assert differences.shape == (4, 2)
    assert differences[:, -1] == pytest.approx([-0.5, -0.5005, -0.501, -0.5], abs=1e-6)
    sides = loaded.cost.variants
    # when the variant ends, after 3 s, the baseline is at step 3: its loss is 1 above its end
    assert curves.at_equal_time("a", sides) == pytest.approx(-1.500375, abs=1e-5)
    assert curves.at_equal_time("lost", sides) == pytest.approx(-1.0, abs=1e-5)  # of its seed that did not


def test_no_loss_is_made_up_before_the_first_validation(done):
    loaded = load_experiment(done.out)
    sides = loaded.cost.variants
    sides["a"] = replace(sides["a"], step_s=0.4)  # it ends after 2.4 s; the baseline is first validated after 3 s
    assert curves_of(loaded).at_equal_time("a", sides) is None


def curves_with(*validations):
    """Of losses 1 + 10 / step; the variant's are 0.5 below."""
    steps, losses = {}, {}
    for name, below in (("baseline", 0.0), ("a", 0.5)):
        steps[name] = list(validations)
        losses[name] = np.array([[1 + 10 / step - below for step in validations]])
    return Curves(steps, losses, {"baseline": [0], "a": [0]})


def step(seconds, ratio_interval):
    times = dict.fromkeys(("step_s", "step_p20_s", "step_p80_s"), seconds)
    ratios = dict.fromkeys(("ratio", "ratio_p20", "ratio_p80"), seconds)
    return StepCost(**times, **ratios, ratio_interval=ratio_interval, peak_bytes=None)


PACES = {
    "baseline": step(1.0, (1.0, 1.0)),
    "a": step(0.95, (0.94, 0.96)),
}  # the variant ends when the baseline is at step 95


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
    paces = {**PACES, "a": step(0.95, (0.9, 1.02))}
    assert curves_with(20, 100).at_equal_time("a", paces, 0.001) == pytest.approx(-0.5)


def test_summaries_are_of_the_seeds_that_all_shown_variants_have():
    steps = {"baseline": [3, 6], "a": [3, 6], "null": [3, 6]}
    losses = {
        "baseline": np.array([[4.0, 3.0], [4.2, 3.2], [9.0, 9.0]]),
        "a": np.array([[3.9, 2.8], [4.3, 3.1]]),
        "null": np.array([[1.0, 1.0]]),
    }
    curves = Curves(steps, losses, {"baseline": [0, 1, 2], "a": [0, 1], "null": [1]})
    found = curves.summaries(("baseline", "a"), {}, None)
    assert list(found) == ["baseline", "a"]
    assert found["baseline"].mean == pytest.approx([4.1, 3.1])  # without seed 2, which a lacks
    assert found["baseline"].difference == []
    assert found["a"].mean == pytest.approx([4.1, 2.95])
    assert found["a"].sd == pytest.approx([np.std([3.9, 4.3], ddof=1), np.std([2.8, 3.1], ddof=1)])
    assert (found["a"].pairs, found["a"].shares) == (2, [3, 6])
    assert found["a"].difference == pytest.approx([0.0, -0.15])
    half = student(0.05, 1) * np.std([-0.2, -0.1], ddof=1) / np.sqrt(2)
    assert found["a"].half_width[1] == pytest.approx(half)
    higher = curves.summaries(("baseline", "a"), {}, None, sign=-1)  # of a metric with its sign changed
    assert higher["a"].mean == pytest.approx([-4.1, -2.95])
    assert higher["a"].difference == pytest.approx([0.0, 0.15])
    assert higher["a"].half_width[1] == pytest.approx(half)
    assert higher["a"].sd == found["a"].sd


def test_a_difference_at_equal_time_has_the_sign_of_the_metric():
    lower = curves_with(20, 60, 95, 100).summaries(("baseline", "a"), PACES, 0.1)["a"].at_equal_time
    higher = curves_with(20, 60, 95, 100).summaries(("baseline", "a"), PACES, 0.1, sign=-1)["a"].at_equal_time
    assert lower == pytest.approx((1 + 10 / 100 - 0.5) - (1 + 10 / 95))
    assert higher == -lower

"""The plots of a report: what is drawn, where, and in which color."""

import numpy as np
import pytest
from lightning_llm.ablate.plots import costs, forest, loss_curves, tuning_curves

from lightning_llm.ablate.curves import Curves
from lightning_llm.io.charts import COLORS, GRAY, canvas
from lightning_llm.statistics.estimates import student

UNTUNED = {"tuned": None, "note": "", "verdict": "better"}
ROWS = {
    "a": {"difference": -0.02, "interval": (-0.03, -0.01), "sentence": "better"},
    "b": {"difference": 0.01, "interval": (-0.01, 0.03), "sentence": "neither"},
    "\x1blost": {"difference": None, "interval": None, "sentence": "worse", "note": "1 of 4 runs diverged"},
}
PAIRS = [{"baseline": 3.0, "variant": 2.98}, {"baseline": 3.0, "variant": None}]
REPORT = {
    **{"metric": "val_loss", "unit": "nats/token", "delta": 0.005},
    "variants": {name: {**UNTUNED, "by_seed": PAIRS, **row} for name, row in ROWS.items()},
}


@pytest.fixture
def axes():
    with canvas(8, 3, ncols=2) as both:
        yield both[0]


def texts(axis):
    return {text.get_text(): tuple(getattr(text, "xy", ())) for text in axis.texts}


def test_differences_are_one_line_per_variant(axes):
    forest(axes, REPORT)
    (axis, _) = axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b", r"\x1blost"]
    assert texts(axis) == {"better": (-0.02, 0), "neither": (0.01, 1), "1 of 4 runs diverged": (0, 2)}
    assert axis.get_ylim() == (2.6, -0.8)  # the first is at the top
    (points, _, (bars,)) = axis.containers[0]
    assert np.allclose(bars.get_segments()[0], [(-0.03, 0), (-0.01, 0)])
    assert points.get_color() == COLORS[0]
    dots = [line for line in axis.lines if line.get_alpha() == 0.7]
    assert np.allclose([line.get_xydata()[0] for line in dots], [(-0.02, 0.22), (-0.02, 1.22)])
    assert "shaded: ±0.005" in axis.get_xlabel()


def test_the_line_at_zero_has_a_gap_for_words_above_it(axes):
    forest(axes, REPORT)
    segments = axes[0].collections[0].get_segments()
    assert [list(segment[:, 1]) for segment in segments] == [[-0.8, 1 - 0.46], [1 - 0.14, 2.6]]  # around b alone


def test_without_delta_nothing_is_shaded(axes):
    forest(axes, {**REPORT, "delta": None})
    assert not axes[0].patches
    assert "shaded" not in axes[0].get_xlabel()


def test_a_tuned_difference_has_its_variants_color_and_is_hollow(axes):
    a = REPORT["variants"]["a"]
    forest(axes, {**REPORT, "variants": {"b": a, "a": {**a, "tuned": a}}})
    plain, tuned = (container[0] for container in axes[0].containers[1:])
    assert plain.get_color() == tuned.get_color() == COLORS[1]
    assert (plain.get_markerfacecolor(), tuned.get_markerfacecolor()) == (COLORS[1], "none")


def test_losses_are_means_over_the_seeds_of_all_arms(axes):
    steps = {"baseline": [3, 6], "a": [3, 6]}
    losses = {"baseline": np.array([[4.0, 3.0], [4.2, 3.2], [9.0, 9.0]]), "a": np.array([[3.9, 2.8], [4.3, 3.1]])}
    loss_curves(axes, REPORT, Curves(steps, losses, {"baseline": [0, 1, 2], "a": [0, 1]}))
    base, a = axes[0].lines
    assert (base.get_color(), a.get_color()) == (GRAY, COLORS[0])
    assert np.allclose(base.get_ydata(), [4.1, 3.1])  # without seed 2, which a lacks
    assert np.allclose(a.get_ydata(), [4.1, 2.95])
    difference = next(line for line in axes[1].lines if line.get_color() == COLORS[0])
    assert np.allclose(difference.get_ydata(), [0.0, -0.15])
    half = student(0.05, 1) * np.std([-0.2, -0.1], ddof=1) / np.sqrt(2)
    band = axes[1].collections[0].get_paths()[0].vertices
    at_end = band[band[:, 0] == 6, 1]
    assert np.allclose([at_end.min(), at_end.max()], [-0.15 - half, -0.15 + half])


def test_tuning_leaves_out_what_diverged(axes):
    sides = {
        "baseline": {"values": [1.0, 2.0, 4.0], "losses": [3.2, 3.0, None], "best": 2.0},
        "a": {"values": [1.0, 2.0, 4.0], "losses": [None] * 3, "best": None},
    }
    tuning_curves(axes, {**REPORT, "tuning": {"option": "lr", "variants": sides}})
    (curve, best) = axes[0].lines
    assert np.allclose(curve.get_xydata(), [(1.0, 3.2), (2.0, 3.0)])
    assert list(best.get_xdata()) == [2.0, 2.0]
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["1", "2", "4"]


def test_costs_are_those_of_a_whole_run(axes):
    step = {"step_s": 0.5, "step_p20_s": 0.4, "step_p80_s": 0.7, "peak_bytes": 3 * 2**20, "training_s": 50.0}
    row = {"mean": 3.0, "sd_over_seeds": 0.01, "steps": 100}
    variants = {"a": {**row, "difference": -0.5}, "b": {**row, "difference": None}}
    sides = {"baseline": step, "a": {**step, "peak_bytes": None}, "b": step}
    costs(axes, {**REPORT, "baseline": row, "variants": variants, "cost": {"variants": sides}})
    times, peaks = ([tuple(map(float, c[0].get_xydata()[0])) for c in axis.containers] for axis in axes)
    assert times == [(50.0, 3.0), (50.0, 2.5)]  # b has no loss
    assert peaks == [(3.0, 3.0)]  # MiB; that of a is not known
    (_, _, (spread, _)) = axes[0].containers[0]
    assert np.allclose(spread.get_segments()[0][:, 0], [50.0 - 10.0, 50.0 + 20.0])

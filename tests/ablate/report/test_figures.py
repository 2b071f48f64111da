"""The figures of a report: what is drawn, where, and in which color."""

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_llm.ablate.ratios import StepCost
from lightning_llm.ablate.report.figures import costs, curves, differences, tuning
from lightning_llm.ablate.report.record import VERSION, Curve, Mean, Pair, Row, TunedVariant, Tuning, Variant
from lightning_llm.ablate.report.report import Report
from lightning_llm.io.charts import COLORS, GRAY, canvas

PAIRS = [Pair(0, 3.0, 2.98), Pair(1, 3.0, None)]
FOUND = {"verdict": "better", "direction": "better", "has_ended": True, "pairs": 2, "level": 0.95, "warnings": []}
FOUND |= {"diverged": 0, "baseline_diverged": 0, "metric": "val_loss", "unit": "nats/token", "by_seed": PAIRS}


def row(variant, difference, interval, sentence, note="", **fields):
    about = {"variant": variant, "difference": difference, "interval": interval, "sentence": sentence, "note": note}
    return Row(**{**FOUND, **about, **fields})


A = row("a", -0.02, (-0.03, -0.01), "better")
B = row("b", 0.01, (-0.01, 0.03), "neither")
LOST = row("\x1blost", None, None, "worse", "1 of 4 runs diverged")
REPORT = Report(
    version=VERSION,
    kind="experiment",
    name="test",
    metric="val_loss",
    unit="nats/token",
    delta=0.005,
    alpha=0.05,
    level=0.95,
    rows=[A, B, LOST],
    variants={name: Variant() for name in ("baseline", "a", "b", "\x1blost")},
)


@pytest.fixture
def axes():
    with canvas(8, 3, ncols=2) as both:
        yield both[0]


def texts(axis):
    return {text.get_text(): tuple(getattr(text, "xy", ())) for text in axis.texts}


def test_differences_are_one_line_per_variant(axes):
    differences(axes, REPORT)
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
    differences(axes, REPORT)
    segments = axes[0].collections[0].get_segments()
    assert [list(segment[:, 1]) for segment in segments] == [[-0.8, 1 - 0.46], [1 - 0.14, 2.6]]  # around b alone


def test_without_delta_nothing_is_shaded(axes):
    differences(axes, replace(REPORT, delta=None))
    assert not axes[0].patches
    assert "shaded" not in axes[0].get_xlabel()


def test_a_tuned_difference_has_its_variants_color_and_is_hollow(axes):
    b = dataclasses.replace(A, variant="b")
    variants = dict.fromkeys(("baseline", "b", "a"), Variant())
    differences(axes, replace(REPORT, variants=variants, rows=[b, A, dataclasses.replace(A, kind="tuned")]))
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["b", "a", "a, tuned"]
    plain, tuned = (container[0] for container in axes[0].containers[1:])
    assert plain.get_color() == tuned.get_color() == COLORS[1]
    assert (plain.get_markerfacecolor(), tuned.get_markerfacecolor()) == (COLORS[1], "none")


def test_only_rows_of_the_deciding_metric_are_drawn(axes):
    others = [dataclasses.replace(A, kind="secondary"), dataclasses.replace(A, kind="null", variant="null")]
    others.append(dataclasses.replace(A, metric="seconds"))
    differences(axes, replace(REPORT, rows=[A, *others]))
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["a"]


def test_the_axis_says_which_sign_is_better(axes):
    differences(axes, REPORT)
    assert axes[0].get_xlabel() == (
        "difference of val_loss, nats/token (negative is better; dots: pairs); shaded: ±0.005"
    )
    differences(axes, replace(REPORT, metric="accuracy", unit="accuracy", higher_is_better=True, rows=[]))
    assert axes[0].get_xlabel() == "difference of accuracy (positive is better); shaded: ±0.005"


def test_losses_and_differences_are_lines_with_bands(axes):
    base = Curve(steps=[3, 6], mean=[4.1, 3.1], sd=[0.1, 0.2])
    paired = {"pairs": 2, "shares": [3, 6], "difference": [0.0, -0.15], "half_width": [0.3, 0.25]}
    a = Curve(steps=[2, 4], mean=[4.1, 2.95], sd=[0.2, 0.3], **paired)
    curves(axes, replace(REPORT, curves={"baseline": base, "a": a}))
    (of_base, of_a) = axes[0].lines
    assert (of_base.get_color(), of_a.get_color()) == (GRAY, COLORS[0])
    assert np.allclose(of_base.get_xydata(), [(3, 4.1), (6, 3.1)])
    assert np.allclose(of_a.get_xydata(), [(2, 4.1), (4, 2.95)])
    difference = next(line for line in axes[1].lines if line.get_color() == COLORS[0])
    assert np.allclose(difference.get_xydata(), [(3, 0.0), (6, -0.15)])
    (band,) = axes[1].collections
    band = band.get_paths()[0].vertices
    at_end = band[band[:, 0] == 6, 1]
    assert np.allclose([at_end.min(), at_end.max()], [-0.15 - 0.25, -0.15 + 0.25])
    assert axes[0].get_ylabel() == "validation loss, nats/token"


def test_the_difference_of_one_pair_has_no_band(axes):
    base = Curve(steps=[3, 6], mean=[4.1, 3.1], sd=[0.0, 0.0])
    a = replace(base, pairs=1, shares=[3, 6], difference=[0.0, -0.15], half_width=[0.0, 0.0])
    curves(axes, replace(REPORT, curves={"baseline": base, "a": a}))
    assert not axes[1].collections
    assert len(axes[1].lines) == 2  # with that at 0


def test_tuning_leaves_out_what_diverged(axes):
    of_all = {"untuned": 1.0, "values": [1.0, 2.0, 4.0], "is_bracketed": True, "best_loss": None}
    of_all |= {"vertex": None, "vertex_loss": None, "vertices": []}
    base = TunedVariant(losses=[3.2, 3.0, None], best=2.0, **of_all)
    a = TunedVariant(losses=[None] * 3, best=None, **of_all)
    found = Tuning(option="lr", seeds=[0], variants={"baseline": base, "a": a}, runs=6, run_seconds=1.0)
    tuning(axes, replace(REPORT, tuning=found))
    (curve, best) = axes[0].lines
    assert np.allclose(curve.get_xydata(), [(1.0, 3.2), (2.0, 3.0)])
    assert list(best.get_xdata()) == [2.0, 2.0]
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["1", "2", "4"]


def test_costs_are_those_of_a_whole_run(axes):
    ratios = dict.fromkeys(("ratio", "ratio_p20", "ratio_p80"), 1.0) | {"ratio_interval": None}
    step = StepCost(step_s=0.5, step_p20_s=0.4, step_p80_s=0.7, peak_bytes=3 * 2**20, **ratios)
    side = Variant(steps=100, means={"val_loss": Mean(3.0, 0.01)}, step=step)
    variants = {"baseline": side, "a": replace(side, step=replace(step, peak_bytes=None)), "b": side}
    rows = [row("a", -0.5, None, "better"), row("b", None, None, "undecided")]
    costs(axes, replace(REPORT, variants=variants, rows=rows))
    times, peaks = ([tuple(map(float, c[0].get_xydata()[0])) for c in axis.containers] for axis in axes)
    assert times == [(50.0, 3.0), (50.0, 2.5)]  # b has no loss
    assert peaks == [(3.0, 3.0)]  # MiB; that of a is not known
    (_, _, (spread, _)) = axes[0].containers[0]
    assert np.allclose(spread.get_segments()[0][:, 0], [50.0 - 10.0, 50.0 + 20.0])

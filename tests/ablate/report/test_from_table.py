"""A verdict on losses that are given: against scipy, and what is printed, exported, and refused."""

import csv
import dataclasses
import io
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

import lightning_llm.ablate
from lightning_llm.ablate import verdict
from lightning_llm.ablate.report import from_table
from lightning_llm.ablate.report.record import Pair
from lightning_llm.ablate.report.report import COLUMNS
from lightning_llm.statistics.verdict import Sample, verdicts

BASELINE = [3.21, 3.18, 3.25, 3.2, 3.22, 3.17, 3.24, 3.19]
GELU = [3.22, 3.2, 3.26, 3.22, 3.25, 3.18, 3.26, 3.2]
LOSSES = {"baseline": BASELINE, "gelu": GELU, "relu2": [value - 0.03 for value in GELU]}


class DataFrame:
    """What is used of a data frame of pandas."""

    def __init__(self, rows, index=None):
        self._rows, self.columns = rows, list(rows[0])
        self.index = type("Index", (), {"names": [index]})

    def to_dict(self, orient):
        assert orient == "records"
        return [{name: value for name, value in row.items() if name != self.index.names[0]} for row in self._rows]

    def reset_index(self):
        return DataFrame(self._rows)


def by_seed(losses):
    return {name: dict(zip((5, 3, 9, 1, 0, 2, 4, 8), values, strict=True)) for name, values in losses.items()}


@pytest.mark.parametrize(("variants", "alpha"), [(1, 0.05), (2, 0.05), (2, 0.1)])
def test_pairs_are_compared_as_by_scipy(variants, alpha):
    losses = dict(list(LOSSES.items())[: variants + 1])
    found = verdict(losses, alpha=alpha)
    assert [row.variant for row in found.rows] == list(losses)[1:]
    for own in found.rows:
        name = own.variant
        truth = stats.ttest_rel(losses[name], BASELINE)
        assert own.interval == pytest.approx([*truth.confidence_interval(1 - alpha / variants)])
        assert own.p_adjusted == pytest.approx(variants * truth.pvalue)
        assert own.pairs == 8


@pytest.mark.parametrize("variants", [1, 2])
def test_without_pairs_they_are_compared_as_by_welch(variants):
    losses = {"baseline": BASELINE, "gelu": GELU[:5], "relu2": [3.1, 3.2, 3.0, 3.4]}
    losses = dict(list(losses.items())[: variants + 1])
    found = verdict(losses, unpaired=True)
    for own in found.rows:
        truth = stats.ttest_ind(losses[own.variant], BASELINE, equal_var=False)
        assert own.interval == pytest.approx([*truth.confidence_interval(1 - 0.05 / variants)])
        assert own.p == pytest.approx(truth.pvalue)
    assert " variant   runs      difference" in str(found)
    assert "gelu      8 and 5" in str(found)
    assert "after 8 and 5 unpaired runs" in str(found)
    assert from_table.UNPAIRED in str(found)
    assert from_table.FIXED not in str(found)
    assert found["gelu"].by_seed == []


def test_it_prints_what_ablate_prints():
    found = verdict(LOSSES, delta=0.005, metric="val_loss")
    lines = str(found).splitlines()
    assert lines[:2] == [
        "val_loss of gelu, relu2, compared with baseline",
        "Delta 0.005 val_loss; a difference is variant minus baseline, so a negative one is an improvement.",
    ]
    assert " variant   pairs   difference   97.5% interval       p adj.   verdict" in lines
    assert lines[-2:] == [
        "gelu: worse, by more than 0.005; difference +0.0162 (+0.0088 to +0.0237) val_loss after 8 pairs.",
        "relu2: better, by more than 0.005; difference -0.0137 (-0.0212 to -0.0063) val_loss after 8 pairs.",
    ]
    (spread,) = (line for line in lines if line.startswith("gelu: standard deviation of a pair 0.0074 ("))
    saved = ", without pairing 0.041, correlation 0.97 (0.84 to 0.99), pairing saved 238 ("
    assert saved in spread
    assert from_table.FIXED in lines
    assert repr(found) == str(found)
    assert max(len(line) for line in lines if line.startswith(" ")) <= COLUMNS  # the table


@pytest.mark.parametrize(
    "losses",
    [
        by_seed(LOSSES),
        {name: np.array(values, dtype=np.float32) for name, values in LOSSES.items()},
        DataFrame([{"baseline": b, "gelu": g, "relu2": r} for b, g, r in zip(*LOSSES.values(), strict=True)]),
        DataFrame(
            [
                {"seed": seed, "variant": name, "loss": np.float64(value)}
                for name, values in LOSSES.items()
                for seed, value in sorted(enumerate(values), reverse=name == "gelu")
            ],
            index="seed",
        ),
    ],
    ids=["by seed", "arrays", "wide", "long"],
)
def test_losses_in_any_form_have_the_same_verdicts(losses):
    found, truth = verdict(losses), verdict(LOSSES)
    for row, true in zip(found.rows, truth.rows, strict=True):
        assert (row.variant, row.verdict) == (true.variant, true.verdict)
        assert row.interval == pytest.approx(true.interval, abs=1e-5)


def test_a_run_that_failed_counts_as_in_an_experiment():
    failed = [math.nan, math.inf, None, -math.inf, *[3.2] * 4]
    found = verdict({"baseline": BASELINE, "gelu": failed})
    truth = verdicts({"gelu": Sample(BASELINE, failed)})["gelu"]
    for field in dataclasses.fields(truth):
        assert getattr(found["gelu"], field.name) == getattr(truth, field.name)
    assert "4 of 8 runs of the variant failed to train" in str(found)
    lost = verdict({"baseline": [math.nan, *BASELINE[1:]], "gelu": [*GELU[:7], 9.0]})
    row = lost["gelu"]
    assert row.by_seed[0] == Pair(0, None, 3.22)
    assert row.robust.outliers == [7]  # the seed, not the place among the pairs that are left


def test_seeds_are_in_order_and_named():
    found = verdict(by_seed(LOSSES))
    assert [pair.seed for pair in found["gelu"].by_seed] == [0, 1, 2, 3, 4, 5, 8, 9]
    named = {name: dict(zip("cabd", values, strict=False)) for name, values in LOSSES.items()}
    assert [pair.seed for pair in verdict(named)["gelu"].by_seed] == ["a", "b", "c", "d"]


def test_higher_is_better_with_a_minus():
    found = verdict(LOSSES, metric="-accuracy")
    assert (found["gelu"].verdict, found["relu2"].verdict) == ("better", "worse")
    assert str(found).startswith("accuracy of gelu, relu2, compared with baseline\n")
    assert "so a positive one is an improvement." in str(found).splitlines()[1]


def test_a_side_whose_seed_changes_nothing_is_doubted():
    found = str(verdict({"baseline": BASELINE, "gelu": [3.3] * 8, "same": BASELINE}))
    assert "All 8 runs of gelu have the same result. Does the seed reach the program?" in found
    assert "difference +0.0000 loss after 8 pairs; the change has no effect on the output, so more seeds" in found
    assert "All 8" not in str(verdict({"baseline": [3.3] * 8, "gelu": [3.4] * 8}))  # its sentence says so
    assert found.count("All 8") == 1
    found = str(verdict({"baseline": [3.3] * 8, "gelu": GELU, "flat": [3.4] * 8}))
    assert ("All 8 runs of baseline have" in found, found.count("All 8")) == (True, 1)


def test_tables_for_other_programs():
    found = verdict({"a & b": BASELINE, "x|y_z": GELU, "same": BASELINE}, baseline="a & b")
    first, rule, second, third = (line for line in found.to_markdown().splitlines() if line.startswith("|"))
    assert first == "| variant | pairs | difference | 97.5% interval | p adj. | verdict |"
    assert rule == "| --- | --- | --- | --- | --- | --- |"
    assert second == r"| x\|y_z | 8 | +0.0162 | +0.0088 to +0.0237 | 0.0009 | worse |"
    assert third == "| same | 8 | +0.0000 | – | – | undecided |"
    latex = found.to_latex().splitlines()
    assert latex[:3] == [
        r"\begin{tabular}{lrrrrl}",
        r"\toprule",
        r"variant & pairs & difference & 97.5\% interval & p adj. & verdict \\",
    ]
    assert r"x|y\_z & 8 & $+0.0162$ & $+0.0088$ to $+0.0237$ & 0.0009 & worse \\" in latex
    assert r"same & 8 & $+0.0000$ & -- & -- & undecided \\" in latex
    (gelu, same) = csv.DictReader(io.StringIO(found.to_csv()))
    assert (gelu["variant"], gelu["baseline"], gelu["pairs"], gelu["verdict"]) == ("x|y_z", "a & b", "8", "worse")
    assert (float(gelu["low"]), float(gelu["high"])) == found["x|y_z"].interval
    assert (same["low"], same["p_adjusted"]) == ("", "")
    with pytest.raises(KeyError, match=r"'gelu' is none of the variants x|y_z, same"):
        found["gelu"]


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_plot_is_a_figure_and_a_file(tmp_path, ending, begins):
    losses = {"baseline": BASELINE, "$gelu": GELU, "failed": [math.nan, *GELU[1:]]}
    figure = verdict(losses, delta=0.005).plot(tmp_path / f"plot.{ending}")
    assert (tmp_path / f"plot.{ending}").read_bytes().startswith(begins)
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["$gelu", "failed"]
    assert axis.get_xlabel() == "difference of loss (negative is better; dots: pairs); shaded: ±0.005"


def test_a_plot_without_pairs_has_no_dots_and_needs_a_known_ending(tmp_path):
    found = verdict(LOSSES, unpaired=True)
    assert found.plot().axes[0].get_xlabel() == "difference of loss (negative is better)"
    with pytest.raises(ValueError, match=r"plot.jpg: a plot must end with .png, .svg, .pdf$"):
        found.plot(tmp_path / "plot.jpg")


ONE = {"baseline": [3.2], "gelu": [3.1]}
SHORT = {"baseline": BASELINE, "gelu": GELU[:7]}


@pytest.mark.parametrize(
    ("losses", "options", "says"),
    [
        (
            LOSSES,
            {"baseline": "relu"},
            r"baseline \(--baseline\) must be one of baseline, gelu, relu2: losses has no variant",
        ),
        ({}, {}, r"baseline \(--baseline\) must be one of its variants, and it has none: losses has"),
        ({"baseline": BASELINE}, {}, "losses has only 'baseline': it needs the losses of a variant too"),
        (
            {"baseline": BASELINE, "trial": range(len(BASELINE))},
            {},
            "losses: 'trial' counts its rows, from 0 to 7, so these are no losses: call this column seed",
        ),
        (ONE, {}, "losses has one seed per variant, .*: train each variant with 4 seeds or more; .* power"),
        ({"baseline": BASELINE, "gelu": [3.1]}, {"unpaired": True}, "losses has one run of 'gelu', which"),
        (SHORT, {}, "has 7 runs of 'gelu' and 8 of 'baseline', and every pair needs both: write nan"),
        (by_seed(LOSSES) | {"gelu": {0: 3.1, 5: 3.2}}, {}, "has no run of 'gelu' with seeds 3, 9, 1, 2, 4, 8, and"),
        ({"baseline": {0: 3.1}, "gelu": {0: 3, 1: 3}}, {}, "no run of 'baseline' with seed 1, and 'gelu' has: write"),
        ({"baseline": {0: 3.1}, "gelu": [3.1]}, {}, "'gelu' has no seeds, and another variant has: give seeds for all"),
        ({"baseline": BASELINE, "gelu": 3.1}, {}, "losses: 'gelu' must have one number per seed, got 3.1"),
        ({"baseline": BASELINE, "gelu": "3.1"}, {}, "losses: 'gelu' must have one number per seed, got '3.1'"),
        ({"baseline": BASELINE, "gelu": ["OOM"]}, {}, "losses: 'gelu', seed 0: 'OOM' is not a number; expected"),
        ({"baseline": BASELINE, "gelu": []}, {"unpaired": True}, "losses has no run of 'gelu'"),
        ({"baseline": [0.0] * 10_001, "gelu": [0.0] * 10_001}, {}, "has 10001 runs of 'baseline', expected"),
        (
            DataFrame([{"variant": "a", "loss": 1, "bpb": 2}]),
            {},
            r"give metric \(--metric\) as one of loss, bpb, with a minus",
        ),
        (DataFrame([{"variant": "a", "loss": "x"}]), {}, "losses, row 0, column 'loss': 'x' is not a number"),
        ([BASELINE, GELU], {}, "losses must be numbers by variant or a data frame, got "),
        (LOSSES, {"delta": -1.0}, "delta must be above 0, got -1.0"),
        (LOSSES, {"alpha": 0.7}, "alpha must be above 0 and below 0.5, got 0.7"),
    ],
)
def test_mistakes_are_one_line(losses, options, says):
    with pytest.raises(ValueError, match=says) as raised:
        verdict(losses, **options)
    assert "\n" not in str(raised.value)


def test_it_needs_neither_torch_nor_matplotlib():
    code = "import sys; from lightning_llm.ablate import verdict; print(verdict({'baseline': [1, 2], 'a': [2, 4]}))"
    check = "assert not {'torch', 'lightning', 'matplotlib', 'pandas'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True, capture_output=True)
    assert {"verdict", "Report"} <= set(dir(lightning_llm.ablate))

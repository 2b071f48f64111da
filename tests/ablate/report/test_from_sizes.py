"""What three sizes say of a fourth, in a report and on its page; and stored predictions that are right or not."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lightning_llm.ablate.ladder import folder_of_size, prediction_of, read_ladder, store_prediction, with_further
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.from_sizes import ladder_report, prediction_for, predictions
from lightning_llm.ablate.report.record import VERSION, Variant, row_of
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.report.words import GUESS, size_lines
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.tuning import Grid
from lightning_llm.statistics.extrapolation import AtSize, Drift, SpreadBySize, predict, steps_of
from lightning_llm.statistics.known_steps import LADDERS, STEPS
from tests.ablate.conftest import COMPUTES, frozen, train_size, work


def differences_of(row):
    """Mean, standard deviation and number of the differences, from the losses of each seed."""
    differences = [pair.difference for pair in row.by_seed]
    return {"mean": np.mean(differences), "sd": np.std(differences, ddof=1), "pairs": len(differences)}


def answers(report):
    return {name: None if each is None else each.answer for name, each in report.sizes.predicted.items()}


def rows_of(report, variant):
    """The rows of a variant, from the smallest size to the largest."""
    return [row for row in report.of_kind("result") if row.variant == variant]


def test_a_difference_at_three_sizes_is_predicted_at_the_fourth(ladder):
    made = ladder(
        {"same": [-0.1, -0.1, -0.1], "gone": [-0.02, -0.01, -0.003], "turned": [-0.03, -0.015, 0.015]}, delta=0.02
    )
    report = ladder_report(*read_ladder(Path(made.folder)))
    assert report.has_ended
    assert answers(report) == {
        "same": "holds",
        "gone": "fades",
        "turned": "unknown",  # a drift may turn it again
    }
    rows = rows_of(report, "same")
    assert [row.size for row in rows] == ["25k", "50k", "100k"]
    assert [row.compute for row in rows] == [COMPUTES[size] for size in made.sizes]
    sizes = {size: report_of(load_experiment(folder_of_size(made, size))) for size in made.sizes}
    every = [
        AtSize(math.log(COMPUTES[size], 4), row.difference, row.sd, row.pairs)
        for size, each in sizes.items()
        for row in each.rows
    ]
    own = [at for at, name in zip(every, ["same", "gone", "turned", "null"] * 3, strict=True) if name == "same"]
    spread = SpreadBySize.of(every)
    names = ("same", "gone", "turned")
    steps = [step for place, _ in enumerate(names) for step in steps_of(every[place::4], spread)]
    expected = predict(own, spread, Drift.of([*STEPS, *steps]), 13.0, 4)
    found = report.sizes.predicted["same"]
    assert found.interval == pytest.approx(expected.interval)
    assert found.prediction_interval == pytest.approx(expected.prediction_interval)
    assert found.difference == pytest.approx(expected.mean)
    learned = report.sizes.drift
    assert (learned.own_steps, learned.other_steps, learned.other_ladders) == (6, len(STEPS), len(LADDERS))
    assert 0.5 < learned.decay < 1
    nulls = [AtSize(math.log(COMPUTES[row.size], 4), **differences_of(row)) for row in report.of_kind("null")]
    stored = [AtSize(math.log(row.compute, 4), **differences_of(row)) for row in rows]
    for one, other in zip([*stored, *nulls], [*own, *every[3::4]], strict=True):  # the losses give the numbers again
        assert (one.pairs, one.mean) == (other.pairs, pytest.approx(other.mean))
        assert one.sd == pytest.approx(other.sd, abs=1e-12)
    lines = size_lines(report)
    assert lines[0].startswith("same at 200k (6.7e+07 FLOPs): holds: the direction is that at the largest size; ")
    assert "gone at 200k (6.7e+07 FLOPs): fades: the difference is smaller than 0.02; " in lines[1]
    assert lines[3].startswith(f"Predictions: 4 times the compute multiplies a difference by {learned.decay:.2f}; ")
    assert lines[3].endswith(
        f"learned from 6 steps from size to size of this ladder and {len(STEPS)} of {len(LADDERS)} other ladders."
    )
    assert lines[4] == GUESS


def test_at_the_smallest_size_the_tuned_variants_are_compared(ladder, tmp_path):
    option = "model.optimizer.init_args.lr"
    tune = Grid(option=option, factors=(0.5, 1.0, 2.0), seeds=1)
    made = ladder({"a": [-0.1, -0.1, -0.1]}, tune=msgspec.to_builtins(tune) | {"factors": [0.5, 1.0, 2.0]})
    shutil.rmtree(folder_of_size(made, "25k"))
    variants = {"baseline": {"effect": 0.3, "lr": 0.01, "best": 0.02}, "a": {"effect": 0.2, "lr": 0.01, "best": 0.005}}
    planned = {name: {"tuned": 0.01} for name in (*variants, "null")}
    looks, out, base = [4], "sizes/25k", variants["baseline"]
    plan = frozen(Path(made.folder), {"a": variants["a"]}, looks, 0.01, out, base, base, tune=tune, planned=planned)
    assert ladder_report(*read_ladder(Path(made.folder))).sizes.tuned_option == ""  # not yet
    assert rows_of(ladder_report(*read_ladder(Path(made.folder))), "a")[0].difference is None
    work(plan.out)
    report = ladder_report(*read_ladder(Path(made.folder)))
    assert (report.sizes.tuned_option, report.sizes.tuned_factors) == (option, {"baseline": 2.0, "a": 0.5})
    first, untuned = rows_of(report, "a")[0], report_of(load_experiment(plan.out))
    assert first.difference == pytest.approx(-0.1, abs=0.001)
    assert untuned["a"].difference == pytest.approx(-0.1, abs=0.001)  # both are an octave off
    mean = untuned.variants["baseline"].means["val_loss"].value
    assert report.sizes.sizes["25k"].mean == pytest.approx(mean - 1)
    assert size_lines(report)[0] == (
        f"{option} was tuned at 25k, and at larger sizes multiplies what size sets there: baseline × 2, a × 0.5."
    )
    assert answers(report) == {"a": "holds"}


def test_the_multiplier_is_the_compute_that_gives_the_same_loss(ladder):
    made = ladder({"a": [-0.5, -0.25, 0.0]}, base=(3.0, 2.5, 2.25))
    report = ladder_report(*read_ladder(Path(made.folder)))
    rows = rows_of(report, "a")
    # the baseline falls by 0.5 for 4 times the compute, then by 0.25; at the size between them by their mean
    assert rows[0].multiplier == pytest.approx(4, rel=0.01)
    assert rows[1].multiplier == pytest.approx(4 ** (0.25 / 0.375), rel=0.01)
    assert rows[2].multiplier == pytest.approx(1, rel=0.01)
    low, high = rows[0].multiplier_interval
    assert low < rows[0].multiplier < high
    shown = [line.split("|")[-2].strip() for line in report.to_markdown().splitlines() if line.startswith("| a |")]
    assert shown == [f"{row.multiplier:.2f}" for row in rows]


def test_a_size_with_a_diverged_run_has_no_difference_and_nothing_is_predicted_two_sizes_up(ladder):
    made = ladder({"gap": [-0.1, [1], -0.1], "lost": [-0.1, -0.1, [1]], "same": [-0.1, -0.1, -0.1]})
    report = ladder_report(*read_ladder(Path(made.folder)))
    assert rows_of(report, "lost")[2].difference is None
    assert answers(report) == {"gap": "holds", "lost": None, "same": "holds"}
    needs = "no prediction, which needs differences that vary, at two sizes, the largest among them"
    assert f"lost at 200k (6.7e+07 FLOPs): {needs}" in size_lines(report)[1]
    report.write(made.folder)  # the page can be drawn


def test_a_stored_prediction_is_right_or_not_and_never_rewritten(ladder):
    made = ladder({"same": [-0.1, -0.1, -0.1], "bends": [-0.1, -0.1, -0.1]})
    prediction = prediction_for(made, COMPUTES)
    assert store_prediction(made, prediction) == prediction
    assert store_prediction(made, msgspec.structs.replace(prediction, variants={})) == prediction  # the first one stays
    assert prediction_of(made, "200k").variants.keys() == {"same", "bends"}
    assert prediction_of(made, "200k").hash == prediction.hash
    waiting = ladder_report(*read_ladder(Path(made.folder)))
    assert [each.is_hit for each in waiting.sizes.predictions[0].variants.values()] == [None, None]
    assert waiting.sizes.target == "200k"
    train_size(made, "200k", {"same": -0.1, "bends": 0.2}, -0.9)
    report = ladder_report(*read_ladder(Path(made.folder)))
    assert {name: each.is_hit for name, each in report.sizes.predictions[0].variants.items()} == {
        "same": True,
        "bends": False,
    }
    assert report.sizes.predictions[0].hash == prediction.hash
    assert report.sizes.target == ""
    lines = size_lines(report)
    assert any(line.startswith("same at 200k: hit: predicted -0.1") for line in lines)
    assert any(line.startswith("bends at 200k: miss: ") and line.endswith("observed +0.2002.") for line in lines)
    assert with_further(made, "400k", ["200k"]).sizes == ("25k", "50k", "100k", "200k")


def test_the_page_shows_names_as_text(ladder):
    made = ladder({"<b>$x$&": [-0.1, -0.1, -0.1]})
    page = ladder_report(*read_ladder(Path(made.folder))).write(made.folder)
    html = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;$x$&amp;" in html
    assert "<b>" not in html
    assert html.count("<svg") == 1
    assert "sizes/100k/report.html" in html
    stored = json.loads((Path(made.folder) / "report.json").read_text())
    assert stored["sizes"]["predicted"]["<b>$x$&"]["answer"] == "holds"
    assert Report.read(made.folder) == ladder_report(*read_ladder(Path(made.folder)))


def test_without_a_target_the_sizes_are_shown_alone(ladder):
    made = ladder({"a": [-0.1, -0.1, -0.1]}, predict=None)
    report = ladder_report(*read_ladder(Path(made.folder)))
    assert report.sizes.target == ""
    assert answers(report) == {}
    shares = "95% each, 95% for all variants of a size together"
    assert size_lines(report) == [f"Intervals of differences: {shares}; predictions: 90% for each variant."]


def test_intervals_of_several_variants_say_what_each_is(ladder):
    report = ladder_report(*read_ladder(Path(ladder({"a": [-0.1] * 3, "b": [0.1] * 3}, predict=None).folder)))
    assert "97.5% each, 95% for all variants of a size together" in size_lines(report)[-1]


def test_a_pair_whose_baseline_diverged_does_not_count(tmp_path):
    untested = row_of(None, variant="a", metric="val_loss", unit="nats/token")
    numbers = {"difference": -0.1, "sd": 0.01, "pairs": 8, "direction": "better"}
    row = dataclasses.replace(untested, **numbers)
    about = {"name": "test", "metric": "val_loss", "unit": "nats/token", "alpha": 0.05, "level": 0.95}
    variants = {"baseline": Variant(), "a": Variant()}
    report = Report(version=VERSION, kind="experiment", rows=[row], variants=variants, **about)
    sizes = dict.fromkeys(("25k", "50k", "100k"), report)
    fewer_rows = [dataclasses.replace(row, baseline_diverged=6)]
    lost = {**sizes, "100k": msgspec.structs.replace(report, rows=fewer_rows)}
    whole, fewer = (predictions(each, COMPUTES, "200k", 8)[0]["a"] for each in (sizes, lost))
    assert fewer.interval[1] - fewer.interval[0] > whole.interval[1] - whole.interval[0]


def test_a_prediction_of_a_variant_that_diverged_has_no_observation(ladder):
    made = ladder({"a": [-0.1, -0.1, -0.1]})
    store_prediction(made, prediction_for(made, COMPUTES))
    assert any("not observed yet" in line for line in size_lines(ladder_report(*read_ladder(Path(made.folder)))))
    train_size(made, "200k", {"a": [0, 1, 2, 3]}, 0.0)
    lines = size_lines(ladder_report(*read_ladder(Path(made.folder))))
    assert any("no difference was observed, since a run failed to train" in line for line in lines)

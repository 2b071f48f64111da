"""Rules that predict one size up, scored on the stored ladders; and the steps that the package ships."""

import math

import numpy as np
import pytest

from benchmarks import known_steps, ladder_predictions
from benchmarks.__main__ import main
from lightning_llm.ablate.report.report import Report
from lightning_llm.statistics import known_steps as shipped
from lightning_llm.statistics.extrapolation import AtSize, SpreadBySize


@pytest.fixture(scope="module")
def found():
    return known_steps.series(known_steps.ladders())


def test_the_shipped_steps_are_those_of_the_reports(capsys):
    assert known_steps.main(["--check"]) == 0
    by_ladder = known_steps.known_steps(known_steps.series(known_steps.ladders()))
    assert len(shipped.STEPS) == sum(map(len, by_ladder.values()))
    assert tuple(by_ladder) == shipped.LADDERS


def test_a_difference_of_two_ladders_counts_once(found):
    alibi = [name for name, variants in found.items() if "alibi" in variants]
    assert alibi == ["held-out"]  # parts has the same runs


def test_a_step_is_a_mean_difference_at_two_sizes(found):
    report = Report.read(known_steps.EXPERIMENTS / "held-out.json")
    rows = [row for row in report.of_kind("result") if row.variant == "relu"]
    steps = known_steps.known_steps(found)["held-out"]
    own = [step for step in steps if step.before == rows[0].difference]
    assert [step.after for step in own] == [rows[1].difference]
    assert own[0].h == pytest.approx(math.log(rows[1].compute / rows[0].compute, 4))


@pytest.fixture
def rows(measured):
    return measured("ladder", "--shapes", "rules")


def test_every_rule_is_scored_on_what_was_observed(rows):
    report = Report.read(known_steps.EXPERIMENTS / "held-out.json")
    relu = next(row for row in report.of_kind("result") if (row.variant, row.size) == ("relu", "200k"))
    for row in rows.values():
        each = [
            high - low + 20 * max(0.0, low - observed, observed - high)
            for (low, high), observed in zip(row["intervals"], row["observed"], strict=True)
        ]
        assert row["score"] == pytest.approx(np.mean(each))
        assert row["hits"] == sum(
            low <= observed <= high for (low, high), observed in zip(row["intervals"], row["observed"], strict=True)
        )
    known = rows["pooled decay; below"]
    assert known["observed"][known["variants"].index("held-out: relu")] == relu.difference
    assert known["variants"] == rows["curves; known"]["variants"]
    assert known["count"] == 19


def test_the_curves_are_those_that_were_stored(rows):
    report = Report.read(known_steps.EXPERIMENTS / "held-out.json")
    predicted = report.sizes.predictions[0].variants["alibi"].predicted
    row = rows["curves; known"]
    assert row["intervals"][row["variants"].index("held-out: alibi")] == list(predicted.prediction_interval)


def test_no_rule_learns_from_what_it_predicts(found, monkeypatch):
    cases = [
        case for report in known_steps.ladders() for case in ladder_predictions.cases_of(report, found[report.name])
    ]
    targets = {case.ladder: case.target for case in cases}
    case = next(case for case in cases if case.variant == "sandwich-norm")
    for steps in (ladder_predictions.steps_below(found, targets), ladder_predictions.steps_without(found, case)):
        assert case.observed not in [step.after for step in steps]
        assert case.sizes[-1].mean in [step.after for step in steps]
    others = [step.after for step in ladder_predictions.steps_without(found, case)]
    assert next(other.observed for other in cases if other.variant == "geglu") in others


def test_persisting_has_the_pairs_noise_alone():
    spread = SpreadBySize(math.log(0.008), 0.0)
    sizes = tuple(AtSize(float(x), 0.02, 0.008, 8) for x in range(3))
    case = ladder_predictions.Case("a", "b", sizes, spread, 3.0, 8, 0.0, None, None)
    mean, (low, high) = ladder_predictions.persists(case)
    assert (mean, low + high) == (0.02, pytest.approx(0.04))
    assert (high - low) / 2 == pytest.approx(1.7207 * 0.008 / 2, rel=1e-3)  # t of 21 degrees of freedom


def test_other_shapes_are_mistakes(capsys):
    assert main(["ladder", "--shapes", "held-out"]) == 2
    assert "must be rules, transfer, or rising sizes" in capsys.readouterr().err

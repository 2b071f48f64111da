"""The simulated coverage of extrapolated intervals, and the scores of predictions that were checked."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
from scipy import stats

from benchmarks import ladder_predictions
from benchmarks.__main__ import main
from lightning_llm.ablate.ladder import read_ladder, store_prediction
from lightning_llm.ablate.report.from_sizes import ladder_report, prediction_for
from lightning_llm.ablate.report.report import Report
from tests.ablate.conftest import COMPUTES, LADDER_FILE, ladder, train_size  # noqa: F401


@pytest.fixture
def rows_of(measured, monkeypatch):
    monkeypatch.setattr(ladder_predictions, "DRAWS", 240)
    return partial(measured, "ladder", "--shapes", "coverage")


def test_smooth_curves_are_covered_and_a_bend_is_not(rows_of, monkeypatch):
    monkeypatch.setattr(ladder_predictions, "GATE", (0.75, 1.0))  # so few draws
    monkeypatch.setattr(ladder_predictions, "CURVES", {"linear": lambda x: -0.03 + 0.006 * x})
    rows = rows_of()
    assert rows["linear, 4 times the compute"]["covered"] > 0.8
    assert rows["linear, 4 times the compute"]["promised"] > 0.8
    assert rows["linear, 16 times the compute"]["half_width"] > rows["linear, 4 times the compute"]["half_width"] > 0
    assert rows["bends after the third size, 16 times the compute"]["covered"] < 0.7
    assert (
        rows["linear, 4 times the compute"]["lowest"]
        <= rows["linear, 4 times the compute"]["covered"]
        <= rows["linear, 4 times the compute"]["highest"]
    )


def test_intervals_that_do_not_cover_fail(rows_of, monkeypatch, capsys):
    bend = ladder_predictions.NOT_SMOOTH["bends after the third size"]
    monkeypatch.setattr(ladder_predictions, "CURVES", {"bend": bend})
    rows_of(status=2)
    assert "bend, 16 times: " in capsys.readouterr().err


@pytest.fixture
def checked(ladder, measured, monkeypatch, tmp_path):  # noqa: F811
    """``checked(differences at 25k, 50k and 100k, those at 200k)``: rows by variant, and the report."""

    def rows(sizes, target):
        made = ladder(sizes)
        store_prediction(made, prediction_for(made, COMPUTES))
        train_size(made, "200k", target, -0.9)
        ladder_report(*read_ladder(Path(made.folder))).write(made.folder)
        started = []

        def run(command, **options):
            started.append(command[3:])
            return type("Ended", (), {"returncode": 0})

        monkeypatch.setattr(ladder_predictions, "subprocess", type("Stub", (), {"run": run}))
        variants = {name: {} for name in sizes}
        asked = {
            **LADDER_FILE,
            "name": made.name,
            "out": made.out,
            "variants": variants,
            "pairs": made.looks[-1],
            "delta": made.delta,
            "predict": "200k",
        }
        (tmp_path / "lad.yaml").write_text(json.dumps(asked))
        monkeypatch.setattr(ladder_predictions, "EXAMPLES", tmp_path)
        found = measured("ladder", "--shapes", "held-out=lad")
        assert [words[:2] for words in started] == [["ablate", "run"], ["ablate", "extend"]]
        assert started[1][2:] == [made.out, "--size", "200k"]
        return found, Report.read(made.folder)

    return rows


def test_a_prediction_is_scored_by_its_width_and_by_what_it_misses(checked):
    rows, report = checked({"same": [-0.1, -0.1, -0.1], "bends": [-0.1, -0.1, -0.1]}, {"same": -0.1, "bends": 0.2})
    predicted = {name: own.predicted for name, own in report.sizes.predictions[0].variants.items()}
    for name, is_hit in {"same": True, "bends": False}.items():
        (low, high), row = predicted[name].prediction_interval, rows[name]
        assert row["hit"] is is_hit
        assert row["predicted"] == [low, high]
        assert row["answer"] == predicted[name].answer
        assert row["score"] == pytest.approx(high - low + 20 * max(0.0, row["observed"] - high, low - row["observed"]))
    everything = rows["all"]
    assert (everything["hits"], everything["count"]) == (1, 2)
    assert [everything["share_low"], everything["share_high"]] == pytest.approx([0.012579, 0.987421], abs=1e-6)
    assert everything["score"] == pytest.approx((rows["same"]["score"] + rows["bends"]["score"]) / 2)


def test_the_simple_predictions_are_the_largest_sizes_difference_and_a_line(checked):
    rows, report = checked({"line": [-0.3, -0.2, -0.1], "flat": [-0.1, -0.1, -0.1]}, {"line": 0.0, "flat": -0.1})
    line, flat = rows["line"], rows["flat"]
    middle = {name: [sum(row[name]) / 2 for row in (line, flat)] for name in ("persists", "line")}
    assert middle["persists"] == pytest.approx([line["differences"][-1], flat["differences"][-1]])
    step = line["differences"][-1] - line["differences"][-2]
    assert middle["line"][0] == pytest.approx(line["differences"][-1] + step, abs=1e-3)
    assert line["score_line"] < line["score_persists"]
    # all sizes of both variants have one spread
    results = list(report.of_kind("result"))
    freedom = sum(row.pairs - 1 for row in results if row.size != "200k")
    reach = (flat["persists"][1] - flat["persists"][0]) / 2 / stats.t.isf(0.05, freedom)
    sds = [row.sd for row in results if row.variant == "flat"]
    assert math.sqrt(2 / 4) * min(sds) / 2 < reach < math.sqrt(2 / 4) * max(sds) * 2


def test_a_ladder_that_cannot_be_trained_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder_predictions, "EXAMPLES", tmp_path)
    variants = {"a": {"model.architecture.mlp": "relu"}}
    asked = {"baseline": "gone.yaml", "variants": variants, "sizes": ["25k", "50k", "100k"], "predict": "200k"}
    Path("lad.yaml").write_text(json.dumps(asked))
    assert main(["ladder", "--shapes", "held-out=lad", "--json", "rows.json"]) == 2
    assert "lightning-llm ablate run" in capsys.readouterr().err
    assert not Path("rows.json").exists()


@pytest.mark.parametrize("name", ["nothing", "which-mlp"])  # the second is no ladder
def test_other_experiments_are_mistakes(name, capsys):
    assert main(["ladder", "--shapes", f"held-out={name}"]) == 2
    line = capsys.readouterr().err
    assert f"shapes '{name}': there are held-out, ladder, " in line


def test_a_ladder_without_anything_observed_fails(checked, monkeypatch, capsys):
    with pytest.raises(AssertionError):  # the status is 2
        checked({"lost": [-0.1, -0.1, -0.1]}, {"lost": [0, 1, 2, 3]})
    assert "held-out=lad: no variant has both a prediction and an observed difference" in capsys.readouterr().err

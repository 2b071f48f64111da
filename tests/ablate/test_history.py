"""Earlier experiments beside a new one: the seeds that they have used, and their noise."""

import json

import pytest

from lightning_llm.ablate import history
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.history import Earlier, Spread, earlier, siblings, spread_in, spread_of
from lightning_llm.ablate.plan import PlannedVariant, PlanRecord
from lightning_llm.ablate.report.record import VERSION
from lightning_llm.io.records import write_record

ABOUT = {"metric": "val_loss", "unit": "nats/token", "verdict": "undecided", "direction": "not shown"}
ABOUT |= {"sentence": "", "has_ended": True, "pairs": 4, "level": 0.95, "diverged": 0, "baseline_diverged": 0}
ABOUT |= {"note": "", "warnings": [], "variant": "null", "kind": "null"}
NOISE = {"sd_interval": [0.01, 0.05], "unpaired_sd": 0.1}
NOISE |= dict.fromkeys(("correlation_interval", "seeds_saved", "seeds_saved_interval"))
NULL = {**ABOUT, "sd": 0.02, "noise": NOISE}


def report_with(*rows, metric="val_loss", version=VERSION):
    """The JSON of a report with these rows."""
    facts = {"version": version, "kind": "experiment", "name": "first", "unit": "nats/token"}
    return json.dumps({**facts, "metric": metric, "alpha": 0.05, "level": 0.95, "rows": rows})


@pytest.fixture
def add(tmp_path):
    """``add(name, runs)``: an experiment of the baseline ``x`` with these runs, and its report if it has rows."""

    def added(name, runs=(), config="x", metric="val_loss", rows=None):
        folder = tmp_path / name
        for run in runs:
            (folder / "runs" / run).mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        experiment = Experiment(name=name, variants={"a": {}}, metric=metric)
        variants = {"baseline": PlannedVariant()}
        record = PlanRecord(experiment=experiment, variants=variants, program="fit", asked={"baseline": config})
        write_record(folder / "plan.json", record)
        if rows is not None:
            (folder / "report.json").write_text(report_with(*rows, metric=metric))
        return folder

    return added


def test_an_experiment_has_used_the_seeds_of_its_baseline(add, tmp_path):
    tuning = "baseline,lr=0.002,seed=100"
    add("first", [tuning, "baseline,seed=11", "baseline,seed=2", "baseline,seed=x", "a,seed=7", "null,seed=8"])
    assert list(earlier(tmp_path / "new", "x", "val_loss")) == [Earlier("first", [2, 11, 100], None)]


def test_only_experiments_with_the_same_baseline_and_metric_count(add, tmp_path):
    add("other", config="y")
    add("bits", metric="bits_per_byte")
    (add("damaged") / "plan.json").write_text("{")
    (add("older") / "plan.json").write_text('{"metric": "val_loss"}')
    itself = add("new")
    assert list(earlier(itself, "x", "val_loss")) == []
    assert [each.name for each in earlier(tmp_path / "another", "x", "val_loss")] == ["new"]


def test_of_very_many_the_last_are_looked_at(add, tmp_path, monkeypatch):
    folders = [add(name) for name in ("a", "b", "c", "d")]
    assert siblings(tmp_path / "b") == [folders[0], *folders[2:]]
    monkeypatch.setattr(history, "MOST", 2)
    assert siblings(tmp_path / "new") == folders[2:]


@pytest.mark.parametrize(
    ("rows", "spread"),
    [
        ([NULL], Spread(0.02, "first", "null", (0.01, 0.05))),
        ([{**ABOUT, "sd": 0.02}], Spread(0.02, "first", "null")),
        ([], None),
        ([ABOUT], None),
        ([{**ABOUT, "sd": 0.0}], None),  # a null variant that began like the baseline
        ([{**ABOUT, "sd": 1e9}], None),
        ([{**ABOUT, "sd": "0.02"}], None),
        ([{**NULL, "noise": {**NOISE, "sd_interval": [0.01]}}], None),
        ([{**NULL, "kind": "secondary"}], None),
    ],
)
def test_the_spread_is_that_of_a_report(add, tmp_path, rows, spread):
    folder = add("first", rows=rows)
    assert [each.spread for each in earlier(tmp_path / "new", "x", "val_loss")] == [spread]
    if spread is not None:
        assert spread_in(folder, "val_loss") == spread


def test_the_spread_is_the_largest_of_the_variants(add):
    of_variants = ({**ABOUT, "variant": name, "kind": "result", "sd": sd} for name, sd in (("a", 0.3), ("b", None)))
    folder = add("first", rows=[*of_variants, NULL])
    assert spread_in(folder, "val_loss") == Spread(0.3, "first", "a")


def test_the_spread_in_a_metric_of_which_higher_is_better_is_that_of_its_report(add):
    row = {**NULL, "kind": "result", "variant": "a", "metric": "accuracy"}
    folder = add("first", metric="-accuracy")
    (folder / "report.json").write_text(report_with(row, metric="accuracy"))
    assert spread_in(folder, "-accuracy") == Spread(0.02, "first", "a", (0.01, 0.05))


def test_a_spread_in_another_metric_is_none(add):
    folder = add("first", rows=[NULL])
    with pytest.raises(ValueError, match=r"first has no report.json with the spread of .* in bits_per_byte: give --sp"):
        spread_in(folder, "bits_per_byte")


def test_the_largest_spread_counts():
    experiments = [Earlier("a", [], Spread(0.1)), Earlier("b", [], None), Earlier("c", [], Spread(0.3, "c"))]
    assert spread_of(experiments) == Spread(0.3, "c")
    assert spread_of(experiments[1:2]) is None


def test_a_spread_says_where_it_is_from():
    assert str(Spread(0.012345)) == "0.01235"
    assert str(Spread(0.02, "first", "null")) == "0.02 (null variant of first)"
    assert str(Spread(0.02, "first", "null", (0.01, 0.05))) == "0.02 (null variant of first, 95% interval 0.01 to 0.05)"

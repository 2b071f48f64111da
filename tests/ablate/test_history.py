"""Earlier experiments beside a new one: the seeds that they have used, and their noise."""

import json

import pytest

from lightning_llm.ablate import history
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.history import Earlier, Spread, earlier, siblings, spread_in, spread_of
from lightning_llm.ablate.plan import PlannedVariant, PlanRecord
from lightning_llm.io.records import write_record

NOISE = {"null": {"sd": 0.02, "noise": {"sd_interval": [0.01, 0.05]}}}


@pytest.fixture
def add(tmp_path):
    """``add(name, runs)``: an experiment of the baseline ``x`` with these runs, and its report if it has noise."""

    def added(name, runs=(), config="x", metric="val_loss", aa=None):
        folder = tmp_path / name
        for run in runs:
            (folder / "runs" / run).mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        experiment = Experiment(name=name, variants={"a": {}}, metric=metric)
        variants = {"baseline": PlannedVariant()}
        record = PlanRecord(experiment=experiment, variants=variants, program="fit", asked={"baseline": config})
        write_record(folder / "plan.json", record)
        if aa is not None:
            (folder / "report.json").write_text(json.dumps({"metric": metric, "aa": aa}))
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
    ("aa", "spread"),
    [
        (NOISE, Spread(0.02, "first", "null", (0.01, 0.05))),
        ({"null": {"sd": 0.02, "noise": None}}, Spread(0.02, "first", "null")),
        ({"null": None}, None),
        ({"null": {"sd": None}}, None),
        ({"null": {"sd": 0.0}}, None),  # a null variant that began like the baseline
        ({"null": {"sd": 1e9}}, None),
        ({"null": {"sd": "0.02"}}, None),
        ({"null": {"sd": 0.02, "noise": {"sd_interval": [0.01]}}}, None),
        ({}, None),
    ],
)
def test_the_spread_is_that_of_a_report(add, tmp_path, aa, spread):
    folder = add("first", aa=aa)
    assert [each.spread for each in earlier(tmp_path / "new", "x", "val_loss")] == [spread]
    if spread is not None:
        assert spread_in(folder, "val_loss") == spread


def test_the_spread_is_the_largest_of_the_variants(add):
    folder = add("first", aa=NOISE)
    report = {"metric": "val_loss", "aa": NOISE, "variants": {"a": {"sd": 0.3, "noise": None}, "b": {"sd": None}}}
    (folder / "report.json").write_text(json.dumps(report))
    assert spread_in(folder, "val_loss") == Spread(0.3, "first", "a")


def test_a_spread_in_another_metric_is_none(add):
    folder = add("first", aa=NOISE)
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

"""A batch of ideas as an experiment: which runs it needs, what it adopts, and what it cannot have."""

import pytest

from lightning_llm.ablate.experiment import Batch, experiment_of
from lightning_llm.ablate.extension import extension_of
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.results import load_experiment
from lightning_llm.statistics.batch import LOOKS
from tests.ablate.conftest import work

FILE = {"baseline": "base.yaml", "variants": {"a": {"model.architecture.mlp": "relu"}}, "batch": True}


@pytest.fixture
def batch(experiment):
    ideas = {"good": {"effect": -0.2, "noise": 0.02}, "bad": {"effect": 0.1, "noise": 0.02}, "idle": {"effect": 0.0}}
    plan = experiment(ideas, stop=Batch())
    work(plan.out)
    return load_experiment(plan.out)


def test_a_useless_idea_is_given_up_and_a_useful_one_is_adopted(batch):
    report = report_of(batch)
    assert report.is_batch
    assert report.has_ended
    assert {name: report[name].verdict for name in ("good", "bad", "idle")} == {
        "good": "better",
        "bad": "undecided",
        "idle": "undecided",
    }
    assert report["bad"].pairs == report["idle"].pairs == LOOKS[0]
    assert RunKey("bad", LOOKS[0]) not in batch.results
    assert report["good"].e_value >= 60 > 1 >= report["bad"].e_value
    assert Plan.read(batch.plan.out).experiment.stop == Batch()


def test_the_report_says_what_is_promised(batch, tmp_path):
    report = report_of(batch)
    text = report.to_markdown()
    assert "Adopted 1 of 3 ideas: good." in text
    assert "at most 5% of the adopted ideas are useless, in expectation" in text
    assert "Simultaneous" not in text
    (head,) = (line for line in text.splitlines() if line.startswith("| variant") and "e-value" in line)
    (good,) = (line for line in text.splitlines() if line.startswith("| good") and "adopted" in line)
    assert head.split("|")[-2].strip() == "verdict"
    assert good.split("|")[-2].strip() == "adopted"
    assert "bad: not adopted: e-value " in text
    report.write(tmp_path)
    assert Report.read(tmp_path) == report


def test_a_batch_gets_no_more_pairs(batch):
    with pytest.raises(ValueError, match="is a batch, whose rule is fixed: begin another one with other seeds"):
        extension_of(batch, 4, None)


@pytest.mark.parametrize("more", [{"looks": [4, 8]}, {"pairs": 8}, {"delta": 0.01}, {"sizes": ["25k", "50k"]}])
def test_a_batch_has_its_own_looks(more):
    with pytest.raises(ValueError, match=f"the file: {next(iter(more))}: a batch compares variants by its own looks"):
        experiment_of({**FILE, **more}, "the file", "n")


def test_the_file_or_the_option_asks_for_it():
    assert experiment_of(FILE, "the file", "n").stop == Batch()
    assert experiment_of(FILE, "the file", "n").delta is None
    assert experiment_of({**FILE, "batch": False}, "the file", "n").stop != Batch()

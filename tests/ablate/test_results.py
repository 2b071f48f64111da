"""Which runs of an experiment are pairs, and what they wrote about their validation windows."""

import json
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.fit.program import Fit
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import Plan, PlannedVariant, PlanRecord
from lightning_llm.ablate.progress import run_in_words
from lightning_llm.ablate.results import Result, _mismatch, load_experiment
from lightning_llm.ablate.tuning import Grid
from lightning_llm.runs.directory import WINDOWS
from tests.ablate.conftest import work

LONGER = {"a": {"steps": 7}}
A = {"effect": -0.5}


@pytest.mark.parametrize(
    ("a", "null", "planned", "says"),
    [
        ({}, {"embed": "07"}, None, "their initial values differ: embed"),
        ({"drawn": "07"}, {}, None, r"their initial values differ: layers\.0\.mlp\.up"),  # only the null variant may
        ({"steps": 5}, {}, None, "they have 6 and 5 steps"),
        ({"steps": 7, "batches": "other", "prefix": "other"}, {}, LONGER, "their training batches up to step 4 differ"),
        ({"precision": "bf16-true"}, {}, None, "their precision differs: 32-true and bf16-true"),
        ({}, {"precision": "bf16-true"}, None, "their precision differs: 32-true and bf16-true"),
    ],
)
def test_runs_that_are_no_pair_stop_the_experiment(experiment, a, null, planned, says):
    plan = experiment({"a": {**A, **a}}, null=null, planned=planned)
    with pytest.raises(ValueError, match=f"are no pair: {says}"):
        work(plan.out)


def test_only_what_the_plan_excuses_may_differ(tmp_path):
    variants = {name: PlannedVariant(steps=6, tokenizer="t") for name in ("baseline", "b")}
    variants["a"] = PlannedVariant(steps=6, tokenizer="t", excused=("precision",))
    asked = Experiment(name="test", variants={"a": {"trainer.precision": "bf16-true"}, "b": {}})
    plan = Plan(tmp_path, PlanRecord(experiment=asked, variants=variants, program="fit"))
    summary = {"steps": 6, "batches": "1", "validation_batches": "2", "initial_values": {"embed": "2 float32 00"}}
    base = Result(
        RunKey("baseline", 0), tmp_path, 3.0, "", {**summary, "precision": "32-true", "threads": 1}, Fit(plan)
    )
    for name, precision, threads, says in (
        ("a", "bf16-true", 1, ""),
        ("a", "bf16-true", 2, "their number of threads differs: 1 and 2"),
        ("b", "bf16-true", 1, "their precision differs: 32-true and bf16-true"),
    ):
        changed = {**base.summary, "precision": precision, "threads": threads}
        other = Result(RunKey(name, 0), tmp_path, 3.0, "", changed, Fit(plan))
        assert _mismatch(plan, Fit(plan), base, other) == says


PLAN = Plan(Path("out"), PlanRecord(experiment=Experiment(name="test", variants={}), variants={}, program="fit"))
RECORD = {"step": 6, "windows": [8, 3], "tokens": [64, 20], "nats": [1.5, -0.25]}


@pytest.fixture
def result(tmp_path):
    def of(content, loss=3.0):
        if content is not None:
            (tmp_path / WINDOWS).write_text(content if isinstance(content, str) else json.dumps(content))
        return Result(RunKey("a", 0), tmp_path, loss, "", {"steps": 6}, Fit(PLAN))

    return of


def test_windows_are_read_unless_they_are_missing_or_of_another_end(result):
    assert result(None).windows() is None
    assert result(RECORD).windows() == RECORD
    assert result(RECORD, loss=None).windows() is None
    assert result({**RECORD, "step": 5}).windows() is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "Expected `object`, got `array`"),
        ("{", "Input data was truncated"),
        ({**RECORD, "nats": [1.5]}, "windows, tokens and nats differ in length"),
        ({**RECORD, "tokens": [64, "x"]}, r"Expected `int`, got `str` - at `\$\.tokens"),
        ({**RECORD, "nats": [1.5, None]}, r"Expected `float`, got `null` - at `\$\.nats"),
    ],
)
def test_damaged_windows_are_one_line(result, content, says):
    with pytest.raises(ValueError, match=says) as error:
        result(content).windows()
    assert "windows.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_runs_on_other_batches_are_no_pair(experiment):
    plan = experiment({"a": {"effect": 0.0, "batches": "other"}})
    with pytest.raises(ValueError, match="are no pair: their training batches differ; remove the folder"):
        work(plan.out)


def test_a_variant_of_another_depth_is_a_pair(experiment):
    deeper = {"effect": 0.0, "residual": "01"}
    with pytest.raises(ValueError, match="are no pair: their initial values differ"):
        work(experiment({"a": deeper}, out="same").out)
    plan = experiment({"a": {**deeper, "layers": 2}}, out="deeper")
    work(plan.out)
    assert not load_experiment(plan.out).state.needed


def test_tuned_runs_without_an_untuned_baseline_are_compared_with_the_tuned_one(experiment):
    tune = Grid(option="model.optimizer.init_args.lr", factors=(0.5, 1.0, 2.0), seeds=1)
    planned = {name: {"tuned": 0.01} for name in ("baseline", "null", "a")}
    plan = experiment({"a": {"effect": -0.5, "batches": "other"}}, tune=tune, planned=planned)
    for name, batches in (("baseline,lr=0.02", "2"), ("a,lr=0.02", "other")):  # the untuned ones ended at seed 2
        folder = plan.run_dir(RunKey(name, 2))
        folder.mkdir(parents=True)
        hashes = {"initial_values": {"a": "1 float32 00"}, "validation_batches": "1", "batches": batches}
        (folder / "config.yaml").write_text("{}")
        (folder / "summary.json").write_text(json.dumps({"val_loss": 3.0, **hashes}))
        (folder / "status.json").write_text(json.dumps({"status": "finished", "step": 6}))
    with pytest.raises(ValueError, match=r"a,lr=0\.02,seed=2 and .*baseline,lr=0\.02,seed=2 are no pair"):
        load_experiment(plan.out)


def test_other_batches_are_a_pair_where_the_plan_gives_a_variant_other_steps(experiment):
    plan = experiment({"a": {"effect": -0.5, "batches": "other", "steps": 7}}, planned=LONGER)
    work(plan.out)
    assert load_experiment(plan.out).state.verdicts["a"].verdict == "better"


@pytest.mark.parametrize(
    ("effect", "failure"),
    [
        (4.5, "diverged: its val_loss is 7.5, and guessing at random has 4.17"),
        (1.2, "is no better than chance: its val_loss is 4.2, and guessing at random has 4.17"),
        (1.16999, "is no better than chance: its val_loss is 4.17, and guessing at random has 4.17"),
    ],
)
def test_a_run_that_is_no_better_than_guessing_failed_to_train(experiment, capsys, effect, failure):
    """A finite loss of 7.5 would be an outlier that hides everything: no mean has it."""
    planned = {name: {"chance": 4.17} for name in ("baseline", "null", "a")}
    plan = experiment({"a": {"effect": effect}}, planned=planned)
    work(plan.out)
    loaded = load_experiment(plan.out)
    assert loaded.results[RunKey("a", 0)].failure == failure
    found = loaded.state.verdicts["a"]
    assert (found.verdict, found.diverged, found.difference) == ("worse", 4, None)
    assert found.sentence == "worse: 4 of 4 runs failed to train, and 0 of 8 of the baseline and the null variant"
    shown = run_in_words(plan, RunKey("a", 0), loaded.results, "1 of 4 pairs")
    assert shown.startswith(f"a seed 0  {failure.partition(':')[0]} (baseline 3.0")
    assert main(["ablate", "report", str(plan.out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"a,seed=0 {failure}." in said
    assert failure.startswith("diverged") == ("diverged" in said)

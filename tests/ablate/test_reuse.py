"""Finished runs of earlier experiments, with a stand-in for ``fit``: which are used again, and what is said of them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from lightning_llm.ablate import reuse
from lightning_llm.ablate.names import BASELINE, NULL
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.report import words
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.reuse import Identity, link_needed, reusable
from lightning_llm.ablate.tuning import Grid
from lightning_llm.runs.find import find_runs
from lightning_llm.runs.list import list_runs
from tests.ablate.conftest import with_curves, work

ENVIRONMENT = {"precision": "32-true"}
BASE = Identity({"lr": 1}, "code", "text", "", ENVIRONMENT)


def identities(variant="a", **changed):
    """Of a baseline, its null variant and a variant; ``changed`` in the first two."""
    base = BASE._replace(**changed)
    null = base._replace(options={**base.options, "callbacks": "redraw"})
    return {BASELINE: base, NULL: null, variant: BASE._replace(options={"mlp": variant})}


def plan_of(experiment, out, variant="a", reuse_runs="baseline", tuned=None, effect=-0.5, **asked):
    """An experiment with one variant, planned beside those that are there."""
    own = asked.pop("identities", identities(variant))
    planned = {name: {"identity": each.hash} for name, each in own.items()}
    folder = experiment.args[0] / out
    reused = reusable(folder, own, reuse_runs, first_seed=asked.get("first_seed", 0), tuned=tuned)
    return experiment({variant: {"effect": effect}}, out=out, planned=planned, record={"reused": reused}, **asked)


def trained(plan):
    """The runs that were trained in an experiment."""
    started = plan.out / "started.txt"
    return started.read_text().split() if started.exists() else []


@pytest.fixture
def first(experiment):
    """An experiment that has ended."""
    plan = plan_of(experiment, "first")
    work(plan.out)
    with_curves(plan)
    return plan


def test_a_second_experiment_trains_no_baseline_no_replay_and_no_null(experiment, first):
    plan, said = plan_of(experiment, "second", "b", effect=0.1), []
    work(plan.out, log=said.append)
    assert set(trained(plan)) == {f"b,seed={seed}" for seed in range(4)}
    assert "baseline,seed=0: from first" in said
    alone = plan_of(experiment, "alone", "b", "none", effect=0.1)
    work(alone.out)
    assert len(trained(alone)) == 13
    ours, theirs = (report_of(load_experiment(each.out)) for each in (plan, alone))
    assert (ours.rows, ours.variants) == (theirs.rows, theirs.variants)
    assert [row.kind for row in ours.rows] == ["result", "null"]
    assert (ours.checks, ours.checks.replay_difference) == (theirs.checks, 0.0)
    assert theirs.design.reused == {}
    lines = words.design_lines(ours)
    assert lines[-2:] == ["Reused from first: baseline seeds 0 to 3; null seeds 0 to 3.", words.SHARED]
    assert "In first, the baseline with one seed, trained twice: bit-identical." in words.noise_lines(ours)
    assert words.KNOWN not in lines
    third = plan_of(experiment, "third", "c")
    for each in (first, plan, alone):
        shutil.rmtree(each.out)
    assert load_experiment(third.out).replay is None
    work(third.out)  # what is gone is trained again, and the first seed twice
    assert {"baseline,seed=0", "baseline-again,seed=0", "null,seed=3", "c,seed=0"} <= set(trained(third))
    report = report_of(load_experiment(third.out))
    design = report.design
    assert (design.reused, design.reused_replay, design.reused_variants) == ({}, "", False)
    assert report.spent.runs == 13


def test_a_third_experiment_names_the_one_that_trained_the_same_seed_twice(experiment, first):
    plan = plan_of(experiment, "a-second", "b")  # its name comes before that of the first
    work(plan.out)
    third = plan_of(experiment, "third", "c")
    work(third.out)
    assert third.record.reused.runs["baseline,seed=0"] == "a-second"
    assert report_of(load_experiment(third.out)).design.reused_replay == "first"
    assert not any(run.startswith("baseline") for run in trained(third))


def test_a_first_seed_that_is_trained_here_is_trained_twice(experiment, first):
    shutil.rmtree(first.run_dir(RunKey(BASELINE, 0)))
    plan = plan_of(experiment, "second", "b")
    work(plan.out)
    assert {run for run in trained(plan) if run.startswith("baseline")} == {"baseline,seed=0", "baseline-again,seed=0"}
    assert report_of(load_experiment(plan.out)).design.reused_replay == ""


def test_no_pair_with_a_reused_run_says_how_to_train_it(experiment, first):
    plan = plan_of(experiment, "second", "b")
    link_needed(plan)
    run = plan.run_dir(RunKey("b", 0))
    shutil.copytree(first.run_dir(RunKey("a", 0)), run)
    change(run, validation_batches="other")
    with pytest.raises(ValueError, match=r"are no pair: .*give another --out, and --reuse none"):
        load_experiment(plan.out)


@pytest.mark.parametrize(
    "changed",
    [
        {"options": {"lr": 2}},
        {"code": "another"},
        {"data": "another"},
        {"weights": "another"},
        {"environment": {"precision": "bf16-true"}},
    ],
)
def test_a_baseline_that_differs_is_trained(experiment, first, changed):
    plan = plan_of(experiment, "second", identities=identities(**changed))
    assert plan.record.reused.runs == {}
    assert plan.record.reused.replay is None


def test_runs_of_variants_are_used_on_request_alone(experiment, first):
    assert {run.partition(",")[0] for run in plan_of(experiment, "second").record.reused.runs} == {BASELINE, NULL}
    plan = plan_of(experiment, "third", reuse_runs="variants")
    work(plan.out)
    assert trained(plan) == []
    assert words.design_lines(report_of(load_experiment(plan.out)))[-1] == words.KNOWN
    assert not plan_of(experiment, "fourth", "new", reuse_runs="variants").record.reused.variants


@pytest.mark.parametrize(
    "edit",
    [
        lambda run: (run / "summary.json").unlink(),
        lambda run: (run / "summary.json").write_text("{"),
        lambda run: (run / "status.json").write_text('{"status": "diverged", "step": 3}'),
        lambda run: change(run, precision="bf16-true"),
        lambda run: change(run, changed_on_resume=["step 3: threads: 2 -> 1"]),
        lambda run: change(run, val_loss=None),
        lambda run: (shutil.move(run, run.parents[2] / "elsewhere"), run.symlink_to(run.parents[2] / "elsewhere")),
    ],
)
def test_a_run_that_is_not_whole_is_trained(experiment, first, edit):
    edit(first.run_dir(RunKey(BASELINE, 1)))
    assert {f"baseline,seed={seed}" for seed in (0, 2, 3)} <= plan_of(experiment, "second").record.reused.runs.keys()
    assert "baseline,seed=1" not in plan_of(experiment, "third").record.reused.runs


def change(run, **fields):
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_each_run_is_listed_once_and_nobody_loses_it(experiment, first):
    plan = plan_of(experiment, "second", "b")
    link_needed(plan)
    linked, original = (each.run_dir(RunKey(BASELINE, 0)) for each in (plan, first))
    assert (linked / "summary.json").samefile(original / "summary.json")
    both = [str(first.out), str(plan.out)]
    assert [run.path.name for run in find_runs(both)].count("baseline,seed=0") == 1
    assert [Path(row.run).name for row in list_runs(both)].count("baseline,seed=0") == 1
    shutil.rmtree(first.out)
    assert load_experiment(plan.out).results[RunKey(BASELINE, 0)].loss == pytest.approx(3.0)


def test_neither_locks_nor_links_of_a_run_are_linked(experiment, first, tmp_path):
    run, elsewhere = first.run_dir(RunKey(BASELINE, 0)), tmp_path / "elsewhere"
    elsewhere.write_text("secret")
    (run / "lock").write_text("1 host\n")
    (run / "notes.txt").symlink_to(elsewhere)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-6.ckpt").symlink_to(elsewhere)
    plan = plan_of(experiment, "second", "b")
    link_needed(plan)
    linked = plan.run_dir(RunKey(BASELINE, 0))
    names = {str(path.relative_to(linked)) for path in linked.rglob("*")}
    assert {"summary.json", "checkpoints", "reused_from"} <= names
    assert not names & {"lock", "notes.txt", "checkpoints/step-6.ckpt"}
    assert not (run / "reused_from").exists()


def test_a_kill_while_files_are_linked_is_harmless(experiment, first, monkeypatch):
    plan = plan_of(experiment, "second", "b")
    links = iter(range(100))

    def killed(source, target, link=os.link):
        if next(links) == 5:
            raise KeyboardInterrupt
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            link_needed(plan)
    assert len(load_experiment(plan.out).results) == 1  # whole runs alone count
    work(plan.out)
    assert set(trained(plan)) == {f"b,seed={seed}" for seed in range(4)}


def test_a_run_that_began_here_is_not_replaced(experiment, first):
    plan = plan_of(experiment, "second", "b")
    plan.run_dir(RunKey(BASELINE, 0)).mkdir(parents=True)
    assert not reuse.link_unclaimed(plan, RunKey(BASELINE, 0))
    assert reuse.link_unclaimed(plan, RunKey(BASELINE, 1))


def test_tuned_runs_are_used_where_the_same_option_is_tuned(experiment):
    base = {"effect": 0.0, "lr": 1.0, "best": 1.0}
    tune = Grid(option="model.optimizer.init_args.lr", factors=(0.5, 1.0, 2.0), seeds=1)
    own = identities("a")
    planned = {name: {"identity": each.hash, "tuned": 1.0} for name, each in own.items()}
    plan = experiment({"a": base}, out="first", base=base, planned=planned, tune=tune)
    work(plan.out)
    tuned = {run for run in trained(plan) if run.startswith("baseline,lr=")}
    assert len(tuned) >= 2
    for option, expected in ((tune.option, tuned), ("model.optimizer.init_args.eps", set()), (None, set())):
        runs = reusable(plan.out.parent / "second", own, "baseline", first_seed=0, tuned=option).runs
        assert {run for run in runs if run.startswith("baseline,lr=")} == expected


def test_the_hash_of_an_identity_is_that_of_all_its_fields():
    changed = [BASE._replace(**{field: "other"}) for field in ("code", "data", "weights")]
    changed += [BASE._replace(**{field: {"a": 1}}) for field in ("options", "environment")]
    assert len({each.hash for each in (BASE, *changed)}) == 6
    assert Identity(**yaml.safe_load(yaml.safe_dump(BASE._asdict()))).hash == BASE.hash

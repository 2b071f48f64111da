"""Workers, with a stand-in for ``fit``: each run once, to the verdicts, whatever ends on the way."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_llm.ablate import child, claims, local, worker
from lightning_llm.ablate.plan import CONFIGS
from lightning_llm.ablate.results import load_experiment, losses_of
from lightning_llm.ablate.scheduler import Run
from lightning_llm.ablate.worker import work
from lightning_llm.runs.lock import RunLock


def test_a_worker_takes_runs_until_the_verdicts_are_in(experiment):
    plan, said = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.0}}), []
    work(plan.out, say=said.append)
    loaded = load_experiment(plan.out)
    assert {name: each.verdict for name, each in loaded.state.verdicts.items()} == {"a": "better", "b": "undecided"}
    assert said[:3] == ["baseline,seed=0: starting", "baseline-again,seed=0: starting", "null,seed=0: starting"]
    assert Counter(said) == Counter(f"{run}: starting" for run in loaded.results)  # each once
    assert Run("a", 4) not in loaded.results  # decided at four pairs
    assert Run("b", 4) in loaded.results
    assert loaded.replay_difference == 0.0
    assert loaded.state.null.sd == pytest.approx(0.003e-3 * np.std([0, 1, 2, 0], ddof=1))
    assert loaded.results[Run("a", 1)].summary["seconds"] == 1.0
    work(plan.out, say=said.append)
    assert len(said) == len(loaded.results)  # nothing is repeated


def test_a_diverged_run_is_an_outcome(experiment):
    plan = experiment({"a": {"effect": -0.5, "diverges": [1]}})
    work(plan.out)
    loaded = load_experiment(plan.out)
    assert (loaded.results[Run("a", 1)].has_diverged, loaded.results[Run("a", 1)].reason) == (True, "loss is nan")
    assert (loaded.state.verdicts["a"].verdict, loaded.state.verdicts["a"].diverged) == ("undecided", 1)


def test_a_failed_run_ends_the_worker_with_the_last_line_of_its_log(experiment):
    plan = experiment({"a": {"effect": 0.0, "fails": True}})
    with pytest.raises(ValueError, match=r"^a,seed=0 failed: .*No space left on device; see .*a,seed=0\.txt$"):
        work(plan.out)
    assert not claims.taken(plan.out, ["a,seed=0"])


def test_runs_on_other_batches_are_no_pair(experiment):
    plan = experiment({"a": {"effect": 0.0, "batches": "other"}})
    with pytest.raises(ValueError, match="are no pair: their training batches differ; remove the folder"):
        work(plan.out)


def test_tuned_runs_without_an_untuned_baseline_are_compared_with_the_tuned_one(experiment):
    tune = {"option": "model.optimizer.init_args.lr", "factors": [0.5, 1.0, 2.0], "seeds": 1}
    sides = {name: {"steps": 6, "tokenizer": "t", "tuned": 0.01} for name in ("baseline", "null", "a")}
    plan = experiment({"a": {"effect": -0.5, "batches": "other"}}, tune=tune, sides=sides)
    for name, batches in (("baseline,lr=0.02", "2"), ("a,lr=0.02", "other")):  # the untuned ones ended at seed 2
        folder = plan.run_dir(Run(name, 2))
        folder.mkdir(parents=True)
        hashes = {"initial_values": {"a": "1 float32 00"}, "validation_batches": "1", "batches": batches}
        (folder / "config.yaml").write_text("{}")
        (folder / "summary.json").write_text(json.dumps({"val_loss": 3.0, **hashes}))
        (folder / "status.json").write_text(json.dumps({"status": "finished", "step": 6}))
    with pytest.raises(ValueError, match=r"a,lr=0\.02,seed=2 and .*baseline,lr=0\.02,seed=2 are no pair"):
        load_experiment(plan.out)


def test_an_edit_while_a_worker_runs_ends_it_before_the_next_run(experiment):
    plan = experiment({"a": {"effect": -0.5}})

    def edit(line):
        (plan.out / CONFIGS / "a.yaml").write_text("effect: -1.0\n")

    with pytest.raises(ValueError, match=r"a\.yaml was changed after the start"):
        work(plan.out, say=edit)
    assert (plan.out / "started.txt").read_text().split() == ["baseline,seed=0"]


def test_other_batches_are_a_pair_where_the_plan_gives_the_sides_other_steps(experiment):
    sides = {name: {"steps": 6 + (name == "a"), "tokenizer": "t"} for name in ("baseline", "null", "a")}
    plan = experiment({"a": {"effect": -0.5, "batches": "other", "steps": 7}}, sides=sides)
    work(plan.out)
    assert load_experiment(plan.out).state.verdicts["a"].verdict == "better"


def test_a_run_in_which_another_process_still_trains_is_waited_for(experiment, monkeypatch):
    """Its worker was killed: the claim is free, the lock of the run is not."""
    plan, slept = experiment({"a": {"effect": -0.5}}), []
    run = plan.run_dir(Run("baseline", 0))
    run.mkdir(parents=True)
    lock = RunLock(run).acquire()

    def sleep(seconds):
        if not slept:
            started = (plan.out / "started.txt").read_text().split()
            assert "baseline,seed=0" not in started
            assert "a,seed=1" in started  # all others are done meanwhile
            lock.release()
        slept.append(seconds)

    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=sleep))
    work(plan.out)
    assert slept
    assert "baseline,seed=0" in (plan.out / "started.txt").read_text().split()
    assert len(list((plan.out / claims.CLAIMS).glob("baseline,seed=0.*"))) == 1


def test_two_workers_do_each_run_once(experiment, monkeypatch, capsys):
    plan = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.4}})
    main = plan.out / "code" / "fit.py"  # the snapshot has the stand-in; workers are those of the real package
    command = f"import sys; sys.path.insert(0, {str(Path(local.__file__).parents[2])!r}); "
    command += "from lightning_llm.__main__ import main; sys.exit(main())"
    start = child.subprocess.Popen

    def popen(words, **options):
        assert words[1] == str(main)
        return start([words[0], "-c", command, *words[2:]], **options)

    monkeypatch.setattr(child.subprocess, "Popen", popen)
    local.run_workers(plan, [{"cores": ""}, {"cores": ""}])
    started = Counter((plan.out / "started.txt").read_text().split())
    assert set(started.values()) == {1}
    assert {name: each.verdict for name, each in load_experiment(plan.out).state.verdicts.items()} == {
        "a": "better",
        "b": "worse",
    }
    lines = capsys.readouterr().err.splitlines()
    assert any(
        re.match(r"run \d+/17  a seed 2  val_loss 2\.5190 \(baseline 3\.0200, \d of 4 pairs", line) for line in lines
    )
    assert lines[-1].startswith("run 17/17  ")


def test_slots_share_the_cores(experiment, monkeypatch):
    monkeypatch.setattr(local, "cores", lambda: [2, 3, 5, 7])
    assert local.threads_for("cpu", 0, 1, None) == 1
    assert local.threads_for("cpu", 0, 1, 2) == 2
    assert local.threads_for("cpu", 0, 1 << 60, None) == 4  # memory for one
    assert local.threads_for("cuda", 2, 1, None) == 2
    plan = experiment({"a": {"effect": 0.0}}, threads=2)
    assert local.slots(plan, [], None) == [{"cores": "2,3"}, {"cores": "5,7"}]
    assert local.slots(plan, [], 1) == [{"cores": "2,3"}]
    plan = experiment({"a": {"effect": 0.0}}, threads=2, accelerator="cuda", out="gpu")
    places = local.slots(plan, ["4", "6"], None)
    with pytest.raises(ValueError, match="was planned for GPUs, and none is visible here: continue it where one is"):
        local.slots(plan, [], 4)
    assert places == [{"cores": "2,3", local.VISIBLE: "4"}, {"cores": "5,7", local.VISIBLE: "6"}]


def test_the_fits_of_a_slurm_job_do_not_see_it(experiment, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    found = worker.environment(experiment({"a": {"effect": 0.0}}))
    assert "SLURM_JOB_ID" not in found
    assert found["OMP_NUM_THREADS"] == "1"


def test_what_is_shown_says_what_it_is(experiment):
    plan = experiment({"a": {"effect": -0.5}})
    work(plan.out)
    results = {run: each for run, each in load_experiment(plan.out).results.items() if run.seed == 0}
    state = plan.state(losses_of(results))
    words = local.progress_in_words(plan, state, results, 180.0)
    assert words == "1 of 4 pairs, about 3.0 minutes left"
    shown = local.run_in_words(plan, Run("a", 0), results, words)
    assert shown == "a seed 0  val_loss 2.5000 (baseline 3.0000, 1 of 4 pairs, about 3.0 minutes left)"
    assert local.run_in_words(plan, Run("baseline", 0), results, words).startswith(
        "baseline seed 0  val_loss 3.0000 (1 of"
    )


def test_a_run_that_is_worse_than_guessing_has_exploded(experiment):
    """A finite loss of 7.5 would be an outlier that hides everything: it counts as diverged."""
    sides = {name: {"steps": 6, "tokenizer": "t", "chance": 4.17} for name in ("baseline", "null", "a")}
    plan = experiment({"a": {"effect": 4.5}}, sides=sides)
    work(plan.out)
    loaded = load_experiment(plan.out)
    assert loaded.results[Run("a", 0)].reason == "its val_loss 7.5 is above the 4.17 of guessing at random"
    found = loaded.state.verdicts["a"]
    assert (found.verdict, found.diverged, found.difference) == ("worse", 4, None)

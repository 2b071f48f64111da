"""Workers, with a stand-in for ``fit``: each run once, to the verdicts, whatever ends on the way."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_llm.ablate import claims, worker
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import CONFIGS
from lightning_llm.ablate.results import Replay, load_experiment
from lightning_llm.ablate.worker import work
from lightning_llm.io.atomic import remove_path
from lightning_llm.runs.lock import RunLock


def test_a_worker_takes_runs_until_the_verdicts_are_in(experiment):
    plan, said = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.0}}), []
    work(plan.out, say=said.append)
    loaded = load_experiment(plan.out)
    assert {name: each.verdict for name, each in loaded.state.verdicts.items()} == {"a": "better", "b": "undecided"}
    assert said[:3] == ["baseline,seed=0: starting", "baseline-again,seed=0: starting", "null,seed=0: starting"]
    assert Counter(said) == Counter(f"{run}: starting" for run in loaded.results)  # each once
    assert RunKey("a", 4) not in loaded.results  # decided at four pairs
    assert RunKey("b", 4) in loaded.results
    assert loaded.replay == Replay(0.0)
    assert loaded.state.null.sd == pytest.approx(0.003e-3 * np.std([0, 1, 2, 0], ddof=1))
    assert loaded.results[RunKey("a", 1)].summary["seconds"] == 1.0
    work(plan.out, say=said.append)
    assert len(said) == len(loaded.results)  # nothing is repeated


def test_a_diverged_run_is_an_outcome(experiment):
    plan = experiment({"a": {"effect": -0.5, "diverges": [1]}})
    work(plan.out)
    loaded = load_experiment(plan.out)
    assert (loaded.results[RunKey("a", 1)].has_failed, loaded.results[RunKey("a", 1)].failure) == (
        True,
        "diverged: loss is nan",
    )
    assert (loaded.state.verdicts["a"].verdict, loaded.state.verdicts["a"].diverged) == ("undecided", 1)


def test_a_failed_run_ends_the_worker_with_the_last_line_of_its_log(experiment):
    plan = experiment({"a": {"effect": 0.0, "fails": True}})
    with pytest.raises(ValueError, match=r"^a,seed=0 failed: .*No space left on device; see .*a,seed=0\.txt$"):
        work(plan.out)
    assert not claims.taken(plan.out, ["a,seed=0"])


def test_an_edit_while_a_worker_runs_ends_it_before_the_next_run(experiment):
    plan = experiment({"a": {"effect": -0.5}})

    def edit(line):
        (plan.out / CONFIGS / "a.yaml").write_text("effect: -1.0\n")

    with pytest.raises(ValueError, match=r"a\.yaml was changed after the start"):
        work(plan.out, say=edit)
    assert (plan.out / "started.txt").read_text().split() == ["baseline,seed=0"]


def test_a_run_in_which_another_process_still_trains_is_waited_for(experiment, monkeypatch):
    """Its worker was killed: the claim is free, the lock of the run is not."""
    plan, slept = experiment({"a": {"effect": -0.5}}), []
    run = plan.run_dir(RunKey("baseline", 0))
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


def test_the_fits_of_a_slurm_job_do_not_see_it(experiment, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    found = worker.environment(experiment({"a": {"effect": 0.0}}))
    assert "SLURM_JOB_ID" not in found
    assert found["OMP_NUM_THREADS"] == "1"


def test_a_run_whose_folder_was_deleted_is_not_blamed_on_the_last_line_of_its_log(experiment, monkeypatch):
    plan = experiment({"a": {"effect": -0.5}})
    fit = worker._fit

    def deleted_at_its_end(*arguments):
        status = fit(*arguments)
        remove_path(plan.run_dir(RunKey("baseline", 0)))
        return status

    monkeypatch.setattr(worker, "_fit", deleted_at_its_end)
    with pytest.raises(
        ValueError, match=r"^baseline,seed=0: its folder is gone: the same command again trains it from the start"
    ):
        work(plan.out)
    monkeypatch.setattr(worker, "_fit", fit)
    work(plan.out)
    assert load_experiment(plan.out).state.verdicts["a"].verdict == "better"


def test_a_run_that_is_killed_before_it_makes_its_folder_is_begun_again(experiment, monkeypatch):
    plan = experiment({"a": {"effect": -0.5}})
    fit, killed = worker._fit, []

    def killed_once(plan, run, *arguments):
        if not killed:
            killed.append(run)
            return -9
        return fit(plan, run, *arguments)

    monkeypatch.setattr(worker, "_fit", killed_once)
    work(plan.out)
    assert load_experiment(plan.out).state.verdicts["a"].verdict == "better"


def test_a_run_that_is_killed_again_and_again_is_named(experiment, monkeypatch):
    plan = experiment({"a": {"effect": -0.5}})
    monkeypatch.setattr(worker, "_fit", lambda *arguments: -9)
    with pytest.raises(ValueError, match=rf"^baseline,seed=0 was ended by signal 9 {worker.MOST_KILLS} times: see "):
        work(plan.out)


def test_an_experiment_that_is_deleted_ends_its_workers_and_stays_away(experiment, monkeypatch):
    plan = experiment({"a": {"effect": -0.5}})

    def deleted_in_between(*arguments):
        remove_path(plan.out)
        plan.run_dir(RunKey("baseline", 0)).mkdir(parents=True)  # by a fit that saves
        return 0

    monkeypatch.setattr(worker, "_fit", deleted_in_between)
    with pytest.raises(ValueError, match=r"out is gone: its folder was deleted or moved while its runs trained$"):
        work(plan.out)
    assert not plan.out.exists()
    with pytest.raises(ValueError, match=r"is gone"):
        worker._try(plan, RunKey("baseline", 0), {}, {}, None, print)
    assert not plan.out.exists()

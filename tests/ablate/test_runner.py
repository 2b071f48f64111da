"""The runner, with a stand-in for ``fit``: each run once, to the verdicts, whatever ends on the way."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_llm.ablate import claims, runner
from lightning_llm.ablate.fit import program
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import RUNS, Replay
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.runner import Runner
from lightning_llm.ablate.slots import Slot
from lightning_llm.io.atomic import remove_path
from lightning_llm.runs.lock import RunLock
from tests.ablate.conftest import InThisProcess, work


def test_a_worker_takes_runs_until_the_verdicts_are_in(experiment):
    plan, said = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.0, "noise": 0.1}}), []
    work(plan.out, log=said.append)
    loaded = load_experiment(plan.out)
    assert {name: each.verdict for name, each in loaded.state.verdicts.items()} == {"a": "better", "b": "undecided"}
    assert said[:3] == ["baseline,seed=0: starting", "baseline-again,seed=0: starting", "null,seed=0: starting"]
    assert Counter(said) == Counter(f"{run}: starting" for run in loaded.results)  # each once
    assert RunKey("a", 4) not in loaded.results  # decided at four pairs
    assert RunKey("b", 4) in loaded.results
    assert loaded.replay == Replay(0.0)
    assert loaded.state.null.sd == pytest.approx(0.003e-3 * np.std([0, 1, 2, 0], ddof=1))
    assert loaded.results[RunKey("a", 1)].summary["seconds"] == 1.0
    work(plan.out, log=said.append)
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
    assert not claims.claimed(plan.out, ["a,seed=0"])


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

    monkeypatch.setattr(runner, "time", SimpleNamespace(sleep=sleep))
    work(plan.out)
    assert slept
    assert "baseline,seed=0" in (plan.out / "started.txt").read_text().split()
    assert len(list((plan.out / claims.CLAIMS).glob("baseline,seed=0.*"))) == 1


def test_two_slots_train_each_run_once(experiment):
    plan = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.4}})
    work(plan.out, slots=2)
    started = Counter((plan.out / "started.txt").read_text().split())
    assert set(started.values()) == {1}
    words = {name: each.verdict for name, each in load_experiment(plan.out).state.verdicts.items()}
    assert words == {"a": "better", "b": "worse"}


def test_a_run_that_another_runner_has_is_left_to_it(experiment, monkeypatch):
    plan, said = experiment({"a": {"effect": -0.5}}), []
    claim = claims.take(plan.out, "baseline,seed=0")
    others = []

    def sleep(seconds):
        if not others:
            claim.give_up()  # the other one was stopped
        others.append(seconds)

    monkeypatch.setattr(runner, "time", SimpleNamespace(sleep=sleep))
    work(plan.out, log=said.append)
    assert others
    assert said[-1] == "baseline,seed=0: starting"
    assert Counter(said)["baseline,seed=0: starting"] == 1


@pytest.fixture
def processes(monkeypatch):
    """``processes(kind)``: runs of this class in the place of real ones, which end at once."""

    def use(kind):
        monkeypatch.setattr(program, "RunProcess", kind)
        monkeypatch.setattr(runner, "wait_for_one", lambda processes, wait_s: None)
        return lambda plan, **options: Runner(plan, [Slot()]).run(**options)

    return use


def test_a_run_whose_claim_was_taken_by_another_runner_is_ended_here(experiment, processes, monkeypatch):
    plan, ended = experiment({"a": {"effect": -0.5}}), []

    class Slow(InThisProcess):
        def status(self, wait_s=0.0):
            return None if not ended else super().status()

        def ask_to_end(self):
            ended.append(self.log.stem)

    monkeypatch.setattr(claims.Claim, "renew", lambda claim: bool(ended))
    monkeypatch.setattr(claims, "STALE_S", 0.5)  # until the run is taken again
    processes(Slow)(plan)
    assert ended[0] == "baseline,seed=0"
    assert load_experiment(plan.out).state.verdicts["a"].verdict == "better"


def test_what_trains_when_the_runner_is_stopped_is_asked_to_end(experiment, processes):
    plan, asked = experiment({"a": {"effect": -0.5}}), []

    class Endless(InThisProcess):
        def ask_to_end(self):
            asked.append(self.log.stem)

        def status(self, wait_s=0.0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes(Endless)(plan)
    assert asked == ["baseline,seed=0"]
    assert not claims.claimed(plan.out, asked)


def test_it_stops_when_it_is_told_to(experiment, processes):
    plan, seen = experiment({"a": {"effect": -0.5}}), []
    processes(InThisProcess)(
        plan, show=lambda results: seen.append(len(results)), until=lambda results: len(results) > 2
    )
    assert seen == [0, 1, 2, 3]


def test_a_run_whose_folder_was_deleted_is_not_blamed_on_the_last_line_of_its_log(experiment, processes):
    plan = experiment({"a": {"effect": -0.5}})

    class Deleted(InThisProcess):
        def status(self, wait_s=0.0):
            status = super().status()
            remove_path(plan.run_dir(RunKey("baseline", 0)))
            return status

    line = r"^baseline,seed=0: its folder is gone: the same command again trains it from the start"
    with pytest.raises(ValueError, match=line):
        processes(Deleted)(plan)
    work(plan.out)
    assert load_experiment(plan.out).state.verdicts["a"].verdict == "better"


def test_a_run_that_is_killed_before_it_makes_its_folder_is_begun_again(experiment, processes):
    plan, killed = experiment({"a": {"effect": -0.5}}), []

    class KilledOnce(InThisProcess):
        def status(self, wait_s=0.0):
            if not killed:
                killed.append(self.log)
                return -9
            return super().status()

    processes(KilledOnce)(plan)
    assert load_experiment(plan.out).state.verdicts["a"].verdict == "better"


def test_a_run_that_is_killed_again_and_again_is_named(experiment, processes):
    class Killed(InThisProcess):
        def status(self, wait_s=0.0):
            return -9

    line = rf"^baseline,seed=0 was ended by signal 9 {runner.MOST_KILLS} times: see "
    with pytest.raises(ValueError, match=line):
        processes(Killed)(experiment({"a": {"effect": -0.5}}))


def test_an_experiment_that_is_deleted_ends_its_runs_and_stays_away(experiment, processes):
    plan = experiment({"a": {"effect": -0.5}})

    class DeletedInBetween(InThisProcess):
        def status(self, wait_s=0.0):
            remove_path(plan.out)
            plan.run_dir(RunKey("baseline", 0)).mkdir(parents=True)  # by a fit that saves
            return 0

    line = r"out is gone: its folder was deleted or moved while its runs trained$"
    with pytest.raises(ValueError, match=line):
        processes(DeletedInBetween)(plan)
    assert not plan.out.exists()


def test_of_an_experiment_without_its_plan_the_finished_runs_stay(experiment, processes):
    plan = experiment({"a": {"effect": -0.5}})

    def show(results):
        if len(results) == 3:
            (plan.out / "plan.json").unlink()

    with pytest.raises(ValueError, match="is gone"):
        processes(InThisProcess)(plan, show=show)
    assert len(list((plan.out / RUNS).iterdir())) == 3

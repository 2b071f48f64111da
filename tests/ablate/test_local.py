"""Workers on this machine: their places, and what is shown while they work."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_llm.ablate import child, local
from lightning_llm.ablate.curves import curves_of
from lightning_llm.ablate.next_runs import Added, RunKey
from lightning_llm.ablate.page import sections_of
from lightning_llm.ablate.report import report_of
from lightning_llm.ablate.results import load_experiment, losses_of
from lightning_llm.ablate.worker import work
from lightning_llm.io.atomic import remove_path


def test_two_workers_do_each_run_once(experiment, monkeypatch, capsys):
    plan = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.4}}, threads=2)  # so that no run is a fork
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
    monkeypatch.setattr(local, "host_memory", lambda: 1000)
    for fitting, threads in ((4, 1), (3, 2), (2, 2)):
        assert local.threads_for("cpu", 0, int(local.MEMORY_SHARE * 1000) // fitting, None) == threads
        assert local.runs_at_a_time(threads, "cpu", 0, None) <= fitting
    assert local.threads_for("cpu", 0, 1, 3) == 1
    assert local.runs_at_a_time(1, "cpu", 0, 3) == 3
    assert local.runs_at_a_time(1, "cuda", 8, None) == 8
    assert local.threads_for("cuda", 2, 1, None) == 2
    plan = experiment({"a": {"effect": 0.0}}, threads=2)
    assert local.slots(plan, [], None) == [{"cores": "2,3"}, {"cores": "5,7"}]
    assert local.slots(plan, [], 1) == [{"cores": "2,3"}]
    plan = experiment({"a": {"effect": 0.0}}, threads=2, accelerator="cuda", out="gpu")
    places = local.slots(plan, ["4", "6"], None)
    with pytest.raises(ValueError, match="was planned for GPUs, and none is visible here: continue it where one is"):
        local.slots(plan, [], 4)
    assert places == [{"cores": "2,3", local.VISIBLE: "4"}, {"cores": "5,7", local.VISIBLE: "6"}]


def test_what_is_shown_says_what_it_is(experiment):
    plan = experiment({"a": {"effect": -0.5}})
    work(plan.out)
    results = {run: each for run, each in load_experiment(plan.out).results.items() if run.seed == 0}
    state = plan.state(losses_of(results))
    words = local.progress_in_words(plan, state, 180.0)
    assert words == "1 of 4 pairs, about 3.0 minutes left"
    shown = local.run_in_words(plan, RunKey("a", 0), results, words)
    assert shown == "a seed 0  val_loss 2.5000 (baseline 3.0000, 1 of 4 pairs, about 3.0 minutes left)"
    assert local.run_in_words(plan, RunKey("baseline", 0), results, words).startswith(
        "baseline seed 0  val_loss 3.0000 (1 of"
    )


def test_progress_counts_the_pairs_that_are_added(experiment):
    """The same with a variant that has no verdict and gets no pairs."""
    plan = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.0}}, looks=(4,))
    work(plan.out)
    plan.add(Added(2, ["a"]))
    before = losses_of(load_experiment(plan.out).results)
    work(plan.out)
    all_losses = losses_of(load_experiment(plan.out).results)
    added = [run for run in all_losses if run not in before]
    ended, shown = dict(before), []
    for run in sorted(added, key=lambda run: run.seed):
        ended[run] = all_losses[run]
        shown.append(local.progress_in_words(plan, plan.state(ended), None))
    assert (shown, plan.state(ended).unfinished) == (
        ["4 of 6 pairs", "5 of 6 pairs", "5 of 6 pairs", "6 of 6 pairs"],
        ["b"],
    )
    report = report_of(load_experiment(plan.out))
    assert (report["looks"], report["tested_after"]) == ([4], [4, 6])
    assert "tested after 4 and 6 pairs" in "".join(sections_of(report, curves_of(load_experiment(plan.out))))


def test_an_experiment_that_is_deleted_is_named(experiment, monkeypatch):
    plan, ended = experiment({"a": {"effect": 0.0}}), []

    class Worker:
        def __init__(self, *arguments):
            self.child = SimpleNamespace(ask_to_end=lambda: None, end=ended.append)

        def is_running(self):
            was_there = plan.out.exists()
            remove_path(plan.out)
            return was_there

    monkeypatch.setattr(local, "Worker", Worker)
    monkeypatch.setattr(local, "POLL_S", 0.0)
    with pytest.raises(ValueError, match=r"out is gone: its folder was deleted or moved while its runs trained$"):
        local.run_workers(plan, [{"cores": ""}])
    assert ended

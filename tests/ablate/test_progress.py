"""What is shown while runs train."""

import re

from lightning_llm.ablate import progress
from lightning_llm.ablate.next_runs import Extension, RunKey
from lightning_llm.ablate.progress import Display
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.render import page
from lightning_llm.ablate.results import load_experiment, losses_of
from tests.ablate.conftest import work


def test_each_run_that_ends_is_a_line(experiment, capsys):
    plan = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.4}})
    work(plan.out)
    results = load_experiment(plan.out).results
    with Display(plan) as display:
        display.show({})
        display.show({run: result for run, result in results.items() if run.seed < 3})
        display.show(results)
    lines = capsys.readouterr().err.splitlines()
    line = r"run \d+/17  a seed 2  val_loss 2\.5190 \(baseline 3\.0200, \d of 4 pairs"
    assert any(re.match(line, each) for each in lines)
    assert [each.split()[1] for each in lines] == [f"{number}/17" for number in range(1, 18)]


def test_what_is_shown_says_what_it_is(experiment):
    plan = experiment({"a": {"effect": -0.5}})
    work(plan.out)
    results = {run: each for run, each in load_experiment(plan.out).results.items() if run.seed == 0}
    state = plan.state(losses_of(results))
    words = progress.progress_in_words(plan, state, 180.0)
    assert words == "1 of 4 pairs, about 3.0 minutes left"
    shown = progress.run_in_words(plan, RunKey("a", 0), results, words)
    assert shown == "a seed 0  val_loss 2.5000 (baseline 3.0000, 1 of 4 pairs, about 3.0 minutes left)"
    assert progress.run_in_words(plan, RunKey("baseline", 0), results, words).startswith(
        "baseline seed 0  val_loss 3.0000 (1 of"
    )


def test_progress_counts_the_pairs_that_are_added(experiment):
    """The same with a variant that has no verdict and gets no pairs."""
    plan = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.0, "noise": 0.1}}, looks=(4,))
    work(plan.out)
    plan.extend(Extension(2, ("a",)))
    before = losses_of(load_experiment(plan.out).results)
    work(plan.out)
    all_losses = losses_of(load_experiment(plan.out).results)
    added = [run for run in all_losses if run not in before]
    ended, shown = dict(before), []
    for run in sorted(added, key=lambda run: run.seed):
        ended[run] = all_losses[run]
        shown.append(progress.progress_in_words(plan, plan.state(ended), None))
    assert (shown, plan.state(ended).unfinished) == (
        ["4 of 6 pairs", "5 of 6 pairs", "5 of 6 pairs", "6 of 6 pairs"],
        ["b"],
    )
    report = report_of(load_experiment(plan.out))
    assert (report.design.looks, report.design.tested_after) == ([4], [4, 6])
    assert "tested after 4 and 6 pairs" in str(report)
    assert "tested after 4 and 6 pairs" in page(report)

"""Tables before the first run: what an experiment takes and will find."""

import io
from types import SimpleNamespace

import pytest

from lightning_llm.ablate import plan_tables
from lightning_llm.ablate.experiment import Experiment, Looks
from lightning_llm.ablate.fit.planning import CostEstimate
from lightning_llm.ablate.history import Earlier, Spread
from lightning_llm.ablate.plan import Reused
from lightning_llm.ablate.plan_tables import (
    power_analyses,
    runs_of,
    show_cost_estimates,
    show_plan,
    show_power_analysis,
    warnings_of,
)
from lightning_llm.ablate.tuning import Grid
from lightning_llm.io.console import Console
from lightning_llm.statistics.design import Design
from lightning_llm.statistics.power import PowerAnalysis, power_analysis

TUNE = Grid(option="model.optimizer.init_args.lr", factors=(0.5, 1.0, 2.0), seeds=2)


def printed(show, *content, width=120):
    file = io.StringIO()
    show(*content, Console(file=file, width=width))
    return file.getvalue()


def experiment(looks=(4,), variants=("a",), half_width=None, **options):
    stop = Looks(pairs=looks, half_width=half_width)
    return Experiment(name="test", variants={name: {} for name in variants}, stop=stop, **options)


def test_the_runs_of_an_experiment_are_counted():
    found = PowerAnalysis(0.0, {}, pairs=5.0, ended={4: 0.5, 8: 1.0})  # 4 or 8 pairs, as likely
    assert runs_of(experiment((4, 8)), found) == 1 + 4 + 6 + 5  # again, null, baseline, variant
    assert runs_of(experiment((4, 8), ("a", "b")), found) == 1 + 4 + 7 + 2 * 5  # the baseline waits for the last one
    tuned = experiment((4, 8), tune=TUNE)
    assert runs_of(tuned, found) == 1 + 4 + 2 * (6 + 5) + 2 * (3 + 1) * 2  # the grid and the vertex of both variants


def test_an_outlook_is_at_shares_of_delta_or_of_the_spread():
    with_delta, without = Design(0.05, (4,), delta=0.01), Design(0.05, (4,))
    assert [found.difference for found in power_analyses(with_delta, 0.1)] == [0.0, 0.005, 0.01, 0.02, 0.04]
    assert [found.difference for found in power_analyses(without, 0.1)] == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.3])


def test_a_design_that_can_reach_nothing_warns():
    assert warnings_of(Design(0.05, (3,), delta=1.0), 0.01) == ["warning: a verdict needs at least 4 pairs"]
    assert warnings_of(Design(0.05, (4,)), 0.01) == []
    assert warnings_of(Design(0.05, (4,), delta=1.0), 0.01) == []
    (line,) = warnings_of(Design(0.05, (4,), delta=0.001), 0.01)
    assert "differ by less than delta 0.001 in only 0% of experiments: give more pairs, or a delta of about " in line
    delta = float(line.partition("a delta of about ")[2].partition(",")[0])
    assert (
        power_analysis(Design(0.05, (4,), delta=1.1 * delta), 0.0, 0.01).probabilities["equivalent"]
        > plan_tables.ENOUGH
    )
    assert (
        power_analysis(Design(0.05, (4,), delta=0.9 * delta), 0.0, 0.01).probabilities["equivalent"]
        < plan_tables.ENOUGH
    )


def test_an_outlook_names_spread_and_tuning():
    said = printed(show_power_analysis, experiment(delta=0.01, tune=TUNE), Spread(0.001, "first", "null"))
    assert "verdict by 4, %" in said
    assert "if a pair's difference has a standard deviation of 0.001 (null variant of first)." in said
    assert "The runs include at least 16 of tuning" in said
    assert "A variant that changes more than initial values usually has a larger one" in said
    assert "initial values" not in printed(show_power_analysis, experiment(), Spread(0.001, "first", "gelu"))
    assert "±0.5 by 4, %" in printed(show_power_analysis, experiment(half_width=0.5), Spread(0.001))


def test_a_new_plan_says_what_it_shares_and_what_it_can_find(monkeypatch):
    monkeypatch.setattr(
        plan_tables, "show_power_analysis", lambda *content: content[-1].print_lines("the power analysis")
    )
    record = SimpleNamespace(seen={"first": [0, 1, 2]}, reused=Reused())
    plan = SimpleNamespace(record=record, experiment=experiment(), out="an out")
    said = printed(show_plan, plan, [Earlier("first", [0, 1, 2], Spread(0.02, "first", "gelu"))])
    assert "note: first has used seeds 0 to 2 with this baseline" in said
    assert "4 pairs are a pilot: by default, the first test is after 8" in said
    assert "What the spread of the gelu of first lets this experiment find:\nthe power analysis" in said
    said = printed(show_plan, plan, [Earlier("first", [0], None)])
    assert "see lightning-llm ablate power --from 'an out' --pairs 16" in said
    assert "the power analysis" not in said
    longer = SimpleNamespace(record=SimpleNamespace(seen={}, reused=Reused()), experiment=experiment((8,)), out="out")
    assert printed(show_plan, longer, []) == ""


def test_what_experiments_take_is_summed():
    cost_estimates = {
        "small": CostEstimate(1000, 50, 10**12, 9, 60.0),
        "large": CostEstimate(20_000, 500, None, 9, 3540.0),
    }
    lines = printed(show_cost_estimates, cost_estimates).splitlines()
    assert [line.split() for line in lines if "small" in line] == [
        ["small", "1,000", "50", "1.00e+12", "9", "60.0", "s"]
    ]
    assert [line.split()[3] for line in lines if "large" in line] == ["–"]
    assert lines[-1].startswith("About 60.0 minutes of training steps at most, by timed steps")

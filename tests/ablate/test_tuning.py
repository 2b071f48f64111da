"""Fair tuning: one grid for all variants, which grows until each one's best value is inside it."""

import json
import math
import re

import pytest

from lightning_llm.__main__ import main
from lightning_llm.ablate.experiment import Experiment, Looks
from lightning_llm.ablate.next_runs import RunKey, state_of
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.tuning import MOST_EXTENSIONS, Grid, Tune, Tuned, lowest_point, tuning_of
from tests.ablate.conftest import work

RATE = "model.optimizer.init_args.lr"
GRID = Grid(option=RATE, factors=(0.5, 1.0, 2.0), seeds=2)
TUNE = Tune(GRID, {"baseline": 0.001, "a": 0.002})


def grown(tune, variants, loss):
    """The tuning with every run that it asks for, and these runs."""
    losses = {}
    while needed := tuning_of(tune, variants, losses).needed:
        for name, seed in needed:
            variant, _, value = name.partition(",lr=")
            losses[name, seed] = loss(variant, float(value), seed)
    return tuning_of(tune, variants, losses).variants, losses


def parabola(best):
    """A loss that is lowest at ``best[name]``, with noise that its seeds cancel."""
    return lambda name, value, seed: 3 + math.log2(value / best[name]) ** 2 + 0.01 * (-1) ** seed


def test_the_grid_grows_for_all_sides_until_each_optimum_is_inside():
    variants, losses = grown(TUNE, ["baseline", "a"], parabola({"baseline": 0.0012, "a": 0.011}))
    assert variants["baseline"].values == [0.0005, 0.001, 0.002, 0.004, 0.008]
    assert variants["a"].values == [0.001, 0.002, 0.004, 0.008, 0.016]  # the same factors
    assert (variants["baseline"].best, variants["a"].best) == (0.0012, 0.011)  # by the parabola, between the values
    assert all(each.is_bracketed for each in variants.values())
    assert {seed for _, seed in losses} == {100, 101}
    assert ("baseline,lr=0.0005", 100) in losses
    assert ("baseline,lr=0.0012", 101) in losses  # the vertex is trained with the same seeds
    assert variants["baseline"].vertex_loss == pytest.approx(3.0)
    assert variants["baseline"].vertices == [0.0012, 0.0012]
    assert variants["a"].losses[0] == pytest.approx(3 + math.log2(11) ** 2)


def test_a_grid_grows_downward_and_only_so_far():
    low, _ = grown(TUNE, ["baseline"], lambda name, value, seed: value)
    assert len(low["baseline"].values) == 3 + MOST_EXTENSIONS
    assert (low["baseline"].best, low["baseline"].is_bracketed) == (low["baseline"].values[0], False)


def test_a_vertex_that_is_worse_than_the_grid_is_not_used():
    """Its runs have another loss than the parabola through the grid predicts."""

    def loss(name, value, seed):
        on_grid = min((abs(value / each - 1), each) for each in (0.0005, 0.001, 0.002))[0] < 1e-6
        return 3 + math.log2(value / 0.0012) ** 2 + (0.0 if on_grid else 0.2)

    variants, _ = grown(TUNE, ["baseline"], loss)
    found = variants["baseline"]
    assert (found.vertex, found.vertex_loss) == (0.0012, pytest.approx(3.2))
    assert (found.best, found.best_loss) == (0.001, pytest.approx(3 + math.log2(1 / 1.2) ** 2))


def test_the_spread_of_the_vertex_is_that_over_seeds():
    best = {100: 0.0009, 101: 0.0012}
    variants, _ = grown(TUNE, ["baseline"], lambda name, value, seed: 3 + math.log2(value / best[seed]) ** 2)
    assert variants["baseline"].vertices == [0.0009, 0.0012]
    assert variants["baseline"].vertex == pytest.approx((0.0009 * 0.0012) ** 0.5, rel=1e-3)


def test_a_value_with_a_diverged_run_is_no_optimum():
    found = Tuned.of([1.0, 2.0, 4.0], [[3.0], [2.9], [None]])
    assert (found.best, found.is_bracketed, found.vertex) == (2.0, True, None)  # without a parabola
    lost, _ = grown(TUNE, ["baseline"], lambda name, value, seed: None)
    assert (lost["baseline"].best, lost["baseline"].is_bracketed) == (None, False)


def test_the_lowest_point_of_a_parabola():
    assert lowest_point([0.0, 1.0, 3.0], [(x - 1.3) ** 2 for x in (0.0, 1.0, 3.0)]) == pytest.approx(1.3)
    assert lowest_point([0.0, 1.0, 2.0], [1.0, 1.0, 1.0]) is None


def test_tuning_follows_the_verdicts_and_its_runs_are_pairs_of_their_own():
    asked = Experiment(name="test", variants={"a": {}}, stop=Looks(pairs=(2,)), delta=None, alpha=0.05)
    losses = {RunKey(name, seed): 3.0 + 0.1 * seed for name in ("baseline", "null", "a") for seed in (0, 1)}
    assert state_of(asked, losses, tune=TUNE).tuning == {}
    losses[RunKey("baseline-again", 0)] = 3.0
    state = state_of(asked, losses, tune=TUNE)
    assert (len(state.needed), state.needed[0]) == (12, RunKey("baseline,lr=0.0005", 100))
    assert state.verdicts
    losses |= grown(TUNE, ["baseline", "a"], parabola({"baseline": 0.001, "a": 0.0019}))[1]
    state = state_of(asked, losses, tune=TUNE)
    # the baseline's own value is the best one: its runs are there
    assert state.needed == [RunKey("a,lr=0.0019", 0), RunKey("a,lr=0.0019", 1)]
    losses |= dict.fromkeys(state.needed, 2.0)
    ended = state_of(asked, losses, tune=TUNE)
    assert (ended.needed, ended.tuned.verdicts["a"].pairs) == ([], 2)
    assert ended.tuned.verdicts["a"].difference == pytest.approx(-1.05)


def test_a_difference_that_only_the_learning_rate_makes_is_gone_after_tuning(experiment, capsys):
    """The planted case: the baseline's rate is a quarter of its best one, the variant's is right."""
    planned = {name: {"tuned": 1.0} for name in ("baseline", "null", "a")}
    tune = Grid(option=RATE, factors=(0.5, 1.0, 2.0), seeds=2)
    variants = {"a": {"effect": 0.0, "lr": 1.0, "best": 1.0}}
    plan = experiment(variants, delta=0.01, base={"lr": 1.0, "best": 4.0}, planned=planned, tune=tune)
    work(plan.out)
    state = load_experiment(plan.out).state
    assert (state.verdicts["a"].verdict, state.tuned.verdicts["a"].verdict) == ("better", "equivalent")
    assert (state.tuning["baseline"].best, state.tuning["a"].best) == (4.0, 1.0)
    started = (plan.out / "started.txt").read_text().split()
    assert len(started) == len(set(started)) == 13 + 2 * 2 * 5 + 4
    assert main(["ablate", "report", str(plan.out)]) == 0
    report = json.loads((plan.out / "report.json").read_text())
    untuned, tuned = (row for row in report["rows"] if row["kind"] in ("result", "tuned"))
    assert (untuned["kind"], untuned["difference"]) == ("result", pytest.approx(-4.0))
    assert (tuned["kind"], tuned["difference"]) == ("tuned", pytest.approx(0.0))
    assert report["tuning"]["variants"]["baseline"]["best"] == 4.0
    assert (report["tuning"]["runs"], report["tuning"]["run_seconds"]) == (20, 20.0)
    assert "a, tuned" in (printed := capsys.readouterr().out)
    assert f"Tuned {RATE}: baseline 4 (untuned 1, by seed 4 to 4), a 1 (untuned 1, by seed 1 to 1); 20 runs" in printed
    page = (plan.out / "report.html").read_text()
    assert "Tuning curves" in page
    assert re.findall(r">([\d.]+)</text>", page[page.index("Tuning curves") :])[:5] == ["0.5", "1", "2", "4", "8"]


def test_added_pairs_stay_below_the_seeds_of_tuning(experiment, capsys):
    """The untuned variants were decided at the first of two looks; the tuned ones need more pairs after the second."""
    planned = {name: {"tuned": 1.0} for name in ("baseline", "null", "a")}
    tune = Grid(option=RATE, factors=(0.5, 1.0, 2.0), seeds=1)
    variants = {"a": {"effect": 0.0, "noise": 0.1, "lr": 1.0, "best": 1.0}}
    plan = experiment(variants, base={"lr": 1.0, "best": 4.0}, planned=planned, tune=tune)
    work(plan.out)
    state = load_experiment(plan.out).state
    assert (state.look, state.tuned.look, state.tuned.unfinished) == (4, 5, ["a"])
    assert main(["ablate", "extend", str(plan.out), "--pairs", "90"]) == 2
    said = "--pairs 90: seeds 100 to 100 belong to tuning, and 140 pairs use 0 to 139: give fewer"
    assert said in capsys.readouterr().err
    assert load_experiment(plan.out).plan.extensions == []

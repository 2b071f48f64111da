"""The comparison of an idea: which runs it needs, and when it has a verdict."""

import math

import pytest

from lightning_llm.ablate.experiment import Experiment, ScreenAndConfirm
from lightning_llm.ablate.idea_runs import evidence_of, progress_of_idea, state_of_idea
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.results import losses_of, results_of
from tests.ablate.conftest import work

STOP = ScreenAndConfirm(level=0.0045, looks=(12, 20), first_confirming_seed=900)
EXPERIMENT = Experiment(name="e", variants={"a": {}}, stop=STOP, first_seed=10)
BETTER = [-1.0, -1.2, -0.9, -1.1, -1.05, -0.95, -1.0, -1.1]
FRESH = [-0.5, -0.6, -0.4, -0.7, -0.5, -0.3, -0.6, -0.5, -0.4, -0.6, -0.5, -0.7]


def losses(differences, first=10, base=3.0):
    """Of pairs with these differences, from a seed on."""
    runs = {}
    for seed, difference in enumerate(differences, first):
        runs[RunKey(BASELINE, seed)] = base
        runs[RunKey("a", seed)] = None if math.isinf(difference) else base + difference
    return runs


def needed(known):
    return state_of_idea(EXPERIMENT, STOP, known).needed


def seeds(runs):
    return sorted({run.seed for run in runs})


def test_pairs_come_in_the_order_of_their_seeds_up_to_the_next_look():
    assert needed({})[:4] == [RunKey(BASELINE, 10), RunKey("a", 10), RunKey(BASELINE, 11), RunKey("a", 11)]
    assert seeds(needed({})) == [10, 11, 12]
    ahead = losses([-1.0]) | {RunKey("a", 12): 3.0}
    assert needed(ahead) == [RunKey(BASELINE, 11), RunKey("a", 11), RunKey(BASELINE, 12)]
    assert evidence_of(EXPERIMENT, STOP, ahead).differences == [-1.0]
    assert seeds(needed(losses(BETTER[:3]))) == [*range(13, 18)]


def test_an_idea_that_passes_the_screen_needs_fresh_pairs_of_both_sides_and_nothing_else():
    runs = needed(losses(BETTER))
    assert seeds(runs) == [*range(900, 912)]
    assert {run.name for run in runs} == {BASELINE, "a"}
    assert needed(losses(BETTER) | losses(FRESH, first=900)) == []
    evidence = evidence_of(EXPERIMENT, STOP, losses([*BETTER, 9.0]) | losses([*FRESH, 9.0], first=900))
    assert evidence.decision[:3] == ("adopted", 8, 12)
    assert evidence.screened == pytest.approx(BETTER)
    assert evidence.confirmed == pytest.approx(FRESH)
    weak = [value + 0.45 for value in FRESH]
    assert seeds(needed(losses(BETTER) | losses(weak, first=900))) == [*range(912, 920)]


@pytest.mark.parametrize("differences", [[0.1, 0.2, 0.1], [0.0] * 3, [-1.0, math.inf]])
def test_an_idea_that_is_rejected_needs_nothing(differences):
    known = losses(differences)
    assert evidence_of(EXPERIMENT, STOP, known).decision.step == "rejected"
    assert needed(known) == []


def test_the_next_seed_takes_the_place_of_a_pair_whose_baseline_diverged():
    known = losses([-1.0]) | {RunKey(BASELINE, 11): None} | losses([-1.2], first=12)  # 11 need not run for the idea
    evidence = evidence_of(EXPERIMENT, STOP, known)
    assert evidence.differences == pytest.approx([-1.0, -1.2])
    assert seeds(needed(known)) == [13]
    fresh = losses(FRESH[:11], first=900) | {RunKey(BASELINE, 905): None}
    assert seeds(needed(losses(BETTER) | fresh)) == [911, 912]
    lost = {RunKey(name, seed): None for name in (BASELINE, "a") for seed in range(10, 26)}
    assert needed(lost) == []  # and there is no verdict
    assert evidence_of(EXPERIMENT, STOP, lost).decision[:2] == ("screen", 0)


def test_progress_says_how_many_pairs_may_come():
    def words(known):
        return progress_of_idea(STOP, state_of_idea(EXPERIMENT, STOP, known))

    assert words({}) == "0 of 3 pairs of the screen"
    assert words(losses(BETTER[:4])) == "4 of 8 pairs of the screen"
    assert words(losses(BETTER) | losses([-0.5], first=900)) == "1 of 12 fresh pairs that confirm it, at most 20"
    assert words(losses([0.1] * 3)) == "it has a verdict"


def test_workers_train_what_an_idea_needs_and_no_more(experiment):
    plan = experiment({"a": {"effect": -0.5}}, first_seed=10, stop=STOP)
    assert plan.experiment.stop == STOP
    assert plan.is_blind
    work(plan.out)
    trained = (plan.out / "started.txt").read_text().split()
    assert len(trained) == len(set(trained))
    evidence = evidence_of(plan.experiment, STOP, losses_of(results_of(plan)))
    assert evidence.decision.step == "adopted"
    pairs = [*range(10, 18), *range(900, 912)]
    assert set(trained) == {f"{name},seed={seed}" for name in (BASELINE, "a") for seed in pairs}
    assert not Plan.read(plan.out).state(losses_of(results_of(plan))).needed

"""A comparison that stops by an e-process: which runs it needs, and when it has a verdict."""

import math

import pytest

from lightning_llm.ablate.e_process import evidence_of, progress_of_e_process, state_of_e_process
from lightning_llm.ablate.experiment import EProcess, Experiment
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.results import losses_of, results_of
from lightning_llm.statistics.stream import CONFIRMATION
from tests.ablate.conftest import work

STOP = EProcess(threshold=20.0, most=6, first_confirming_seed=900)
EXPERIMENT = Experiment(name="e", variants={"a": {}}, stop=STOP, first_seed=10)
BETTER = [-1.0, -1.2, -0.9, -1.1, -1.05, -0.95]


def losses(differences, first=10, base=3.0):
    """Of pairs with these differences, from a seed on."""
    runs = {}
    for seed, difference in enumerate(differences, first):
        runs[RunKey(BASELINE, seed)] = base
        runs[RunKey("a", seed)] = None if math.isinf(difference) else base + difference
    return runs


def needed(known):
    return state_of_e_process(EXPERIMENT, STOP, known).needed


def test_pairs_come_in_the_order_of_their_seeds():
    assert needed({})[:4] == [RunKey(BASELINE, 10), RunKey("a", 10), RunKey(BASELINE, 11), RunKey("a", 11)]
    assert len(needed({})) == 12
    ahead = losses([-1.0]) | {RunKey("a", 12): 3.0}
    assert needed(ahead)[:3] == [RunKey(BASELINE, 11), RunKey("a", 11), RunKey(BASELINE, 12)]
    assert evidence_of(EXPERIMENT, STOP, ahead).differences == [-1.0]


def test_an_idea_at_its_bar_needs_fresh_pairs_and_nothing_else():
    runs = needed(losses(BETTER[:4]))
    assert {run.seed for run in runs} == set(range(900, 900 + CONFIRMATION))
    assert {run.name for run in runs} == {BASELINE, "a"}
    fresh = losses([-0.5, -0.6, -0.4, -0.7, -0.5, -0.3, -0.6, -0.5], first=900)
    assert needed(losses(BETTER[:4]) | fresh) == []
    evidence = evidence_of(EXPERIMENT, STOP, losses([*BETTER[:4], 9.0]) | fresh)
    assert evidence.decision == ("adopted", 4)
    assert evidence.counted == pytest.approx(BETTER[:4])


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, 0.2, 0.1, 0.2], "rejected"),
        ([0.0] * 4, "rejected"),
        ([-1.0, math.inf], "rejected"),
        ([-1.0, -0.5, -1.2, 0.4, -1.3, 0.3], "out of pairs"),
    ],
)
def test_an_idea_that_is_rejected_needs_nothing(differences, verdict):
    known = losses(differences)
    assert evidence_of(EXPERIMENT, STOP, known).decision.step == verdict
    assert needed(known) == []


def test_a_pair_whose_baseline_diverged_is_left_out():
    known = losses([-1.0]) | {RunKey(BASELINE, 11): None, RunKey("a", 11): 2.0} | losses([-1.2], first=12)
    evidence = evidence_of(EXPERIMENT, STOP, known)
    assert evidence.differences == pytest.approx([-1.0, -1.2])
    assert needed(known)[0] == RunKey(BASELINE, 13)
    lost = {RunKey(name, seed): None for name in (BASELINE, "a") for seed in range(10, 16)}
    assert needed(lost) == []  # and there is no verdict
    assert evidence_of(EXPERIMENT, STOP, lost).decision == ("pair", 0)


def test_progress_says_how_many_pairs_may_come():
    first = state_of_e_process(EXPERIMENT, STOP, losses([-1.0, -1.1]))
    assert progress_of_e_process(STOP, first) == "2 pairs, at most 6"
    assert progress_of_e_process(STOP, state_of_e_process(EXPERIMENT, STOP, losses([-1.0]))) == "1 pair, at most 6"
    confirming = state_of_e_process(EXPERIMENT, STOP, losses(BETTER[:4]) | losses([-0.5], first=900))
    assert progress_of_e_process(STOP, confirming) == "1 of 8 pairs that confirm it"


def test_workers_train_what_an_idea_needs_and_no_more(experiment):
    stop = EProcess(threshold=5.0, most=6, first_confirming_seed=900)
    plan = experiment({"a": {"effect": -0.5}}, first_seed=10, stop=stop)
    assert plan.experiment.stop == stop
    assert plan.is_blind
    work(plan.out)
    trained = (plan.out / "started.txt").read_text().split()
    assert len(trained) == len(set(trained))
    evidence = evidence_of(plan.experiment, stop, losses_of(results_of(plan)))
    assert evidence.decision.step == "adopted"
    pairs = [*range(10, 10 + evidence.decision.pairs), *range(900, 908)]
    assert set(trained) == {f"{name},seed={seed}" for name in (BASELINE, "a") for seed in pairs}
    assert not Plan.read(plan.out).state(losses_of(results_of(plan))).needed

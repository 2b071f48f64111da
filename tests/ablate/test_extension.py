"""Pairs that are added after the last look: which look they reach, and when they cannot be added."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_llm.ablate.experiment import Experiment, Looks
from lightning_llm.ablate.extension import extension_of
from lightning_llm.ablate.next_runs import Extension, RunKey, State
from lightning_llm.ablate.tuning import Grid

TUNE = Grid(option="model.optimizer.init_args.lr", factors=(0.5, 1.0, 2.0), seeds=2)


def state(needed=(), unfinished=("a",), tuned=None, **pairs):
    """After looks at so many pairs of each variant."""
    verdicts = {name: SimpleNamespace(pairs=count) for name, count in pairs.items()}
    return State(list(needed), max(pairs.values(), default=0), verdicts, list(unfinished), [8], tuned=tuned)


def loaded(reached, **options):
    """An experiment with two variants and planned looks at 4 and 8 pairs; further ones are at 12, 18, and 27."""
    experiment = Experiment(name="test", variants={"a": {}, "b": {}}, stop=Looks(pairs=(4, 8)), **options)
    return SimpleNamespace(plan=SimpleNamespace(out=Path("an out"), experiment=experiment), state=reached)


@pytest.mark.parametrize(
    ("pairs", "variants", "look"),
    [(1, None, 12), (4, None, 12), (5, None, 18), (1, ["b"], 8), (5, ["b"], 12), (5, ["a", "b"], 18)],
)
def test_added_pairs_reach_the_first_look_that_has_them(pairs, variants, look):
    ended = state(a=8, b=4)  # b has a verdict
    assert extension_of(loaded(ended), pairs, variants) == (Extension(pairs, variants and tuple(variants)), look)


def test_the_comparison_of_tuned_arms_may_reach_a_later_look():
    ended = state(a=8, tuned=state(a=12))
    assert extension_of(loaded(ended), 1, None) == (Extension(1, None), 18)
    decided = state(unfinished=(), a=8, tuned=state(a=12))
    assert extension_of(loaded(decided), 1, None) == (Extension(1, None), 18)


@pytest.mark.parametrize(
    ("reached", "pairs", "variants", "says"),
    [
        (
            state([RunKey("a", 0)], a=8),
            1,
            None,
            "an out has not used up its plan: lightning-llm ablate run 'an out' cont",
        ),
        (state(a=8), 1, ["a", "x"], "--variants x: an out has a, b"),
        (state(unfinished=(), a=8), 1, None, "an out: every comparison has ended: name those that you want to know"),
        (state(a=8), 0, None, "--pairs must be from 1 to 1000, got 0"),
        (state(a=8), 1001, ["a"], "--pairs must be from 1 to 1000, got 1001"),
        (state(a=8), 1000, None, "--pairs 1000: 1008 pairs are too many: the last look is at 710: give fewer"),
    ],
)
def test_what_cannot_be_added_is_named(reached, pairs, variants, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        extension_of(loaded(reached), pairs, variants)


def test_added_pairs_leave_the_seeds_of_tuning_alone():
    experiment = loaded(state(a=8), tune=TUNE, first_seed=90)
    with pytest.raises(ValueError, match=r"^--pairs 1: seeds 100 to 101 belong to tuning, .*: give fewer"):
        extension_of(experiment, 1, None)
    assert extension_of(loaded(state(a=8), tune=TUNE), 1, None)[1] == 12

"""Which runs are a group, which are pairs, and how two groups differ."""

from pathlib import Path

import pytest
import torch
from lightning_llm.ablate.comparison import effects, group_runs

from lightning_llm.runs.find import Run
from lightning_llm.statistics.design import BETTER, UNDECIDED
from lightning_llm.statistics.estimates import paired, unpaired


def groups(*values):
    runs = [(_run(number, mlp, seed), {"val_loss": loss}) for number, (mlp, seed, loss) in enumerate(values)]
    return group_runs(runs)


def _run(number, mlp, seed):
    return Run(Path(f"runs/a/version_{number}"), {"mlp": mlp, "seed_everything": seed, "width": 8})


def test_runs_are_grouped_by_what_differs_but_their_seeds():
    first, second = groups(("swiglu", 1, 2.0), ("gelu", 1, 3.0), ("swiglu", 2, 2.5), ("swiglu", 3, 3.0))
    assert (first.name, first.options, first.num_seeds, len(first.runs)) == ("mlp=swiglu", {"mlp": "swiglu"}, 3, 3)
    assert (second.name, second.num_seeds, len(second.runs)) == ("mlp=gelu", 1, 1)
    assert first.measures["val_loss"].mean == pytest.approx(2.5)
    assert first.measures["val_loss"].spread == pytest.approx(torch.tensor([2.0, 2.5, 3.0]).std().item())
    assert second.measures["val_loss"].spread is None
    assert "seconds" not in first.measures


HASHES = {"batches": "00ff", "validation_batches": "11ee", "initial_values": {"embed": "8x4 float32 aa"}}


def hashes(groups, **changes):
    """Summaries of all runs of the groups; ``changes`` are those of the last group."""
    return {Path(run): {**HASHES, **(changes if group is groups[-1] else {})} for group in groups for run in group.runs}


def test_runs_of_the_same_seeds_and_hashes_are_pairs():
    found = groups(
        *(("swiglu", seed, loss) for seed, loss in enumerate([2.0, 2.4, 2.2, 2.3])),
        *(("gelu", seed, loss) for seed, loss in [(2, 2.1), (0, 1.9), (3, 2.2), (1, 2.3)]),
    )
    ((effect,),) = effects(found, hashes(found))
    assert (effect.verdict.pairs, effect.verdict.verdict, effect.note) == (4, BETTER, "")
    assert effect.verdict.correlation == pytest.approx(1)
    ((other,),) = effects(found, hashes(found, batches="00fe"))
    truth = unpaired([2.0, 2.4, 2.2, 2.3], [2.1, 1.9, 2.2, 2.3])
    assert (other.verdict.pairs, other.verdict.verdict, other.verdict.p) == (0, UNDECIDED, pytest.approx(truth.p))
    assert other.note == "not paired: seed 0: their training batches differ"


def test_seeds_without_a_partner_are_left_out_of_the_pairs():
    found = groups(("swiglu", 1, 2.0), ("swiglu", 2, 2.4), ("swiglu", 3, 9.0), ("gelu", 1, 2.1), ("gelu", 2, 2.4))
    ((effect,),) = effects(found, hashes(found))
    assert effect.verdict.p == pytest.approx(paired([2.0, 2.4], [2.1, 2.4]).p)
    assert (effect.base, effect.note) == (pytest.approx(2.2), "1 seed without a partner left out")


@pytest.mark.parametrize(
    ("seeds", "says"), [((3, 4), "not paired: no seed in common"), ((2, 4), "not paired: only one seed in common")]
)
def test_too_few_seeds_in_common_are_no_pairs(seeds, says):
    found = groups(("swiglu", 1, 2.0), ("swiglu", 2, 2.4), *(("gelu", seed, 2.2) for seed in seeds))
    ((effect,),) = effects(found, hashes(found))
    assert (effect.verdict.pairs, effect.note) == (0, says)


def test_one_seed_each_has_no_interval():
    found = groups(("swiglu", 1, 2.0), ("gelu", 1, 3.0))
    ((effect,),) = effects(found, hashes(found))
    assert (effect.verdict.verdict, effect.verdict.note) == (UNDECIDED, "one pair: no interval")
    ((effect,),) = effects(found, {})
    assert effect.note == "not paired: seed 1: a run has no record of its training batches"
    assert effect.verdict.note == "one run on one side: no interval"


def test_runs_of_one_seed_count_once():
    found = groups(("swiglu", 1, 2.0), ("swiglu", 1, 2.2), ("swiglu", 2, 2.4), ("gelu", 1, 2.2), ("gelu", 2, 2.4))
    ((effect,),) = effects(found, hashes(found))
    assert effect.verdict.p == pytest.approx(paired([2.1, 2.4], [2.2, 2.4]).p)


def test_the_same_seed_again_is_no_spread():
    (group,) = groups(("swiglu", 1, 2.0), ("swiglu", 1, 2.0))
    assert (group.num_seeds, len(group.runs), group.measures["val_loss"].spread) == (1, 2, None)

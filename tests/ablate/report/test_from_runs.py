"""Which runs are a group, which are pairs, and how two groups differ."""

from itertools import product
from pathlib import Path

import pytest
import torch

from lightning_llm.ablate.report import from_runs
from lightning_llm.ablate.report.from_runs import group_runs, rows_of_groups
from lightning_llm.runs.find import Run
from lightning_llm.statistics.design import BETTER, UNDECIDED
from lightning_llm.statistics.estimates import paired, unpaired
from lightning_llm.statistics.no_spread import ALL_ALIKE
from lightning_llm.training.metrics import Metric


def groups(*values):
    runs = [(_run(number, mlp, seed), {"val_loss": loss}) for number, (mlp, seed, loss) in enumerate(values)]
    return group_runs(runs)


def _run(number, mlp, seed):
    return Run(Path(f"runs/a/version_{number}"), {"mlp": mlp, "seed_everything": seed, "width": 8})


def test_runs_are_grouped_by_what_differs_but_their_seeds():
    first, second = groups(("swiglu", 1, 2.0), ("gelu", 1, 3.0), ("swiglu", 2, 2.5), ("swiglu", 3, 3.0))
    assert (first.name, first.options, first.num_seeds, len(first.runs)) == ("mlp=swiglu", {"mlp": "swiglu"}, 3, 3)
    assert (second.name, second.num_seeds, len(second.runs)) == ("mlp=gelu", 1, 1)
    assert first.means["val_loss"].value == pytest.approx(2.5)
    assert first.means["val_loss"].sd == pytest.approx(torch.tensor([2.0, 2.5, 3.0]).std().item())
    assert second.means["val_loss"].sd is None
    assert "seconds" not in first.means


HASHES = {"batches": "00ff", "validation_batches": "11ee", "initial_values": {"embed": "8x4 float32 aa"}}


def hashes(groups, **changes):
    """Summaries of all runs of the groups; ``changes`` are those of the last group."""
    return {Path(run): {**HASHES, **(changes if group is groups[-1] else {})} for group in groups for run in group.runs}


def test_runs_of_the_same_seeds_and_hashes_are_pairs():
    found = groups(
        *(("swiglu", seed, loss) for seed, loss in enumerate([2.0, 2.4, 2.2, 2.3])),
        *(("gelu", seed, loss) for seed, loss in [(2, 2.1), (0, 1.9), (3, 2.2), (1, 2.3)]),
    )
    (row,) = rows_of_groups(found, hashes(found))
    assert (row.pairs, row.verdict, row.note) == (4, BETTER, ALL_ALIKE)
    assert row.correlation == pytest.approx(1)
    (other,) = rows_of_groups(found, hashes(found, batches="00fe"))
    truth = unpaired([2.0, 2.4, 2.2, 2.3], [2.1, 1.9, 2.2, 2.3])
    assert (other.pairs, other.verdict, other.p) == (0, UNDECIDED, pytest.approx(truth.p))
    assert other.note == "not paired: seed 0: their training batches differ"


def test_seeds_without_a_partner_are_left_out_of_the_pairs():
    found = groups(("swiglu", 1, 2.0), ("swiglu", 2, 2.4), ("swiglu", 3, 9.0), ("gelu", 1, 2.1), ("gelu", 2, 2.4))
    (row,) = rows_of_groups(found, hashes(found))
    assert row.p == pytest.approx(paired([2.0, 2.4], [2.1, 2.4]).p)
    assert (row.baseline_mean, row.note) == (
        pytest.approx(2.2),
        "1 seed without a partner left out; a verdict needs at least 4 pairs",
    )


@pytest.mark.parametrize(
    ("seeds", "says"), [((3, 4), "not paired: no seed in common"), ((2, 4), "not paired: only one seed in common")]
)
def test_too_few_seeds_in_common_are_no_pairs(seeds, says):
    found = groups(("swiglu", 1, 2.0), ("swiglu", 2, 2.4), *(("gelu", seed, 2.2) for seed in seeds))
    (row,) = rows_of_groups(found, hashes(found))
    assert (row.pairs, row.runs_of_sides) == (0, (2, 2))
    assert row.note == f"{says}; a verdict needs at least 4 runs on each side"


def test_one_seed_each_has_no_interval():
    found = groups(("swiglu", 1, 2.0), ("gelu", 1, 3.0))
    (row,) = rows_of_groups(found, hashes(found))
    assert (row.verdict, row.note) == (UNDECIDED, "one pair: no interval")
    (row,) = rows_of_groups(found, {})
    why = "not paired: seed 1: a run has no record of its training batches"
    assert row.note == f"{why}; one run on one side: no interval"


def test_runs_of_one_seed_count_once():
    found = groups(("swiglu", 1, 2.0), ("swiglu", 1, 2.2), ("swiglu", 2, 2.4), ("gelu", 1, 2.2), ("gelu", 2, 2.4))
    (row,) = rows_of_groups(found, hashes(found))
    assert row.p == pytest.approx(paired([2.1, 2.4], [2.2, 2.4]).p)


def test_the_same_seed_again_is_no_spread():
    (group,) = groups(("swiglu", 1, 2.0), ("swiglu", 1, 2.0))
    assert (group.num_seeds, len(group.runs), group.means["val_loss"].sd) == (1, 2, None)


def test_a_metric_of_which_higher_is_better_has_its_own_sign(monkeypatch):
    monkeypatch.setitem(from_runs.METRICS, "accuracy", Metric("accuracy", "share", higher_is_better=True))
    values = {("swiglu", seed): 0.5 + 0.01 * seed for seed in range(4)}
    values |= {("gelu", seed): 0.6 + 0.012 * seed for seed in range(4)}
    runs = [(_run(n, *key), {"val_loss": 2.0, "accuracy": value}) for n, (key, value) in enumerate(values.items())]
    found = group_runs(runs)
    (_, row) = rows_of_groups(found, hashes(found))
    truth = paired(*([value for (mlp, _), value in values.items() if mlp == side] for side in ("swiglu", "gelu")))
    assert (row.metric, row.unit, row.higher_is_better, row.verdict) == ("accuracy", "share", True, BETTER)
    assert row.difference == pytest.approx(truth.difference)
    low, high = row.interval
    assert 0 < low < row.difference < high
    assert (low + high) / 2 == pytest.approx(row.difference)
    assert (row.baseline_mean, row.mean) == (pytest.approx(0.515), pytest.approx(0.618))
    assert row.robust.median == pytest.approx(0.103)
    assert [(pair.seed, pair.baseline) for pair in row.by_seed] == [(seed, 0.5 + 0.01 * seed) for seed in range(4)]
    assert found[1].means["accuracy"].value == pytest.approx(0.618)


def test_a_pair_is_named_by_its_seed_or_by_both_of_its_seeds():
    def run(number, mlp, seeds):
        options = {"mlp": mlp, "seed_everything": seeds[0], "data.seed": seeds[1]}
        return Run(Path(f"runs/{number}"), options), {"val_loss": 2.0 + 0.1 * number}

    found = group_runs([run(n, mlp, seeds) for n, (mlp, seeds) in enumerate(product("ab", [(1, 1), (2, 3)]))])
    (row,) = rows_of_groups(found, hashes(found))
    assert [pair.seed for pair in row.by_seed] == [1, "2, 3"]

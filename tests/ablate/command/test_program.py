"""What the runs of a command say of themselves, besides their losses."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_llm.ablate.command.program import CommandProgram
from lightning_llm.ablate.command.spec import Command
from lightning_llm.ablate.names import AGAIN, BASELINE
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.results import Result

LOADS = [0.1, 0.4, 0.9, 1.2, 1.6, 1.9, 2.4, 2.8]


@pytest.mark.parametrize(
    ("follows", "moved", "warns"),
    [
        (0.1, 0.05, True),  # the first run, repeated under another load, ended with another loss
        (0.1, 0.0, False),  # with the same: the load does not matter, and the rest is chance
        (0.1, None, True),  # it was not repeated
        (0.0, 0.05, False),
    ],
)
def test_losses_that_follow_the_load_are_named_unless_a_repeated_run_says_no(follows, moved, warns):
    other = [0.03, -0.02, 0.01, 0.04, -0.03, 0.02, -0.01, 0.0]
    losses = [3.0 + follows * load + 0.01 * noise for load, noise in zip(LOADS, other, strict=True)]
    experiment = SimpleNamespace(metric="loss", first_seed=0, command=Command(text="x", words=("x",)))
    program = CommandProgram(SimpleNamespace(experiment=experiment))

    def result(name, seed, loss, load):
        return Result(RunKey(name, seed), Path("x"), loss, "", {"load": load}, program)

    found = [result(BASELINE, seed, loss, load) for seed, (loss, load) in enumerate(zip(losses, LOADS, strict=True))]
    if moved is not None:
        found.append(result(AGAIN, 0, losses[0] + moved, 1.0))
    notes = program.notes({each.run: each for each in found})
    assert any("varies with the load of the machine" in note for note in notes) == warns


@pytest.mark.parametrize(
    ("losses", "outputs", "is_ignored"),
    [
        ((3.1, 3.1), ("a", "a"), True),
        ((3.1, 3.2), ("a", "a"), False),  # the metric is in a file, and the program prints the same
        ((3.1, 3.1), ("a", "b"), False),  # a coarse metric
        ((3.1, 3.1, 3.1), ("a", "b", "c"), True),
    ],
)
def test_a_seed_does_nothing_only_if_metric_and_output_are_the_same(losses, outputs, is_ignored):
    seeds = range(len(losses))
    command = SimpleNamespace(reseed=False, trees={BASELINE: SimpleNamespace(hash="1"), "x": SimpleNamespace(hash="2")})
    experiment = SimpleNamespace(
        metric="loss", first_seed=0, command=command, variants={}, seeds=lambda count: range(count)
    )
    program = CommandProgram(SimpleNamespace(experiment=experiment))
    found = {
        RunKey(BASELINE, seed): Result(
            RunKey(BASELINE, seed), Path("x"), losses[seed], "", {"output": outputs[seed]}, program
        )
        for seed in seeds
    }
    assert bool(program.problem(found)) == is_ignored
    other = Result(RunKey("x", 0), Path("x"), losses[-1], "", {"output": outputs[0]}, program)
    same_effect = "x: the change has no effect" in program.problem({**found, other.run: other})
    assert same_effect == (not is_ignored and losses[-1] == losses[0])

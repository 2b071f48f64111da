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

"""What all runs of an experiment take. How its arms are read and its plan is frozen: tests/cli/test_ablate.py."""

import pytest
import torch

from lightning_llm.ablate import setup
from lightning_llm.ablate.cost import flops_of
from lightning_llm.ablate.setup import outlay_of
from lightning_llm.measure.timer import Timing


@pytest.fixture
def two_seconds_a_step(monkeypatch):
    """Each step takes two seconds, on a machine with eight cores."""
    monkeypatch.setattr(setup, "interleave", lambda steps, **options: {"baseline": Timing((2.0, 2.0, 2.0))})
    monkeypatch.setattr("lightning_llm.ablate.slots.cores", lambda: list(range(8)))
    monkeypatch.setattr(setup, "threads_for", lambda accelerator, gpus, need_bytes, workers: 2)


def test_runs_share_the_cores(make_arm, two_seconds_a_step):
    threads = torch.get_num_threads()
    arm = make_arm("baseline")
    found = outlay_of(arm, runs=9, workers=None)
    assert (found.steps, found.runs) == (6, 9)
    assert found.seconds == 2.0 * 6 * 9 / 4  # four at a time, of two threads each
    assert outlay_of(arm, runs=9, workers=3).seconds == 2.0 * 6 * 9 / 3
    assert found.flops == flops_of(arm) * 6
    arm.model.architecture = arm.architecture
    arm.model.configure_model()
    assert found.parameters == sum(parameter.numel() for parameter in arm.model.parameters())
    assert torch.get_num_threads() == threads

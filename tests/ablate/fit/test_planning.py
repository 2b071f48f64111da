"""What all runs of an experiment take. How its variants are read and its plan is frozen: tests/cli/test_ablate.py."""

import pytest
import torch

from lightning_llm.ablate.fit import planning
from lightning_llm.ablate.fit.cost import flops_of
from lightning_llm.ablate.fit.planning import cost_estimate_of
from lightning_llm.measure.timer import Timing


@pytest.fixture
def two_seconds_a_step(monkeypatch):
    """Each step takes two seconds, on a machine with eight cores."""
    monkeypatch.setattr(planning, "interleave", lambda steps, **options: {"baseline": Timing((2.0, 2.0, 2.0))})
    monkeypatch.setattr("lightning_llm.ablate.slots.cores", lambda: list(range(8)))
    monkeypatch.setattr(planning, "threads_for", lambda accelerator, gpus, need_bytes, workers: 2)


def test_runs_share_the_cores(make_variant, two_seconds_a_step):
    threads = torch.get_num_threads()
    variant = make_variant("baseline")
    found = cost_estimate_of(variant, runs=9, workers=None)
    assert (found.steps, found.runs) == (6, 9)
    assert found.seconds == 2.0 * 6 * 9 / 4  # four at a time, of two threads each
    assert cost_estimate_of(variant, runs=9, workers=3).seconds == 2.0 * 6 * 9 / 3
    assert found.flops == flops_of(variant) * 6
    variant.model.architecture = variant.architecture
    variant.model.configure_model()
    assert found.parameters == sum(parameter.numel() for parameter in variant.model.parameters())
    assert torch.get_num_threads() == threads

"""The catalog of optimizers says of each class what the class itself says."""

import inspect

import pytest
import torch

from lightning_llm import optim
from lightning_llm.optim.catalog import OPTIMIZERS


@pytest.mark.parametrize("path", OPTIMIZERS)
def test_defaults_are_those_of_the_classes(path):
    cls = getattr(optim if path.startswith("lightning_llm") else torch.optim, path.rpartition(".")[2])
    own = inspect.signature(cls).parameters
    known = OPTIMIZERS[path]
    assert (own["lr"].default, own["weight_decay"].default) == (known.lr, known.weight_decay)


@pytest.mark.parametrize("path", [path for path in OPTIMIZERS if path.startswith("torch")])
def test_the_state_is_what_a_step_makes(path):
    weight = torch.nn.Parameter(torch.zeros(3, 5))
    optimizer = getattr(torch.optim, path.rpartition(".")[2])([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = [value for value in optimizer.state[weight].values() if value is not None and value.shape == weight.shape]
    assert len(tensors) == OPTIMIZERS[path].state_per_parameter

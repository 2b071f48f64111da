"""Operators that an eager block launches: a small step waits for each of them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm import LanguageModel, ModelConfig

SEQ = 640
SIZES = {"vocab_size": 101, "hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 3}


class Launches(TorchDispatchMode):
    """Counts the operators that are no views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def launches(layers, **changes):
    """Of forward and backward on a device without numbers, where no part takes the way of a CPU."""
    model = LanguageModel(ModelConfig(**{**SIZES, **changes}, num_hidden_layers=layers))
    with torch.device("meta"):
        model.configure_model()
        ids = torch.zeros(1, SEQ, dtype=torch.int64)
    with Launches() as found:
        model.loss({"input_ids": ids, "targets": ids}).backward()
    return found.count


@pytest.mark.parametrize(
    ("changes", "most"), [({}, 145), ({"mlp": "swiglu"}, 142), ({"checkpoint_level": 2}, 186)], ids=str
)
def test_operators_that_a_block_launches(monkeypatch, changes, most):
    """What a third block adds to two."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)  # there is none for meta
    assert 0 < launches(3, **changes) - launches(2, **changes) <= most

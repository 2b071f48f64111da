"""A step reads no value from its device: on ``meta``, which has none, it runs through, and any read is an error."""

import pytest
import torch

from lightning_llm import LanguageModel, ModelConfig
from lightning_llm.model.mlp import MemoryOptimizedSwiGLU
from lightning_llm.optim import AdamW, clip_grad_norm_, param_groups

SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _no_autocast(monkeypatch):
    """There is none for ``meta``."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)


def step(**changes):
    model = LanguageModel(ModelConfig(**{**SIZES, **changes}))
    with torch.device("meta"):
        model.configure_model()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    optimizer = AdamW(param_groups(model), lr=0.01, fused=False)
    ids = torch.zeros(4, 33, dtype=torch.int64, device="meta")
    for _ in range(2):
        model.loss({"input_ids": ids[:, :-1], "targets": ids[:, 1:]}).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "changes", [{}, {"checkpoint_level": 2, "dropout": 0.1}, {"mlp": "swiglu", "recompute": "block"}], ids=str
)
def test_a_step_waits_for_nothing(changes):
    step(**changes)


def test_a_value_that_is_read_is_found(monkeypatch):
    forward = MemoryOptimizedSwiGLU.forward
    monkeypatch.setattr(
        MemoryOptimizedSwiGLU, "forward", lambda self, x, *norm: forward(self, x * x.sum().item(), *norm)
    )
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        step(checkpoint_level=2)

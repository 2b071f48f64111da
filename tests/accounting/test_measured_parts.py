"""A part that no formula describes is measured: a new built-in one too, and not taken for one of the known ones."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_llm import ModelConfig, Transformer
from lightning_llm.accounting import parameters_by_part, step_memory
from lightning_llm.accounting.counts import hidden_matrix_parameters, step_flops
from lightning_llm.accounting.measured_parts import measure_parts
from lightning_llm.accounting.parts import parts_to_measure
from lightning_llm.model import attention, mlp, norm
from lightning_llm.model.parts import BUILT_IN, BuiltIn
from tests.accounting.test_memory import second_step

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
STEP = {"rows": 3, "context_length": 200, "precision": "32-true"}


class NewMLP(nn.Module):
    """Four matrices, and three activations saved for backward."""

    def __init__(self, config):
        super().__init__()
        sizes = [config.hidden_size, *[config.intermediate_size] * 3, config.hidden_size]
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class WiderWithDepth(nn.Module):
    """An MLP whose parameters depend on its layer."""

    def __init__(self, config, layer):
        super().__init__()
        self.into, self.out = nn.Linear(config.hidden_size, layer + 1), nn.Linear(layer + 1, config.hidden_size)

    def forward(self, x):
        return self.out(self.into(x))


class NewNorm(nn.Module):
    """Three times as many parameters as an RMSNorm, and more of them saved."""

    def __init__(self, size, *, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(3, size)), eps

    def forward(self, x):
        return (x / (x.std(-1, keepdim=True) + self.eps) * self.weight[0]).tanh() * self.weight[1] + self.weight[2]


class NewAttention(attention.CausalSelfAttention):
    """One more matrix for each layer."""

    def __init__(self, config, layer=0):
        super().__init__(config, layer=layer)
        self.more = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, context):
        return self.more(super().forward(x, context))


NEW = {"mlp": (mlp, NewMLP), "norm": (norm, NewNorm), "attention": (attention, NewAttention)}


@pytest.mark.parametrize("kind", NEW)
def test_a_new_built_in_part_is_measured(monkeypatch, kind):
    module, made = NEW[kind]
    monkeypatch.setattr(module, made.__name__, made, raising=False)
    monkeypatch.setitem(BUILT_IN[kind], "new", BuiltIn(f"{kind}.{made.__name__}"))
    config = ModelConfig(**SIZES, **{kind: "new"})
    assert parts_to_measure(config) == {kind: "new"}
    with pytest.raises(ValueError, match=f"{kind} 'new' has no formula: its cost can only be measured"):
        parameters_by_part(config)
    measured = measure_parts(config, "32-true", 200)
    assert sum(parameters_by_part(config, measured).values()) == sum(
        p.numel() for p in Transformer(config).parameters()
    )
    peak = second_step(config, loss_chunks=None, accumulation=1, **STEP)[0]
    assert step_memory(config, **STEP).step_peak == pytest.approx(peak, rel=0.005)


def test_parts_of_some_layers_are_counted_at_their_own_indices():
    own = {"mlp": WiderWithDepth}
    config = ModelConfig(**{**SIZES, "num_hidden_layers": 5}, layers=[{}, own])
    built = sum(parameter.numel() for parameter in Transformer(config).parameters())
    assert sum(parameters_by_part(config, measure_parts(config, "32-true", 16)).values()) == built


def test_flops_of_a_new_built_in_mlp(monkeypatch):
    monkeypatch.setattr(mlp, "NewMLP", NewMLP, raising=False)
    monkeypatch.setitem(BUILT_IN["mlp"], "new", BuiltIn("mlp.NewMLP"))
    config = ModelConfig(**SIZES, mlp="new")
    measured, matrices = measure_parts(config, "32-true", 200), 2 * (64 * 160 * 2 + 160 * 160 * 2)
    found = step_flops(config, tokens=1, context_length=200, measured=measured)
    assert found.by_part["mlp"] == 2 * matrices
    assert hidden_matrix_parameters(config, measured) == matrices + 2 * 4 * 64 * 64


class OwnLoss(nn.Module):
    """Cross entropy; it calls the head."""

    def __init__(self, config):
        super().__init__()

    def forward(self, hidden, head, targets, weights=None, num_chunks=None):
        logits = head(hidden).flatten(0, -2)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


def test_the_head_is_counted_once_with_a_loss_of_the_users_own():
    known, config = ModelConfig(**SIZES), ModelConfig(**SIZES, loss=f"{__name__}.OwnLoss")
    measured = measure_parts(config, "32-true", 200)
    tokens = {"tokens": 7, "context_length": 200}
    assert step_flops(config, measured=measured, **tokens) == step_flops(known, **tokens)


def test_a_large_new_built_in_mlp(monkeypatch):
    monkeypatch.setattr(mlp, "NewMLP", NewMLP, raising=False)
    monkeypatch.setitem(BUILT_IN["mlp"], "new", BuiltIn("mlp.NewMLP"))
    config = ModelConfig(**SIZES | {"hidden_size": 16384, "intermediate_size": 65536}, mlp="new")
    with torch.device("meta"):
        expected = sum(p.numel() for p in NewMLP(config).parameters())
    assert measure_parts(config, "32-true", 64)["mlp"].parameters == expected

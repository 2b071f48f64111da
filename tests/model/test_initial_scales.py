"""Scales by role: the assigned ones where the table draws, else measured; the same before a run and at its start."""

import pytest
import torch
from torch import nn

from lightning_llm import ModelConfig, Transformer
from lightning_llm.model.initial_scales import (
    initial_rules,
    initial_scales,
    one_of_each_kind,
    rules_in_words,
    scales_of_blocks,
)
from lightning_llm.model.loss import CrossEntropy
from tests.model.test_initial_values import MLP, SIZES, STD, OtherNames, Zeros, path_of, with_mlp
from tests.model.test_parts import PARTS

OUTPUT_STD = STD / 2


def config_with(part):
    return ModelConfig(**SIZES, mlp=path_of(part))


def test_names_of_layers_change_no_scale():
    ours = Transformer(ModelConfig(**SIZES, mlp="swiglu"), seed=3)
    theirs = with_mlp(OtherNames)
    assert initial_scales(theirs, theirs.config) == initial_scales(ours, ours.config)
    assert initial_scales(ours, ours.config)["MLP output"] == pytest.approx((OUTPUT_STD, 2 * 16 * 24))
    assert initial_scales(ours, ours.config)["MLP"] == pytest.approx((STD, 4 * 16 * 24))


def test_values_of_a_constructor_are_measured():
    model = with_mlp(Zeros)
    assert initial_scales(model, model.config)["MLP output"] == (0.0, 2 * 16 * 24)


def test_loaded_values_are_measured():
    model = with_mlp(OtherNames)
    with torch.no_grad():
        for layer in model.layers:
            nn.init.constant_(layer.mlp.up.weight, 3.0)
            nn.init.constant_(layer.mlp.gate.weight, 3.0)
    assert initial_scales(model, model.config)["MLP"].rms == pytest.approx(STD)
    assert initial_scales(model, model.config, is_loaded=True)["MLP"].rms == pytest.approx(3.0)


@pytest.mark.parametrize("part", ["usual", "canon", "gated DeltaNet", "experts", "every other layer"])
def test_a_run_starts_at_the_scales_that_were_computed_before_it(part):
    config = ModelConfig(**{**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, **PARTS[part]})
    model = Transformer(config, seed=3)
    at_start = initial_scales(model, config)
    before = scales_of_blocks(one_of_each_kind(config, seed=3), config)
    assert {"attention", "attention output", "MLP", "MLP output"} <= before.keys()
    for role, scale in before.items():
        assert scale.elements == at_start[role].elements
        assert scale.rms == pytest.approx(at_start[role].rms, rel=0.05)  # of convolutions, of one layer


def words(config):
    return rules_in_words(one_of_each_kind(config, seed=3), config, seed=3)


class Norm(nn.Module):
    def __init__(self, size, *, eps):
        super().__init__()
        self.scale = nn.Parameter(torch.full((size,), 0.5))

    def forward(self, x):
        return x * self.scale


class Loss(CrossEntropy):
    def __init__(self, config):
        super().__init__(config)
        self.temperature = nn.Parameter(torch.empty(1 << 24))


HERE = "tests.model.test_initial_scales"


def test_custom_parts_outside_of_the_mlp_are_described_too():
    described = words(ModelConfig(**SIZES, norm=f"{HERE}.Norm"))
    assert [line.partition(":")[0] for line in described] == [
        "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm",
        "norm",
    ]
    assert all(line.endswith("its constructor set scale") for line in described)
    with pytest.raises(ValueError, match="sets temperature to other values each time"):
        words(ModelConfig(**SIZES, loss=f"{HERE}.Loss"))


def test_the_rules_of_custom_parts_in_words():
    writes = "layers.0.mlp: down writes to the residual stream (the part returns its output)"
    assert words(config_with(Zeros)) == [f"{writes}; its constructor set down.weight"]
    assert words(config_with(OtherNames)) == [f"{writes}; the table sets all weights"]
    assert words(ModelConfig(**SIZES)) == []


def test_the_rules_by_name():
    rules = initial_rules(with_mlp(Zeros))
    assert rules[f"{MLP}.down.weight"] == "kept"
    assert rules["layers.0.self_attn.o_proj.weight"] == "residual"
    assert f"{MLP}.up.weight" not in rules

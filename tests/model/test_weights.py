"""Initial values are a function of seed, name and shape: swapping one part changes no other weight."""

import pytest
import torch
from torch import nn

from lightning_llm import LanguageModel, ModelConfig, Transformer
from lightning_llm.model.initial_values import seed_of

BASE = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
CHANGES = [
    {"mlp": "relu"},
    {"intermediate_size": 72},
    {"qk_norm": True},
    {"attention_bias": True},
    {"position": "learned"},
    {"norm": "layernorm"},
    {"num_hidden_layers": 2},
    {"vocab_size": 62},
    {"num_key_value_heads": 1},
    {"checkpoint_level": 1},
    {"tie_word_embeddings": True},
    {"mlp": "tests.model.test_weights.Foreign"},
    {"mlp": "mixture_of_experts"},
    {"attention": {"class_path": "sliding_window", "init_args": {"window": 4}}},
    {"block": "sandwich"},
    {"partial_rotary_factor": 0.5},
]


class Foreign(nn.Module):
    """Draws in its constructor, from two kinds of modules."""

    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(config.hidden_size))
        self.mix = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return x * self.scale


def weights(seed=3, **changes):
    architecture = {**BASE, **changes}
    return Transformer(ModelConfig(**architecture), seed=seed).state_dict()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_change_leaves_the_weights_that_both_have(change):
    before, after = weights(), weights(**change)
    tied = {"lm_head.weight"} if change.get("tie_word_embeddings") else set()
    shared = {name for name in before.keys() & after.keys() if before[name].shape == after[name].shape} - tied
    assert len(shared) >= 8
    for name in shared:
        if change.get("num_hidden_layers") and name.endswith(("o_proj.weight", "down_proj.weight")):
            scale = (3 / 2) ** 0.5  # their scale depends on the depth
            torch.testing.assert_close(after[name], before[name] * scale)
        else:
            assert torch.equal(after[name], before[name]), name


def test_each_weight_and_each_seed_has_values_of_its_own():
    found = {**weights(3), **{f"of another seed: {name}": value for name, value in weights(4).items()}}
    drawn = [value.flatten()[:24] for name, value in found.items() if "norm" not in name]
    assert len({tuple(value.tolist()) for value in drawn}) == len(drawn) == 2 * (2 + 3 * 7)
    assert all(value.std() > 0 for value in drawn)


def test_a_foreign_module_draws_by_seed_and_name():
    change = {"mlp": "tests.model.test_weights.Foreign"}
    one, wider, other = weights(**change), weights(**change, attention_bias=True, qk_norm=True), weights(4, **change)
    for name in ("layers.0.mlp.scale", "layers.2.mlp.mix.weight"):
        assert torch.equal(one[name], wider[name])
        assert not torch.equal(one[name], other[name])
    assert not torch.equal(one["layers.0.mlp.scale"], one["layers.1.mlp.scale"])


def test_without_a_seed_a_model_takes_one_number_of_the_global_generator():
    config = ModelConfig(**BASE)
    torch.manual_seed(5)
    torch.randint(2**62, ())
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = Transformer(config)
    assert torch.equal(torch.rand(1), expected)
    other = Transformer(config)
    torch.manual_seed(5)
    again = Transformer(config)
    assert torch.equal(one.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_dtype_has_the_same_values_rounded(dtype):
    usual = weights()
    torch.set_default_dtype(dtype)
    try:
        made = weights()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(made[name], value.to(dtype)) for name, value in usual.items())


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_blocks_start_from_the_same_values():
    model = LanguageModel(ModelConfig(**BASE), compile_mode="default")
    model.seed = 3
    model.configure_model()
    assert all(torch.equal(value, model.transformer.state_dict()[name]) for name, value in weights().items())


def test_the_scales_are_those_of_the_table():
    found = weights(hidden_size=192, num_attention_heads=4, num_hidden_layers=2)
    for name, value in found.items():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value))
        else:
            std = 0.02 / 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert value.std() == pytest.approx(std, rel=0.05), name
            assert abs(value.mean()) < 0.05 * std


def test_the_seed_of_a_name_is_stable():
    assert seed_of(0, "lm_head.weight", (2, 3)) == 39245704425317943

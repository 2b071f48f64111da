"""The null variant: other initial values of the MLPs, and of nothing else."""

from types import SimpleNamespace

import pytest
import torch

from lightning_llm.ablate.null_variant import RedrawMLP
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer


def module(seed=3):
    """What the callback needs of a LanguageModel."""
    config = ModelConfig(vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    return SimpleNamespace(transformer=Transformer(config, seed=seed), architecture=config, seed=seed)


def weights(made):
    return {name: value.clone() for name, value in made.transformer.named_parameters()}


def redrawn(made, ckpt_path=None):
    """The names of the weights that the callback changes."""
    before = weights(made)
    RedrawMLP().on_fit_start(SimpleNamespace(ckpt_path=ckpt_path), made)
    return {name for name, value in weights(made).items() if not torch.equal(value, before[name])}


def test_the_null_variant_draws_its_mlps_again_and_nothing_else():
    made = module()
    before = weights(made)
    assert redrawn(made) == {name for name in before if ".mlp." in name}
    for name, value in weights(made).items():
        assert value.std().item() == pytest.approx(before[name].std().item(), rel=0.1)


def test_a_resumed_run_has_its_weights():
    assert redrawn(module(), "resumed.ckpt") == set()


def test_each_layer_and_each_seed_has_values_of_its_own():
    runs = [module(), module(), module(seed=4)]
    for made in runs:
        redrawn(made)
    ups = [[layer.mlp.up_proj.weight for layer in made.transformer.layers] for made in runs]
    assert torch.equal(ups[0][0], ups[1][0])  # the same seed
    assert not torch.equal(ups[0][0], ups[2][0])
    assert not torch.equal(ups[0][0], ups[0][1])

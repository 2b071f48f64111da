"""The null variant: other initial values of the MLPs, and of nothing else."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_llm.ablate.fit.null_variant import RedrawMLP
from lightning_llm.model.block import Block
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer


class Fixed(nn.Module):
    """An MLP in which nothing is random."""

    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x):
        return x * self.scale


class FixedAttention(Fixed):
    def forward(self, x, context):
        return x * self.scale


class HalfZero(nn.Module):
    """An MLP whose output layer starts at 0, and stays so in the null variant."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 8)
        self.down = nn.Linear(8, config.hidden_size)
        self.shift = nn.Parameter(torch.randn(8))
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return self.down(self.up(x) + self.shift)


class ZeroBlock(Block):
    def __init__(self, config, layer, seed):
        super().__init__(config, layer, seed)
        nn.init.zeros_(self.mlp.down_proj.weight)


def module(seed=3, **options):
    """What the callback needs of a LanguageModel."""
    sizes = {"vocab_size": 65, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ModelConfig(**sizes, **options)
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


HERE = "tests.ablate.fit.test_null_variant"


def test_what_a_constructor_sets_is_made_again_too():
    changed = redrawn(module(mlp=f"{HERE}.HalfZero"))
    assert changed == {f"layers.{layer}.mlp.{name}" for layer in range(2) for name in ("up.weight", "shift")}


def test_what_a_block_sets_in_its_parts_stays():
    changed = redrawn(module(block=f"{HERE}.ZeroBlock"))
    assert changed == {f"layers.{layer}.mlp.{name}_proj.weight" for layer in range(2) for name in ("gate", "up")}


@pytest.mark.parametrize("tied", [False, True])
def test_where_the_mlps_are_not_random_others_are_redrawn(tied):
    fixed = {"mlp": f"{HERE}.Fixed", "tie_word_embeddings": tied, "vocab_multiple_of": 16}
    assert redrawn(module(**fixed)) == {
        f"layers.{layer}.self_attn.{name}_proj.weight" for layer in range(2) for name in "qkvo"
    }
    both = module(**fixed, attention=f"{HERE}.FixedAttention")
    assert redrawn(both) == {"embed_tokens.weight"}
    assert not both.transformer.embed_tokens.weight[65:].any()


class Wrapped(Block):
    """Puts something else in the place of a part that it has built, and does without the attention."""

    def __init__(self, config, layer, seed):
        super().__init__(config, layer, seed)
        self.mlp = nn.Sequential(self.mlp)
        del self.self_attn

    def add_branches(self, x, context):
        return x + self.mlp(x)


def test_a_block_without_the_usual_parts_is_redrawn_where_it_can_be():
    assert redrawn(module(block=f"{HERE}.Wrapped")) == {"embed_tokens.weight"}

"""The mixture of experts against its formula, token by token."""

import pytest
import torch
from torch import nn

from lightning_llm import LanguageModel
from lightning_llm.model.experts import MixtureOfExperts
from tests.model.made import built, config, with_arguments


@pytest.mark.parametrize("top_k", [1, 3])
def test_experts_are_a_weighted_sum_of_the_chosen(top_k):
    experts = built("mlp", mlp=with_arguments("mixture_of_experts", num_experts=5, top_k=top_k, z_loss=0.1))
    assert isinstance(experts, MixtureOfExperts)
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    expected, counts, z = torch.zeros_like(x), torch.zeros(5), experts.router(x)
    for row, place in torch.cartesian_prod(torch.arange(3), torch.arange(7)):
        weights, chosen = z[row, place].softmax(-1).topk(top_k)
        for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
            expected[row, place] += weight * experts.experts[expert](x[row, place])
            counts[expert] += 1
    torch.testing.assert_close(experts(x), expected)
    balance = 5 * (counts / counts.sum() * z.softmax(-1).mean((0, 1))).sum()
    drift = z.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(experts.auxiliary_loss, 0.01 * balance + 0.1 * drift)
    assert not experts(x[:, :0]).numel()


def test_balanced_experts_have_a_balance_of_one_and_unused_ones_get_gradients_of_zero():
    experts = built("mlp", mlp=with_arguments("mixture_of_experts", num_experts=4, top_k=1, load_balancing=1, z_loss=0))
    nn.init.zeros_(experts.router.weight)
    experts(torch.randn(3, 8, 24, dtype=torch.float64)).sum().backward()
    assert experts.auxiliary_loss.item() == pytest.approx(1)
    assert sum(bool(expert.up_proj.weight.grad.any()) for expert in experts.experts) == 1


def test_the_auxiliary_loss_is_added_in_training_only():
    model = LanguageModel(config(mlp=with_arguments("mixture_of_experts", num_experts=4, load_balancing=2.0)))
    model.seed = 0
    model.configure_model()
    ids = torch.randint(61, (2, 9))
    batch = {"input_ids": ids, "targets": ids}
    plain = model.cross_entropy(batch)
    with_added = model.loss(batch)
    left = [layer.mlp.auxiliary_loss for layer in model.transformer.layers]
    torch.testing.assert_close(with_added, plain + sum(left))
    torch.testing.assert_close(model.eval().loss(batch), plain)

"""Norms against their formulas in float64."""

import torch
from torch import nn

from lightning_llm.model.norm import DynamicTanh


def test_dynamic_tanh_is_its_formula_and_starts_as_the_paper_says():
    norm = DynamicTanh(7, eps=1e-5, alpha=0.8)
    assert [norm.alpha.tolist(), norm.weight.tolist(), norm.bias.tolist()] == [[0.800000011920929], 7 * [1], 7 * [0]]
    for parameter in norm.double().parameters():
        nn.init.normal_(parameter)
    x, dy = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True), torch.randn(2, 5, 7, dtype=torch.float64)
    inner = (2 * norm.alpha * x).exp()
    expected = (inner - 1) / (inner + 1) * norm.weight + norm.bias
    got, inputs = norm(x), [x, *norm.parameters()]
    torch.testing.assert_close(got, expected)
    ours, theirs = (torch.autograd.grad(out, inputs, dy) for out in (got, expected))
    torch.testing.assert_close(ours, theirs)

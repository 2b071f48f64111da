"""Blocks against their formulas."""

import pytest
import torch
from torch.nn import functional as F

from lightning_llm import Transformer
from lightning_llm.measure import MemoryMeter
from tests.model.made import built, config, context_of


def test_blocks_join_their_branches_as_their_papers_say():
    x, context = torch.randn(2, 7, 24, dtype=torch.float64), context_of(7)

    def normed(weight, x):
        return F.rms_norm(x, (24,), weight, 1e-5)

    for name in ("pre", "post", "sandwich"):
        block = built("block", block=name)
        norms = {each: module.weight for each, module in block.named_children() if "norm" in each}
        if name == "post":
            first, second = norms.values()
            expected = normed(first, x + block.self_attn(x, context))
            expected = normed(second, expected + block.mlp(expected))
        elif name == "pre":
            first, second = norms.values()
            expected = x + block.self_attn(normed(first, x), context)
            expected = expected + block.mlp(normed(second, expected))
        else:
            first, second, third, fourth = norms.values()
            expected = x + normed(second, block.self_attn(normed(first, x), context))
            expected = expected + normed(fourth, block.mlp(normed(third, expected)))
        torch.testing.assert_close(block(x, context), expected)


@pytest.mark.parametrize("recompute", ["mlp", "attention", "block"])
@pytest.mark.parametrize("block", ["post", "sandwich"])
def test_blocks_recompute(block, recompute):
    found = []
    for part in ("none", recompute):
        model = Transformer(config(block=block, recompute=part), seed=0).double()
        ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
        with MemoryMeter(exclude=[model, ids]) as meter:
            hidden = model(ids)
            saved = meter.live_bytes
        found.append((saved, torch.autograd.grad(hidden.square().sum(), model.layers.parameters())))
    assert found[1][0] < found[0][0]
    torch.testing.assert_close(found[1][1], found[0][1])

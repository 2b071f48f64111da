"""The CPU form of short attention against float64, judged by the error of the plain form in the same dtype."""

import pytest
import torch

from lightning_llm.ops.attention import causal_attention
from tests.ops.judged import DTYPES, assert_as_good_as_plain


def plain_attention(query, key, value):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    seq = query.shape[-2]
    mask = torch.full((seq, seq), float("-inf"), dtype=query.dtype).triu(1)
    return (query @ key.mT * query.shape[-1] ** -0.5 + mask).softmax(-1) @ value


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 2, 64, 32), (1, 3, 3, 77, 10), (5, 2, 1, 1, 8)])
def test_attention(dtype, shape):
    batch, heads, kv_heads, seq, head_dim = shape
    torch.manual_seed(0)
    inputs = [torch.randn(batch, n, seq, head_dim, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    assert_as_good_as_plain(causal_attention, plain_attention, inputs, dtype)


def test_gradients_of_attention_by_finite_differences():
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, 5, 4, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    assert torch.autograd.gradcheck(causal_attention, inputs)


def test_attention_loses_no_penalty_on_its_gradients():
    heads = torch.randn(1, 2, 5, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(causal_attention(heads, heads, heads).sum(), heads, create_graph=True)

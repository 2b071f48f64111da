"""The CPU forms of attention and RMSNorm against float64, judged by the error of the plain form in the same dtype."""

import pytest
import torch
from torch.nn import functional as F

from lightning_llm.ops import sizes
from lightning_llm.ops.attention import causal_attention
from lightning_llm.ops.norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16]


def plain_attention(query, key, value):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    seq = query.shape[-2]
    mask = torch.full((seq, seq), float("-inf"), dtype=query.dtype).triu(1)
    return (query @ key.mT * query.shape[-1] ** -0.5 + mask).softmax(-1) @ value


def plain_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def with_gradients(function, inputs, dtype):
    inputs = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    out = function(*inputs)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, dtype=torch.float64).to(dtype))
    return [out.detach(), *(x.grad for x in inputs)]


def assert_as_good_as_plain(ours, plain, inputs, dtype):
    inputs = [x.to(dtype).double() for x in inputs]  # the truth starts from the same rounded inputs
    truth = with_gradients(plain, inputs, torch.float64)
    our_results, plain_results = with_gradients(ours, inputs, dtype), with_gradients(plain, inputs, dtype)
    for got, reference, true in zip(our_results, plain_results, truth, strict=True):
        assert got.dtype == dtype
        assert (got.double() - true).norm() <= 2 * (reference.double() - true).norm()


@pytest.fixture(params=["blocks", "at once"])
def blocks(request, monkeypatch):
    """Several blocks of queries, heads and rows; or all at once, as such small shapes are."""
    if request.param == "blocks":
        monkeypatch.setattr(sizes, "ATTENTION_ROWS", 30)
        monkeypatch.setattr(sizes, "ATTENTION_BYTES", 30 * 77 * 8)
        monkeypatch.setattr(sizes, "NORM_BYTES", {"cpu": 2000})


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 2, 64, 32), (1, 3, 3, 77, 10), (5, 2, 1, 1, 8)])
def test_attention(dtype, shape):
    batch, heads, kv_heads, seq, head_dim = shape
    torch.manual_seed(0)
    inputs = [torch.randn(batch, n, seq, head_dim, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    assert_as_good_as_plain(causal_attention, plain_attention, inputs, dtype)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 123, 77), (64, 128), (1, 1)])
def test_norm(dtype, shape):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)]
    assert_as_good_as_plain(lambda x, w: rms_norm(x, w, 1e-6), plain_norm, inputs, dtype)


def test_gradients_by_finite_differences():
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, 5, 4, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    assert torch.autograd.gradcheck(causal_attention, inputs)
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 7), (7,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (x, weight))


def test_norm_gives_autocasts_dtype():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32


def test_a_frozen_weight_gets_no_gradient():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is None
    assert x.grad is not None


def test_neither_loses_a_penalty_on_its_gradients():
    """The incoming gradient of a sum is a constant, which torch's own decorator does not notice."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    heads = torch.randn(1, 2, 5, 4, requires_grad=True)
    for out, given in ((rms_norm(x, weight, 1e-5), x), (causal_attention(heads, heads, heads), heads)):
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(out.sum(), given, create_graph=True)

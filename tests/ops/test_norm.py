"""RMSNorm against float64, judged by the error of the plain form in the same dtype."""

import pytest
import torch
from torch.nn import functional as F

from lightning_llm.ops import norm
from lightning_llm.ops.norm import rms_norm
from tests.conftest import needs_cuda
from tests.ops.judged import DTYPES, assert_as_good_as_plain


def plain_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 123, 77), (64, 128), (1, 1)])
def test_norm(dtype, shape):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)]
    assert_as_good_as_plain(lambda x, w: rms_norm(x, w, 1e-6), plain_norm, inputs, dtype)


def test_gradients_of_norm_by_finite_differences():
    torch.manual_seed(0)
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


def test_norm_loses_no_penalty_on_its_gradients():
    """The incoming gradient of a sum is a constant, which torch's own decorator does not notice."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(rms_norm(x, weight, 1e-5).sum(), x, create_graph=True)


PAIRS = {
    "queries and keys under bf16-mixed": (torch.bfloat16, torch.float32),
    "the residual stream under FSDP2 with bf16-mixed": (torch.bfloat16, torch.bfloat16),
    "the residual stream under bf16-mixed": (torch.float32, torch.float32),
}


@pytest.mark.parametrize("name", PAIRS)
def test_cudas_kernel_gets_input_and_weight_as_they_are(fake_cuda, monkeypatch, name):
    """Under autocast it would save a float32 copy of its input; with another dtype, the weight would be rounded."""
    dtype, weight_dtype = PAIRS[name]
    calls = []
    monkeypatch.setattr(
        F, "rms_norm", lambda *args: calls.append((*args, torch.is_autocast_enabled("cuda"))) or args[0]
    )
    monkeypatch.setattr(norm, "rms_norm_function", lambda x, weight, eps, dtype, save_scale: x.to(dtype))
    with fake_cuda(autocast=torch.bfloat16):
        x, weight = (torch.empty(s, device="cuda", dtype=d) for s, d in (((50, 8), dtype), ((8,), weight_dtype)))
        out = rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    if dtype == weight_dtype:
        given, _, given_weight, _, is_cast = calls[0]
        assert given is x
        assert given_weight is weight
        assert not is_cast
    else:
        assert not calls


def saved_bytes(function, *inputs):
    """The output, and the bytes of the storages that autograd saves."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = function(*inputs)
    return out, sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}.values())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", PAIRS)
def test_a_norm_under_autocast_saves_its_input_as_it_is(name, device):
    dtype, weight_dtype = PAIRS[name]
    torch.manual_seed(0)
    x = torch.randn(64, 128, device=device).to(dtype).requires_grad_()
    weight = (1 + torch.randn(128, device=device) / 8).to(weight_dtype).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        out, saved = saved_bytes(lambda x, weight: rms_norm(x, weight, 1e-6), x, weight)
    assert saved == x.nbytes + weight.nbytes + 4 * len(x)
    dy = torch.randn_like(out)
    out.backward(dy)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = plain_norm(*wide)
    truth.backward(dy.double())
    pairs = [(out, truth), *((t.grad, w.grad) for t, w in zip((x, weight), wide, strict=True))]
    for got, true in pairs:  # nothing but the result is rounded
        rounding = (true.to(got.dtype).double() - true).norm()
        assert (got.double() - true).norm() <= 1.1 * rounding + 1e-5 * true.norm()

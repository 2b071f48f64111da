import math

import pytest
import torch
from torch import nn

from lightning_llm.optim import clip_grad_norm_

SHAPES = [(5,), (123, 77), (1,), (5, 3, 7)]


def with_gradients(dtype=torch.float32, shapes=SHAPES, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(dtype)
    return params


def norm64(params):
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in params))


def test_only_copies_from_cuda_are_not_waited_for(monkeypatch):
    asked, to = [], torch.Tensor.to

    def spy(self, *args, non_blocking=False, **options):
        asked.append(non_blocking)
        return to(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    clip_grad_norm_(with_gradients(), 0.5)
    assert asked
    assert not any(asked)  # to the host from MPS, the numbers would not be there yet


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_and_scaled_gradients_are_as_exact_as_torchs(dtype):
    ours, theirs = with_gradients(dtype), with_gradients(dtype)
    expected = norm64(ours)
    scaled = [param.grad.double() * 0.5 / (expected + 1e-6) for param in ours]
    norm = clip_grad_norm_(ours, 0.5)
    their_norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    assert norm.shape == ()
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # One rounding of the result is what any implementation has, and torch's may be right by luck.
    rounding = torch.finfo(norm.dtype).eps * expected
    assert abs(norm.item() - expected) <= 2 * max(abs(their_norm.item() - expected), rounding)

    def error(params):
        return sum((p.grad.double() - s).square().sum().item() for p, s in zip(params, scaled, strict=True)) ** 0.5

    assert error(ours) <= 2 * error(theirs)


def test_hand_countable():
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    params[0].grad, params[1].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    assert clip_grad_norm_(params, 4.0, eps=1.0) == 7.0
    assert [param.grad.tolist() for param in params] == [[1.0, 1.5], [3.0]]


def test_eps_keeps_the_norm_below_the_maximum():
    params = with_gradients(scale=1e3)
    clip_grad_norm_(params, 1.0)
    assert 0.999 < norm64(params) < 1.0


@pytest.mark.parametrize("excess", [1.0, 1.0000001, math.inf])
def test_gradients_at_or_below_the_maximum_are_untouched(excess):
    params = [nn.Parameter(torch.zeros(2))]
    params[0].grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(params, 5.0 * excess) == 5.0
    assert params[0].grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_a_factor_multiplies_the_gradients_before_they_are_clipped(max_norm, factor):
    ours, theirs = with_gradients(torch.float64), with_gradients(torch.float64)
    for param in theirs:
        param.grad *= factor
    norm = clip_grad_norm_(ours, max_norm, factor=torch.tensor(factor))
    torch.testing.assert_close(norm, clip_grad_norm_(theirs, max_norm), rtol=1e-14, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-14, atol=0)


def test_a_factor_of_one_costs_no_pass_over_the_gradients(monkeypatch):
    def refused(*_):
        raise AssertionError("multiplied")

    monkeypatch.setattr(torch, "_foreach_mul_", refused)
    clip_grad_norm_(with_gradients(), math.inf, factor=torch.tensor(1.0, dtype=torch.float64))


def test_iterators_single_tensors_and_missing_gradients():
    params = with_gradients()
    params[1].grad = None
    expected = norm64(params[:1] + params[2:])
    assert clip_grad_norm_(iter(params), math.inf).item() == pytest.approx(expected, rel=1e-6)
    assert clip_grad_norm_(params[0], 1e-3).item() == pytest.approx(norm64(with_gradients()[:1]), rel=1e-6)
    assert norm64(params[:1]) < 1e-3
    for nothing in ([], [params[1]], params[1]):
        assert clip_grad_norm_(nothing, 1.0) == 0.0


def test_dtypes_share_one_norm():
    dtypes = (torch.bfloat16, torch.float64, torch.float32)
    mixed = [param for dtype in dtypes for param in with_gradients(dtype, shapes=[(9, 9)])]
    expected = norm64(mixed)
    assert clip_grad_norm_(mixed, expected / 2).item() == pytest.approx(expected, rel=1e-6)
    assert norm64(mixed) == pytest.approx(expected / 2, rel=2**-8)  # a bfloat16 keeps 8 bits
    assert [param.grad.dtype for param in mixed] == list(dtypes)


def test_a_norm_that_is_no_number_changes_nothing():
    params = with_gradients(shapes=[(2,)])
    params[0].grad = torch.tensor([math.nan, 4.0])
    assert clip_grad_norm_(params, 1.0).isnan()
    assert params[0].grad[1] == 4.0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_bad_maximum(max_norm):
    with pytest.raises(ValueError, match=f"max_norm must be above 0, got {max_norm}: use inf"):
        clip_grad_norm_(with_gradients(), max_norm)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_nothing_waits_for_the_device(max_norm):
    params = [nn.Parameter(param.detach().cuda()) for param in with_gradients()]
    for param in params:
        param.grad = torch.ones_like(param)
    try:
        torch.cuda.set_sync_debug_mode("error")
        norm = clip_grad_norm_(params, max_norm)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(sum(param.numel() for param in params) ** 0.5, rel=1e-6)

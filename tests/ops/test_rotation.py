"""The rotation of queries and keys: values, gradients of any order, and memory."""

import pytest
import torch

from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.ops.rotation import rotate_halves
from tests.conftest import needs_cuda


def written_out(x, cos, sin):
    left, right, rest = x[..., :3], x[..., 3:6], x[..., 6:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)


def angles(seq, half, dtype=torch.float64):
    turned = torch.arange(seq).unsqueeze(-1) / torch.arange(1.0, half + 1)
    return turned.cos().to(dtype), turned.sin().to(dtype)


@pytest.mark.parametrize("size", [6, 8])
def test_it_is_the_rotation_written_out(size):
    x = torch.randn(2, 5, 4, size, dtype=torch.float64).transpose(1, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate_halves(x, *angles(5, 3)), x)
    assert torch.autograd.gradgradcheck(lambda x: rotate_halves(x, *angles(5, 3)), x)
    torch.testing.assert_close(rotate_halves(x, *angles(5, 3)), written_out(x, *angles(5, 3)))


def test_a_step_makes_its_result_and_its_gradient_and_nothing_else():
    x, cos_sin = torch.randn(2, 4, 64, 32, requires_grad=True), angles(64, 16, torch.float32)
    d_out = torch.ones(2, 4, 64, 32)
    with MemoryMeter(exclude=[x, *cos_sin, d_out]) as meter:
        rotate_halves(x, *cos_sin).backward(d_out)
    assert meter.peak_bytes == 2 * x.nbytes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_on_cuda_the_layout_of_the_heads_stays(device):
    x = torch.ones(2, 5, 4, 6, device=device).transpose(1, 2)  # (batch, heads, seq, size), as attention has it
    out = rotate_halves(x, *(each.to(device, x.dtype) for each in angles(5, 3)))
    assert out.is_contiguous() is (device == "cpu")
    assert device == "cpu" or out.stride() == x.stride()

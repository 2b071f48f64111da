"""The rotation of queries and keys: values, gradients of any order, and memory."""

import pytest
import torch

from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.ops.rotation import rotate_halves


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


def test_on_cuda_the_layout_of_the_heads_stays(fake_cuda):
    with fake_cuda():
        x = torch.empty(2, 5, 4, 6, device="cuda").transpose(1, 2)  # (batch, heads, seq, size), as attention has it
        cos = torch.empty(5, 3, device="cuda")
        assert rotate_halves(x, cos, cos).stride() == x.stride()
        assert rotate_halves(x.cpu(), cos.cpu(), cos.cpu()).is_contiguous()

"""The memory-optimized SwiGLU never needs more memory than plain linear layers, however few the tokens."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_llm import MemoryOptimizedSwiGLU, SwiGLU
from lightning_llm.measure import MemoryMeter
from lightning_llm.model.norm import RMSNorm

PRECISIONS = {
    "float32": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
}


def peak(mlp, *, tokens, hidden, autocast, accumulates, with_norm=True):
    """Of forward and backward, beyond the parameters, the input and the gradient of the output."""
    dtype = mlp.gate_proj.weight.dtype
    norm = RMSNorm(hidden, eps=1e-5, dtype=dtype)
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    held = [*mlp.parameters(), *norm.parameters(), x, torch.ones(tokens, hidden, dtype=autocast or dtype)]
    dy = held[-1]
    if accumulates:
        for tensor in held[:-1]:
            tensor.grad = torch.zeros_like(tensor)
            held.append(tensor.grad)
    with MemoryMeter(held) as meter:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            takes_norm = getattr(mlp, "checkpoint_level", 0) == 2
            y = mlp(x, norm) if takes_norm else mlp(norm(x) if with_norm else x)
        y.backward(dy)
    return meter.peak_bytes


def check(hidden, width, tokens, precision, *, accumulates=False):
    dtype, autocast = PRECISIONS[precision]
    options = {"tokens": tokens, "hidden": hidden, "autocast": autocast, "accumulates": accumulates}
    for with_norm in (False, True):
        plain = peak(SwiGLU(hidden, width, dtype=dtype), **options, with_norm=with_norm)
        for level in (0, 1, 2) if with_norm else (0, 1):
            ours = peak(MemoryOptimizedSwiGLU(hidden, width, level, dtype=dtype), **options, with_norm=with_norm)
            assert ours <= plain, (hidden, width, tokens, precision, level, with_norm, accumulates)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(256, 704, 64), (128, 384, 200), (96, 32, 256)])
def test_peak_is_at_most_the_plain_ones(shape, precision):
    check(*shape, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(1024, 4096, 512), (1024, 4096, 1024), (1024, 2752, 768), (2048, 5504, 2048)])
def test_peak_of_wide_layers_is_at_most_the_plain_ones(shape, precision):
    with FakeTensorMode():
        check(*shape, precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "precision", "accumulates"),
    [  # the smallest and the widest, of few tokens and many
        ((32, 96), "float32", True),
        ((32, 96), "bf16-mixed", False),
        ((96, 32), "bf16-true", True),
        ((2048, 5504), "float32", False),
        ((2048, 5504), "bf16-mixed", True),
        ((2048, 5504), "bf16-true", False),
    ],
)
def test_peak_over_shapes(width, precision, accumulates):
    for tokens in (64, 100, 200, 384, 512, 640, 768, 1000, 1024, 1536, 2048):
        with FakeTensorMode():
            check(*width, tokens, precision, accumulates=accumulates)


def test_with_few_tokens_accumulated_gradients_are_added_to_one_by_one():
    """Three new gradients at once are less than the peak."""
    options = {"tokens": 16, "hidden": 64, "autocast": None, "accumulates": True}
    for level in (0, 1, 2):
        ours = peak(MemoryOptimizedSwiGLU(64, 256, level), **options)
        assert ours < 3 * 64 * 256 * 4

"""Sums of matmuls in float32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm.ops.dispatch import matmul_into
from tests.conftest import needs_cuda


class Operators(TorchDispatchMode):
    """Notes each operator and the dtypes of the tensors that it is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append((str(function), [x.dtype for x in args if isinstance(x, torch.Tensor)]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_the_matmul_gives_float32(fake_cuda, accumulate, dtype):
    with fake_cuda():
        left, right = (torch.empty(shape, device="cuda", dtype=dtype) for shape in ((5, 7), (7, 3)))
        out = torch.empty(5, 3, device="cuda")
        with Operators() as operators:
            matmul_into(out, left, right, accumulate=accumulate)
    matmuls = [name for name, _ in operators.seen if "mm" in name]
    assert matmuls == ["aten.mm.dtype" if accumulate else "aten.mm.dtype_out"]
    assert not any("copy" in name for name, _ in operators.seen)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matmuls_and_sums(device, accumulate, dtype):
    """On CUDA nothing is rounded to the dtype of the factors; into a part of a wider matrix, too."""
    torch.manual_seed(0)
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((50, 70), (70, 30)))
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.ones(50, 64, device=device, dtype=wide)
    matmul_into(out[:, 3:33], left, right, accumulate=accumulate)
    true = left.double() @ right.double() + accumulate
    rounding = 8 * torch.finfo(wide if device == "cuda" else dtype).eps
    assert (out[:, 3:33] - true).abs().max() <= rounding * true.abs().max()
    assert out[:, :3].eq(1).all()
    assert out[:, 33:].eq(1).all()

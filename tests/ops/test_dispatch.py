"""Sums of matmuls in float32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm.ops import dispatch
from lightning_llm.ops.dispatch import adds_in_matmul, matmul_into
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


@pytest.fixture
def wide_matmuls(monkeypatch):
    """Matmuls into a wider dtype on a CPU, which has none; ``wide_matmuls(rounding)`` rounds those that add."""

    def product(left, right, dtype):
        return left.to(dtype) @ right.to(dtype)

    def make(rounding=None):
        def added(total, left, right, dtype, *, out):
            if rounding is Exception:
                raise RuntimeError("not implemented")
            result = product(left, right, dtype)
            return out.copy_(total + (result if rounding is None else result.to(rounding)))

        monkeypatch.setattr(torch, "mm", product)
        monkeypatch.setattr(torch, "addmm", added)

    adds_in_matmul.cache_clear()
    yield make
    adds_in_matmul.cache_clear()


@pytest.mark.parametrize(("rounding", "expected"), [(None, True), (torch.bfloat16, False), (Exception, False)])
def test_a_matmul_adds_only_where_it_has_the_bits_of_an_addition(wide_matmuls, rounding, expected):
    wide_matmuls(rounding)
    before = torch.get_rng_state()
    assert adds_in_matmul(torch.bfloat16, torch.device("cpu")) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_on_cuda_later_products_are_added_inside_the_matmul(fake_cuda, monkeypatch):
    seen = []
    monkeypatch.setattr(dispatch, "_has_values", lambda: True)
    monkeypatch.setattr(torch, "addmm", lambda total, *_, out: seen.append(total is out))
    for adds in (True, False):
        monkeypatch.setattr(dispatch, "adds_in_matmul", lambda *_, adds=adds: adds)
        with fake_cuda():
            left, right = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((5, 7), (7, 3)))
            for accumulate in (True, False):
                matmul_into(torch.empty(5, 3, device="cuda"), left, right, accumulate=accumulate)
    assert seen == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(896, 768, 50257), (4096, 2048, 50304), (100, 72, 136)])
def test_on_a_gpu_sums_have_the_same_bits_however_they_are_added(monkeypatch, dtype, shape):
    """With the layouts of the head's gradient, (vocab, hidden) from (rows, vocab) and (rows, hidden)."""
    rows, hidden, vocab = shape
    torch.manual_seed(0)
    logits, h = (torch.randn(rows, width, device="cuda", dtype=dtype) for width in (64 * -(-vocab // 64), hidden))
    start, found = torch.randn(vocab, hidden, device="cuda"), []
    for adds in (adds_in_matmul, lambda *_: False):
        monkeypatch.setattr(dispatch, "adds_in_matmul", adds)
        total = start.clone()
        matmul_into(total, logits[:, :vocab].t(), h, accumulate=True)
        found.append(total)
    assert torch.equal(*found)


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

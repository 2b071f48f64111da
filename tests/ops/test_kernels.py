"""The Triton kernels through the interpreter, in a process of its own: it decides when Triton is imported."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the interpreter comes with Triton")

SCRIPT = """
import torch
from test_swiglu import assert_as_good_as_plain as judge_mlp, make_inputs as mlp_inputs, optimised
from test_losses import assert_as_good_as_plain as judge_loss, make_inputs as loss_inputs, ours, plain
from lightning_llm.ops import kernels
from lightning_llm.ops.conventions import kernels_for

kernels.ROW_BLOCK = kernels.VOCAB_BLOCK = 32  # several blocks and a rest in each row
assert kernels_for(torch.empty(1)) is kernels
assert kernels_for(torch.empty(1, dtype=torch.float64)) is None

for dtype in (torch.float32, torch.float16):  # the interpreter cuts float32 off to bf16 where a GPU rounds
    for level in (0, 1):
        judge_mlp(optimised(level, num_chunks=2), mlp_inputs((5, 23, 77), with_norm=False), dtype)
    for options in ({}, {"reduction": "none", "z_loss": 0.1}, {"reduction": "sum", "num_chunks": 3}):
        judge_loss(*loss_inputs((5, 23, 77)), dtype, **options)

assert optimised(1)(*mlp_inputs((5, 23, 77), with_norm=False, dtype=torch.bfloat16)).dtype == torch.bfloat16
inputs, targets = loss_inputs((4, 8, 5), torch.float32)  # vocabulary below a block; no bias; no gradients
inputs = [t.detach() * 30 for t in inputs]
torch.testing.assert_close(ours(*inputs, targets), plain(*inputs, targets))
torch.testing.assert_close(ours(*inputs[:2], None, targets), plain(*inputs[:2], None, targets))
for wrong in (-1, 5, 99):
    z, losses = torch.zeros(3, 8)[:, :5], torch.empty(3)
    z.untyped_storage().fill_(0)
    kernels.losses_of_rows(z, None, torch.tensor([0, wrong, 4]), None, 0.0, losses)
    assert losses.isnan().tolist() == [False, True, False], (wrong, losses)
print("kernels agree")
"""


def test_kernels_agree_with_the_plain_forms():
    here = os.path.dirname(__file__)
    root = os.path.dirname(os.path.dirname(here))
    path = os.pathsep.join([root, here, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "kernels agree"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_on_a_gpu(dtype):
    from lightning_llm.ops import kernels

    torch.manual_seed(0)
    g, u, da = (torch.randn(130, 5000, device="cuda", dtype=dtype)[:, 3:4099] for _ in range(3))
    out, scratch = torch.empty_like(g), torch.empty_like(g)
    wide = [t.double().requires_grad_() for t in (g, u)]
    a = torch.nn.functional.silu(wide[0]) * wide[1]
    d_g, d_u = torch.autograd.grad(a, wide, da.double())
    kernels.gate_backward(g, u, da, out, scratch)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    for got, true in ((out, a), (scratch, d_g), (da, d_u)):
        torch.testing.assert_close(got.double(), true, **tolerance)
    z, index = torch.randn(20, 50257, device="cuda", dtype=dtype), torch.randint(0, 50257, (20,), device="cuda")
    logits, losses = z.double().requires_grad_(), torch.empty(20, device="cuda")
    truth = torch.nn.functional.cross_entropy(logits, index, reduction="none")
    kernels.losses_of_rows(z, None, index, torch.ones(20, device="cuda"), 0.0, losses)
    torch.testing.assert_close(losses.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z.double(), torch.autograd.grad(truth.sum(), logits)[0], **tolerance)

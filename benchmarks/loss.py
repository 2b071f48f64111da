"""``python -m benchmarks loss``: memory and time of head and cross-entropy together.

Variants: plain (all logits, then torch's cross-entropy), torch's own ``linear_cross_entropy``, Liger-Kernel's fused one
where it is installed and there is CUDA, and ours. torch's own hides its chunks from the operator-level meter, so every
variant also runs in a process of its own, and its resident high-water is reported too.
"""

import gc
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Bench, Case, Request, measure
from benchmarks.rows import COLUMNS, Row, columns
from benchmarks.workloads import ShapeSizes
from lightning_llm.measure.gauges import high_water_bytes, restart_high_water
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.same.processes import in_fresh_processes

CHUNKS = (4, 64)


def run(request: Request) -> Iterator[Row]:
    """A row for each variant."""
    dtype = getattr(torch, request.dtype)
    for row in measure(cases(request.sizes, dtype, request.device), request, tokens=request.sizes["tokens"]):
        if request.device == "cpu":
            row.resident_bytes = added_resident_bytes(row.variant, request.sizes, dtype)
        yield row


def cases(sizes: ShapeSizes, dtype: torch.dtype, device: str) -> dict[str, Case]:
    """The variants, all with the same hidden states, weight and targets."""
    tokens, hidden, vocab = sizes.values()
    torch.manual_seed(0)
    h = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, hidden, device=device) * hidden**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    losses: dict[str, Any] = {"plain": _plain, "ours": linear_cross_entropy}
    losses |= {f"ours, {n} chunks": partial(linear_cross_entropy, num_chunks=n) for n in CHUNKS}
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 or later
        losses["torch"] = partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
    if device == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        losses["liger"] = lambda *inputs: LigerFusedLinearCrossEntropyFunction.apply(*inputs)[0]
    inputs = [h, weight, targets]
    return {name: Case(forward=partial(loss, *inputs), held=inputs) for name, loss in losses.items()}


def added_resident_bytes(variant: str, sizes: ShapeSizes, dtype: torch.dtype) -> int:
    """The resident high-water that one step adds to a fresh process that holds the inputs already."""
    return in_fresh_processes(_resident, [(variant, sizes, dtype)], name=variant)[0]


def _resident(job: tuple[str, ShapeSizes, torch.dtype]) -> int:
    variant, sizes, dtype = job
    case = cases(sizes, dtype, "cpu")[variant]
    small = cases({**sizes, "tokens": 64, "vocab": 128}, dtype, "cpu")[variant]
    small.step()  # libraries load and make their workspaces
    gc.collect()
    before = restart_high_water()
    case.step()
    return high_water_bytes() - before


def _plain(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, weight).float(), targets)


BENCH = Bench(
    run=run,
    shapes=["4096x768x50257"],
    sizes=("tokens", "hidden", "vocab"),
    named_shapes={"llama-3-8b": ["4096x4096x128256"]},
    columns={**COLUMNS, **columns("resident MiB")},
    files=("lightning_llm/ops/losses.py", "lightning_llm/ops/loss_chunks.py"),
)

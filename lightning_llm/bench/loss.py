"""``lightning-llm bench loss``: memory and time of head and cross-entropy together.

Variants: plain (all logits, then torch's cross-entropy), torch's own ``linear_cross_entropy``, Liger-Kernel's fused one
where it is installed and there is CUDA, and ours. torch's own hides its chunks from the operator-level meter, so every
variant is also run in a process of its own, whose resident high-water is reported beside it.
"""

import dataclasses
import multiprocessing
import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_llm.bench.harness import Case, Row, measure
from lightning_llm.ops.losses import linear_cross_entropy

SHAPES = {"llama-3-8b": ["4096x4096x128256"]}  # named sets: tokens x hidden x vocab
DEFAULT_SHAPES = ["4096x768x50257"]
CHUNKS = (4, 64)


def parse_shape(text: str) -> tuple[int, int, int]:
    """``4096x768x50257``: tokens, hidden, vocab."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"shapes {text!r} is not TOKENSxHIDDENxVOCAB, such as {DEFAULT_SHAPES[0]}, nor one of {', '.join(SHAPES)}"
        )
    tokens, hidden, vocab = map(int, parts)
    return tokens, hidden, vocab


def run(
    *, device: str, dtypes: list[torch.dtype], shapes: list[str], rounds: int, budget_s: float | None
) -> Iterator[Row]:
    """Rows for every shape and dtype; a budget is shared evenly."""
    parsed = [parse_shape(text) for text in shapes]
    share = None if budget_s is None else budget_s / (len(parsed) * len(dtypes))
    for text, shape in zip(shapes, parsed, strict=True):
        for dtype in dtypes:
            rows = measure(
                "loss",
                cases(shape, dtype, device),
                shape=text,
                dtype=dtype,
                device=device,
                tokens=shape[0],
                rounds=rounds,
                budget_s=share,
            )
            for row in rows:
                resident = None if device != "cpu" else resident_bytes(row.variant, shape, dtype)
                yield dataclasses.replace(row, resident_bytes=resident)


def cases(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> dict[str, Case]:
    """The variants, all with the same hidden states, weight and targets."""
    tokens, hidden, vocab = shape
    torch.manual_seed(0)
    h = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, hidden, device=device) * hidden**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)

    def case(loss: Any) -> Case:
        return Case(forward=lambda: loss(h, weight, targets), held=[h, weight, targets])

    found = {"plain": case(_plain), "ours": case(linear_cross_entropy)}
    for chunks in CHUNKS:
        found[f"ours, {chunks} chunks"] = case(
            lambda h, w, t, chunks=chunks: linear_cross_entropy(h, w, t, num_chunks=chunks)
        )
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 or later
        found["torch"] = case(_of_torch)
    if device == "cuda" and (liger := _liger()) is not None:
        found["liger"] = case(lambda h, w, t: liger.apply(h, w, t)[0])
    return found


def resident_bytes(variant: str, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """The resident high-water that one step adds to a fresh process that holds the inputs already."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_resident, (variant, shape, dtype))


def _resident(variant: str, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    case = cases(shape, dtype, "cpu")[variant]
    small = cases((64, shape[1], 128), dtype, "cpu")[variant]
    small.step()  # libraries load and make their workspaces
    before = _high_water()
    case.step()
    return _high_water() - before


def _high_water() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB


def _plain(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, weight).float(), targets)


def _of_torch(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = F.linear_cross_entropy(h, weight, targets, options=options)
    return loss


def _liger() -> Any | None:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyFunction

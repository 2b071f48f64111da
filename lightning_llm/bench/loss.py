"""``lightning-llm bench loss``: memory and time of head and cross-entropy together.

Variants: plain (all logits, then torch's cross-entropy), torch's own ``linear_cross_entropy``, Liger-Kernel's fused one
where it is installed and there is CUDA, and ours. torch's own hides its chunks from the operator-level meter, so every
variant is also run in a process of its own, whose resident high-water is reported beside it.
"""

import dataclasses
import gc
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_llm.bench.harness import Case, Request, Row, chosen, measure
from lightning_llm.measure.resident import high_water_bytes, restart_high_water
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


def run(asked: Request) -> Iterator[Row]:
    """Rows for every shape and dtype; a budget is shared evenly."""
    parsed = [parse_shape(text) for text in asked.shapes]
    share = None if asked.budget_s is None else asked.budget_s / (len(parsed) * len(asked.dtypes))
    for text, shape in zip(asked.shapes, parsed, strict=True):
        for dtype in asked.dtypes:
            rows = measure(
                "loss",
                chosen(cases(shape, dtype, asked.device), asked.variants),
                shape=text,
                dtype=dtype,
                device=asked.device,
                tokens=shape[0],
                rounds=asked.rounds,
                budget_s=share,
            )
            for row in rows:
                resident = None if asked.device != "cpu" else resident_bytes(row.variant, shape, dtype)
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
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(_resident, variant, shape, dtype).result()


def _resident(variant: str, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    case = cases(shape, dtype, "cpu")[variant]
    small = cases((64, shape[1], 128), dtype, "cpu")[variant]
    small.step()  # libraries load and make their workspaces
    gc.collect()
    before = restart_high_water()
    case.step()
    return high_water_bytes() - before


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

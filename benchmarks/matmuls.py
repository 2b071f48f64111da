"""The matmuls of a training step and nothing else: the least that a step takes which multiplies by torch.

Of each linear layer three: y = x Wᵀ forward, dx = dy W and dW = dyᵀ x backward. Of causal attention six batched ones:
Q Kᵀ and P V forward, dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K and dK = dSᵀ Q backward, each with half of the keys, as half of
the pairs are masked. Results go to buffers that exist already, so that no time is spent on fresh memory.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.workloads import ShapeSizes
from lightning_llm.ops import sizes as cuts


class Matmul(NamedTuple):
    """(batch, rows, inner) times (batch, inner, columns); ``transposed`` says which factor is stored transposed."""

    batch: int
    rows: int
    inner: int
    columns: int
    transposed: str = ""


def matmuls_of(model: nn.Module, sizes: ShapeSizes, dtype: torch.dtype, *, cuts_head: bool) -> list[Matmul]:
    """Those of a step with the sizes of ``baselines``; all linear layers of the model count, the head among them.

    ``cuts_head`` says whether the logits are made a chunk at a time, as ours are.
    """
    tokens, vocab, matmuls = sizes["rows"] * sizes["context"], sizes["vocab"], []
    chunks = cuts.slices(tokens, cuts.loss_rows(tokens, vocab, dtype.itemsize, "cpu"))
    blocks = product(chunks, cuts.slices(vocab, cuts.vocab_block("cpu")))
    cut = [(rows.stop - rows.start, block.stop - block.start) for rows, block in blocks]  # of the logits
    for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
        is_cut, inner = cuts_head and layer.out_features == vocab, layer.in_features
        for rows, out in cut if is_cut else [(tokens, layer.out_features)]:
            matmuls += [Matmul(1, rows, inner, out, "right"), Matmul(1, rows, out, inner)]
            matmuls += [Matmul(1, out, rows, inner, "left")]
    batch, seq, half = sizes["rows"] * sizes["heads"], sizes["context"], max(1, sizes["context"] // 2)
    head_dim = sizes["hidden"] // sizes["heads"]
    scores = Matmul(batch, seq, head_dim, half, "right")  # Q Kᵀ and dP
    weighted = Matmul(batch, seq, half, head_dim)  # P V and dQ
    summed = Matmul(batch, half, seq, head_dim, "left")  # dV and dK
    return matmuls + [scores, weighted, scores, summed, weighted, summed] * sizes["layers"]


def matmuls_alone(model: nn.Module, sizes: ShapeSizes, dtype: torch.dtype, *, cuts_head: bool) -> Callable[[], None]:
    """A function that computes those of a step on a CPU; factors of one shape are one tensor."""
    factors: dict[tuple[int, ...], Tensor] = {}
    results: dict[tuple[int, ...], Tensor] = {}

    def factor(*shape: int, is_transposed: bool) -> Tensor:
        stored = (shape[0], shape[2], shape[1]) if is_transposed else shape
        if stored not in factors:
            factors[stored] = torch.randn(stored, dtype=dtype)
        return factors[stored].mT if is_transposed else factors[stored]

    work = []
    for batch, rows, inner, columns, transposed in matmuls_of(model, sizes, dtype, cuts_head=cuts_head):
        left = factor(batch, rows, inner, is_transposed=transposed == "left")
        right = factor(batch, inner, columns, is_transposed=transposed == "right")
        result = results.setdefault((batch, rows, columns), torch.empty(batch, rows, columns, dtype=dtype))
        work.append((torch.mm, left[0], right[0], result[0]) if batch == 1 else (torch.bmm, left, right, result))

    def run() -> None:
        with torch.no_grad():
            for multiply, left, right, result in work:
                multiply(left, right, out=result)

    return run

"""From a chunk of logits to losses and dz, one program per row: see ``ops/loss_chunks.py``.

The first pass over the row finds the maximum and the sum of exponentials together, rescaling the sum whenever the
maximum grows (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3). The second
writes dz over the logits. Everything between load and store is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    z_ptr,
    bias_ptr,
    index_ptr,
    weight_ptr,
    loss_ptr,
    z_row,
    vocab,
    z_loss,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_row
    target = tl.load(index_ptr + row)
    known = (target >= 0) & (target < vocab)  # where it is not, the loss is NaN rather than a wrong number
    target_logit = tl.load(z_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    if HAS_BIAS:
        target_logit += tl.load(bias_ptr + target, mask=known, other=0.0)

    columns = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        mask = start + columns < vocab
        z = tl.load(z_ptr + start + columns, mask=mask, other=float("-inf")).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias_ptr + start + columns, mask=mask, other=0.0)
        larger = tl.maximum(largest, tl.max(z))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger))
        largest = larger
    log_z = largest + tl.log(total)
    tl.store(loss_ptr + row, (largest - target_logit) + tl.log(total) + z_loss * log_z * log_z)

    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + row)
        factor = weight * (1.0 + 2.0 * z_loss * log_z)
        for start in range(0, vocab, BLOCK):
            mask = start + columns < vocab
            z = tl.load(z_ptr + start + columns, mask=mask, other=float("-inf")).to(tl.float32)
            if HAS_BIAS:
                z += tl.load(bias_ptr + start + columns, mask=mask, other=0.0)
            dz = factor * tl.exp(z - log_z)
            dz = tl.where(start + columns == target, dz - weight, dz)
            tl.store(z_ptr + start + columns, dz.to(z_ptr.dtype.element_ty), mask=mask)


def losses_of_rows(
    z: Tensor, bias: Tensor | None, index: Tensor, weights: Tensor | None, z_loss: float, losses: Tensor
) -> None:
    """As ``loss_chunks._losses_of_rows``, into ``losses`` (rows,), without the gradient of the bias."""
    assert z.stride(1) == 1
    bias_or_any, weights_or_any = (z if tensor is None else tensor.contiguous() for tensor in (bias, weights))
    options = {"HAS_BIAS": bias is not None, "HAS_WEIGHT": weights is not None, "num_warps": 8}
    tensors, (rows, vocab) = (z, bias_or_any, index.contiguous(), weights_or_any, losses), z.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    with torch.cuda.device_of(z):  # type: ignore[no-untyped-call]
        _rows[(rows,)](*tensors, z.stride(0), vocab, z_loss, BLOCK=block, **options)
